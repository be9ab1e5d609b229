"""Training that starts from the model of another run: `model: {from: RUN, which: best, shifts: keep}`.

Options (all numbers that once came from data included), species, cutoff and weights are those of that run, which was trained
here or imported; weights alone are trained. A Deep Potential takes up species that the new data has beside.
The new run keeps all of it: continuing or loading it never needs the first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgefield.config.typed import select
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import FrameData
from forgefield.data.starter import CUTOFFS
from forgefield.errors import ForgefieldError
from forgefield.models.potential import Potential
from forgefield.parallel.ranks import Ranks
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.problem.initial_options import SourceModel, is_proposed, require_same_options, section_of
from forgefield.training.problem.model_options import MOST_FRAMES, batches_of_frames, spread
from forgefield.training.problem.transfer import Transfer, fit_shifts, set_shifts

RECORD = "initial_model"
"""Where `run.json` says what a run started from."""
GRAPH = ("cutoff", "adaptive_cutoff", "max_neighbours")
"""Settings of the data section that belong to a model."""


@dataclass(frozen=True)
class InitialModel:
    """known: the run and its model. state: weights to begin with; None where the run has begun, and goes on with its own.
    shifts: `keep` or `fit`.

    record: what `run.json` keeps. references: `data.reference_energies` of the first run.
    """

    known: SourceModel
    state: Mapping[str, Tensor] | None
    shifts: str
    record: dict[str, Any] = field(default_factory=dict)
    references: Any = None
    new_species: list[str] = field(default_factory=list)
    """Those of the data that the model does not know yet."""

    def options(self, config: Config, data: FrameData) -> dict[str, Any]:
        """The model's options in full: those of the run, with what the config says of parts that are trained, and with
        statistics of species that are new to it."""
        resolved = copy.deepcopy(dict(self.known.resolved))
        hooks = self.known.hooks
        for part, _, option in (name.rpartition(".") for name in hooks.training_options):
            given = config.model.get(part)
            if isinstance(given, Mapping) and option in given:
                resolved[part][option] = given[option]
        if not self.new_species:
            return resolved
        section = {**section_of(resolved), hooks.shift_option: None}
        rows = spread(len(data.train), MOST_FRAMES)
        measured = hooks.measure(
            {key: value for key, value in section.items() if key != "name"},
            lambda: batches_of_frames(data.train, rows, float(resolved["cutoff"])),
            species=data.species.symbols,
            cutoff=float(resolved["cutoff"]),
        )
        return hooks.add_species(resolved, self.new_species, measured)

    def settle(self, config: Config, notify: Callable[[str], None]) -> Config:
        """The config with everything that the model decides: species and neighbours. Refuses what contradicts it."""
        known, config = self.known, copy.deepcopy(config)
        species = config.data.species
        strange = [symbol for symbol in species or [] if symbol not in known.species]
        if strange:
            known.hooks.check_new_species(known.resolved, strange, known.whose)
            if self.shifts != "fit":
                raise ForgefieldError(
                    f"data.species names {', '.join(strange)}, which the model of {known.whose} does not know; its energies "
                    "have to be fitted for them: model.shifts=fit (--finetune)."
                )
            self.new_species.extend(strange)
            notify(f"New species, of which the model of {known.whose} learns from now on: {', '.join(strange)}.")
        require_same_options(config.model, known, species)
        self._require_same_references(config.data.reference_energies)
        if species is not None and species != known.species and not strange:
            notify(
                f"Species are those of {known.whose}, in its order: {', '.join(known.species)} "
                f"(data.species has {', '.join(species)})."
            )
        config.data.species = [*known.species, *strange]
        unused = ["model.preset"] if config.model.get("preset") is not None else []
        if is_proposed(config.model, known) and config.data.cutoff in CUTOFFS:
            if config.data.cutoff != known.resolved["cutoff"]:
                unused.append(f"data.cutoff={config.data.cutoff:g}")
            config.data.cutoff = None
        for name in GRAPH:
            setattr(config.data, name, self._of_model(name, getattr(config.data, name)))
        config.model.pop("preset", None)
        if unused and self.state is not None:
            verb = "is" if len(unused) == 1 else "are"
            notify(f"The model is that of {known.whose}; {' and '.join(unused)} of the config {verb} not used.")
        config.model["name"] = known.resolved["name"]
        return config

    def _of_model(self, name: str, given: float | int | None) -> float | int | None:
        of_model = self.known.resolved.get(name)
        if given is not None and (of_model is None or not math.isclose(given, of_model, rel_tol=1e-12)):
            shown = "none" if of_model is None else f"{of_model:g}"
            raise ForgefieldError(
                f"data.{name} is {given:g}, and the model of {self.known.whose} was made for {shown}; leave it out, or set "
                f"data.{name}=null: it comes with the model."
            )
        return of_model

    def _require_same_references(self, given: Any) -> None:
        if given not in ("auto", "fit", self.references):
            raise ForgefieldError(
                f"data.reference_energies is {given}, but the model of {self.known.whose} has its energy shifts already; leave "
                "it out (model.shifts=fit fits them to the new data)."
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
        """Give the model its first weights, on all ranks the same. Returns what changed beside, in words.

        resolved: its options, changed where shifts are. device: where rank 0 fits them. change: what the new task makes of the
        model.
        """
        if self.shifts == "fit" and not potential.has_energy:
            raise ForgefieldError("model.shifts=fit fits shifts of energies, and the task has none; leave it out.")
        if self.state is None:
            return None
        state = dict(self.state)
        if self.new_species:
            counts = len(self.known.species), len(self.new_species)
            state = self.known.hooks.add_species_to_state(potential.state_dict(), state, *counts)
        potential.load_state_dict(change.first_state(potential.state_dict(), state))
        fits_shifts = self.known.hooks.fits_shifts_to_new_energies
        gained = change.gained_energy and fits_shifts and train.frames.carries("energy").any()
        if self.shifts != "fit" and not gained:
            return None
        fitted = ranks.broadcast(
            fit_shifts(potential, train, device=torch.device(device)) if ranks.is_rank_zero else None
        )
        set_shifts(potential, resolved, fitted.after)
        self.record["fitted_shifts"] = asdict(fitted)
        return fitted.table()


def starts_from_run(config: Config) -> bool:
    return "from" in config.model


def refuse_itself(config: Config) -> None:
    """Refuse a run that would start from itself, before its folder is touched."""
    own = config.folder.resolve()
    if own in [place.resolve() for place in (Path(config.model["from"]), Path(config.out) / config.model["from"])]:
        raise ForgefieldError(
            f"Run {config.name} cannot start from itself (model.from); give the new run its own name=NAME, or leave "
            "model.from out to continue it."
        )


def initial_model(
    run: Run, config: Config, ranks: Ranks, *, begun: bool, trust_code: bool = False
) -> InitialModel | None:
    """The model that `model.from` names, read by rank 0 and sent to all; None where the config describes a new model.

    begun: whether `run` has begun, and so has its own copy of the model. trust_code: whether code that the run names may be
    imported.
    """
    if not starts_from_run(config):
        return None
    return ranks.broadcast(_read(run, config, begun, trust_code) if ranks.is_rank_zero else None)


def _read(run: Run, config: Config, begun: bool, trust_code: bool) -> InitialModel:
    model = config.model
    if begun:
        info = run.info
        record = info.get(RECORD) or {}
        known = SourceModel(
            f"run {record.get('run', run.name)}",
            _section(run),
            info["model"],
            Run.open(run, trust_code=trust_code).trust,
        )
        return InitialModel(known, None, model["shifts"], record, record.get("reference_energies"))
    first = Run.open(model["from"], out=config.out, trust_code=trust_code)
    info = first.info
    potential = first.load_potential(model["which"])
    resolved = _at_any_precision(info, model) if info.get("status") == "imported" else info["model"]
    references = select(first.settings, "data.reference_energies")
    record = {
        "run": first.name,
        "folder": str(first.path),
        "which": model["which"],
        "shifts": model["shifts"],
        "section": _section(first),
        "reference_energies": references,
    }
    known = SourceModel(f"run {first.name}", record["section"], resolved, first.trust)
    state = {name: tensor.detach().clone() for name, tensor in potential.state_dict().items()}
    return InitialModel(known, state, model["shifts"], record, references)


def _section(run: Run) -> dict[str, Any]:
    """The `model` section that a run's options come from, over any number of runs that started from one another."""
    info = run.info
    if info.get(RECORD):
        return info[RECORD]["section"]
    return section_of(info["model"]) if info.get("status") == "imported" else run.config.model


def _at_any_precision(info: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an imported model. Files spell out the precision of each part; where it is that of the whole, and the config
    does not name it, it follows `training.precision`."""
    resolved = copy.deepcopy(dict(info["model"]))
    for name, part in resolved.items():
        if isinstance(part, dict) and part.get("precision") == info["precision"]:
            named = model.get(name)
            if not (isinstance(named, Mapping) and "precision" in named):
                part["precision"] = "default"
    return resolved
