"""Which places of an epoch's order make step k of rank r, and what every loader of points has in common.

An order is fixed by (seed, epoch). Step k takes the next `world_size * points` places of it and place p belongs to rank
p mod world_size: ranks together see what one rank with the larger batch would see, and an epoch can be taken up behind any
place, on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError

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
