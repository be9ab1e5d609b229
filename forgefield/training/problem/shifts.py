"""Energy shifts of a model's species, fitted to data that the model was not made for.

The change of each shift is the least-squares solution of (label - prediction) over compositions, as in fine-tuning with
DeePMD-kit: another reference of energies is taken up before the first step, and forces stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.data.dataset import GraphDataset
from forgefield.errors import ForgefieldError
from forgefield.models.potential import Potential
from forgefield.models.resolving import REFERENCES, hooks_of
from forgefield.training.problem.model_options import measured_batches, spread

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
    for batch in measured_batches(dataset, rows, potential.cutoff, edges=EDGES_AT_ONCE):
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
