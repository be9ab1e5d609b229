"""Blocks: several optimiser steps that Lightning sees as one batch, so that its loop costs nothing where steps are short.

A block begins at every `size`-th step of an epoch, counted from its start, and where `trainer.max_steps` or a resume falls
between; which points a step has is the loader's, whatever the blocks. Places are counted in points, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from typing import Any

from torch import Tensor

from forgefield.ldos.data.loader import CHUNK, PointLoader, filled_up


@dataclass(frozen=True)
class Block:
    """Steps of one batch of Lightning's.

    totals: points of each step over all ranks. own: those of this rank. rows: (n_steps, points), rows of the kept points,
    filled up where a step has fewer; None for streamed points, which `batches` has as they come.
    """

    totals: list[int]
    own: list[int]
    rows: Tensor | None
    batches: list[dict[str, Tensor]] | None

    def __len__(self) -> int:
        return len(self.totals)

    def parts(self, at: int) -> list[Block]:
        """It as two, the second from its step `at` on; where none begins there, itself."""
        if not 0 < at < len(self):
            return [self]
        return [
            Block(
                self.totals[part],
                self.own[part],
                None if self.rows is None else self.rows[part],
                None if self.batches is None else self.batches[part],
            )
            for part in (slice(at), slice(at, None))
        ]


class BlockLoader:
    """Serves the steps of `inner`, a loader of points, `size` at a time. limit: steps of an epoch, as
    `trainer.limit_train_batches` says; all, if None."""

    epochs_are_alike = True

    def __init__(self, inner: Any, size: int, limit: int | None = None) -> None:
        self.inner, self.size = inner, size
        self.limit = limit
        self._cut: tuple[int, int] | None = None
        """Epoch, and step in it at which a block ends whatever its size."""

    # ---- the plan

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    @property
    def draws(self) -> int:
        return self.inner.draws

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of a whole epoch."""
        n = self.inner.batches_in(self.inner.epoch)
        return n if self.limit is None else min(n, self.limit)

    def _steps(self) -> tuple[int, int]:
        """First step of the (rest of the) present epoch, and the one behind its last."""
        first = self.inner._rest_of_epoch()[0]
        stop = len(self.inner)
        return first, stop if self.limit is None else max(min(stop, self.limit), first)

    def _bounds(self) -> list[int]:
        """Steps at which the blocks of the (rest of the) present epoch begin, and the end of the last."""
        first, stop = self._steps()
        places = {first, stop, *range((first // self.size + 1) * self.size, stop, self.size)}
        if self._cut is not None and self._cut[0] == self.epoch and first < self._cut[1] < stop:
            places.add(self._cut[1])
        return sorted(places)

    def __len__(self) -> int:
        return self._first_block() + len(self._bounds()) - 1

    def _first_block(self) -> int:
        return self._steps()[0] // self.size

    def batches_in(self, epoch: int) -> int:
        """Blocks of a whole epoch."""
        return -(-self.steps_per_epoch // self.size)

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)

    def cut_after(self, steps: int) -> None:
        """Let a block end after so many further steps of the present epoch."""
        self._cut = self.epoch, self._steps()[0] + steps

    def start_at(self, sample: int) -> int:
        """Let the next iteration begin behind so many points of its epoch; returns the number of its first block."""
        self.inner.start_at(sample)
        return self._first_block()

    def position(self, batch: int) -> int:
        """How many points of the present epoch come before this block, over all ranks."""
        bounds = self._bounds()
        return self.inner.position(bounds[min(max(batch - self._first_block(), 0), len(bounds) - 1)])

    # ---- blocks

    def __iter__(self) -> Iterator[Block]:
        # A generator: nothing is taken from `start_at` until the first block is asked for. Lightning makes an iterator
        # just to see that it can.
        bounds = self._bounds()
        positions = [self.inner.position(step) for step in range(bounds[0], bounds[-1] + 1)]
        totals = [later - earlier for earlier, later in pairwise(positions)]
        own = [len(self.inner.places(*pair)) for pair in pairwise(positions)]
        kept = isinstance(self.inner, PointLoader)
        rows = self._rows(bounds, positions) if kept else repeat(None)
        batches = repeat(None) if kept else self._batches(bounds)
        for (start, stop), of_block, found in zip(pairwise(bounds), rows, batches):
            part = slice(start - bounds[0], stop - bounds[0])
            yield Block(totals[part], own[part], of_block, found)

    def _rows(self, bounds: list[int], positions: list[int]) -> Iterator[Tensor]:
        """Rows of each block, (n_steps, points); those of many blocks are computed at once."""
        points = self.inner.budget.size
        at_once = max(self.size, (CHUNK if self.inner.device.type == "cpu" else 64 * CHUNK) // points)
        known, first, last = None, 0, 0
        for start, stop in pairwise(bounds):
            if known is None or stop > last:
                first, last = start, max(bound for bound in bounds if bound <= max(start + at_once, stop))
                order = self.inner.order(positions[first - bounds[0]], positions[last - bounds[0]])
                known = filled_up(order, (last - first) * points).view(-1, points)
            yield known[start - first : stop - first]

    def _batches(self, bounds: list[int]) -> Iterator[list[dict[str, Tensor]]]:
        steps = iter(self.inner)
        for start, stop in pairwise(bounds):
            yield list(islice(steps, stop - start))
