"""Batches that hold frames of one source each: their order in an epoch, and which of them a rank has in a step.

Batches are made before they are dealt, from (seed, epoch) and the budget alone. A step takes the next whole batches, one
for each rank, so that the epoch is the same for any number of ranks and can be resumed after any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forgefield.data.sampling.order import TOGETHER, Chances, drawn_in_turn, seeded_permutation, shuffle_within
from forgefield.data.sampling.plan import Budget, StepPlan, refuse_oversized
from forgefield.data.store.columns import offsets, ranges
from forgefield.errors import ForgefieldError


class SourceBatches:
    """An epoch of batches, each of one source: every row once, or sources drawn by probability, a batch at a time.

    source_of_row: (n,) source of each row. costs: (n,) atoms or edges of each row; for frames they do not matter. sizes:
    frames of a batch of each source, instead of the budget. names: of the sources. where: describes a row, in messages.
    probabilities: of the sources, (n_sources,), from their numbers of batches; an epoch then draws as many batches as there
    are, or `draws` of these numbers, from sources chosen with these probabilities. Without it, each batch comes once.

    Every source is shuffled and cut into batches according to the budget; the last batch of a source may be smaller.
    """

    def __init__(
        self,
        source_of_row: np.ndarray,
        costs: np.ndarray,
        budget: Budget,
        *,
        sizes: Sequence[int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        names: Sequence[str] = (),
        where: Callable[[int], str] | None = None,
        probabilities: Callable[[np.ndarray], np.ndarray] | None = None,
        draws: Callable[[np.ndarray], int] | None = None,
    ) -> None:
        sources = np.asarray(source_of_row, dtype=np.int64)
        n_sources = max(len(names), int(sources.max(initial=-1)) + 1)
        if sizes is not None and len(sizes) != n_sources:
            raise ForgefieldError(
                f"{budget.setting}.by_source gives {len(sizes)} numbers of frames for {n_sources} sources; it needs one for "
                "each"
            )
        refuse_oversized(costs, budget, where)
        self.budget, self.seed, self.shuffle, self.names = budget, int(seed), shuffle, list(names)
        self._rows = np.argsort(sources, kind="stable")
        self._source = sources[self._rows]
        self._costs = np.maximum(costs[self._rows], 1)
        counts = np.bincount(sources, minlength=n_sources)
        self._ends = np.cumsum(counts)
        self._first = self._ends - counts
        self._frames = self._frames_of_batches(sizes)
        self.n_batches = np.bincount(self._source[self._cut(np.arange(len(sources)))], minlength=n_sources)
        """(n_sources,) batches of each source, with frames in the order of the data."""
        self._chances: Chances | None = None
        if probabilities is not None:
            chances = probabilities(self.n_batches)
            total = int(self.n_batches.sum()) if draws is None else draws(self.n_batches)
            self._chances = Chances(chances, self.n_batches, total, self.seed, self.names or None)
        self._made: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def draws(self) -> int:
        """Rows of the first epoch; others may have a few more or less where sources are drawn by probability."""
        return len(self.rows(0))

    def rows(self, epoch: int) -> np.ndarray:
        """Rows of that epoch, one batch after the other, int64."""
        return self._epoch(epoch)[0]

    def batches(self, epoch: int) -> np.ndarray:
        """Where batches begin in these rows and the last one ends, (n_batches + 1,)."""
        return self._epoch(epoch)[1]

    def counts(self, epoch: int) -> np.ndarray:
        """(n_sources,) batches of each source in that epoch."""
        return self.n_batches if self._chances is None else self._chances.counts(epoch)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self._made is None or self._made[0] != epoch:
            order = np.arange(len(self._rows))
            if self.shuffle:
                order = shuffle_within(self._source, len(self._ends), self.seed, epoch)
            begins = self._cut(order)
            lengths = np.diff(np.append(begins, len(order)))
            chosen = self._chosen(begins, epoch)
            rows = self._rows[order[ranges(begins[chosen], lengths[chosen])]]
            self._made = epoch, rows, offsets(lengths[chosen])
        return self._made[1:]

    def _chosen(self, begins: np.ndarray, epoch: int) -> np.ndarray:
        """Numbers of the batches of an epoch, in their order."""
        if self._chances is not None:
            available = np.bincount(self._source[begins], minlength=len(self._ends))
            first = np.cumsum(available) - available
            return drawn_in_turn(self._chances.counts(epoch), first, available, self.seed, epoch)
        if self.shuffle:
            return seeded_permutation(len(begins), self.seed, epoch, TOGETHER)
        return np.arange(len(begins))

    def _frames_of_batches(self, sizes: Sequence[int] | None) -> np.ndarray:
        """(n_sources,) frames of a batch; 0 where that differs from batch to batch."""
        if sizes is not None:
            return np.asarray(sizes, dtype=np.int64)
        if self.budget.kind == "frames":
            return np.full(len(self._ends), self.budget.size)
        frames = np.ones(len(self._ends), dtype=np.int64)
        filled = np.flatnonzero(self._ends > self._first)
        least = np.minimum.reduceat(self._costs, self._first[filled])
        most = np.maximum.reduceat(self._costs, self._first[filled])
        needed = -(-self.budget.size // most) if self.budget.bound == "lower" else self.budget.size // most
        frames[filled] = np.where(least == most, np.maximum(needed, 1), 0)
        return frames

    def _cut(self, order: np.ndarray) -> np.ndarray:
        """Where batches begin among the rows sorted by source and put into this order, ascending."""
        frames = self._frames[self._source]
        position = np.arange(len(order)) - self._first[self._source]
        begins = [np.flatnonzero((frames > 0) & (position % np.maximum(frames, 1) == 0))]
        for source in np.flatnonzero(self._frames == 0):
            first, end = self._first[source], self._ends[source]
            begins.append(first + StepPlan(self._costs[order[first:end]], self.budget).bounds[:-1])
        return np.sort(np.concatenate(begins))


class WholeBatches:
    """Steps of one whole batch for each rank; in the last step some ranks may have none.

    batches: (n_batches + 1,) where batches begin and the last one ends, as `SourceBatches.batches` returns it.
    """

    def __init__(self, batches: np.ndarray, world_size: int = 1, *, start: int = 0) -> None:
        if world_size < 1:
            raise ValueError(f"there is no plan for {world_size} ranks")
        if not 0 <= start <= batches[-1]:
            raise ValueError(f"an epoch has {batches[-1]} frames; it cannot start after frame {start}")
        self.world_size = int(world_size)
        self._whole = batches
        self._cuts = np.append(start, batches[batches > start]) if start < batches[-1] else batches[-1:]
        self.bounds = np.append(self._cuts[:-1][::world_size], self._cuts[-1])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def from_position(self, position: int, world_size: int | None = None) -> WholeBatches:
        """The plan of the rest of the epoch after its first `position` frames, on the same or another number of ranks."""
        return WholeBatches(self._whole, self.world_size if world_size is None else world_size, start=position)

    def share(self, step: int, rank: int) -> np.ndarray:
        """Positions in the epoch's order that this rank has in this step, int64."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank} among {self.world_size}")
        if not 0 <= step < len(self):
            raise IndexError(f"there is no step {step} among {len(self)}")
        batch = step * self.world_size + rank
        return np.arange(self._cuts[batch], self._cuts[batch + 1]) if batch + 1 < len(self._cuts) else np.arange(0)

    def n_frames_of_rank(self, step: int, rank: int) -> int:
        """How many frames this rank has in this step."""
        return len(self.share(step, rank))
