"""A look at the atoms' surroundings: neighbours, nearest distances, atoms too close to each other.

All frames of a small table are looked at, some of a large one, evenly spread over it; memory holds one block of frames at a
time. Where a store keeps the shortest distance of every frame, those with the shortest are looked at in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from ase.data import chemical_symbols, covalent_radii

from forgefield.data.neighbours.lists import neighbour_pairs
from forgefield.data.store.table import FrameTable

FRAMES = 5000
"""Most frames that are looked at."""
ATOMS = 1_000_000
"""Most atoms in them, about."""
CLOSEST = 100
"""Frames with the shortest distances that are looked at beyond that, where they are known."""
BLOCK_ATOMS = 100_000
"""Atoms read at a time."""
TOO_CLOSE = 0.5
"""Share of the sum of covalent radii below which two atoms are too close."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Survey:
    rows: np.ndarray
    """Frames looked at, ascending."""
    cutoff: float
    """A."""
    neighbours: tuple[int, float, int]
    """Fewest, mean and most neighbours of an atom."""
    closest: tuple[float, str] | None
    """Distance, A, of the closest pair within the cutoff, and which it is."""
    too_close: np.ndarray
    """Frames with atoms closer than half the sum of their covalent radii."""
    nearest: np.ndarray
    """Distance of each atom to its nearest neighbour, A, of the atoms that have one."""
    lone_share: float
    """Share of the atoms without any neighbour, in frames of several atoms."""
    typical_bond: float | None
    """Median over atoms: distance to the nearest neighbour over the sum of the two covalent radii."""


@dataclass(frozen=True)
class _Surroundings:
    """Of the atoms of one frame."""

    degree: np.ndarray
    nearest: np.ndarray
    bond: np.ndarray
    """Shortest distance of each atom in units of the sum of covalent radii."""
    pair: tuple[float, str] | None


def row_blocks(n_atoms: np.ndarray, limit: int = BLOCK_ATOMS) -> Iterator[np.ndarray]:
    """Positions in `n_atoms`, (n,), in runs of at most `limit` atoms, of one frame at least."""
    block = (np.cumsum(n_atoms) - 1) // limit
    for places in np.split(np.arange(len(n_atoms)), np.flatnonzero(np.diff(block)) + 1):
        if len(places):
            yield places


def even_rows(table: FrameTable, frames: int, atoms: int) -> np.ndarray:
    """Rows spread evenly over the table: all, or about as many as `frames` and `atoms` allow."""
    n = len(table)
    mean = max(float(table.n_atoms.mean()), 1.0) if n else 1.0
    wanted = max(1, min(n, frames, int(atoms / mean)))
    return np.arange(n) if wanted >= n else np.unique(np.linspace(0, n - 1, wanted).round().astype(np.int64))


def survey_table(table: FrameTable, cutoff: float, progress: Progress | None = None) -> Survey:
    """Surroundings within `cutoff`, A, in up to 5000 frames."""
    rows = np.union1d(even_rows(table, FRAMES, ATOMS), _known_closest(table))
    fewest, most, edges, atoms = np.inf, 0, 0, 0
    lone, with_others = 0, 0
    best: tuple[float, str] | None = None
    too_close, nearest, bonds = [], [], []
    for places in row_blocks(table.n_atoms[rows]):
        for row, found in zip(rows[places], _block(table, rows[places], cutoff)):
            fewest, most = min(fewest, found.degree.min()), max(most, found.degree.max())
            edges, atoms = edges + int(found.degree.sum()), atoms + len(found.degree)
            if len(found.degree) > 1:
                lone, with_others = lone + int((found.degree == 0).sum()), with_others + len(found.degree)
            nearest.append(found.nearest)
            bonds.append(found.bond)
            if found.bond.min(initial=np.inf) < TOO_CLOSE:
                too_close.append(row)
            if found.pair is not None and (best is None or found.pair[0] < best[0]):
                best = (found.pair[0], f"{found.pair[1]}, {table.where(int(row))}")
        if progress is not None:
            progress(int(places[-1]) + 1, len(rows))
    distances, ratios = np.concatenate(nearest), np.concatenate(bonds)
    return Survey(
        rows=rows,
        cutoff=cutoff,
        neighbours=(int(fewest), edges / atoms, int(most)),
        closest=best,
        too_close=np.array(too_close, dtype=np.int64),
        nearest=distances,
        lone_share=lone / max(with_others, 1),
        typical_bond=float(np.median(ratios)) if len(ratios) else None,
    )


def _known_closest(table: FrameTable) -> np.ndarray:
    """Rows with the shortest distances that a store has written down; those with atoms too close are among them."""
    if not all(part.columns.has("closest") for part in table.parts):
        return np.zeros(0, dtype=np.int64)
    shortest = np.empty(len(table))
    for part, places, local in table.located(np.arange(len(table))):
        shortest[places] = part.columns.column("closest")[local]
    return np.argsort(shortest, kind="stable")[:CLOSEST]


def _block(table: FrameTable, rows: np.ndarray, cutoff: float) -> Iterator[_Surroundings]:
    positions, numbers = table.atoms("positions", rows), table.atoms("numbers", rows)
    cell, pbc = table.column("cell", rows), table.column("pbc", rows)
    ends = table.n_atoms[rows].cumsum()
    for i, (first, end) in enumerate(zip(ends - table.n_atoms[rows], ends)):
        yield _surroundings(positions[first:end], numbers[first:end], cell[i], pbc[i], cutoff)


def _surroundings(
    positions: np.ndarray, numbers: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float
) -> _Surroundings:
    n = len(numbers)
    pairs = neighbour_pairs(positions, cell, pbc, cutoff)
    ends = np.concatenate([pairs.source, pairs.destination])
    degree = np.bincount(ends, minlength=n)
    if len(ends) == 0:
        return _Surroundings(degree, np.zeros(0), np.zeros(0), None)
    lengths = np.sqrt(pairs.squares)
    radii = covalent_radii[numbers]
    ratios = lengths / (radii[pairs.source] + radii[pairs.destination])
    nearest, bond = np.full(n, np.inf), np.full(n, np.inf)
    np.minimum.at(nearest, ends, np.tile(lengths, 2))
    np.minimum.at(bond, ends, np.tile(ratios, 2))
    at = int(lengths.argmin())
    symbols = sorted(chemical_symbols[numbers[atom]] for atom in (pairs.source[at], pairs.destination[at]))
    has_any = degree > 0
    return _Surroundings(degree, nearest[has_any], bond[has_any], (float(lengths[at]), "-".join(symbols)))
