"""From a trained model to another task: the encoder is taken over, and with it every head that is asked for as it was; other
heads are new, and those that the task does not train are left out.

Numbers that came from the first data stay with what is taken over. A model that had no energy gets the scale and the shifts of
energies from the new data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
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
from forgefield.models.resolving import (
    DIRECT,
    HEADS,
    PREDICTS,
    REFERENCES,
    branch_names,
    direct_outputs,
    hooks_of,
    resolve_model,
)
from forgefield.settings import Config
from forgefield.training.problem.heads import has_energy, head_specifications, output_units
from forgefield.training.problem.initial_options import section_of
from forgefield.training.problem.model_options import batches_of_frames, spread

ENERGY = ("energy_scales", "energy_shifts")
"""Options and state of a model that only energies need."""
_SAME = (*CHOSEN, "per", "shape", "kind", "reduce", "classes", "net_zero")


@dataclass(frozen=True)
class Transfer:
    """resolved: options of the new model in full. kept, fresh, dropped: names of heads. gained_energy: whether only the new
    model has one."""

    resolved: dict[str, Any]
    kept: list[str]
    fresh: list[str]
    dropped: list[str]
    gained_energy: bool

    def changes_anything(self) -> bool:
        return bool(self.fresh or self.dropped or self.gained_energy)

    def describe(self) -> str:
        parts = ["the encoder", *(f"the head of {name}" for name in self.kept)]
        text = f"Taken over: {', '.join(parts)}."
        if self.fresh:
            text += f" New: {', '.join(f'a head for {name}' for name in self.fresh)}."
        if self.gained_energy:
            text += " New: an energy, with scale and shifts from the data."
        if self.dropped:
            text += f" Left out: {', '.join(self.dropped)}."
        return text

    def first_state(self, fresh: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State to begin with: `trained` of the first run, `fresh` where the new model is new."""
        new = tuple(f"heads.{head_key(name)}." for name in self.fresh)
        new += tuple(f"model.{name}" for name in ENERGY) if self.gained_energy else ()
        return {name: own if name.startswith(new) and new else trained[name] for name, own in fresh.items()}


def transfer(
    known: Mapping[str, Any],
    section: Mapping[str, Any],
    config: Config,
    task: Any,
    data: FrameData,
    *,
    trust: Trust = NO_CODE,
) -> Transfer:
    """What the model of a run becomes for this task. known: its options in full, made of `section`. task: options. trust:
    whether `known` and `section` may name code that is not Forgefield's."""
    resolved = copy.deepcopy(dict(known))
    if (resolved.get(PREDICTS) or {}).get(DIRECT):  # what it gives is part of the model itself
        return _own(resolved, config, data)
    before = resolved.pop(PREDICTS, None) or {"energy": True, HEADS: {}}
    given = check_heads(config.model.get(HEADS)) if HEADS not in known else {}
    facts, wants_energy = head_specifications(task, data), has_energy(task)
    heads, kept = _heads(given, facts, before[HEADS])
    if heads:
        resolved[PREDICTS] = {"energy": wants_energy, HEADS: heads}
    elif not wants_energy:
        raise ForgefieldError("task trains neither an energy nor anything else that a model could give.")
    gained = wants_energy and not before["energy"]
    if gained:
        resolved |= _energy_terms(resolved, section, data, trust)
    return Transfer(
        resolved=resolved,
        kept=kept,
        fresh=[name for name in heads if name not in kept],
        dropped=[*(["energy"] if before["energy"] and not wants_energy else []), *_missing(before[HEADS], heads)],
        gained_energy=gained,
    )


def _own(resolved: dict[str, Any], config: Config, data: FrameData) -> Transfer:
    """For a model that gives its outputs by itself: nothing of it changes, the task chooses among them."""
    outputs = direct_outputs(section_of(resolved))
    if config.model.get(HEADS):
        raise ForgefieldError(
            f"model.heads does not apply: the fitting network of this model gives {', '.join(outputs)} by itself; leave it out."
        )
    units = output_units(outputs, config.task, data)
    chosen = {name: asdict(outputs[name]) | {"unit": unit} for name, unit in units.items()}
    resolved[PREDICTS][HEADS] = chosen | resolved[PREDICTS][HEADS]
    return Transfer(resolved, [], [], [], gained_energy=False)


def _missing(names: Iterable[str], among: Iterable[str]) -> list[str]:
    return [name for name in names if name not in among]


def _heads(
    given: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Options of every head, and the names of those that are the first run's."""
    wanted = {
        name: {
            **{key: before[name][key] for key in CHOSEN if name in before and key in before[name]},
            **given.get(name, {}),
        }
        for name in {**facts, **given}
    }
    heads = complete_heads(wanted, facts)
    kept = [
        name
        for name, head in heads.items()
        if name in before and all(head[key] == before[name].get(key, head[key]) for key in _SAME)
    ]
    return {name: dict(before[name]) if name in kept else head for name, head in heads.items()}, kept


def _energy_terms(
    resolved: Mapping[str, Any], section: Mapping[str, Any], data: FrameData, trust: Trust
) -> dict[str, Any]:
    """Scale and shifts of energies as a new model of this kind would have them; none for models without such options, and
    none for a Deep Potential, whose shifts are fitted when it has its weights (`InitialModel.start`)."""
    if branch_names(resolved):
        raise ForgefieldError(
            "task asks for an energy, which the model had not been trained for, and the model has branches, each with energy "
            "shifts of its own that would have to be fitted; train a new model."
        )
    if resolved["name"] not in ARCHITECTURES or not all(key in resolved for key in ENERGY):
        return {}
    options = {key: value for key, value in section.items() if key not in ("from", "which", "shifts", HEADS)}
    made = resolve_model(
        options,
        species=resolved["species"],
        cutoff=resolved["cutoff"],
        adaptive_cutoff=resolved.get("adaptive_cutoff"),
        statistics=data.statistics,
        trust=trust,
    )
    return {key: made[key] for key in ENERGY}


MOST_FRAMES = 2000
"""Of larger data sets so many frames are looked at, evenly spread."""
EDGES_AT_ONCE = 50_000


@dataclass(frozen=True)
class ShiftFit:
    """before, after: shift of each species, eV. rms_before, rms_after: of the energy errors, eV/atom."""

    species: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    rms_before: float
    rms_after: float
    n_frames: int

    def table(self) -> str:
        """The change in words, a line for each species."""
        lines = [
            f"Energy shifts fitted to {self.n_frames} training frames, eV:",
            "  species        before         after",
        ]
        for symbol, before, after in zip(self.species, self.before, self.after):
            lines.append(f"  {symbol:<7} {before:>13.6f} {after:>13.6f}")
        lines.append(
            f"  rms error of the energy: {1000 * self.rms_before:.4g} before, {1000 * self.rms_after:.4g} after, meV/atom"
        )
        return "\n".join(lines)


def shifts_of(potential: Potential) -> Tensor:
    """The shifts themselves, a parameter or a buffer of the model."""
    shifts = potential.interface.species_shifts()
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
    """Shifts that fit the energies of `dataset` best. The model stays as it is."""
    shifts = shifts_of(potential)
    labelled = np.flatnonzero(dataset.frames.carries("energy"))
    if not len(labelled):
        raise ForgefieldError("model.shifts is fit, but no training frame carries an energy to fit them to.")
    rows = labelled[spread(len(labelled), MOST_FRAMES)]
    counts, errors, n_atoms = _errors(potential, dataset, rows, device)
    change = np.linalg.lstsq(counts, errors, rcond=None)[0]
    left = errors - counts @ change
    before = shifts.detach().double().cpu().numpy()
    return ShiftFit(
        species=potential.species,
        before=tuple(before.tolist()),
        after=tuple((before + change).tolist()),
        rms_before=_rms(errors / n_atoms),
        rms_after=_rms(left / n_atoms),
        n_frames=len(rows),
    )


@torch.no_grad()
def set_shifts(potential: Potential, resolved: dict[str, Any], values: Sequence[float]) -> None:
    """Give the model these shifts, eV, in its state and in its resolved options."""
    shifts = shifts_of(potential)
    shifts.copy_(torch.tensor(values, dtype=torch.float64))
    if potential.interface.species_shifts() is not None:
        hooks_of(resolved).set_shifts(resolved, values)
    elif REFERENCES in resolved:
        resolved[REFERENCES] = dict(zip(potential.species, values))


@torch.no_grad()
def _errors(
    potential: Potential, dataset: GraphDataset, rows: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Atoms of each species whose shift counts (n_frames, n_species), label - prediction (n_frames,) eV, atoms (n_frames,)."""
    n_species, training = len(potential.species), potential.training
    counts, errors, n_atoms = [], [], []
    potential.to(device).eval()
    for batch in batches_of_frames(dataset, rows, potential.cutoff, edges=EDGES_AT_ONCE):
        n_frames = batch["n_atoms"].shape[0]
        on_device = {key: value.to(device) for key, value in batch.items()}
        predicted = potential(on_device, forces=False)["energy"].cpu()
        table = torch.bincount(batch["frame"] * n_species + batch["species"], minlength=n_frames * n_species)
        counts.append(table.view(n_frames, n_species).double())
        errors.append(batch["energy"] - predicted)
        n_atoms.append(batch["n_atoms"].double())
    potential.to("cpu").train(training)
    counted = potential.interface.counted_species()
    weight = 1.0 if counted is None else counted
    return (torch.cat(counts) * weight).numpy(), torch.cat(errors).numpy(), torch.cat(n_atoms).numpy()


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
