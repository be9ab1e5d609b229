"""The static structure factor of periodic structures, S(k) = |sum over atoms of exp(i k r)|^2 / n_atoms.

k are the wave vectors of the cell, linear combinations of 2 pi times its reciprocal vectors. Averages are over all of them in a
shell of lengths; the factor of an ideal gas is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from forgefield.errors import ForgefieldError

VECTORS = 2048
"""Wave vectors at a time."""


@dataclass(frozen=True)
class StructureFactor:
    """Shells that contain wave vectors. k: (n,), mean length, 1/A. values: (n,), mean of S. vectors: (n,), how many."""

    k: np.ndarray
    values: np.ndarray
    vectors: np.ndarray


def static_structure_factor(
    structures: Iterable[tuple[np.ndarray, np.ndarray]], *, k_max: float, shells: int
) -> StructureFactor:
    """S(k) averaged over directions and structures, in `shells` shells of equal width up to k_max, 1/A.

    structures: positions (n_atoms, 3) and cells (3, 3), rows are the cell vectors, A.
    """
    if not k_max > 0 or shells < 1:
        raise ForgefieldError(
            f"shells of wave vectors need k_max > 0 and at least one of them, not {k_max:g} and {shells}"
        )
    sums = np.zeros((3, shells))
    for positions, cell in structures:
        vectors = wave_vectors(cell, k_max)
        lengths = np.linalg.norm(vectors, axis=1)
        shell = shell_of(lengths, k_max, shells)
        for row, weights in enumerate((lengths, structure_factor(positions, vectors), np.ones(len(lengths)))):
            sums[row] += np.bincount(shell, weights, minlength=shells)
    filled = sums[2] > 0
    if not filled.any():
        raise ForgefieldError(f"no wave vector of these cells is shorter than {k_max:g} 1/A; use a larger k_max")
    k, values, count = sums[:, filled]
    return StructureFactor(k / count, values / count, 2 * count.astype(np.int64))


def structure_factor(positions: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """(n,), S of each wave vector (n, 3), 1/A."""
    values = np.empty(len(vectors))
    for start in range(0, len(vectors), VECTORS):
        phases = vectors[start : start + VECTORS] @ positions.T
        values[start : start + VECTORS] = np.cos(phases).sum(axis=1) ** 2 + np.sin(phases).sum(axis=1) ** 2
    return values / len(positions)


def wave_vectors(cell: np.ndarray, k_max: float) -> np.ndarray:
    """(n, 3), 1/A, up to the length k_max: one of each pair k and -k, without 0."""
    reciprocal = 2 * math.pi * np.linalg.inv(cell).T
    largest = np.floor(k_max * np.linalg.norm(cell, axis=1) / (2 * math.pi) + 1e-9).astype(int)
    axes = np.meshgrid(*(np.arange(-n, n + 1) for n in largest), indexing="ij")
    numbers = np.stack(axes, axis=-1).reshape(-1, 3)
    numbers = numbers[len(numbers) // 2 + 1 :]  # in this order, the second half is minus the first
    vectors: np.ndarray = numbers @ reciprocal
    short: np.ndarray = np.linalg.norm(vectors, axis=1) <= k_max * (1 + 1e-12)
    return vectors.compress(short, axis=0)


def shell_of(lengths: np.ndarray, k_max: float, shells: int) -> np.ndarray:
    """Index of the shell of each length in 0 < k <= k_max; the upper end of a shell belongs to it."""
    shell: np.ndarray = np.ceil(lengths * (shells / k_max)).astype(int) - 1
    return shell.clip(0, shells - 1)
