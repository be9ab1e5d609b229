"""A small set of frames that stands for a large one.

It has every species, every composition if there is room, and the whole range of energies.
"""

from __future__ import annotations

import numpy as np

from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError


def representative_rows(table: FrameTable, n: int) -> np.ndarray:
    """(n,) rows, ascending, chosen without chance.

    Compositions get places in proportion to their frames, at least one each if there are enough places, else those that bring
    species not yet seen come first. Within a composition frames are taken evenly over the range of energies per atom (of
    forces, where there are no energies).
    """
    if n < 1:
        raise ForgefieldError(f"{n} frames were asked for; it should be at least 1")
    if n >= len(table):
        return np.arange(len(table))
    composition, species = _compositions(table)
    sizes = np.bincount(composition)
    places = _places(sizes, n) if n >= len(sizes) else _first_compositions(sizes, species, n)
    rank = np.lexsort((np.arange(len(table)), _range_value(table), composition))
    begins = np.cumsum(sizes) - sizes
    chosen = [
        rank[begin + ((np.arange(k) + 0.5) * size / k).astype(np.int64)]
        for begin, size, k in zip(begins, sizes, places)
        if k
    ]
    return np.sort(np.concatenate(chosen))


def _compositions(table: FrameTable) -> tuple[np.ndarray, list[set[int]]]:
    """(n_frames,) number of the composition of each frame, and the atomic numbers in each composition."""
    found = table.components
    # Two numbers that are the same for two frames only if all their (species, count) are; exact in integers modulo 2^64.
    entry = found.number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + found.count.astype(np.uint64)
    entry = (entry ^ (entry >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    starts = np.flatnonzero(np.diff(found.frame, prepend=-1))
    key = np.add.reduceat(entry ^ (entry >> np.uint64(32)), starts)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    ends = np.append(starts, len(found.frame))
    return number, [set(found.number[ends[row] : ends[row + 1]].tolist()) for row in first]


def _range_value(table: FrameTable) -> np.ndarray:
    if table.carries("energy").any():
        return table.column("energy") / table.n_atoms
    return np.asarray(table.column("max_force"))


def _places(sizes: np.ndarray, n: int) -> np.ndarray:
    """Places of each composition, at least one and at most its frames, n in all, else in proportion to the frames."""
    places = np.maximum(np.floor(sizes * n / sizes.sum()), 1).astype(np.int64)
    while places.sum() != n:
        missing = sizes * n / sizes.sum() - places
        if places.sum() < n:
            places[np.where(places < sizes, missing, -np.inf).argmax()] += 1
        else:
            places[np.where(places > 1, missing, np.inf).argmin()] -= 1
    return places


def _first_compositions(sizes: np.ndarray, species: list[set[int]], n: int) -> np.ndarray:
    """One place for n compositions: those with most new species first, among equals the ones with most frames."""
    places = np.zeros(len(sizes), dtype=np.int64)
    missing = set().union(*species)
    while missing and places.sum() < n:
        best = max(np.flatnonzero(places == 0), key=lambda i: (len(species[i] & missing), sizes[i]))
        missing -= species[best]
        places[best] = 1
    by_size = np.argsort(np.where(places > 0, -1, sizes), kind="stable")[::-1]
    places[by_size[: n - places.sum()]] = 1
    return places
