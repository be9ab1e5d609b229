"""Transfer of a trained model to another task: the encoder and all heads with unchanged options are reused; other heads are
new, and heads that the task does not train are removed.

Reused modules keep the statistics of their original data. A model without an energy gets the scale and shifts of energies from
the new data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.trust import NO_CODE, Trust
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import FrameData
from forgefield.errors import ForgefieldError
from forgefield.models.heads.options import CHOSEN, check_heads, complete_heads
from forgefield.models.potential import Potential
from forgefield.models.predictor import head_key
from forgefield.models.registry import ARCHITECTURES
from forgefield.models.resolved import DIRECT, HEADS, PREDICTS, REFERENCES
from forgefield.models.resolving import (
    branch_names,
    derivative_outputs,
    direct_outputs,
    hooks_of,
    networks_of,
    resolve_model,
)
from forgefield.settings import Config
from forgefield.tasks.options import TaskOptions
from forgefield.training.problem.heads import has_energy, head_specifications, output_units
from forgefield.training.problem.initial_options import section_of
from forgefield.training.problem.model_options import batches_of_frames, evenly_spaced

ENERGY = ("energy_scales", "energy_shifts")
"""Options and state of a model that are used for energies only."""
_HEAD_OPTIONS = (*CHOSEN, "per", "shape", "kind", "reduce", "classes", "net_zero")
"""Options of a head that have to be equal for it to be reused."""


@dataclass(frozen=True)
class Transfer:
    """resolved: options of the new model. reused, new, removed: names of heads. adds_energy: whether only the new model has an
    energy."""

    resolved: dict[str, Any]
    reused: list[str]
    new: list[str]
    removed: list[str]
    adds_energy: bool

    def changes_anything(self) -> bool:
        return bool(self.new or self.removed or self.adds_energy)

    def describe(self) -> str:
        reused = ["the encoder", *(f"the head of {name}" for name in self.reused)]
        text = f"Reused: {', '.join(reused)}."
        if self.new:
            text += f" New: {', '.join(f'a head for {name}' for name in self.new)}."
        if self.adds_energy:
            text += " New: an energy, with scale and shifts from the data."
        if self.removed:
            text += f" Removed: {', '.join(self.removed)}."
        return text

    def initial_state(self, initialised: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Initial state of the new model: `trained` of the first run, and `initialised` for new modules."""
        new = tuple(f"heads.{head_key(name)}." for name in self.new)
        new += tuple(f"model.{name}" for name in ENERGY) if self.adds_energy else ()
        return {name: tensor if name.startswith(new) and new else trained[name] for name, tensor in initialised.items()}


def transfer(
    source: Mapping[str, Any],
    section: Mapping[str, Any],
    config: Config,
    task: TaskOptions,
    data: FrameData,
    *,
    trust: Trust = NO_CODE,
) -> Transfer:
    """The transfer of the model of a run to this task.

    source: resolved options of the model.
    section: the `model` section from which they were resolved.
    trust: whether `source` and `section` may name code that is not Forgefield's.
    """
    resolved = copy.deepcopy(dict(source))
    if (resolved.get(PREDICTS) or {}).get(DIRECT):
        return _transfer_direct(resolved, config, data)
    before = resolved.pop(PREDICTS, None) or {"energy": True, HEADS: {}}
    options = check_heads(config.model.get(HEADS)) if HEADS not in source else {}
    needs_energy = has_energy(task)
    earlier, derived = networks_of(before[HEADS]), derivative_outputs(section_of(resolved))
    heads, reused = _heads(options, head_specifications(task, data, derived), earlier)
    if heads or (derived and needs_energy):
        kept = {name: asdict(output) for name, output in derived.items()} if needs_energy else {}
        resolved[PREDICTS] = {"energy": needs_energy, HEADS: {**heads, **kept}}
    elif not needs_energy:
        raise ForgefieldError("task has no target that a model can predict.")
    adds_energy = needs_energy and not before["energy"]
    if adds_energy:
        resolved |= _energy_terms(resolved, section, data, trust)
    removed = [name for name in earlier if name not in heads]
    return Transfer(
        resolved=resolved,
        reused=reused,
        new=[name for name in heads if name not in reused],
        removed=["energy", *removed] if before["energy"] and not needs_energy else removed,
        adds_energy=adds_energy,
    )


def _transfer_direct(resolved: dict[str, Any], config: Config, data: FrameData) -> Transfer:
    """The transfer of a model with direct outputs, which does not change; the task selects outputs."""
    outputs = direct_outputs(section_of(resolved))
    if config.model.get(HEADS):
        raise ForgefieldError(
            f"model.heads does not apply: the fitting network of this model predicts {', '.join(outputs)}; leave it out."
        )
    units = output_units(outputs, config.task, data)
    chosen = {name: asdict(outputs[name]) | {"unit": unit} for name, unit in units.items()}
    resolved[PREDICTS][HEADS] = chosen | resolved[PREDICTS][HEADS]
    return Transfer(resolved, [], [], [], adds_energy=False)


def _heads(
    options: Mapping[str, Mapping[str, Any]],
    specifications: Mapping[str, Mapping[str, Any]],
    before: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], list[str]]:
    """Options of all heads, and the names of those that are reused. before: heads of the first run."""
    requested = {
        name: {
            **{key: before[name][key] for key in CHOSEN if name in before and key in before[name]},
            **options.get(name, {}),
        }
        for name in {**specifications, **options}
    }
    heads = complete_heads(requested, specifications)
    reused = [
        name
        for name, head in heads.items()
        if name in before and all(head[key] == before[name].get(key, head[key]) for key in _HEAD_OPTIONS)
    ]
    return {name: dict(before[name]) if name in reused else head for name, head in heads.items()}, reused


def _energy_terms(
    resolved: Mapping[str, Any], section: Mapping[str, Any], data: FrameData, trust: Trust
) -> dict[str, Any]:
    """Scale and shifts of energies of a new model of this kind; empty for models without such options, and for a Deep
    Potential, whose shifts are fitted after its weights are loaded (`InitialModel.start`)."""
    if branch_names(resolved):
        raise ForgefieldError(
            "task has an energy, for which the model was not trained; this is not supported for models with branches, because "
            "the energy shifts of each branch would have to be fitted. Train a new model."
        )
    if resolved["name"] not in ARCHITECTURES or not all(key in resolved for key in ENERGY):
        return {}
    options = {key: value for key, value in section.items() if key not in ("from", "which", "shifts", HEADS)}
    new = resolve_model(
        options,
        species=resolved["species"],
        cutoff=resolved["cutoff"],
        adaptive_cutoff=resolved.get("adaptive_cutoff"),
        statistics=data.statistics,
        trust=trust,
    )
    return {key: new[key] for key in ENERGY}


MAX_FRAMES = 2000
"""Maximum number of frames for a fit of shifts; of larger data sets an evenly spaced selection."""
BATCH_EDGES = 50_000


@dataclass(frozen=True)
class ShiftFit:
    """before, after: shift of each species, eV. rms_before, rms_after: RMSE of the energy, eV/atom."""

    species: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    rms_before: float
    rms_after: float
    n_frames: int

    def table(self) -> str:
        """A table of the shifts."""
        lines = [
            f"Energy shifts fitted to {self.n_frames} training frames, eV:",
            "  species        before         after",
        ]
        for symbol, before, after in zip(self.species, self.before, self.after):
            lines.append(f"  {symbol:<7} {before:>13.6f} {after:>13.6f}")
        lines.append(
            f"  RMSE of the energy: {1000 * self.rms_before:.4g} before, {1000 * self.rms_after:.4g} after, meV/atom"
        )
        return "\n".join(lines)


def shifts_of(potential: Potential) -> Tensor:
    """The energy shifts, (n_species,), eV: a parameter or buffer of the model. Raises ForgefieldError if it has none."""
    shifts = potential.interface.species_shifts()
    if shifts is None:
        shifts = potential.interface.branch_shifts()
    if shifts is not None:
        return shifts
    if potential.reference_energies is not None:
        return potential.reference_energies
    if branches := potential.interface.branches:
        raise ForgefieldError(
            f"model.shifts is fit, but the model has the branches {', '.join(branches)}, each with its own energy shifts; "
            "shifts are fitted only for models with one energy. Leave model.shifts out."
        )
    raise ForgefieldError(
        f"model.shifts is fit, but {type(potential.model).__name__} has no energy shift for each species (energy_shifts); "
        "leave model.shifts out."
    )


def fit_shifts(potential: Potential, dataset: GraphDataset, *, device: torch.device) -> ShiftFit:
    """Least-squares fit of the shifts to the energies of `dataset`. The model is not changed."""
    shifts = shifts_of(potential)
    labelled = np.flatnonzero(dataset.frames.carries("energy"))
    if not len(labelled):
        raise ForgefieldError("model.shifts is fit, but no training frame has an energy.")
    rows = labelled[evenly_spaced(len(labelled), MAX_FRAMES)]
    counts, errors, n_atoms = _errors(potential, dataset, rows, device)
    change = np.linalg.lstsq(counts, errors, rcond=None)[0]
    residuals = errors - counts @ change
    before = shifts.detach().double().cpu().numpy()
    return ShiftFit(
        species=_shift_names(potential),
        before=tuple(before.tolist()),
        after=tuple((before + change).tolist()),
        rms_before=_rms(errors / n_atoms),
        rms_after=_rms(residuals / n_atoms),
        n_frames=len(rows),
    )


def _shift_names(potential: Potential) -> tuple[str, ...]:
    """What each shift belongs to: a species, or a species of a branch."""
    branches = potential.interface.branches
    return tuple(f"{b}.{s}" for b in branches for s in potential.species) if branches else tuple(potential.species)


@torch.no_grad()
def set_shifts(potential: Potential, resolved: dict[str, Any], values: Sequence[float]) -> None:
    """Set the shifts, eV, in the state and in the resolved options of the model."""
    shifts = shifts_of(potential)
    shifts.copy_(torch.tensor(values, dtype=torch.float64))
    if potential.interface.species_shifts() is not None or potential.interface.branch_shifts() is not None:
        hooks_of(resolved).set_shifts(resolved, values)
    elif REFERENCES in resolved:
        resolved[REFERENCES] = dict(zip(potential.species, values))


@torch.no_grad()
def _errors(
    potential: Potential, dataset: GraphDataset, rows: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Atoms for each shift (n_frames, n_shifts), label - prediction (n_frames,) eV, atoms (n_frames,)."""
    n_species, training = len(_shift_names(potential)), potential.training
    counts, errors, n_atoms = [], [], []
    potential.to(device).eval()
    for batch in batches_of_frames(dataset, rows, potential.cutoff, edges=BATCH_EDGES):
        n_frames = batch["n_atoms"].shape[0]
        on_device = {key: value.to(device) for key, value in batch.items()}
        predicted = potential(on_device, forces=False)["energy"].cpu()
        kinds = batch["species"]
        if potential.interface.branches:
            kinds = kinds + len(potential.species) * batch["branch"][batch["frame"]]
        table = torch.bincount(batch["frame"] * n_species + kinds, minlength=n_frames * n_species)
        counts.append(table.view(n_frames, n_species).double())
        errors.append(batch["energy"] - predicted)
        n_atoms.append(batch["n_atoms"].double())
    potential.to("cpu").train(training)
    counted = potential.interface.counted_species()
    weight = 1.0 if counted is None else counted
    return (torch.cat(counts) * weight).numpy(), torch.cat(errors).numpy(), torch.cat(n_atoms).numpy()


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
