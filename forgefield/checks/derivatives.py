"""Checks that forces and stress are derivatives of the energy, and that outputs are continuous at the cutoff.

Derivatives are central differences of energies at three step sizes, extrapolated to zero step (Romberg); the last correction of
the extrapolation is the error estimate in the note.

A discontinuity is a change across a tiny interval that exceeds the changes in the neighbouring intervals. At the cutoff its
position is known; elsewhere, spikes in the differences along a path are narrowed down by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np
from ase.data import atomic_numbers

from forgefield.checks.probe import CheckResult, Probe, boxed, edited, judged, molecule
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import neighbour_list

FORCE_STEP = 8e-3
"""Largest displacement, A."""
STRAIN_STEP = 2e-3
FORCE_TOLERANCE = 1e-6
"""Relative to the largest force component, but at least 0.1 eV/A."""
STRESS_TOLERANCE = 1e-6
"""Relative to the largest stress component, but at least 0.1 eV/A^3."""
ROUNDING = 1e-12
"""Rounding error of energy differences, relative to the largest energy."""


def check_forces(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare forces along random displacements of all atoms, and of single atoms, with differences of the energy."""
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
    note = f"forces are the negative derivative of the energy (uncertainty {uncertainty:.0e})"
    return judged("forces = -dE/dx", value, FORCE_TOLERANCE * largest + ROUNDING * energy, note)


def check_stress(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare the stress with energy differences under random strains, and check its symmetry. Molecules are put into a box."""
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
    note = f"stress is the strain derivative of the energy (uncertainty {uncertainty:.0e})"
    return judged("stress = dE/dstrain", value, STRESS_TOLERANCE * largest + ROUNDING * energy, note)


def check_derivative(probe: Probe, name: str, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Compare an output that is a derivative of the energy in an input of atoms with differences of the energy, for frames with
    this input."""
    variable = probe.potential.derivative_outputs[name].variable
    value, uncertainty, largest, energy = 0.0, 0.0, 0.1, 0.0
    for frame in frames:
        if variable not in frame.fields:
            continue
        vectors = np.nan_to_num(frame.fields[variable])
        out = probe.potential(probe.batch([frame]), forces=False)
        slopes, energy = out[name].detach().cpu().numpy(), max(energy, abs(float(out["energy"][0])))
        largest = max(largest, float(np.max(np.abs(slopes))))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        for direction in _displacements(len(frame), random):
            towards = np.where(lengths > FORCE_STEP, direction, 0.0)  # at zero the energy need not be differentiable

            def energies(
                steps: np.ndarray, frame: Frame = frame, vectors: np.ndarray = vectors, towards: np.ndarray = towards
            ) -> np.ndarray:
                moved = [{variable: vectors + t * towards} for t in steps]
                return probe.energies([edited(frame, fields=fields) for fields in moved])

            slope, error = derivative(energies, FORCE_STEP)
            value = np.maximum(value, abs(np.sum(slopes * towards) + slope))
            uncertainty = np.maximum(uncertainty, error)
    note = f"{name} is the negative derivative of the energy in {variable} (uncertainty {uncertainty:.0e})"
    return judged(f"{name} = -dE/d{variable}", value, FORCE_TOLERANCE * largest + ROUNDING * energy, note)


def strained(frame: Frame, strain: np.ndarray) -> Frame:
    """The frame with atoms and cell deformed by `strain`, (3, 3), symmetric."""
    deformation = np.eye(3) + strain
    return edited(frame, positions=frame.positions @ deformation, cell=frame.cell @ deformation)


def derivative(energies: Callable[[np.ndarray], np.ndarray], step: float) -> tuple[float, float]:
    """Derivative at zero, to sixth order in `step`, and an estimate of its error. energies: function of (n,) positions."""
    steps = step / np.array([1.0, 2.0, 4.0])
    values = energies(np.concatenate([steps, -steps]))
    first = (values[:3] - values[3:]) / (2 * steps)
    second = (4 * first[1:] - first[:-1]) / 3
    third = (16 * second[1] - second[0]) / 15
    return float(third), float(abs(third - second[1]))


def _displacements(n_atoms: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Unit vectors (n_atoms, 3) in the space of all coordinates: one of all atoms, two of one atom each."""
    collective = random.standard_normal((n_atoms, 3))
    yield collective / np.linalg.norm(collective)
    for _ in range(2):
        single = np.zeros((n_atoms, 3))
        single[random.integers(n_atoms)] = random.standard_normal(3)
        yield single / np.linalg.norm(single)


# ---- continuity


CONTINUITY_TOLERANCE = 1e-7
"""Relative to the largest force component, but at least 0.1 eV/A."""
WIDTH = 2e-6
"""Interval across which a discontinuity is measured, A."""
SPACING = 0.02
"""Between the points of a scan, A."""
MAX_CANDIDATES = 4
"""Number of positions along a path that are examined for a discontinuity."""
MAX_PAIRS = 10
"""Number of pairs of species whose dimers are scanned."""

Path = Callable[[float], Frame]


def check_cutoff(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Check continuity where a pair of atoms leaves the cutoff: in the frames, and for dimers, which are scanned from half the
    cutoff."""
    value, largest = 0.0, 0.1
    for path, crossing in _pairs(probe, frames):
        jump, force = jump_at(probe, path, crossing)
        value, largest = np.maximum(value, jump), np.maximum(largest, force)
    for path in _dimers(probe, random):
        candidates = possible_jumps(probe, path, 0.5 * probe.cutoff, 1.05 * probe.cutoff)
        for x in (probe.cutoff, *candidates):
            value = np.maximum(value, jump_at(probe, path, x)[0])
    note = "energy and forces are continuous where a pair of atoms leaves the cutoff"
    return judged("cutoff smoothness", value, CONTINUITY_TOLERANCE * largest, note)


def jump_at(probe: Probe, path: Path, x: float) -> tuple[float, float]:
    """The discontinuity of the energy or any force component at `x`, and the largest force component there; the same for other
    outputs.

    A continuous function changes about as much in the next interval on one side or the other, also at a kink.
    """
    values = _along(probe, path, x + WIDTH * np.array([-1.5, -0.5, 0.5, 1.5]))
    before, across, after = np.max(np.abs(np.diff(values, axis=0)), axis=1)
    return float(np.maximum(across - 2 * np.maximum(before, after), 0.0)), float(np.max(np.abs(values[:, 1:])))


def possible_jumps(probe: Probe, path: Path, low: float, high: float) -> np.ndarray:
    """Positions of possible discontinuities: spikes in the third differences of a scan, narrowed down to `WIDTH`."""
    grid = np.arange(low, high, SPACING)
    spikes = _third_differences(_along(probe, path, grid)[:, None])[:, 0]
    left, width = grid[1:-2][np.argsort(spikes)[-MAX_CANDIDATES:]], SPACING
    while width > WIDTH / 4:
        width /= 2
        points = left[:, None] + width * np.arange(-1, 4)
        values = _along(probe, path, points.ravel()).reshape(*points.shape, -1)
        first, second = _third_differences(values.swapaxes(0, 1))
        left = np.where(first > second, left, left + width)
    return left + width / 2


def _third_differences(values: np.ndarray) -> np.ndarray:
    """(n, paths, outputs) to (n - 3, paths): small where smooth, largest in an interval with a discontinuity."""
    return np.max(np.abs(np.diff(values, n=3, axis=0)), axis=-1)


def _along(probe: Probe, path: Path, points: np.ndarray) -> np.ndarray:
    """Outputs along a path, (n_points, n_outputs)."""
    return probe.rows([path(float(x)) for x in points])


def _dimers(probe: Probe, random: np.random.Generator) -> Iterator[Path]:
    """Dimers of every pair of species, at most `MAX_PAIRS`, as functions of the distance."""
    pairs = list(combinations_with_replacement(probe.species.symbols, 2))
    chosen = random.permutation(len(pairs))[:MAX_PAIRS]
    for first, second in (pairs[i] for i in sorted(chosen)):
        numbers = np.array([atomic_numbers[first], atomic_numbers[second]])
        direction = random.standard_normal(3)
        direction /= np.linalg.norm(direction)

        def path(r: float, numbers: np.ndarray = numbers, direction: np.ndarray = direction) -> Frame:
            return molecule(numbers, np.stack([np.zeros(3), r * direction]))

        yield path


def _pairs(probe: Probe, frames: Sequence[Frame]) -> Iterator[tuple[Path, float]]:
    """For each frame, a path along which one atom of the pair closest to the cutoff moves away, and where it leaves."""
    for frame in frames:
        source, destination, shifts = neighbour_list(frame.positions, frame.cell, frame.pbc, probe.cutoff)
        vectors = frame.positions[source] + shifts @ frame.cell - frame.positions[destination]
        distances = np.where(source == destination, 0.0, np.linalg.norm(vectors, axis=1))
        if not np.any(distances > 0):
            continue
        edge = int(np.argmax(distances))
        atom, direction = source[edge], vectors[edge] / distances[edge]

        def path(t: float, frame: Frame = frame, atom: int = atom, direction: np.ndarray = direction) -> Frame:
            positions = frame.positions.copy()
            positions[atom] += t * direction
            return edited(frame, positions=positions)

        yield path, probe.cutoff - distances[edge]
