"""Batches of points from disk, for data larger than memory: one window is used while threads read the next.

Every point comes exactly once an epoch, no extra disk is needed, and an epoch can be taken up anywhere: only the window in
which the place lies is read again. The order is that of `windows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forgefield.data.sampling.order import seeded_permutation
from forgefield.ldos.data.loader import CHUNK, Batch, PointSteps, filled_up
from forgefield.ldos.data.permutation import Permutation, positions_tensor, round_keys
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.staging import Filling, PointBlock, Staging, Stretch, gathered
from forgefield.ldos.data.table import PointTable

BLOCKS = 960
"""Blocks of a window: with any number of ranks that divides it each rank reads its own blocks only."""
OFFSET, LEFT_OVER, WITHIN, DEALT = 11, 12, 13, 14


class EpochWindows(Protocol):
    """An epoch as windows, one after the other, and what a rank needs of each."""

    ends: list[int]
    """Place at which each window ends."""

    def stretches(self, window: int, rank: int, world_size: int) -> list[Stretch]:
        """What the rank reads, and where it goes in its buffer."""

    def buffer_rows(self, window: int, places: range) -> Tensor:
        """Row of the buffer for each of a rank's places, all of which are in this window."""


class InOrder:
    """Points as they lie, in windows of equal length. Every rank reads all of a window and takes its own."""

    def __init__(self, n: int, window: int, device: torch.device | str = "cpu") -> None:
        self.ends = [min(start + window, n) for start in range(0, n, window)]
        self._window, self._device = window, device

    def stretches(self, window: int, rank: int, world_size: int) -> list[Stretch]:
        return [Stretch(window * self._window, self.ends[window], 0)]

    def buffer_rows(self, window: int, places: range) -> Tensor:
        return positions_tensor(places.start, places.stop, places.step, self._device) - window * self._window


class ShuffledBlocks:
    """Blocks of all snapshots in windows, shuffled. window: points of a window, at most, but at least one of each block."""

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
        """First place of each block in the selection, in the order of use; beyond n it goes on at 0."""
        last = starts + self.length
        left_over = last[np.append(starts[1:], n) > last]
        self._left_over = ((left_over + offset) % n)[seeded_permutation(len(left_over), seed, epoch, LEFT_OVER)]
        size = self.blocks * self.length
        self.ends = [size * (window + 1) for window in range(self.n_windows)]
        if len(left_over):
            self.ends.append(n)

    def _blocks_in_order(self) -> np.ndarray:
        """Numbers of blocks as they are used, (n_windows * blocks,): of each stretch of n_windows blocks one in each window."""
        stretch = torch.from_numpy(seeded_permutation(self.blocks, *self._key)).repeat(self.n_windows)
        window = torch.arange(self.n_windows).repeat_interleave(self.blocks)
        which = Permutation(self.n_windows, *self._key, DEALT)(window, stretch)
        return (stretch * self.n_windows + which).numpy()

    def stretches(self, window: int, rank: int, world_size: int) -> list[Stretch]:
        if window == self.n_windows:
            first = self.ends[window - 1]
            own = range(first + (rank - first) % world_size, self._n, world_size)
            chosen = self._left_over[np.array(own, dtype=np.int64) - first]
            return [Stretch(int(place), int(place) + 1, at) for at, place in enumerate(chosen)]
        lanes = range(rank, self.blocks, world_size) if self.blocks % world_size == 0 else range(self.blocks)
        found: list[Stretch] = []
        for at, lane in enumerate(lanes):
            found += self._around(int(self._starts[window * self.blocks + lane]), at * self.length)
        return found

    def _around(self, start: int, at: int) -> list[Stretch]:
        """The block that begins at `start`, in two parts where it runs over the end of the data."""
        start %= self._n
        stop = start + self.length
        if stop <= self._n:
            return [Stretch(start, stop, at)]
        return [Stretch(start, self._n, at), Stretch(0, stop - self._n, at + self._n - start)]

    def buffer_rows(self, window: int, places: range) -> Tensor:
        if window == self.n_windows:
            first = self.ends[window - 1]
            wanted = positions_tensor(places.start, places.stop, places.step, self._device)
            return torch.div(wanted - first, places.step, rounding_mode="floor")
        wanted = positions_tensor(places.start, places.stop, places.step, self._device)
        turn = torch.div(wanted, self.blocks, rounding_mode="floor")
        lane = wanted - turn * self.blocks
        within = Permutation(self.length, *self._key, WITHIN, window)(turn - window * self.length, lane)
        ranks = places.step
        if self.blocks % ranks == 0:
            lane = torch.div(lane, ranks, rounding_mode="floor")
        return lane * self.length + within


WINDOW = 1 << 20
"""Points of a window where nothing else is asked for."""


class StreamLoader(PointSteps):
    """As `PointLoader`, of points that stay on disk.

    window: points that are mixed with each other, over all ranks; a rank holds its part of two windows. blocks: of a window.
    device: where the windows are held and batches come from. workers: threads that read, at least 1.
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
        """Rows of the table at this rank's places among start to stop of an epoch's order; nothing is read."""
        plan = self.plan(self.epoch if epoch is None else epoch)
        found = []
        for window, places in _by_window(plan, self.places(start, stop)):
            room = torch.empty(_room(plan, window, self.rank, self.world_size), dtype=torch.int64)
            for stretch in plan.stretches(window, self.rank, self.world_size):
                inside = torch.arange(stretch.start, stretch.stop)
                room[stretch.at : stretch.at + len(inside)] = self.selection.rows(inside)
            found.append(room[plan.buffer_rows(window, places).cpu()])
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[Batch]:
        start, n_steps = self._begin()
        windows = _Windows(self, self.plan(self.epoch), start)
        try:
            for step in range(n_steps):
                yield self._batch(windows, self._own_places(start, step))
        finally:
            windows.close()

    def _batch(self, windows: _Windows, places: range) -> Batch:
        real = len(places)
        size = self._size(real)
        pieces = list(windows.gather(places, size))
        found = pieces[0] if len(pieces) == 1 else {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}
        if len(pieces) > 1 and self.pin and not found["inputs"].is_cuda:
            found = {name: tensor.pin_memory() for name, tensor in found.items()}
        return {**found, "weight": self._weight(real, size, found["inputs"])}


class _Windows:
    """The window in use and the next one, which is being read, from the place where an iteration begins."""

    def __init__(self, loader: StreamLoader, plan: EpochWindows, start: int) -> None:
        self._plan, self._loader = plan, loader
        self._window = next((w for w, end in enumerate(plan.ends) if start < end), len(plan.ends) - 1)
        self._staging = Staging(
            loader.table, loader.selection, dtype=loader.dtype, device=loader.device, workers=loader.workers
        )
        last = len(plan.ends) - 1
        rows = max(_room(plan, window, loader.rank, loader.world_size) for window in {0, last})
        self._buffers = [
            PointBlock.zeros(loader.table, rows, loader.dtype, loader.device)
            for _ in range(min(2, last + 1 - self._window))
        ]
        self._known: tuple[range, Tensor] | None = None
        """Some places of the window in use and their rows in its buffer."""
        self._next = self._begin(self._window)
        self._open()

    def _begin(self, window: int) -> Filling:
        stretches = self._plan.stretches(window, self._loader.rank, self._loader.world_size)
        return self._staging.fill(self._buffer(window), stretches)

    def _buffer(self, window: int) -> PointBlock:
        return self._buffers[window % len(self._buffers)]

    def _open(self) -> None:
        """Wait for the window in use and begin to read the one behind it, where the one before it was."""
        self._next.wait()
        self._known = None
        if self._window + 1 < len(self._plan.ends):
            self._next = self._begin(self._window + 1)

    def gather(self, places: range, size: int) -> Iterator[Batch]:
        """The points at these places, one piece for each window, filled up to `size` in all."""
        missing = size - len(places)
        while len(places):
            while places.start >= self._plan.ends[self._window]:
                self._window += 1
                self._open()
            here = range(places.start, min(places.stop, self._plan.ends[self._window]), places.step)
            places = places[len(here) :]
            rows = self._rows(here)
            is_last = len(places) == 0
            yield gathered(self._buffer(self._window), filled_up(rows, len(rows) + is_last * missing), self._loader.pin)
            missing = 0 if is_last else missing
        if missing:
            nothing = torch.zeros(0, dtype=torch.int64, device=self._loader.device)
            yield gathered(self._buffer(self._window), filled_up(nothing, missing), self._loader.pin)

    def _rows(self, places: range) -> Tensor:
        """Rows in the buffer of places in the window in use; those of many places are computed at once."""
        known = self._known
        if known is None or places[0] not in known[0] or places[-1] not in known[0]:
            most = CHUNK if self._loader.device.type == "cpu" else 64 * CHUNK
            ahead = range(places.start, self._plan.ends[self._window], places.step)[: max(most, len(places))]
            known = self._known = ahead, self._plan.buffer_rows(self._window, ahead)
        first = known[0].index(places[0])
        return known[1][first : first + len(places)]

    def close(self) -> None:
        self._staging.close()


def _by_window(plan: EpochWindows, places: range) -> Iterator[tuple[int, range]]:
    """Windows and the places in each of them."""
    for window, end in enumerate(plan.ends):
        first = plan.ends[window - 1] if window else 0
        part = range(
            places.start + max(0, -(-(first - places.start) // places.step)) * places.step,
            min(end, places.stop),
            places.step,
        )
        if len(part):
            yield window, part


def _room(plan: EpochWindows, window: int, rank: int, world_size: int) -> int:
    """Rows of the buffer that a rank needs for a window, at least one."""
    stretches = plan.stretches(window, rank, world_size)
    return max((stretch.at + stretch.stop - stretch.start for stretch in stretches), default=1)
