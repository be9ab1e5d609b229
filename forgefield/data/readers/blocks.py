"""Several frames at once: what readers of array formats hand over instead of one raw frame after the other.

All frames of a block have the same number of atoms. Labels are chosen, converted and checked for the whole block, which
costs a few microseconds a frame; where anything is unusual the block is taken apart and each frame goes the plain way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from forgefield.data.frame import RawFrame

BLOCK_BYTES = 1 << 20
"""Positions of a block take about this much, so that a frame which outlives its block keeps little else alive."""


@dataclass(slots=True)
class RawBlock:
    positions: np.ndarray
    """(n_frames, n_atoms, 3)."""
    numbers: np.ndarray
    """(n_atoms,), or (n_frames, n_atoms)."""
    cell: np.ndarray
    """(n_frames, 3, 3)."""
    pbc: np.ndarray
    """(3,), or (n_frames, 3)."""
    source: str
    start: int
    """Index of the first frame in its source."""
    info: Mapping[str, np.ndarray] = field(default_factory=dict)
    """(n_frames, ...) each."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """(n_frames, n_atoms, ...) each."""
    extra_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.positions)

    def frames(self) -> Iterator[RawFrame]:
        """The same frames one by one."""
        info, arrays = dict(self.info), dict(self.arrays)
        for i in range(len(self)):
            yield RawFrame(
                positions=self.positions[i],
                numbers=self.numbers if self.numbers.ndim == 1 else self.numbers[i],
                cell=self.cell[i],
                pbc=self.pbc if self.pbc.ndim == 1 else self.pbc[i],
                source=self.source,
                index=self.start + i,
                info={key: value[i] for key, value in info.items()},
                arrays={key: value[i] for key, value in arrays.items()},
                extra_names=self.extra_names,
            )


class LazyColumns(Mapping[str, np.ndarray]):
    """Columns that are read when they are looked up: what nobody asks for stays on disk."""

    def __init__(self, readers: Mapping[str, Callable[[], np.ndarray]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def block_ranges(start: int, stop: int, n_atoms: int) -> Iterator[tuple[int, int]]:
    """Ranges of frames that make blocks of a fitting size."""
    step = max(1, min(256, BLOCK_BYTES // max(24 * n_atoms, 1)))
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def even_ranges(n: int, size: int) -> list[tuple[int, int | None]]:
    """`n` frames in ranges of about `size`, equal to within one frame; the last is open."""
    parts = max(1, round(n / max(size, 1)))
    bounds = [n * i // parts for i in range(parts + 1)]
    ranges: list[tuple[int, int | None]] = list(itertools.pairwise(bounds))
    ranges[-1] = (ranges[-1][0], None)
    return ranges


def within(start: int, stop: int | None, first: int, count: int) -> tuple[int, int]:
    """The part of frames first ... first + count that lies in start ... stop, counted from `first`."""
    end = first + count if stop is None else min(stop, first + count)
    return max(start - first, 0), max(end - first, 0)


def matrices(values: object) -> np.ndarray:
    """(n_frames, 3, 3) from itself or from (n_frames, 9)."""
    return np.asarray(values, dtype=np.float64).reshape(-1, 3, 3)
