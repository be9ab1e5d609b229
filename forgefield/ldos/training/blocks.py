"""Blocks: several optimiser steps that Lightning sees as one batch, so that the cost of its loop is negligible for short steps.

A block starts at every `size`-th step of an epoch, and where `trainer.max_steps` or a resume falls in between. The points of a
step do not depend on the blocks. Positions are counted in points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, repeat

from torch import Tensor

from forgefield.ldos.data.loader import CHUNK, PointLoader, PointSteps, pad_rows


@dataclass(frozen=True)
class Block:
    """The optimiser steps of one Lightning batch.

    totals: points of each step over all ranks. own: those of this rank. rows: (n_steps, points), rows of resident points,
    padded where a step has fewer; None for streamed points, which are in `batches`.
    """

    totals: list[int]
    local: list[int]
    rows: Tensor | None
    batches: list[dict[str, Tensor]] | None

    def __len__(self) -> int:
        return len(self.totals)

    def split_at(self, at: int) -> list[Block]:
        """Two blocks, the second from step `at` on; only this block if `at` is not inside it."""
        if not 0 < at < len(self):
            return [self]
        return [
            Block(
                self.totals[steps],
                self.local[steps],
                None if self.rows is None else self.rows[steps],
                None if self.batches is None else self.batches[steps],
            )
            for steps in (slice(at), slice(at, None))
        ]


class BlockLoader:
    """Groups the steps of a loader of points, `inner`, into blocks of `size`. limit: steps per epoch
    (`trainer.limit_train_batches`); None: all."""

    epochs_are_alike = True

    def __init__(self, inner: PointSteps, size: int, limit: int | None = None) -> None:
        self.inner, self.size = inner, size
        self.limit = limit
        self._cut: tuple[int, int] | None = None
        """Epoch, and a step in it at which a block ends early."""

    # ---- the plan

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    @property
    def draws(self) -> int:
        return self.inner.draws

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimiser steps of a complete epoch."""
        n = self.inner.batches_in(self.inner.epoch)
        return n if self.limit is None else min(n, self.limit)

    def _steps(self) -> tuple[int, int]:
        """First step of the (rest of the) current epoch, and last step + 1."""
        first = self.inner._epoch_start()[0]
        stop = len(self.inner)
        return first, stop if self.limit is None else max(min(stop, self.limit), first)

    def _bounds(self) -> list[int]:
        """Steps at which the blocks of the (rest of the) current epoch start, and the end of the last."""
        first, stop = self._steps()
        bounds = {first, stop, *range((first // self.size + 1) * self.size, stop, self.size)}
        if self._cut is not None and self._cut[0] == self.epoch and first < self._cut[1] < stop:
            bounds.add(self._cut[1])
        return sorted(bounds)

    def __len__(self) -> int:
        return self._first_block() + len(self._bounds()) - 1

    def _first_block(self) -> int:
        return self._steps()[0] // self.size

    def batches_in(self, epoch: int) -> int:
        """Number of blocks of a complete epoch."""
        return -(-self.steps_per_epoch // self.size)

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)

    def cut_after(self, steps: int) -> None:
        """Let a block end after `steps` more steps of the current epoch."""
        self._cut = self.epoch, self._steps()[0] + steps

    def start_at(self, sample: int) -> int:
        """Let the next iteration skip the first `sample` points of its epoch; returns the index of its first block."""
        self.inner.start_at(sample)
        return self._first_block()

    def position(self, batch: int) -> int:
        """Number of points of the current epoch before this block, over all ranks."""
        bounds = self._bounds()
        return self.inner.position(bounds[min(max(batch - self._first_block(), 0), len(bounds) - 1)])

    # ---- blocks

    def __iter__(self) -> Iterator[Block]:
        # A generator, because Lightning creates an iterator just to test that it can: `start_at` must stay in effect until
        # the first block is requested.
        bounds = self._bounds()
        positions = [self.inner.position(step) for step in range(bounds[0], bounds[-1] + 1)]
        totals = [later - earlier for earlier, later in pairwise(positions)]
        local = [len(self.inner.positions(*pair)) for pair in pairwise(positions)]
        resident = isinstance(self.inner, PointLoader)
        rows = self._rows(bounds, positions) if resident else repeat(None)
        batches = repeat(None) if resident else self._batches(bounds)
        for (start, stop), block_rows, block_batches in zip(pairwise(bounds), rows, batches):
            steps = slice(start - bounds[0], stop - bounds[0])
            yield Block(totals[steps], local[steps], block_rows, block_batches)

    def _rows(self, bounds: list[int], positions: list[int]) -> Iterator[Tensor]:
        """Rows of each block, (n_steps, points); those of many blocks are computed at once."""
        points = self.inner.budget.size
        at_once = max(self.size, (CHUNK if self.inner.device.type == "cpu" else 64 * CHUNK) // points)
        rows, first, last = None, 0, 0
        for start, stop in pairwise(bounds):
            if rows is None or stop > last:
                first, last = start, max(bound for bound in bounds if bound <= max(start + at_once, stop))
                order = self.inner.order(positions[first - bounds[0]], positions[last - bounds[0]])
                rows = pad_rows(order, (last - first) * points).view(-1, points)
            yield rows[start - first : stop - first]

    def _batches(self, bounds: list[int]) -> Iterator[list[dict[str, Tensor]]]:
        steps = iter(self.inner)
        for start, stop in pairwise(bounds):
            yield list(islice(steps, stop - start))
