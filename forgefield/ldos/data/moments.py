"""Mean, spread and range of every column of many points, in one pass over the files, in float64.

Blocks are described by themselves and merged, which is exact to rounding whatever the offset of the values; blocks are dealt to
ranks, and what ranks found is merged in the same way. Values that are not finite are counted and named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from forgefield.data.sampling.loader import prepared_ahead
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.table import PointTable

BLOCK = 8192
"""Points that are read at once."""
SLICE = 256
"""Points that are described at once: few enough to stay in the cache."""


@dataclass
class ColumnMoments:
    """Of `count` rows: mean, sum of squared deviations from it, lowest and highest value of each column, (columns,).

    The mean is kept as its distance from `origin`, some row of the data, so that nothing is lost where it is much larger than
    the spread. Moments are merged with those that have the same origin.
    """

    count: int
    origin: np.ndarray
    offset: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, origin: np.ndarray | None = None) -> ColumnMoments:
        """Of rows in float64, (n, columns), n at least 1. origin: (columns,), by default the first row."""
        origin = values[0].copy() if origin is None else origin
        low, high = values.min(axis=0), values.max(axis=0)
        distances = values - origin
        offset = distances.mean(axis=0)
        distances -= offset
        squares = np.einsum("ij,ij->j", distances, distances)
        return cls(len(values), origin, offset, np.where(low == high, 0.0, squares), low, high)

    def merge(self, other: ColumnMoments) -> ColumnMoments:
        """Of both sets of rows together."""
        count = self.count + other.count
        step = other.offset - self.offset
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        squares = self.squares + other.squares + step**2 * (self.count * other.count / count)
        offset = self.offset + step * (other.count / count)
        return ColumnMoments(count, self.origin, offset, np.where(low == high, 0.0, squares), low, high)

    def over_all(self) -> ColumnMoments:
        """All columns taken as one set of numbers, (1,)."""
        origin = self.origin[:1]
        means = (self.origin - origin) + self.offset
        offset = means.mean(keepdims=True)
        squares = (self.squares.sum() + self.count * ((means - offset) ** 2).sum())[None]
        low, high = self.low.min(keepdims=True), self.high.max(keepdims=True)
        return ColumnMoments(self.count * len(means), origin, offset, squares, low, high)

    @property
    def mean(self) -> np.ndarray:
        return self.origin + self.offset

    @property
    def std(self) -> np.ndarray:
        """Sample standard deviation (divided by n - 1), as torch's and MALA's."""
        return np.sqrt(self.squares / max(self.count - 1, 1))


@dataclass
class PointMoments:
    """Moments of inputs and targets; None where there are none, or no rows on this rank."""

    inputs: ColumnMoments | None = None
    targets: ColumnMoments | None = None

    def add(self, other: PointMoments) -> None:
        """Take in those of other rows."""
        for name in ("inputs", "targets"):
            mine, more = getattr(self, name), getattr(other, name)
            if more is not None:
                setattr(self, name, more if mine is None else mine.merge(more))

    @classmethod
    def merged(cls, parts: Iterable[PointMoments]) -> PointMoments:
        """Of all parts together, such as those of all ranks in their order."""
        total = cls()
        for part in parts:
            total.add(part)
        return total


def measure_points(
    table: PointTable,
    selection: Selection | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    block: int = BLOCK,
) -> PointMoments:
    """Moments of the selected points, or of this rank's part of them; every rank reads its own blocks.

    Values that are NaN or infinite are an error that says where they are.
    """
    chosen = EveryPoint(table.n_points) if selection is None else selection
    starts = range(0, chosen.n, block)[rank::world_size]
    origins: list[Any] = [np.empty((1, k)) if k else None for k in (table.n_inputs, table.n_targets)]
    table.read_places(chosen, 0, *origins)  # the same on all ranks

    def describe(number: int) -> PointMoments:
        start = starts[number]
        n = min(block, chosen.n - start)
        arrays: list[Any] = [np.empty((n, k)) if k else None for k in (table.n_inputs, table.n_targets)]
        rows = table.read_places(chosen, start, *arrays)
        found = []
        for values, origin, what in zip(arrays, origins, ("inputs", "targets")):
            if values is not None and not np.isfinite(values.sum()):
                _refuse(table, rows, values, what)
            found.append(None if values is None else _described(values, origin[0]))
        return PointMoments(*found)

    if workers:
        return PointMoments.merged(prepared_ahead(describe, len(starts), workers, 2 * workers))
    return PointMoments.merged(map(describe, range(len(starts))))


def _described(values: np.ndarray, origin: np.ndarray) -> ColumnMoments:
    parts = (ColumnMoments.of(values[start : start + SLICE], origin) for start in range(0, len(values), SLICE))
    return reduce(ColumnMoments.merge, parts)


def _refuse(table: PointTable, rows: np.ndarray, values: np.ndarray, what: str) -> None:
    """Name the values that are not finite, over the whole snapshot that holds the first of them."""
    bad = ~np.isfinite(values)
    if not bad.any():  # a sum that overflowed
        return
    number = int(table.snapshot_of(rows[bad.any(axis=1)][:1])[0])
    snapshot = table.snapshots[number]
    file = snapshot.inputs if what == "inputs" else snapshot.targets
    counts, first = _count_bad(snapshot, what)
    columns = np.flatnonzero(counts)
    word = "descriptor" if what == "inputs" else "level" if snapshot.target in ("ldos", "dos") else "value"
    shown = ", ".join(f"{word} {column} ({counts[column]})" for column in columns[:5])
    more = f" and {len(columns) - 5} more" if len(columns) > 5 else ""
    path = None if file is None else file.path
    raise ForgefieldError(
        f"{path}: {counts.sum()} values are NaN or infinite: {shown}{more}, counted from 0; the first is at "
        f"{snapshot.where(first)}. Make this file again, or leave the snapshot out"
    )


def _count_bad(snapshot: Snapshot, what: str) -> tuple[np.ndarray, int]:
    """How many values of each column of a snapshot are not finite, and the first such point."""
    counts = np.zeros(1, dtype=np.int64)
    first = -1
    for start in range(0, snapshot.n_points, BLOCK):
        values = snapshot.read(start, min(start + BLOCK, snapshot.n_points))[0 if what == "inputs" else 1]
        bad = ~np.isfinite(values)
        counts = counts + bad.sum(axis=0)
        if first < 0 and bad.any():
            first = start + int(np.flatnonzero(bad.any(axis=1))[0])
    return counts, first
