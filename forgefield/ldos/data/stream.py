"""Batches of points from disk, for data larger than memory: one window is used while threads read the next.

Every point comes exactly once an epoch, no extra disk is needed, and an epoch can be taken up anywhere: only the window in
which the place lies is read again. The order is that of `windows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forgefield.ldos.data.loader import CHUNK
from forgefield.ldos.data.memory import gathered
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.staging import Filling, PointBlock, Staging
from forgefield.ldos.data.steps import Batch, PointSteps, filled_up
from forgefield.ldos.data.table import PointTable
from forgefield.ldos.data.windows import BLOCKS, EpochWindows, InOrder, ShuffledBlocks

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
