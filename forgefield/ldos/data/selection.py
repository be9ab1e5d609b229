"""Splits of points by index arithmetic: nothing is copied and no list of indices is stored.

A fraction of the points is spread evenly: the points are divided into as many cells of equal size as points are needed, and
one is drawn from each, determined by the seed. A selection is monotone: consecutive positions are close together on disk.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.permutation import hash_integers, round_keys

SPLIT_KEY = 0x5EED


class Selection(Protocol):
    """A monotone map from positions 0..n-1 to rows."""

    n: int

    def rows(self, positions: Tensor) -> Tensor:
        """Row at each position, int64."""


class EveryPoint:
    """All of n rows."""

    def __init__(self, n: int) -> None:
        self.n = int(n)

    def rows(self, positions: Tensor) -> Tensor:
        return positions


class _Cells:
    """n rows divided into `cells` ranges that differ by at most one row, and one row drawn from each."""

    def __init__(self, n: int, cells: int, key: int) -> None:
        self.n_rows, self.cells, self._key = n, cells, key
        self._base_size, self._remainder = divmod(n, cells)

    def start(self, cell: Tensor) -> Tensor:
        return cell * self._base_size + (cell * self._remainder) // self.cells

    def drawn(self, cell: Tensor) -> Tensor:
        """Offset of the drawn row within its cell."""
        longer = self._base_size + 1
        chance = hash_integers(cell, self._key, min(max(longer * (longer - 1), 1), 2**31 - 1))
        size = self.start(cell + 1) - self.start(cell)
        return chance % size  # both possible sizes divide the range: no offset is favoured


class OnePerCell:
    """The drawn row of each cell."""

    def __init__(self, n: int, cells: int, key: int) -> None:
        self._cells = _Cells(n, cells, key)
        self.n = cells

    def rows(self, positions: Tensor) -> Tensor:
        return self._cells.start(positions) + self._cells.drawn(positions)


class AllButOnePerCell:
    """All rows except the drawn row of each cell."""

    def __init__(self, n: int, cells: int, key: int) -> None:
        self._cells = _Cells(n, cells, key)
        self.n = n - cells

    def rows(self, positions: Tensor) -> Tensor:
        cells = self._cells
        # start(c) - c rows before cell c are not drawn. The cell of a position is the last one for which this is not larger.
        guess = positions.to(torch.float64) * (cells.cells / max(self.n, 1))
        cell = guess.to(torch.int64).clamp(0, cells.cells - 1)
        for _ in range(3):  # the guess is off by two at most
            cell = cell - (cells.start(cell) - cell > positions).to(torch.int64)
            after = cell + 1
            follows = (after < cells.cells) & (cells.start(after) - after <= positions)
            cell = cell + follows.to(torch.int64)
        offset = positions - (cells.start(cell) - cell)
        return cells.start(cell) + offset + (offset >= cells.drawn(cell)).to(torch.int64)


class Within:
    """A selection among the positions of another."""

    def __init__(self, outer: Selection, inner: Selection) -> None:
        self._outer, self._inner = outer, inner
        self.n = inner.n

    def rows(self, positions: Tensor) -> Tensor:
        return self._outer.rows(self._inner.rows(positions))


def split_points(n: int, shares: dict[str, float], seed: int) -> dict[str, Selection]:
    """Selections of n points by name: those in `shares` get that fraction of all points, `train` the others.

    Every point is in exactly one of them. The result depends on (n, shares, seed) only.
    """
    selections: dict[str, Selection] = {"train": EveryPoint(n)}
    for number, (name, share) in enumerate(shares.items()):
        count = _count(n, name, share)
        remaining = selections["train"]
        if count >= remaining.n:
            raise ForgefieldError(
                f"data.{name}={share:g} leaves none of the {n} points for training; the shares should add up to less than 1"
            )
        key = round_keys(seed, SPLIT_KEY, number, count=1)[0]
        selections |= _divide(remaining, name, count, key)
    return selections


def _divide(remaining: Selection, name: str, count: int, key: int) -> dict[str, Selection]:
    n_cells = (
        count if 2 * count <= remaining.n else remaining.n - count
    )  # one per cell is the smaller of the two selections
    drawn, not_drawn = OnePerCell(remaining.n, n_cells, key), AllButOnePerCell(remaining.n, n_cells, key)
    chosen, train = (drawn, not_drawn) if n_cells == count else (not_drawn, drawn)
    return {name: Within(remaining, chosen), "train": Within(remaining, train)}


def _count(n: int, name: str, share: float) -> int:
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1 or not math.isfinite(share):
        raise ForgefieldError(
            f"data.{name} must be snapshots or a fraction of the points between 0 and 1, not {share!r}"
        )
    return max(1, round(n * share))
