"""Batches of points in memory or on a device, and the plan that all loaders of points share.

The order of an epoch is a computed permutation (`permutation.py`) determined by seed and epoch, equal on CPU and GPU. Step k
takes the next `world_size * points` positions of it, and position p belongs to rank p mod world_size: the ranks together see
what one rank with the larger batch would see, and an epoch can resume at any position, on any number of ranks.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from forgefield.data.sampling.loader import prepared_ahead
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.permutation import Permutation, positions_tensor
from forgefield.ldos.data.selection import EveryPoint, Selection
from forgefield.ldos.data.staging import PointBlock, gather_rows

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class PointBudget:
    """Points of one rank in a step."""

    size: int
    kind: str = "points"
    setting: str = "data.batch"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, Integral) or self.size < 1:
            raise ForgefieldError(
                f"{self.setting}.points is {self.size!r}; a batch should have at least one point, a whole number"
            )


class PointSteps(ABC):
    """The plan of a loader: n points per epoch, `points` of them per rank and step.

    pad: fill the last batch with points of weight 0, so that all batches have the same size.
    """

    device: torch.device
    """Device of the batches."""

    def __init__(
        self, n: int, points: int, *, shuffle: bool, seed: int, rank: int, world_size: int, pad: bool, pin: bool
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank} among {world_size}")
        if n < 1:
            raise ForgefieldError("there are no points")
        self.draws = int(n)
        self.budget = PointBudget(points)
        self.shuffle, self.seed = shuffle, int(seed)
        self.rank, self.world_size = rank, world_size
        self.pad, self.pin = pad, pin
        self.epoch = 0
        self._stride = self.budget.size * world_size
        self._resumed: tuple[int, int, int] | None = None
        """After `start_at`: epoch, index of its first batch, position at which that starts."""
        self._start_resumed = False
        self._weights: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}

    # ---- the plan, with the interface of the loader of frames

    epochs_are_alike = True
    """Whether all epochs have the same number of batches."""

    def batches_in(self, epoch: int) -> int:
        """Number of batches of an epoch."""
        return -(-self.draws // self._stride)

    def _epoch_start(self) -> tuple[int, int]:
        """Index of the first batch and its first position: (0, 0) unless `start_at` was called for this epoch."""
        if self._resumed is not None and self._resumed[0] == self.epoch:
            return self._resumed[1:]
        return 0, 0

    def __len__(self) -> int:
        first_batch, start = self._epoch_start()
        return first_batch + -(-(self.draws - start) // self._stride)

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration."""
        self.epoch = int(epoch)

    def start_at(self, sample: int) -> int:
        """Let the next iteration, and only that one, skip the first `sample` points of its epoch.

        Returns the index of the batch it starts with. Any position is possible, also one within a step of this number of
        ranks.
        """
        if not 0 <= sample <= self.draws:
            raise ValueError(f"an epoch has {self.draws} points; it cannot start after point {sample}")
        first_batch = max(self.batches_in(self.epoch) - -(-(self.draws - sample) // self._stride), 0)
        self._resumed, self._start_resumed = (self.epoch, first_batch, sample), True
        return first_batch

    def position(self, batch: int) -> int:
        """Number of points of the current epoch before this batch, over all ranks."""
        first_batch, start = self._epoch_start()
        return min(start + max(batch - first_batch, 0) * self._stride, self.draws)

    def positions(self, start: int, stop: int) -> range:
        """Positions of this rank from start to stop."""
        return range(start + (self.rank - start) % self.world_size, stop, self.world_size)

    def _begin(self) -> tuple[int, int]:
        """First position and number of steps of an iteration. Resets `start_at`: the next iteration starts with its epoch."""
        start = self._epoch_start()[1] if self._start_resumed else 0
        self._start_resumed = False
        return start, -(-(self.draws - start) // self._stride)

    def _step_positions(self, start: int, step: int) -> range:
        """Positions of this rank in a step of the iteration that started at `start`."""
        first = start + step * self._stride
        return self.positions(first, min(first + self._stride, self.draws))

    @abstractmethod
    def order(self, start: int, stop: int, epoch: int | None = None) -> Tensor:
        """Rows at the positions of this rank from start to stop in the order of an epoch (default: current), int64."""

    # ---- batches

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Batches of the current epoch, from the position of `start_at` on."""

    def _weight(self, real: int, size: int, like: Tensor) -> Tensor:
        """1 for the first `real` of `size` points, 0 for the others. Batches share these tensors: do not modify them."""
        key = (real, size, like.device, like.dtype)
        if key not in self._weights:
            weight = torch.zeros(size, dtype=like.dtype, device=like.device)
            weight[:real] = 1
            self._weights[key] = weight.pin_memory() if self.pin and not weight.is_cuda else weight
        return self._weights[key]

    def _size(self, real: int) -> int:
        """Number of points in a batch with `real` actual points; a rank without any gets one of weight 0."""
        return self.budget.size if self.pad else max(real, 1)


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """Rows with the first one (or row 0) repeated up to `size`."""
    missing = size - rows.shape[0]
    if missing == 0:
        return rows
    extra = rows[:1] if rows.shape[0] else rows.new_zeros(1)
    return torch.cat([rows, extra.expand(missing)])


CHUNK = 1 << 16
"""Positions whose rows are computed at once on the CPU; on a GPU 64 times as many."""
CACHED_CHUNKS = 4


class PointLoader(PointSteps):
    """Batches {inputs (B, f), targets (B, t), weight (B,), snapshot (B,)} for one of `world_size` ranks.

    points: all points of some snapshots; batches are on the same device. selection: which of them; None: all. batch: points per
    rank. workers: threads that prepare batches, 0 for none (always 0 on a GPU). prefetch: number of batches prepared ahead.
    pin: batches in pinned memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        points: PointBlock,
        batch: int,
        *,
        selection: Selection | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        prefetch: int | None = None,
        pin: bool = False,
        pad: bool = False,
    ) -> None:
        self.points = points
        self.selection = EveryPoint(len(points)) if selection is None else selection
        super().__init__(
            self.selection.n, batch, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size, pad=pad, pin=pin
        )
        self.device = points.snapshot.device
        self.workers = 0 if points.snapshot.is_cuda else workers
        self.prefetch = 2 * workers if prefetch is None else prefetch
        self._lock = threading.Lock()
        self._chunks: OrderedDict[tuple[int, int, bool], Tensor] = OrderedDict()

    # ---- rows

    def order(self, start: int, stop: int, epoch: int | None = None) -> Tensor:
        """Rows of `points` at this rank's positions from start to stop in the order of an epoch (default: current), int64."""
        epoch = self.epoch if epoch is None else epoch
        rank_positions = self.positions(start, stop)
        positions = positions_tensor(rank_positions.start, rank_positions.stop, rank_positions.step, self.device)
        if self.shuffle:
            positions = Permutation(self.draws, self.seed, epoch)(positions)
        return self.selection.rows(positions)

    def _rows(self, start: int, step: int, real: int) -> Tensor:
        """Rows of a step of the iteration that started at position `start`; those of many steps are computed at once."""
        steps = max(1, (CHUNK if self.device.type == "cpu" else 64 * CHUNK) // self.budget.size)
        number, within = divmod(step, steps)
        key = (self.epoch, start + number * steps * self._stride, self.shuffle)
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = self.order(key[1], min(key[1] + steps * self._stride, self.draws))
                while len(self._chunks) > CACHED_CHUNKS:
                    self._chunks.popitem(last=False)
        return chunk[within * self.budget.size :][:real]

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        # A generator, because Lightning creates an iterator just to test that it can: `start_at` must stay in effect until
        # the first batch is requested.
        start, n_steps = self._begin()

        def prepare(step: int) -> Batch:
            return self._batch(start, step, self._step_positions(start, step))

        if self.workers == 0:
            yield from map(prepare, range(n_steps))
        else:
            yield from prepared_ahead(prepare, n_steps, self.workers, max(self.prefetch, 1))

    def _batch(self, start: int, step: int, positions: range) -> Batch:
        real = len(positions)
        size = self._size(real)
        if self._is_contiguous and size == real:
            block = self.points.rows(positions.start, positions.stop)
            batch = dict(zip(("inputs", "targets", "snapshot"), block.tensors))
            if self.pin and not self.points.snapshot.is_cuda:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        else:
            rows = pad_rows(self._rows(start, step, real), size)
            batch = gather_rows(self.points, rows, self.pin)
        return {**batch, "weight": self._weight(real, size, self.points.inputs)}

    @property
    def _is_contiguous(self) -> bool:
        """Whether the points of a batch are consecutive rows, which need no gathering."""
        return not self.shuffle and self.world_size == 1 and isinstance(self.selection, EveryPoint)
