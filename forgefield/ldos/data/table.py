"""The points of several snapshots as one table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.snapshot import Snapshot

FINGERPRINTED = 32
"""Rows of each snapshot that enter the fingerprint."""


class PointTable:
    """Points of several snapshots; their grids may differ, the numbers of inputs and targets may not."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        if not snapshots:
            raise ForgefieldError("there is no snapshot")
        self.snapshots = list(snapshots)
        _require_same_columns(self.snapshots)
        self.n_inputs, self.n_targets = self.snapshots[0].n_inputs, self.snapshots[0].n_targets
        self.ends = np.cumsum([snapshot.n_points for snapshot in self.snapshots])
        """(n_snapshots,): row after the last one of each snapshot."""
        self.n_points = int(self.ends[-1])

    def __len__(self) -> int:
        return self.n_points

    @property
    def row_values(self) -> int:
        """Number of values per point."""
        return self.n_inputs + self.n_targets

    def n_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Memory of all points."""
        return self.n_points * self.row_values * dtype.itemsize

    def first(self, snapshot: int) -> int:
        """First row of a snapshot."""
        return int(self.ends[snapshot]) - self.snapshots[snapshot].n_points

    def snapshot_of(self, rows: np.ndarray) -> np.ndarray:
        """Index of the snapshot of each row, int64."""
        return np.searchsorted(self.ends, rows, side="right").astype(np.int64)

    def where(self, row: int) -> str:
        """Description of a point for messages."""
        number = int(self.snapshot_of(np.array([row]))[0])
        return self.snapshots[number].where(row - self.first(number))

    def split_by_snapshot(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Rows start to stop divided by snapshot: index of the snapshot, first point and last point + 1."""
        number = int(self.snapshot_of(np.array([start]))[0])
        while start < stop:
            end = min(stop, int(self.ends[number]))
            first = self.first(number)
            yield number, start - first, end - first
            start, number = end, number + 1

    def read_into(self, start: int, inputs: np.ndarray | None, targets: np.ndarray | None) -> None:
        """Fill (n, n_inputs) and (n, n_targets) with the rows from `start` on. None: skip."""
        filled = next(array for array in (inputs, targets) if array is not None)
        n_read = 0
        for number, first, last in self.split_by_snapshot(start, start + len(filled)):
            rows = slice(n_read, n_read + last - first)
            self.snapshots[number].read_into(
                first, None if inputs is None else inputs[rows], None if targets is None else targets[rows]
            )
            n_read += last - first

    def read_selected(
        self, selection: Selection, start: int, inputs: np.ndarray | None, targets: np.ndarray | None
    ) -> np.ndarray:
        """Fill arrays with the selected points at positions from `start` on, reading all rows between at once. Returns their
        rows."""
        filled = next(array for array in (inputs, targets) if array is not None)
        if isinstance(selection, EveryPoint):
            self.read_into(start, inputs, targets)
            return np.arange(start, start + len(filled))
        rows = selection.rows(torch.arange(start, start + len(filled))).numpy()
        first, n = int(rows[0]), int(rows[-1] - rows[0]) + 1
        buffers = [None if array is None else np.empty((n, array.shape[1]), array.dtype) for array in (inputs, targets)]
        self.read_into(first, *buffers)
        for array, source in zip((inputs, targets), buffers):
            if array is not None and source is not None:
                np.take(source, rows - first, axis=0, out=array)
        return rows

    @property
    def fingerprint(self) -> str:
        """Hash of names, sizes, units and some values of the snapshots."""
        digest = hashlib.sha256()
        for snapshot in self.snapshots:
            digest.update(
                repr((snapshot.name, snapshot.n_points, snapshot.cut, snapshot.factor, snapshot.target)).encode()
            )
            for row in np.unique(np.linspace(0, snapshot.n_points - 1, FINGERPRINTED).astype(int)):
                for values in snapshot.read(int(row), int(row) + 1, np.float64):
                    digest.update(values.tobytes())
        return digest.hexdigest()[:16]


def _require_same_columns(snapshots: list[Snapshot]) -> None:
    first = snapshots[0]
    for snapshot in snapshots[1:]:
        for quantity, expected, actual in (
            ("descriptors", first.n_inputs, snapshot.n_inputs),
            ("target values", first.n_targets, snapshot.n_targets),
        ):
            if expected != actual:
                raise ForgefieldError(
                    f"snapshot {first.name} has {expected} {quantity} per point, snapshot {snapshot.name} has {actual}; "
                    "compute all snapshots with the same settings"
                )
        if snapshot.target != first.target:
            raise ForgefieldError(
                f"snapshot {first.name} contains {first.target}, snapshot {snapshot.name} {snapshot.target}"
            )
