"""Training that starts from the model of another run: `model: {from: RUN, which: best, shifts: keep}`.

Options (numbers that were derived from data included), species, cutoff and weights are those of that run, which was trained or
imported; only weights are trained. A Deep Potential can get additional species of the new data. The new run stores all of it,
so that it can be resumed or loaded without the first run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from forgefield.config.typed import select
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import FrameData
from forgefield.data.starter import CUTOFFS
from forgefield.errors import ForgefieldError
from forgefield.models.potential import Potential
from forgefield.models.resolving import branch_names, hooks_of
from forgefield.parallel.ranks import Ranks
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.problem.first_predictions import FirstModel, compare_first_predictions
from forgefield.training.problem.initial_options import SourceModel, is_proposed, require_same_options, section_of
from forgefield.training.problem.model_options import MAX_FRAMES, batches_of_frames, evenly_spaced
from forgefield.training.problem.transfer import Transfer, fit_shifts, set_shifts

RECORD = "initial_model"
"""Key of `run.json` with the run that a run started from."""
Number = TypeVar("Number", int, float)


def _take_over(resolved: object, section: object, names: Sequence[str]) -> None:
    """Set an option, given by the names of its sections and its own, to the value in `section`, if it is there. Sections in
    lists are matched by position."""
    if isinstance(section, Sequence) and isinstance(resolved, list):
        for one, other in zip(resolved, section):
            _take_over(one, other, names)
    elif isinstance(section, Mapping) and names[0] in section and isinstance(resolved, dict):
        if len(names) == 1:
            resolved[names[0]] = section[names[0]]
        elif names[0] in resolved:
            _take_over(resolved[names[0]], section[names[0]], names[1:])


@dataclass(frozen=True)
class InitialModel:
    """The model of another run from which a training starts.

    source: the run and its model.
    state: initial weights; None if the training is resumed.
    shifts: `keep` or `fit`.
    record: entry of `run.json`.
    references: `data.reference_energies` of the first run.
    """

    source: SourceModel
    state: Mapping[str, Tensor] | None
    shifts: str
    record: dict[str, Any] = field(default_factory=dict)
    references: Any = None
    first: FirstModel | None = None
    """The model of the run as it is stored there; None where the run has begun."""
    new_species: list[str] = field(default_factory=list)
    """Species of the data that the model does not have yet."""

    def options(self, config: Config, data: FrameData) -> dict[str, Any]:
        """Resolved options of the model: those of the run, with options of the config that may be changed, and with statistics
        of new species."""
        resolved = copy.deepcopy(dict(self.source.resolved))
        hooks = self.source.hooks
        for name in hooks.training_options:
            _take_over(resolved, config.model, name.split("."))
        if not self.new_species:
            return resolved
        new_section = {**section_of(resolved), hooks.shift_option: None}
        rows = evenly_spaced(len(data.train), MAX_FRAMES)
        measured = hooks.measure(
            {key: value for key, value in new_section.items() if key != "name"},
            lambda: batches_of_frames(data.train, rows, float(resolved["cutoff"])),
            species=data.species.symbols,
            cutoff=float(resolved["cutoff"]),
        )
        return hooks.add_species(resolved, self.new_species, measured)

    def settle(self, config: Config, notify: Callable[[str], None]) -> Config:
        """The config with the species and cutoffs of the model. Raises ForgefieldError for settings that contradict it."""
        source, config = self.source, copy.deepcopy(config)
        species = config.data.species
        new = [symbol for symbol in species or [] if symbol not in source.species]
        if new:
            source.hooks.check_new_species(source.resolved, new, source.name)
            if self.shifts != "fit":
                raise ForgefieldError(
                    f"data.species contains {', '.join(new)}, which the model of {source.name} does not have; their energy "
                    "shifts have to be fitted: set model.shifts=fit (--finetune)."
                )
            self.new_species.extend(new)
            notify(f"New species that are added to the model of {source.name}: {', '.join(new)}.")
        require_same_options(config.model, source, species)
        self._require_same_references(config.data.reference_energies)
        if species is not None and species != source.species and not new:
            notify(
                f"Species are those of {source.name}, in its order: {', '.join(source.species)} "
                f"(data.species has {', '.join(species)})."
            )
        config.data.species = [*source.species, *new]
        unused = ["model.preset"] if config.model.get("preset") is not None else []
        if is_proposed(config.model, source) and config.data.cutoff in CUTOFFS:
            if config.data.cutoff != source.resolved["cutoff"]:
                unused.append(f"data.cutoff={config.data.cutoff:g}")
            config.data.cutoff = None
        config.data.cutoff = self._graph_option("cutoff", config.data.cutoff)
        config.data.adaptive_cutoff = self._graph_option("adaptive_cutoff", config.data.adaptive_cutoff)
        config.data.max_neighbours = self._graph_option("max_neighbours", config.data.max_neighbours)
        config.model.pop("preset", None)
        if unused and self.state is not None:
            verb = "is" if len(unused) == 1 else "are"
            notify(f"The model is that of {source.name}; {' and '.join(unused)} of the config {verb} not used.")
        config.model["name"] = source.resolved["name"]
        return config

    def _graph_option(self, name: str, setting: Number | None) -> Number | None:
        """The value of the model for a setting of the data section, which must not contradict it."""
        value: Number | None = self.source.resolved.get(name)
        if setting is not None and (value is None or not math.isclose(setting, value, rel_tol=1e-12)):
            shown = "none" if value is None else f"{value:g}"
            raise ForgefieldError(
                f"data.{name} is {setting:g}, but that of the model of {self.source.name} is {shown}; leave it out, or set "
                f"data.{name}=null to use that of the model."
            )
        return value

    def _require_same_references(self, setting: object) -> None:
        if setting not in ("auto", "fit", self.references):
            raise ForgefieldError(
                f"data.reference_energies is {setting}, but the model of {self.source.name} has its energy shifts already; "
                "leave it out (model.shifts=fit fits them to the new data)."
            )

    def start(
        self,
        potential: Potential,
        resolved: dict[str, Any],
        train: GraphDataset,
        device: str,
        ranks: Ranks,
        change: Transfer,
    ) -> str | None:
        """Load the initial weights, on all ranks. Returns text: how the predictions compare with those of the first run, and a
        table of fitted shifts, if any.

        resolved: options of the model; fitted shifts are changed in place.
        device: on which rank 0 fits shifts.
        change: of the model for the new task.
        """
        if self.shifts == "fit" and not potential.has_energy:
            raise ForgefieldError("model.shifts=fit fits shifts of energies, but the task has no energy; leave it out.")
        if self.state is None:
            return None
        state = dict(self.state)
        if self.new_species:
            counts = len(self.source.species), len(self.new_species)
            state = self.source.hooks.add_species_to_state(potential.state_dict(), state, *counts)
        potential.load_state_dict(change.initial_state(potential.state_dict(), state))
        report = self._compare(potential, train, ranks, change)
        fits_shifts = self.source.hooks.fits_shifts_to_new_energies
        fits_new_energy = change.adds_energy and fits_shifts and train.frames.carries("energy").any()
        if self.shifts != "fit" and not fits_new_energy:
            return report
        fitted = ranks.broadcast(
            fit_shifts(potential, train, device=torch.device(device)) if ranks.is_rank_zero else None
        )
        set_shifts(potential, resolved, fitted.after)
        self.record["fitted_shifts"] = asdict(fitted)
        return "\n".join(filter(None, (report, fitted.table())))

    def _compare(self, potential: Potential, train: GraphDataset, ranks: Ranks, change: Transfer) -> str | None:
        """See `compare_first_predictions`; None where the models have no forces to compare."""
        has_forces = potential.has_energy and not potential.forces_are_direct and not change.adds_energy
        if self.first is None or not has_forces or self.first.forces_are_direct:
            return None
        text = compare_first_predictions(self.first, potential, train, self.source.name) if ranks.is_rank_zero else None
        return ranks.broadcast(text)


def starts_from_run(config: Config) -> bool:
    return "from" in config.model


def refuse_itself(config: Config) -> None:
    """Raise ForgefieldError for a run that would start from itself."""
    source = config.model["from"]
    if config.folder.resolve() in [path.resolve() for path in (Path(source), Path(config.out) / source)]:
        raise ForgefieldError(
            f"Run {config.name} cannot start from itself (model.from); start another run with name=NAME, or leave "
            "model.from out to resume it."
        )


def initial_model(
    run: Run, config: Config, ranks: Ranks, *, begun: bool, trust_code: bool = False
) -> InitialModel | None:
    """The model of `model.from`, read by rank 0 and sent to all ranks; None if the config describes a new model.

    begun: whether `run` has a checkpoint and thus contains the model.
    trust_code: whether code that the run names may be imported.
    """
    if not starts_from_run(config):
        return None
    return ranks.broadcast(_read(run, config, begun, trust_code) if ranks.is_rank_zero else None)


def _read(run: Run, config: Config, begun: bool, trust_code: bool) -> InitialModel:
    model = config.model
    if begun:
        info = run.info
        record = info.get(RECORD) or {}
        source = SourceModel(
            f"run {record.get('run', run.name)}",
            _section(run),
            info["model"],
            Run.open(run, trust_code=trust_code).trust,
        )
        return InitialModel(source, None, model["shifts"], record, record.get("reference_energies"))
    first = Run.open(model["from"], out=config.out, trust_code=trust_code)
    info = first.info
    first.require_single_model("trained further (model.from)")
    potential = first.load_potential(model["which"])
    resolved = _at_any_precision(info, model) if info.get("status") == "imported" else info["model"]
    stored_state = state = {name: tensor.detach().clone() for name, tensor in potential.state_dict().items()}
    section = _section(first)
    if hooks_of(resolved).adds_branches and list(model.get("branches") or []) not in ([], branch_names(resolved)):
        resolved, state = hooks_of(resolved).add_branches(resolved, state, model["branches"])
        section = {**section, "branches": list(model["branches"])}
    references = select(first.settings, "data.reference_energies")
    record = {
        "run": first.name,
        "folder": str(first.path),
        "which": model["which"],
        "shifts": model["shifts"],
        "section": section,
        "reference_energies": references,
    }
    stored = FirstModel(info["model"], stored_state, first.trust)
    source = SourceModel(f"run {first.name}", section, resolved, first.trust)
    return InitialModel(source, state, model["shifts"], record, references, stored)


def _section(run: Run) -> dict[str, Any]:
    """The `model` section from which the options of a run were resolved, also after several transfers."""
    info = run.info
    if info.get(RECORD):
        section: dict[str, Any] = info[RECORD]["section"]
        return section
    return section_of(info["model"]) if info.get("status") == "imported" else run.config.model


def _at_any_precision(info: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an imported model, whose networks follow `training.precision`, unless the config sets their precision or it
    differs from that of the model."""
    resolved = copy.deepcopy(dict(info["model"]))
    for name, network in resolved.items():
        if isinstance(network, dict) and network.get("precision") == info["precision"]:
            section = model.get(name)
            if not (isinstance(section, Mapping) and "precision" in section):
                network["precision"] = "default"
    return resolved
