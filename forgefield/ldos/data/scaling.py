"""Statistics of the columns of many points, and the scaling of inputs and outputs that follows from them.

Statistics are computed in float64 in one pass over the files: blocks are merged, which is exact to rounding whatever the offset
of the values, and ranks read different blocks. Values that are not finite are an error.

scaled = (value - shift) / scale. `standard` has mean 0 and standard deviation 1 (n - 1 in the denominator, as in MALA),
`minmax` ranges from 0 to 1; for all columns together, or `feature-wise` for each column. The scaling is part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.data.sampling.loader import prepared_ahead
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.table import PointTable

BLOCK = 8192
"""Points read at once."""
SLICE = 256
"""Points processed at once: few enough to stay in the cache."""


@dataclass
class ColumnMoments:
    """Mean, sum of squared deviations, minimum and maximum of each column of `count` rows, (columns,).

    The mean is stored as its distance from `origin`, a row of the data, so that no digits are lost if it is much larger than
    the standard deviation. Only moments with the same origin can be merged.
    """

    count: int
    origin: np.ndarray
    offset: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, origin: np.ndarray | None = None) -> ColumnMoments:
        """Moments of rows in float64, (n, columns), n at least 1. origin: (columns,); default: the first row."""
        origin = values[0].copy() if origin is None else origin
        low, high = values.min(axis=0), values.max(axis=0)
        distances = values - origin
        offset = distances.mean(axis=0)
        distances -= offset
        squares = np.einsum("ij,ij->j", distances, distances)
        return cls(len(values), origin, offset, np.where(low == high, 0.0, squares), low, high)

    def merge(self, other: ColumnMoments) -> ColumnMoments:
        """Moments of both sets of rows together."""
        count = self.count + other.count
        step = other.offset - self.offset
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        squares = self.squares + other.squares + step**2 * (self.count * other.count / count)
        offset = self.offset + step * (other.count / count)
        return ColumnMoments(count, self.origin, offset, np.where(low == high, 0.0, squares), low, high)

    def over_all(self) -> ColumnMoments:
        """Moments of all columns as one set of numbers, (1,)."""
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
        """Add the moments of other rows."""
        for name in ("inputs", "targets"):
            current, added = getattr(self, name), getattr(other, name)
            if added is not None:
                setattr(self, name, added if current is None else current.merge(added))

    @classmethod
    def merged(cls, moments: Iterable[PointMoments]) -> PointMoments:
        """Moments of all rows together, such as those of all ranks in order."""
        total = cls()
        for other in moments:
            total.add(other)
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
    """Moments of the selected points that belong to this rank; every rank reads different blocks.

    NaN or infinite values are an error that states where they are.
    """
    chosen = EveryPoint(table.n_points) if selection is None else selection
    starts = range(0, chosen.n, block)[rank::world_size]
    origins: list[Any] = [np.empty((1, k)) if k else None for k in (table.n_inputs, table.n_targets)]
    table.read_selected(chosen, 0, *origins)  # the same on all ranks

    def measure(number: int) -> PointMoments:
        start = starts[number]
        n = min(block, chosen.n - start)
        arrays: list[Any] = [np.empty((n, k)) if k else None for k in (table.n_inputs, table.n_targets)]
        rows = table.read_selected(chosen, start, *arrays)
        moments = []
        for values, origin, side in zip(arrays, origins, ("inputs", "targets")):
            if values is not None and not np.isfinite(values.sum()):
                _refuse_not_finite(table, rows, values, side)
            moments.append(None if values is None else _moments(values, origin[0]))
        return PointMoments(*moments)

    if workers:
        return PointMoments.merged(prepared_ahead(measure, len(starts), workers, 2 * workers))
    return PointMoments.merged(map(measure, range(len(starts))))


def _moments(values: np.ndarray, origin: np.ndarray) -> ColumnMoments:
    parts = (ColumnMoments.of(values[start : start + SLICE], origin) for start in range(0, len(values), SLICE))
    return reduce(ColumnMoments.merge, parts)


def _refuse_not_finite(table: PointTable, rows: np.ndarray, values: np.ndarray, side: str) -> None:
    """Raise an error that counts all values of the snapshot that are not finite."""
    bad = ~np.isfinite(values)
    if not bad.any():  # a sum that overflowed
        return
    number = int(table.snapshot_of(rows[bad.any(axis=1)][:1])[0])
    snapshot = table.snapshots[number]
    file = snapshot.inputs if side == "inputs" else snapshot.targets
    counts, first = _count_bad(snapshot, side)
    columns = np.flatnonzero(counts)
    word = "descriptor" if side == "inputs" else "level" if snapshot.target in ("ldos", "dos") else "value"
    shown = ", ".join(f"{word} {column} ({counts[column]})" for column in columns[:5])
    more = f" and {len(columns) - 5} more" if len(columns) > 5 else ""
    path = None if file is None else file.path
    raise ForgefieldError(
        f"{path}: {counts.sum()} values are NaN or infinite: {shown}{more}, counted from 0; the first is at "
        f"{snapshot.where(first)}. Compute this file again, or remove the snapshot"
    )


def _count_bad(snapshot: Snapshot, side: str) -> tuple[np.ndarray, int]:
    """Number of values of each column of a snapshot that are not finite, and the first such point."""
    counts = np.zeros(1, dtype=np.int64)
    first = -1
    for start in range(0, snapshot.n_points, BLOCK):
        values = snapshot.read(start, min(start + BLOCK, snapshot.n_points))[0 if side == "inputs" else 1]
        bad = ~np.isfinite(values)
        counts = counts + bad.sum(axis=0)
        if first < 0 and bad.any():
            first = start + int(np.flatnonzero(bad.any(axis=1))[0])
    return counts, first


KINDS = ("none", "standard", "minmax", "feature-wise-standard", "feature-wise-minmax")
_ALIASES = {"normal": "minmax", "feature-wise-normal": "feature-wise-minmax"}
"""Older names in MALA."""


def default_output_scaling(model: Mapping[str, Any]) -> str:
    """Scaling of the targets where `data.points.scaling.outputs` is left out. model: section `model` of the config.

    Per level, because levels differ by orders of magnitude: with one scale for all, the largest ones dominate the loss. Not
    with an output activation, because half of the standardised values are negative.
    """
    return "feature-wise-standard" if model.get("output_activation") is None else "minmax"


def check_scaling_kind(name: object, setting: str = "data.points.scaling") -> str:
    """The kind that `name` means; None is `none`."""
    kind = "none" if name is None else str(name).strip().lower().replace("_", "-")
    kind = _ALIASES.get(kind, kind)
    if kind not in KINDS:
        raise ForgefieldError(
            f"{setting}={name!r} is not known; it must be one of {', '.join(KINDS)}.{did_you_mean(str(name), KINDS)}"
        )
    return kind


@dataclass(frozen=True, eq=False)
class Scaling:
    """shift, scale: (columns,) float64, no scale is 0. constant: constant columns, which become 0."""

    kind: str
    shift: Tensor
    scale: Tensor
    constant: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: str | None, moments: ColumnMoments, setting: str = "data.points.scaling") -> Scaling:
        """The scaling of a kind for columns with these moments."""
        kind = check_scaling_kind(kind, setting)
        columns = len(moments.offset)
        if kind == "none":
            return cls.identity(columns)
        used = moments if kind.startswith("feature-wise") else moments.over_all()
        if kind.endswith("standard"):
            shift, scale = used.mean, used.std
        else:
            shift, scale = used.low, used.high - used.low
        constant = (used.low == used.high) | ~(scale > 0)
        shift, scale = np.where(constant, used.low, shift), np.where(constant, 1.0, scale)
        wide = [torch.from_numpy(np.broadcast_to(values, columns).copy()) for values in (shift, scale)]
        flat = np.broadcast_to(constant, columns)
        return cls(kind, wide[0], wide[1], tuple(int(column) for column in np.flatnonzero(flat)))

    @classmethod
    def identity(cls, columns: int) -> Scaling:
        """The scaling that changes nothing."""
        return cls("none", torch.zeros(columns, dtype=torch.float64), torch.ones(columns, dtype=torch.float64))

    def scaled(self, values: Tensor) -> Tensor:
        """Scaled values, (..., columns)."""
        return (values - self.shift.to(values)) / self.scale.to(values)

    def physical(self, scaled: Tensor) -> Tensor:
        """Values in physical units, (..., columns): the inverse of `scaled`."""
        return scaled * self.scale.to(scaled) + self.shift.to(scaled)

    def describe(self) -> str:
        """One line for a summary, which lists constant columns."""
        if not self.constant:
            return self.kind
        shown = ", ".join(map(str, self.constant[:8])) + (", ..." if len(self.constant) > 8 else "")
        return f"{self.kind}; {len(self.constant)} of {len(self.shift)} columns are constant ({shown}) and become 0"

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values, exact."""
        return {
            "kind": self.kind,
            "shift": self.shift.tolist(),
            "scale": self.scale.tolist(),
            "constant": list(self.constant),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scaling:
        numbers = [torch.tensor(values[name], dtype=torch.float64) for name in ("shift", "scale")]
        return cls(check_scaling_kind(values["kind"]), numbers[0], numbers[1], tuple(values.get("constant", ())))
