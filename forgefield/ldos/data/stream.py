"""Batches of points from disk, for data larger than memory: one window is used while threads read the next.

The order is close to a full shuffle and is read in long ranges. It is a pure function of (seed, epoch); every point occurs once
per epoch, and an epoch can resume anywhere: only the window of that position is read again.

All points are divided into blocks of equal length, at offsets that change every epoch. A window is a set of blocks that fits
into memory, one drawn from every region of the data, so that each window is a sample of all snapshots. Within a window the
positions cycle through its blocks: position p takes a point of block p mod n_blocks, selected by a permutation of that block.
Any range of an epoch therefore has equally many points of each block, and rank r of W needs only the blocks r, r + W, ... of a
window. The few points left between blocks (fewer than one per block, evenly spread) come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forgefield.data.sampling.order import seeded_permutation
from forgefield.ldos.data.loader import CHUNK, Batch, PointSteps, pad_rows
from forgefield.ldos.data.permutation import Permutation, positions_tensor, round_keys
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.staging import Filling, PointBlock, RowRange, Staging, gather_rows
from forgefield.ldos.data.table import PointTable

BLOCKS = 960
"""Blocks per window: with a number of ranks that divides it, each rank reads only its own blocks."""
OFFSET, REMAINDER, WITHIN, DEALT = 11, 12, 13, 14


class EpochWindows(Protocol):
    """The consecutive windows of an epoch, and what a rank needs of each."""

    ends: list[int]
    """Position at which each window ends."""

    def row_ranges(self, window: int, rank: int, world_size: int) -> list[RowRange]:
        """Ranges that the rank reads, and their rows in its buffer."""

    def buffer_rows(self, window: int, positions: range) -> Tensor:
        """Row of the buffer for each of a rank's positions, all of which are in this window."""


class InOrder:
    """Points in the order of the data, in windows of equal length. Every rank reads complete windows."""

    def __init__(self, n: int, window: int, device: torch.device | str = "cpu") -> None:
        self.ends = [min(start + window, n) for start in range(0, n, window)]
        self._window, self._device = window, device

    def row_ranges(self, window: int, rank: int, world_size: int) -> list[RowRange]:
        return [RowRange(window * self._window, self.ends[window], 0)]

    def buffer_rows(self, window: int, positions: range) -> Tensor:
        return positions_tensor(positions.start, positions.stop, positions.step, self._device) - window * self._window


class ShuffledBlocks:
    """Shuffled blocks of all snapshots in windows. window: maximum number of points per window, but at least one per block."""

    def __init__(
        self, n: int, window: int, seed: int, epoch: int, blocks: int = BLOCKS, device: torch.device | str = "cpu"
    ) -> None:
        self.blocks = max(1, min(blocks, n))
        self.n_windows = max(1, min(-(-n // max(window, 1)), n // self.blocks))
        n_blocks = self.n_windows * self.blocks
        self.length = n // n_blocks
        """Points of each block."""
        self._n, self._device = n, device
        self._key = (seed, epoch)
        starts = (
            np.arange(n_blocks, dtype=np.int64) * (n // n_blocks) + np.arange(n_blocks) * (n % n_blocks) // n_blocks
        )
        offset = round_keys(seed, epoch, OFFSET, count=1)[0] % n
        self._starts = (starts + offset)[self._blocks_in_order()]
        """First position of each block in the selection, in the order of use; positions from n on wrap to 0."""
        last = starts + self.length
        remainder = last[np.append(starts[1:], n) > last]
        self._remainder = ((remainder + offset) % n)[seeded_permutation(len(remainder), seed, epoch, REMAINDER)]
        size = self.blocks * self.length
        self.ends = [size * (window + 1) for window in range(self.n_windows)]
        if len(remainder):
            self.ends.append(n)

    def _blocks_in_order(self) -> np.ndarray:
        """Order in which blocks are used, (n_windows * blocks,): of each n_windows adjacent blocks one in each window."""
        group = torch.from_numpy(seeded_permutation(self.blocks, *self._key)).repeat(self.n_windows)
        window = torch.arange(self.n_windows).repeat_interleave(self.blocks)
        member = Permutation(self.n_windows, *self._key, DEALT)(window, group)
        return (group * self.n_windows + member).numpy()

    def row_ranges(self, window: int, rank: int, world_size: int) -> list[RowRange]:
        if window == self.n_windows:
            first = self.ends[window - 1]
            rank_positions = range(first + (rank - first) % world_size, self._n, world_size)
            chosen = self._remainder[np.array(rank_positions, dtype=np.int64) - first]
            return [RowRange(int(position), int(position) + 1, at) for at, position in enumerate(chosen)]
        lanes = range(rank, self.blocks, world_size) if self.blocks % world_size == 0 else range(self.blocks)
        ranges: list[RowRange] = []
        for at, lane in enumerate(lanes):
            ranges += self._wrapped_block(int(self._starts[window * self.blocks + lane]), at * self.length)
        return ranges

    def _wrapped_block(self, start: int, at: int) -> list[RowRange]:
        """The block that starts at `start`; two ranges if it wraps around the end of the data."""
        start %= self._n
        stop = start + self.length
        if stop <= self._n:
            return [RowRange(start, stop, at)]
        return [RowRange(start, self._n, at), RowRange(0, stop - self._n, at + self._n - start)]

    def buffer_rows(self, window: int, positions: range) -> Tensor:
        if window == self.n_windows:
            first = self.ends[window - 1]
            position = positions_tensor(positions.start, positions.stop, positions.step, self._device)
            return torch.div(position - first, positions.step, rounding_mode="floor")
        position = positions_tensor(positions.start, positions.stop, positions.step, self._device)
        cycle = torch.div(position, self.blocks, rounding_mode="floor")
        lane = position - cycle * self.blocks
        within = Permutation(self.length, *self._key, WITHIN, window)(cycle - window * self.length, lane)
        ranks = positions.step
        if self.blocks % ranks == 0:
            lane = torch.div(lane, ranks, rounding_mode="floor")
        return lane * self.length + within


WINDOW = 1 << 20
"""Default number of points per window."""


class StreamLoader(PointSteps):
    """As `PointLoader`, for points that stay on disk.

    window: points that are shuffled together, over all ranks; a rank stores its share of two windows. blocks: per window.
    device: where windows and batches are stored. workers: threads that read, at least 1.
    """

    def __init__(
        self,
        table: PointTable,
        batch: int,
        *,
        selection: Selection | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 2,
        window: int = WINDOW,
        blocks: int = BLOCKS,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pin: bool = False,
        pad: bool = False,
    ) -> None:
        self.table = table
        self.selection = EveryPoint(table.n_points) if selection is None else selection
        super().__init__(
            self.selection.n, batch, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, pad=pad, pin=pin
        )
        self.window, self.blocks, self.workers = window, blocks, workers
        self.device, self.dtype = torch.device(device), dtype

    def plan(self, epoch: int) -> EpochWindows:
        """The windows of an epoch."""
        if not self.shuffle:
            return InOrder(self.draws, self.window, self.device)
        return ShuffledBlocks(self.draws, self.window, self.seed, epoch, self.blocks, self.device)

    def order(self, start: int, stop: int, epoch: int | None = None) -> Tensor:
        """Rows of the table at this rank's positions from start to stop in the order of an epoch; nothing is read."""
        plan = self.plan(self.epoch if epoch is None else epoch)
        parts = []
        for window, positions in _by_window(plan, self.positions(start, stop)):
            buffer = torch.empty(_buffer_size(plan, window, self.rank, self.world_size), dtype=torch.int64)
            for row_range in plan.row_ranges(window, self.rank, self.world_size):
                inside = torch.arange(row_range.start, row_range.stop)
                buffer[row_range.at : row_range.at + len(inside)] = self.selection.rows(inside)
            parts.append(buffer[plan.buffer_rows(window, positions).cpu()])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[Batch]:
        start, n_steps = self._begin()
        windows = _Windows(self, self.plan(self.epoch), start)
        try:
            for step in range(n_steps):
                yield self._batch(windows, self._step_positions(start, step))
        finally:
            windows.close()

    def _batch(self, windows: _Windows, positions: range) -> Batch:
        real = len(positions)
        size = self._size(real)
        pieces = list(windows.gather(positions, size))
        batch = pieces[0] if len(pieces) == 1 else {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}
        if len(pieces) > 1 and self.pin and not batch["inputs"].is_cuda:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {**batch, "weight": self._weight(real, size, batch["inputs"])}


class _Windows:
    """The current window and the next one, which is being read."""

    def __init__(self, loader: StreamLoader, plan: EpochWindows, start: int) -> None:
        self._plan, self._loader = plan, loader
        self._window = next((w for w, end in enumerate(plan.ends) if start < end), len(plan.ends) - 1)
        self._staging = Staging(
            loader.table, loader.selection, dtype=loader.dtype, device=loader.device, workers=loader.workers
        )
        last = len(plan.ends) - 1
        rows = max(_buffer_size(plan, window, loader.rank, loader.world_size) for window in {0, last})
        self._buffers = [
            PointBlock.zeros(loader.table, rows, loader.dtype, loader.device)
            for _ in range(min(2, last + 1 - self._window))
        ]
        self._cached_rows: tuple[range, Tensor] | None = None
        """Some positions of the current window and their rows in its buffer."""
        self._next = self._begin(self._window)
        self._open()

    def _begin(self, window: int) -> Filling:
        row_ranges = self._plan.row_ranges(window, self._loader.rank, self._loader.world_size)
        return self._staging.fill(self._buffer(window), row_ranges)

    def _buffer(self, window: int) -> PointBlock:
        return self._buffers[window % len(self._buffers)]

    def _open(self) -> None:
        """Wait for the current window and start reading the next one into the buffer of the previous one."""
        self._next.wait()
        self._cached_rows = None
        if self._window + 1 < len(self._plan.ends):
            self._next = self._begin(self._window + 1)

    def gather(self, positions: range, size: int) -> Iterator[Batch]:
        """The points at these positions, one piece per window, padded to `size` in total."""
        missing = size - len(positions)
        while len(positions):
            while positions.start >= self._plan.ends[self._window]:
                self._window += 1
                self._open()
            in_window = range(positions.start, min(positions.stop, self._plan.ends[self._window]), positions.step)
            positions = positions[len(in_window) :]
            rows = self._rows(in_window)
            is_last = len(positions) == 0
            yield gather_rows(
                self._buffer(self._window), pad_rows(rows, len(rows) + is_last * missing), self._loader.pin
            )
            missing = 0 if is_last else missing
        if missing:
            no_rows = torch.zeros(0, dtype=torch.int64, device=self._loader.device)
            yield gather_rows(self._buffer(self._window), pad_rows(no_rows, missing), self._loader.pin)

    def _rows(self, positions: range) -> Tensor:
        """Rows in the buffer of positions in the current window; those of many positions are computed at once."""
        cached = self._cached_rows
        if cached is None or positions[0] not in cached[0] or positions[-1] not in cached[0]:
            limit = CHUNK if self._loader.device.type == "cpu" else 64 * CHUNK
            lookahead = range(positions.start, self._plan.ends[self._window], positions.step)[
                : max(limit, len(positions))
            ]
            cached = self._cached_rows = lookahead, self._plan.buffer_rows(self._window, lookahead)
        first = cached[0].index(positions[0])
        return cached[1][first : first + len(positions)]

    def close(self) -> None:
        self._staging.close()


def _by_window(plan: EpochWindows, positions: range) -> Iterator[tuple[int, range]]:
    """Windows and the positions in each of them."""
    for window, end in enumerate(plan.ends):
        first = plan.ends[window - 1] if window else 0
        in_window = range(
            positions.start + max(0, -(-(first - positions.start) // positions.step)) * positions.step,
            min(end, positions.stop),
            positions.step,
        )
        if len(in_window):
            yield window, in_window


def _buffer_size(plan: EpochWindows, window: int, rank: int, world_size: int) -> int:
    """Number of buffer rows that a rank needs for a window, at least one."""
    row_ranges = plan.row_ranges(window, rank, world_size)
    return max((row_range.at + row_range.stop - row_range.start for row_range in row_ranges), default=1)
