"""Check that energy and forces, or other outputs, do not jump when a pair of atoms leaves the cutoff, or on the way there.

A jump is a change across a tiny interval that exceeds the changes in the intervals beside it. Where the cutoff is
crossed the place is known; jumps elsewhere are spikes in the differences along a path, narrowed down by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement

import numpy as np
from ase.data import atomic_numbers

from forgefield.checks.probe import CheckResult, Probe, edited, judged, molecule
from forgefield.data.frame import Frame
from forgefield.data.neighbours.lists import neighbour_list

TOLERANCE = 1e-7
"""Relative to the largest force, at least to 0.1 eV/A."""
WIDTH = 2e-6
"""Interval across which a jump is measured, A."""
SPACING = 0.02
"""Between the points of a scan, A."""
SUSPECTS = 4
MAX_PAIRS = 10

Path = Callable[[float], Frame]


def check_cutoff(probe: Probe, frames: Sequence[Frame], random: np.random.Generator) -> CheckResult:
    """Pairs of atoms pulled through the cutoff, inside the frames and in empty space, there from half the cutoff on."""
    value, largest = 0.0, 0.1
    for path, crossing in _pairs(probe, frames):
        jump, force = jump_at(probe, path, crossing)
        value, largest = np.maximum(value, jump), np.maximum(largest, force)
    for path in _dimers(probe, random):
        suspects = suspicious_places(probe, path, 0.5 * probe.cutoff, 1.05 * probe.cutoff)
        for place in (probe.cutoff, *suspects):
            value = np.maximum(value, jump_at(probe, path, place)[0])
    note = "a pair of atoms leaves the cutoff: nothing jumps"
    return judged("cutoff smoothness", value, TOLERANCE * largest, note)


def jump_at(probe: Probe, path: Path, place: float) -> tuple[float, float]:
    """The jump of energy or any force component at `place`, and the largest force component there (of other outputs likewise).

    A continuous function changes about as much in the next interval on one side or the other, also at a kink.
    """
    values = _along(probe, path, place + WIDTH * np.array([-1.5, -0.5, 0.5, 1.5]))
    before, across, after = np.max(np.abs(np.diff(values, axis=0)), axis=1)
    return float(np.maximum(across - 2 * np.maximum(before, after), 0.0)), float(np.max(np.abs(values[:, 1:])))


def suspicious_places(probe: Probe, path: Path, low: float, high: float) -> np.ndarray:
    """Where a jump would be if there is one: spikes of the third differences of a scan, narrowed down to `WIDTH`."""
    grid = np.arange(low, high, SPACING)
    spikes = _third_differences(_along(probe, path, grid)[:, None])[:, 0]
    left, width = grid[1:-2][np.argsort(spikes)[-SUSPECTS:]], SPACING
    while width > WIDTH / 4:
        width /= 2
        places = left[:, None] + width * np.arange(-1, 4)
        values = _along(probe, path, places.ravel()).reshape(*places.shape, -1)
        first, second = _third_differences(values.swapaxes(0, 1))
        left = np.where(first > second, left, left + width)
    return left + width / 2


def _third_differences(values: np.ndarray) -> np.ndarray:
    """(n, paths, outputs) to (n - 3, paths): small where smooth, largest in the interval that holds a jump."""
    return np.max(np.abs(np.diff(values, n=3, axis=0)), axis=-1)


def _along(probe: Probe, path: Path, places: np.ndarray) -> np.ndarray:
    """What must not jump, (n_places, n_outputs)."""
    return probe.rows([path(float(place)) for place in places])


def _dimers(probe: Probe, random: np.random.Generator) -> Iterator[Path]:
    """Every pair of species in empty space, at most `MAX_PAIRS` of them."""
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
    """In each frame the neighbours nearest to the cutoff: one moves away from the other until it has left."""
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
