"""Which points a split has, by index arithmetic: nothing is copied, no list of indices is kept.

A share of the points is spread evenly: the points are cut into as many equal stretches as points are wanted and one is drawn
from each, fixed by the seed. A selection is monotone: consecutive places lie close together on disk.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.permutation import round_keys, scattered

SPLIT_KEY = 0x5EED


class Selection(Protocol):
    """n places, each of which stands for a row; rows ascend with places."""

    n: int

    def rows(self, places: Tensor) -> Tensor:
        """Row of each place, int64."""


class EveryPoint:
    """All of n rows."""

    def __init__(self, n: int) -> None:
        self.n = int(n)

    def rows(self, places: Tensor) -> Tensor:
        return places


class _Cells:
    """n rows cut into `cells` stretches that differ by one row at most, and one row drawn from each."""

    def __init__(self, n: int, cells: int, key: int) -> None:
        self.n_rows, self.cells, self._key = n, cells, key
        self._whole, self._rest = divmod(n, cells)

    def start(self, cell: Tensor) -> Tensor:
        return cell * self._whole + (cell * self._rest) // self.cells

    def drawn(self, cell: Tensor) -> Tensor:
        """Offset of the row that is drawn within its cell."""
        longer = self._whole + 1
        chance = scattered(cell, self._key, min(max(longer * (longer - 1), 1), 2**31 - 1))
        size = self.start(cell + 1) - self.start(cell)
        return chance % size  # both possible sizes divide the range: no offset is favoured


class OneOfEach:
    """The row that is drawn from each cell."""

    def __init__(self, n: int, cells: int, key: int) -> None:
        self._cells = _Cells(n, cells, key)
        self.n = cells

    def rows(self, places: Tensor) -> Tensor:
        return self._cells.start(places) + self._cells.drawn(places)


class AllButOneOfEach:
    """All rows but the one that is drawn from each cell."""

    def __init__(self, n: int, cells: int, key: int) -> None:
        self._cells = _Cells(n, cells, key)
        self.n = n - cells

    def rows(self, places: Tensor) -> Tensor:
        cells = self._cells
        # Rows before cell c that are not drawn: start(c) - c. The cell of a place is the last one with that not above it.
        guess = places.to(torch.float64) * (cells.cells / max(self.n, 1))
        cell = guess.to(torch.int64).clamp(0, cells.cells - 1)
        for _ in range(3):  # the guess is off by two at most
            cell = cell - (cells.start(cell) - cell > places).to(torch.int64)
            after = cell + 1
            follows = (after < cells.cells) & (cells.start(after) - after <= places)
            cell = cell + follows.to(torch.int64)
        offset = places - (cells.start(cell) - cell)
        return cells.start(cell) + offset + (offset >= cells.drawn(cell)).to(torch.int64)


class Within:
    """A selection among the places of another."""

    def __init__(self, outer: Selection, inner: Selection) -> None:
        self._outer, self._inner = outer, inner
        self.n = inner.n

    def rows(self, places: Tensor) -> Tensor:
        return self._outer.rows(self._inner.rows(places))


def split_points(n: int, shares: dict[str, float], seed: int) -> dict[str, Selection]:
    """Selections of n points by name: those in `shares` get that share of all points, `train` gets the rest.

    Every point is in exactly one of them, whatever the ranks or the device; fixed by (n, shares, seed).
    """
    found: dict[str, Selection] = {"train": EveryPoint(n)}
    for number, (name, share) in enumerate(shares.items()):
        wanted = _count(n, name, share)
        rest = found["train"]
        if wanted >= rest.n:
            raise ForgefieldError(
                f"data.{name}={share:g} leaves none of the {n} points for training; the shares should add up to less than 1"
            )
        key = round_keys(seed, SPLIT_KEY, number, count=1)[0]
        found |= _divided(rest, name, wanted, key)
    return found


def _divided(rest: Selection, name: str, wanted: int, key: int) -> dict[str, Selection]:
    few = wanted if 2 * wanted <= rest.n else rest.n - wanted  # one of each cell are the fewer of both
    one, others = OneOfEach(rest.n, few, key), AllButOneOfEach(rest.n, few, key)
    chosen, left = (one, others) if few == wanted else (others, one)
    return {name: Within(rest, chosen), "train": Within(rest, left)}


def _count(n: int, name: str, share: float) -> int:
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1 or not math.isfinite(share):
        raise ForgefieldError(f"data.{name}={share!r} should be snapshots or a share of the points between 0 and 1")
    return max(1, round(n * share))
