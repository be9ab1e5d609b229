"""Tools of all checks: a float64 copy of the model that is evaluated on frames, modified frames, and results.

Neither the user's model nor the frames are changed: a modified frame is a new frame without labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from forgefield.data.batch import batch_from_frames, to_device
from forgefield.data.frame import Frame
from forgefield.data.labels.fields import fields_of
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.species import SpeciesTable
from forgefield.models.potential import Potential, float64_copy


@dataclass(frozen=True)
class CheckResult:
    """One row of the table of results. value: the largest deviation. tolerance: the largest deviation that is allowed."""

    name: str
    passed: bool
    value: float
    tolerance: float
    note: str


def judged(name: str, value: float, tolerance: float, note: str) -> CheckResult:
    """A result that passes when `value` is within `tolerance`; NaN never passes."""
    return CheckResult(name, bool(value <= tolerance), float(value), float(tolerance), note)


@dataclass(frozen=True)
class Outputs:
    """Outputs for one frame: energy (eV), forces (n_atoms, 3) (eV/A), stress (3, 3) (eV/A^3; NaN without a volume)."""

    energy: float
    forces: np.ndarray
    stress: np.ndarray


class Probe:
    """Evaluates a float64 copy of a potential."""

    def __init__(self, potential: Potential, species: SpeciesTable, cutoff: float):
        self.potential = float64_copy(potential)
        self.species = species
        self.cutoff = float(cutoff)
        graph = graph_of(potential)
        self.graph = graph if graph.adaptive_cutoff is not None else replace(graph, cutoff=self.cutoff)
        tensors = [*self.potential.parameters(), *self.potential.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.vectors = {output.variable for output in self.potential.derivative_outputs.values()}
        """Names of the inputs of atoms that are vectors."""

    def batch(self, frames: Sequence[Frame]) -> dict[str, torch.Tensor]:
        """A batch of these frames, with the fields that are inputs of the model and without labels."""
        fields = {name: field for name, field in fields_of(frames).items() if name in self.potential.inputs}
        batch = batch_from_frames(list(frames), self.species, self.graph, fields)
        for name in self.vectors:  # structures of the checks have no spins
            batch[name] = batch[name].nan_to_num() if name in batch else torch.zeros_like(batch["positions"])
        return to_device(batch, self.device)

    def outputs(self, frames: Sequence[Frame]) -> list[Outputs]:
        """Energy, forces and stress of the frames, evaluated together in one batch."""
        result = self.potential(self.batch(frames), forces=True, stress=True)
        energy, forces, stress = (result[name].detach().cpu().numpy() for name in ("energy", "forces", "stress"))
        ends = np.cumsum([len(frame) for frame in frames])[:-1]
        return [Outputs(float(e), f, s) for e, f, s in zip(energy, np.split(forces, ends), stress)]

    def each(self, frames: Sequence[Frame]) -> list[Outputs]:
        """The same as `outputs`, one frame at a time."""
        return [self.outputs([frame])[0] for frame in frames]

    def rows(self, frames: Sequence[Frame]) -> np.ndarray:
        """Energy and all force components of frames with the same number of atoms, (n_frames, 1 + 3 n_atoms)."""
        return np.array([np.concatenate([[out.energy], out.forces.ravel()]) for out in self.outputs(frames)])

    def energies(self, frames: Sequence[Frame]) -> np.ndarray:
        """Energies only (n_frames,), eV."""
        return self.potential(self.batch(frames), forces=False, stress=False)["energy"].detach().cpu().numpy()


def edited(
    frame: Frame,
    *,
    positions: np.ndarray | None = None,
    numbers: np.ndarray | None = None,
    cell: np.ndarray | None = None,
    pbc: np.ndarray | None = None,
    fields: Mapping[str, np.ndarray] | None = None,
) -> Frame:
    """The frame without labels, with other positions, numbers, cell, pbc or fields."""
    return replace(
        frame,
        positions=frame.positions if positions is None else positions,
        numbers=frame.numbers if numbers is None else numbers,
        cell=frame.cell if cell is None else cell,
        pbc=frame.pbc if pbc is None else pbc,
        fields=frame.fields if fields is None else {**frame.fields, **fields},
        energy=None,
        forces=None,
        stress=None,
    )


def molecule(numbers: np.ndarray, positions: np.ndarray) -> Frame:
    """A frame without periodic boundaries."""
    return Frame(
        positions=np.asarray(positions, dtype=np.float64),
        numbers=np.asarray(numbers, dtype=np.int64),
        cell=np.zeros((3, 3)),
        pbc=np.zeros(3, dtype=bool),
        source="check",
    )


def boxed(frame: Frame, cutoff: float) -> Frame:
    """The frame if it has a volume, otherwise its atoms in a periodic box so small that images are neighbours."""
    if frame.volume > 0:
        return edited(frame)
    extent = np.ptp(frame.positions, axis=0)
    return edited(frame, cell=np.diag(extent + 0.8 * cutoff), pbc=np.ones(3, dtype=bool))


def difference(one: Outputs, other: Outputs) -> float:
    """Largest of: energy per atom (eV), force component (eV/A), stress component (eV/A^3, where both have one)."""
    parts = [abs(one.energy - other.energy) / max(1, len(one.forces)), np.max(np.abs(one.forces - other.forces))]
    if not (np.isnan(one.stress).all() and np.isnan(other.stress).all()):
        parts.append(np.max(np.abs(one.stress - other.stress)))
    return float(np.max(parts))


def exact_tolerance(outputs: Sequence[Outputs]) -> float:
    """Tolerance for rounding in float64: 1e-9 of the largest force (at least 0.1 eV/A) plus 1e-13 of the energy."""
    force = max((float(np.max(np.abs(out.forces))) for out in outputs), default=0.0)
    energy = max((abs(out.energy) for out in outputs), default=0.0)
    return 1e-9 * max(0.1, force) + 1e-13 * energy
