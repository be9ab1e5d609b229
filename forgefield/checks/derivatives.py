"""Checks that forces and stress are derivatives of the energy, by finite differences of the energy alone.

Central differences at three step sizes are extrapolated to zero step (Romberg); the last correction of the
extrapolation is the error estimate that the note states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from forgefield.checks.probe import CheckResult, Probe, boxed, edited, judged
from forgefield.data.frame import Frame

FORCE_STEP = 8e-3
"""Largest displacement, A."""
STRAIN_STEP = 2e-3
FORCE_TOLERANCE = 1e-6
"""Relative to the largest force, at least to 0.1 eV/A."""
STRESS_TOLERANCE = 1e-6
"""Relative to the largest stress component, at least to 0.1 eV/A^3."""
ROUNDING = 1e-12
"""What differences of energies may lose, relative to the largest energy."""


def check_forces(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Forces along random directions of all atoms, and of single atoms, against the slope of the energy."""
    value, uncertainty, largest, energy = 0.0, 0.0, 0.1, 0.0
    for frame in frames:
        out = probe.outputs([frame])[0]
        forces, energy = out.forces, max(energy, abs(out.energy))
        largest = max(largest, float(np.max(np.abs(forces))))
        for direction in _displacements(len(frame), random):

            def energies(steps: np.ndarray, frame: Frame = frame, direction: np.ndarray = direction) -> np.ndarray:
                return probe.energies([edited(frame, positions=frame.positions + t * direction) for t in steps])

            slope, error = derivative(energies, FORCE_STEP)
            value = np.maximum(value, abs(np.sum(forces * direction) + slope))
            uncertainty = np.maximum(uncertainty, error)
    note = f"minus the slope of the energy (slopes known to {uncertainty:.0e})"
    return judged("forces = -dE/dx", value, FORCE_TOLERANCE * largest + ROUNDING * energy, note)


def check_stress(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Stress contracted with random symmetric strains, and its symmetry. Molecules are put into a box for this."""
    value, uncertainty, largest, energy = 0.0, 0.0, 0.1, 0.0
    for frame in (boxed(frame, probe.cutoff) for frame in frames):
        out = probe.outputs([frame])[0]
        stress, energy = out.stress, max(energy, abs(out.energy) / frame.volume)
        largest = max(largest, float(np.max(np.abs(stress))))
        value = np.maximum(value, np.max(np.abs(stress - stress.T)))
        for _ in range(3):
            strain = random.standard_normal((3, 3))
            strain = (strain + strain.T) / np.linalg.norm(strain + strain.T)

            def energies(steps: np.ndarray, frame: Frame = frame, strain: np.ndarray = strain) -> np.ndarray:
                return probe.energies([strained(frame, t * strain) for t in steps])

            slope, error = derivative(energies, STRAIN_STEP)
            value = np.maximum(value, abs(np.sum(stress * strain) - slope / frame.volume))
            uncertainty = np.maximum(uncertainty, error / frame.volume)
    note = f"slope of the energy with strain (slopes known to {uncertainty:.0e})"
    return judged("stress = dE/dstrain", value, STRESS_TOLERANCE * largest + ROUNDING * energy, note)


def strained(frame: Frame, strain: np.ndarray) -> Frame:
    """Atoms and cell deformed together; `strain`: (3, 3), symmetric."""
    deformation = np.eye(3) + strain
    return edited(frame, positions=frame.positions @ deformation, cell=frame.cell @ deformation)


def derivative(energies: Callable[[np.ndarray], np.ndarray], step: float) -> tuple[float, float]:
    """Slope at zero, sixth order in `step`, and an estimate of its error. `energies`: (n,) places to (n,) values."""
    steps = step / np.array([1.0, 2.0, 4.0])
    values = energies(np.concatenate([steps, -steps]))
    first = (values[:3] - values[3:]) / (2 * steps)
    second = (4 * first[1:] - first[:-1]) / 3
    third = (16 * second[1] - second[0]) / 15
    return float(third), float(abs(third - second[1]))


def _displacements(n_atoms: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Unit vectors (n_atoms, 3) in the space of all coordinates: one of all atoms, two of one atom each."""
    all_gather = random.standard_normal((n_atoms, 3))
    yield all_gather / np.linalg.norm(all_gather)
    for _ in range(2):
        alone = np.zeros((n_atoms, 3))
        alone[random.integers(n_atoms)] = random.standard_normal(3)
        yield alone / np.linalg.norm(alone)
