"""Which sizes batches are filled up to, where a captured step needs fixed ones.

A plan is a pure function of the sizes of the batches to come, and the size of a batch a pure function of the plan and the
batch: it does not depend on what came before, so that a resumed run fills up exactly as an uninterrupted one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forgefield.training.engines.blank import EDGES_PER_ATOM

GROWTH = 1.2
"""Ratio of neighbouring sizes beyond the plan."""


@dataclass(frozen=True, order=True)
class Size:
    """Sizes of a filled-up batch, at least one blank frame included."""

    edges: int
    atoms: int
    frames: int

    def holds(self, frames: int, atoms: int, edges: int) -> bool:
        """Whether a batch of these sizes fits, with enough blank atoms to carry the blank edges."""
        return frames < self.frames and edges <= self.edges and self.atoms - atoms >= _blank_atoms(self.edges - edges)


def _blank_atoms(blank_edges: int) -> int:
    return max(1, math.ceil(blank_edges / EDGES_PER_ATOM))


@dataclass(frozen=True)
class SizePlan:
    """sizes: ascending."""

    sizes: tuple[Size, ...]

    def fit(self, frames: int, atoms: int, edges: int) -> Size:
        """The smallest planned size that holds such a batch, or one of a geometric series beyond them."""
        for size in self.sizes:
            if size.holds(frames, atoms, edges):
                return size
        edges = _rounded_up(edges, multiple=2)
        smallest = int(edges / GROWTH)
        return Size(
            edges, _rounded_up(atoms + _blank_atoms(edges - smallest), multiple=1), _rounded_up(frames + 1, multiple=1)
        )

    def describe(self) -> str:
        return ", ".join(f"{size.frames} frames / {size.atoms} atoms / {size.edges} edges" for size in self.sizes)


def _rounded_up(number: int, *, multiple: int) -> int:
    """The next of the series 16 * GROWTH^k that is at least as large."""
    power = math.ceil(math.log(max(number, 16) / 16) / math.log(GROWTH) - 1e-9)
    value = math.ceil(16 * GROWTH**power)
    return max(multiple * math.ceil(value / multiple), number)


def plan_sizes(batches: np.ndarray, *, at_most: int = 4, spare: float = 0.02) -> SizePlan:
    """A plan of few sizes into which batches waste little. batches: (n, 3) frames, atoms and edges of batches to come.

    spare: by how much sizes are enlarged, since the batches of other epochs are put together differently.
    """
    if len(batches) == 0:
        return SizePlan(())
    order = np.argsort(batches[:, 2], kind="stable")
    batches = batches[order]
    limits = _cut(batches[:, 2].astype(np.float64), at_most)
    sizes = []
    for start, stop in zip([0, *limits[:-1]], limits):
        group = batches[start:stop]
        edges = 2 * math.ceil(group[:, 2].max() * (1 + spare) / 2)
        # Batches of the next smaller size may spill over into this one.
        least = int(batches[max(start - 1, 0), 2])
        atoms = math.ceil(group[:, 1].max() * (1 + spare)) + _blank_atoms(edges - least)
        sizes.append(Size(edges, atoms, int(batches[:, 0].max()) + 1))
    return SizePlan(tuple(sorted(set(sizes))))


def _cut(costs: np.ndarray, at_most: int) -> list[int]:
    """Where to cut the sorted costs into groups so that the sum of every member's group maximum is least.

    A further group must save at least 2 % of the whole to be worth its memory.
    """
    candidates = np.unique(np.linspace(0, len(costs), min(len(costs), 64) + 1).astype(int))[1:]
    table: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for _ in range(at_most):
        row: dict[int, tuple[float, list[int]]] = {}
        for end in candidates:
            options = [
                (cost + (end - start) * costs[end - 1], [*cuts, int(end)])
                for start, (cost, cuts) in table[-1].items()
                if start < end
            ]
            if options:
                row[int(end)] = min(options)
        table.append(row)
    total = len(costs)
    chosen, least = table[1][total]
    for row in table[2:]:
        if total in row and row[total][0] < 0.98 * chosen:
            chosen, least = row[total]
    return least
