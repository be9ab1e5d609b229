"""Batches of points that are kept in memory or on a device, gathered as whole tensors.

The order is a computed permutation (`permutation.py`): a fresh one of all points in every epoch, the same on CPU and GPU, and
an epoch can begin anywhere without the part before it being made.
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
from forgefield.ldos.data.staging import PointBlock, gathered

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
                f"{self.setting}.points is {self.size!r}; a batch holds at least one point, and a whole number"
            )


class PointSteps(ABC):
    """The plan of a loader: n points an epoch, `points` of them for each rank in a step.

    pad: fill the short last batch up with points of weight 0, so that all batches have one size.
    """

    def __init__(
        self, n: int, points: int, *, shuffle: bool, seed: int, rank: int, world_size: int, pad: bool, pin: bool
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank} among {world_size}")
        if n < 1:
            raise ForgefieldError("there is no point to make batches of")
        self.draws = int(n)
        self.budget = PointBudget(points)
        self.shuffle, self.seed = shuffle, int(seed)
        self.rank, self.world_size = rank, world_size
        self.pad, self.pin = pad, pin
        self.epoch = 0
        self._stride = self.budget.size * world_size
        self._rest: tuple[int, int, int] | None = None
        """After `start_at`: epoch, number of its first batch, place with which that begins."""
        self._start_at_rest = False
        self._weights: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}

    # ---- the plan; names and meanings are those of the loader of frames

    epochs_are_alike = True
    """Whether all epochs have equally many batches."""

    def batches_in(self, epoch: int) -> int:
        """Batches of that epoch."""
        return -(-self.draws // self._stride)

    def _rest_of_epoch(self) -> tuple[int, int]:
        """Number of the first batch and its first place: of the whole epoch, unless `start_at` said otherwise."""
        if self._rest is not None and self._rest[0] == self.epoch:
            return self._rest[1:]
        return 0, 0

    def __len__(self) -> int:
        first_batch, start = self._rest_of_epoch()
        return first_batch + -(-(self.draws - start) // self._stride)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration takes."""
        self.epoch = int(epoch)

    def start_at(self, sample: int) -> int:
        """Let the next iteration, and only that one, begin behind the first `sample` points of its epoch's order.

        Returns the number of the batch it begins with. The place need not be one where this number of ranks would have
        stopped.
        """
        if not 0 <= sample <= self.draws:
            raise ValueError(f"an epoch has {self.draws} points; it cannot start behind point {sample}")
        first_batch = max(self.batches_in(self.epoch) - -(-(self.draws - sample) // self._stride), 0)
        self._rest, self._start_at_rest = (self.epoch, first_batch, sample), True
        return first_batch

    def position(self, batch: int) -> int:
        """How many points of the present epoch's order come before this batch, over all ranks."""
        first_batch, start = self._rest_of_epoch()
        return min(start + max(batch - first_batch, 0) * self._stride, self.draws)

    def own_frames(self, batch: int) -> int:
        """How many real points this rank has in that batch; 0 where it only keeps step with the others."""
        return len(self.places(self.position(batch), self.position(batch + 1)))

    def is_full(self, batch: int) -> bool:
        """Whether that batch is no smaller than others: only the last of an epoch is."""
        return self.position(batch + 1) - self.position(batch) == self._stride

    def keep_order(self) -> None:
        """From now on points come as they lie, each once, the same in every epoch."""
        self.shuffle = False

    @property
    def frames_per_rank(self) -> int:
        """Points of a rank in a full step."""
        return self.budget.size

    def places(self, start: int, stop: int) -> range:
        """Places of this rank among start to stop."""
        return range(start + (self.rank - start) % self.world_size, stop, self.world_size)

    def _coming(self) -> tuple[int, int]:
        """First place and number of steps of the next iteration."""
        start = self._rest_of_epoch()[1] if self._start_at_rest else 0
        return start, -(-(self.draws - start) // self._stride)

    def _begin(self) -> tuple[int, int]:
        """The same, as an iteration begins: the one after it starts with the epoch."""
        coming = self._coming()
        self._start_at_rest = False
        return coming

    def _own_places(self, start: int, step: int) -> range:
        """Places of this rank in a step of the iteration that began at `start`."""
        first = start + step * self._stride
        return self.places(first, min(first + self._stride, self.draws))

    # ---- batches

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Batches of the present epoch, or of what `start_at` left of it."""

    def _weight(self, real: int, size: int, like: Tensor) -> Tensor:
        """1 for the first `real` of `size` points, 0 for the others. One tensor serves all batches alike: never write to it."""
        key = (real, size, like.device, like.dtype)
        if key not in self._weights:
            weight = torch.zeros(size, dtype=like.dtype, device=like.device)
            weight[:real] = 1
            self._weights[key] = weight.pin_memory() if self.pin and not weight.is_cuda else weight
        return self._weights[key]

    def _size(self, real: int) -> int:
        """Points in a batch that has `real` points of its own: a rank that is left with none has one of weight 0."""
        return self.budget.size if self.pad else max(real, 1)


def filled_up(rows: Tensor, size: int) -> Tensor:
    """Rows with the first one repeated up to `size`; row 0 where there is none."""
    missing = size - rows.shape[0]
    if missing == 0:
        return rows
    extra = rows[:1] if rows.shape[0] else rows.new_zeros(1)
    return torch.cat([rows, extra.expand(missing)])


CHUNK = 1 << 16
"""Places whose rows are computed at once on the CPU; on a device 64 times as many."""
KEPT_CHUNKS = 4


class PointLoader(PointSteps):
    """Batches {inputs (B, f), targets (B, t), weight (B,), snapshot (B,)} for one of `world_size` ranks.

    points: all points of some snapshots, on the CPU or on a device, where the batches will be too. selection: which of them;
    all, if None. batch: points of a rank. workers: threads that gather ahead, 0 for none (always on a device). prefetch: how
    many batches ahead. pin: put batches into memory from which they are copied to a GPU without waiting.
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
        """Rows of `points` at this rank's places among start to stop of an epoch's order (default the present), int64."""
        epoch = self.epoch if epoch is None else epoch
        own = self.places(start, stop)
        places = positions_tensor(own.start, own.stop, own.step, self.device)
        if self.shuffle:
            places = Permutation(self.draws, self.seed, epoch)(places)
        return self.selection.rows(places)

    def epoch_rows(self) -> tuple[Tensor, Tensor]:
        """Rows and weights of all batches of the present epoch, or of what `start_at` left of it, (n_steps, points) each.

        On the device of the points, for engines that gather within a captured step. Padded whatever `pad` says.
        """
        start, n_steps = self._coming()
        rows = filled_up(self.order(start, self.draws), n_steps * self.budget.size)
        weight = torch.zeros_like(rows, dtype=self.points.inputs.dtype)
        weight[: len(self.places(start, self.draws))] = 1
        shape = (n_steps, self.budget.size)
        return rows.view(shape), weight.view(shape)

    def _rows(self, start: int, step: int, real: int) -> Tensor:
        """Rows of a step of the iteration that began at place `start`; those of many steps are computed at once."""
        steps = max(1, (CHUNK if self.device.type == "cpu" else 64 * CHUNK) // self.budget.size)
        number, within = divmod(step, steps)
        key = (self.epoch, start + number * steps * self._stride, self.shuffle)
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = self.order(key[1], min(key[1] + steps * self._stride, self.draws))
                while len(self._chunks) > KEPT_CHUNKS:
                    self._chunks.popitem(last=False)
        return chunk[within * self.budget.size :][:real]

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing is taken from `start_at` until the first batch is asked for. Lightning makes an iterator
        # just to see that it can.
        start, n_steps = self._begin()

        def prepare(step: int) -> Batch:
            return self._batch(start, step, self._own_places(start, step))

        if self.workers == 0:
            yield from map(prepare, range(n_steps))
        else:
            yield from prepared_ahead(prepare, n_steps, self.workers, max(self.prefetch, 1))

    def _batch(self, start: int, step: int, places: range) -> Batch:
        real = len(places)
        size = self._size(real)
        if self._lies_together and size == real:
            part = self.points.part(places.start, places.stop)
            found = dict(zip(("inputs", "targets", "snapshot"), part.tensors))
            if self.pin and not self.points.snapshot.is_cuda:
                found = {name: tensor.pin_memory() for name, tensor in found.items()}
        else:
            rows = filled_up(self._rows(start, step, real), size)
            found = gathered(self.points, rows, self.pin)
        return {**found, "weight": self._weight(real, size, self.points.inputs)}

    @property
    def _lies_together(self) -> bool:
        """Whether the points of a batch are a stretch of rows: nothing is gathered then."""
        return not self.shuffle and self.world_size == 1 and isinstance(self.selection, EveryPoint)
