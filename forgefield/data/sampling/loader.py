"""The loader: batches of this rank, step by step, prepared ahead by threads where that pays.

The frames of a step are determined by (seed, epoch) and the plan (`order.py`, `plan.py`); this file turns rows into batches.
The loader can start anywhere in an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

import numpy as np
import torch

from forgefield.data.batch import Batch, Noise, frame_keys
from forgefield.data.dataset import GraphDataset
from forgefield.data.sampling.by_source import WholeBatches
from forgefield.data.sampling.order import EpochOrder, EveryFrameOnce
from forgefield.data.sampling.plan import Budget, EpochPlan, JoinedPlans, StepPlan, fitting
from forgefield.data.sampling.resident import ResidentFrames
from forgefield.errors import ForgefieldError

T = TypeVar("T")


class FrameLoader:
    """Batches for one of `world_size` ranks.

    Step k of an epoch takes the next stretch of the epoch's one global order and deals it out to the ranks; a rank that is
    left without a frame gets a blank one, which counts for nothing. So every frame is seen exactly once per epoch by
    exactly one rank (with an order of weighted draws: as often as it was drawn), all ranks take equally many steps, and what
    the ranks together see in a step is what one rank with the larger batch would see. Where the order comes in batches
    (`by_source.SourceBatches`), a step takes one of them for each rank.

    batch: the budget of a rank; a number means frames. order: of the rows that fit the budget and their costs; each row once,
    if None.
    keys: seed of `frame_key` of batches; None: no keys. noise: atoms are displaced at random, in training again
    in every epoch, else (evaluation) always alike.
    workers: threads that prepare batches ahead, 0 for none. prefetch: how many batches ahead. pin: put them into memory from
    which they are copied to a GPU without waiting.
    sets: numbers of frames of parts of the dataset; a batch has frames of one part only.
    """

    def __init__(
        self,
        dataset: GraphDataset,
        batch: Budget | int,
        *,
        order: Callable[[np.ndarray, np.ndarray], EpochOrder] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        prefetch: int | None = None,
        pin: bool = False,
        keys: int | None = None,
        noise: Noise | None = None,
        sets: Sequence[int] = (),
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank} among {world_size}")
        self.dataset = dataset
        self.budget = batch if isinstance(batch, Budget) else Budget("frames", batch)
        self.rank, self.world_size = rank, world_size
        self.workers, self.pin = workers, pin
        self.keys, self.noise = keys, noise
        self.resident: ResidentFrames | None = None
        """The frames on the device of the model, if they stay there; batches are then made there."""
        self.prefetch = 2 * workers if prefetch is None else prefetch
        self.epoch = 0
        self._costs = self._cost_of_frames()
        self._rows = np.arange(len(dataset))
        self._set_ends = np.cumsum(sets)
        if self.budget.oversized == "skip":
            self._rows = np.flatnonzero(fitting(self._costs, self.budget))
        if len(self._rows) == 0:
            raise ForgefieldError(
                f"every frame has more {self.budget.kind} than {self.budget.setting}.{self.budget.kind}="
                f"{self.budget.size}; raise it"
            )
        self._order: EpochOrder = EveryFrameOnce(len(self._rows), seed, shuffle)
        if order is not None:
            self._order = order(self._rows, self._costs[self._rows])
        self._planned: tuple[int, np.ndarray, EpochPlan] | None = None
        self._planned_next: tuple[int, np.ndarray, EpochPlan] | None = None
        self._prepared: tuple[int, Iterator[Batch]] | None = None
        """An epoch, and its batches, of which the first ones are on the device already."""
        self._repeated: list[Batch] | None = None
        """The batches of every epoch, if all are alike and they are on the device together."""
        self._is_repeated = order is None and not shuffle and keys is None
        self._rest: tuple[int, int, EpochPlan] | None = None
        """After `start_at`: epoch, number of its first batch, and the plan of what is left."""
        self._start_at_rest = False

    def _cost_of_frames(self) -> np.ndarray:
        if self.budget.kind != "edges":
            return self.dataset.n_atoms
        if self.dataset.n_edges is None and self.dataset.on_device:
            raise ForgefieldError(
                f"{self.budget.setting}.edges needs the number of edges of every frame, which is not known where lists are "
                "made on the device; give atoms, or another data.neighbours"
            )
        if self.dataset.n_edges is None:
            raise ForgefieldError(
                f"{self.budget.setting}.edges needs the number of edges of every frame, and this store holds no neighbour "
                f"lists for these settings; convert it with --cutoff {self.dataset.cutoff:g}, or give atoms"
            )
        return self.dataset.n_edges

    # ---- the plan

    def set_budget(self, budget: Budget) -> None:
        """Make batches of another size, of the same kind. Frames that exceed it are batches alone, and none is skipped."""
        if budget.kind != self.budget.kind or "skip" in (budget.oversized, self.budget.oversized):
            raise ValueError(f"batches of {self.budget} cannot become {budget}")
        self.budget, self._planned, self._rest = budget, None, None
        self._planned_next = self._prepared = self._repeated = None

    @property
    def skipped(self) -> int:
        """Frames left out because they exceed the budget."""
        return len(self.dataset) - len(self._rows)

    @property
    def alone(self) -> int:
        """Frames that exceed the budget and are batches alone."""
        return int((~fitting(self._costs, self.budget)).sum()) if self.budget.oversized == "alone" else 0

    @property
    def order(self) -> EpochOrder:
        return self._order

    @property
    def draws(self) -> int:
        """Frames of an epoch, over all ranks."""
        return self._order.draws

    def _plan(self) -> tuple[np.ndarray, EpochPlan]:
        """Rows of the current epoch in their order, and its plan."""
        if self._planned is None or self._planned[0] != self.epoch:
            following = self._planned_next
            if following is None or following[0] != self.epoch:
                following = (self.epoch, *self._planned_epoch(self.epoch))
            self._planned = following
        return self._planned[1], self._planned[2]

    def _planned_epoch(self, epoch: int) -> tuple[np.ndarray, EpochPlan]:
        rows, batches = self._rows[self._order.rows(epoch)], self._order.batches(epoch)
        if batches is not None:
            return rows, WholeBatches(batches, self.world_size)
        if not len(self._set_ends):
            return rows, self._step_plan(rows)
        parts = np.split(rows, np.searchsorted(rows, self._set_ends[:-1]))
        return rows, JoinedPlans([self._step_plan(part) for part in parts])

    def _step_plan(self, rows: np.ndarray) -> StepPlan:
        balance = self.dataset.n_atoms if self.dataset.n_edges is None else self.dataset.n_edges
        return StepPlan(
            self._costs[rows],
            self.budget,
            self.world_size,
            balance[rows],
            name_of=lambda position: self.dataset.frames.where(int(rows[position])),
        )

    def set_of(self, batch: int) -> int:
        """Number of the part of the dataset to which the frames of a batch belong."""
        plan = self._plan()[1]
        return plan.plan_of(batch) if isinstance(plan, JoinedPlans) else 0

    @property
    def epochs_are_alike(self) -> bool:
        """Whether all epochs have equally many batches."""
        return self.budget.kind == "frames"

    def batches_in(self, epoch: int) -> int:
        """Batches of that epoch."""
        return len(self._planned_epoch(epoch)[1])

    def batch_sizes(self, epochs: int = 4, at_most: int = 4000) -> np.ndarray:
        """(n, 3): frames, atoms and edges of this rank's batches of the first epochs; empty if edges are not counted."""
        n_edges = self.dataset.n_edges
        if n_edges is None:
            return np.empty((0, 3), dtype=np.int64)
        sizes: list[tuple[int, int, int]] = []
        for epoch in range(epochs):
            rows, plan = self._planned_epoch(epoch)
            for step in range(min(len(plan), at_most - len(sizes))):
                mine = rows[plan.share(step, self.rank)]
                if len(mine):
                    sizes.append((len(mine), self.dataset.n_atoms[mine].sum(), n_edges[mine].sum()))
        return np.array(sizes, dtype=np.int64).reshape(-1, 3)

    def _rest_of_epoch(self) -> tuple[int, EpochPlan]:
        """Number of the first batch and the plan from there on: the complete epoch, unless `start_at` was called."""
        if self._rest is not None and self._rest[0] == self.epoch:
            return self._rest[1:]
        return 0, self._plan()[1]

    def __len__(self) -> int:
        first_batch, plan = self._rest_of_epoch()
        return first_batch + len(plan)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration takes."""
        self.epoch = int(epoch)

    def start_at(self, sample: int) -> int:
        """Let only the next iteration start after the first `sample` frames of its epoch's order.

        Returns the number of the batch it begins with. The place need not be one where this number of ranks would have
        stopped.
        """
        _, plan = self._plan()
        rest = plan.from_position(sample)
        first_batch = max(len(plan) - len(rest), 0)
        self._rest, self._start_at_rest = (self.epoch, first_batch, rest), True
        return first_batch

    def position(self, batch: int) -> int:
        """How many frames of the present epoch's order come before this batch, over all ranks."""
        first_batch, plan = self._rest_of_epoch()
        return int(plan.bounds[min(max(batch - first_batch, 0), len(plan))])

    def own_frames(self, batch: int) -> int:
        """How many real frames this rank has in that batch; 0 where it only keeps step with the others."""
        if self.world_size == 1:
            return self.position(batch + 1) - self.position(batch)
        first_batch, plan = self._rest_of_epoch()
        return plan.n_frames_of_rank(batch - first_batch, self.rank)

    def is_full(self, batch: int) -> bool:
        """Whether that batch has full size: only the last of an epoch may be smaller."""
        if self._is_frames:
            size = self.position(batch + 1) - self.position(batch)
            return size == self.budget.size * self.world_size
        return batch + 1 < len(self)

    @property
    def _is_frames(self) -> bool:
        """Whether all batches but the last have the same number of frames."""
        return self.budget.kind == "frames" and self._order.batches(self.epoch) is None

    @property
    def frames_per_rank(self) -> int:
        """Frames of a rank in a full step; the average, where they differ."""
        if self._is_frames:
            return self.budget.size
        return max(1, round(self.draws / (len(self._plan()[1]) * self.world_size)))

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing is taken from `start_at` until the first batch is requested. Lightning makes an iterator
        # just to see that it can.
        rows, plan = self._plan()
        is_rest, self._start_at_rest = self._start_at_rest, False
        if is_rest:
            plan = self._rest_of_epoch()[1]

        epoch = self.epoch
        if self.resident is not None and not is_rest and self._is_repeated and len(rows) <= self.resident.window_frames:
            if self._repeated is None:
                self._repeated = list(self._resident_batches(self.resident, rows, plan, epoch))
            yield from self._repeated
            return
        if self.resident is not None:
            prepared, self._prepared = self._prepared, None
            batches = self._resident_batches(self.resident, rows, plan, epoch)
            if prepared is not None and prepared[0] == epoch and not is_rest:
                batches = prepared[1]
            for number, batch in enumerate(batches, 1):
                if number == len(plan) and not self._is_repeated:
                    self._prepare(self.resident, epoch + 1)
                yield batch
            return

        def prepare(step: int) -> Batch:
            positions = plan.share(step, self.rank)
            return self._batch(rows[positions], epoch, positions)

        if self.workers == 0:
            yield from map(prepare, range(len(plan)))
        else:
            yield from prepared_ahead(prepare, len(plan), self.workers, max(self.prefetch, 1))

    def _prepare(self, resident: ResidentFrames, epoch: int) -> None:
        """Arrange the first batches of an epoch, while the device is busy with the last steps of the one before."""
        rows, plan = self._planned_epoch(epoch)
        batches = self._resident_batches(resident, rows, plan, epoch)
        first = next(batches)
        self._prepared, self._planned_next = (epoch, chain([first], batches)), (epoch, rows, plan)

    def _resident_batches(
        self, resident: ResidentFrames, rows: np.ndarray, plan: EpochPlan, epoch: int
    ) -> Iterator[Batch]:
        if self.noise is not None:
            raise ValueError("noise is added to frames on the host")
        shares = [plan.share(step, self.rank) for step in range(len(plan))]
        positions = np.concatenate([*shares, np.empty(0, dtype=np.int64)])
        keys = self.keys

        def additional(frames: slice) -> dict[str, np.ndarray]:
            return {} if keys is None else {"frame_key": frame_keys(keys, epoch, positions[frames])}

        for batch in resident.batches(rows[positions], [len(share) for share in shares], additional):
            if keys is not None and "frame_key" not in batch:  # a blank frame
                number = torch.from_numpy(frame_keys(keys, epoch, np.zeros(1, dtype=np.int64)))
                batch = batch | {"frame_key": number.to(resident.device)}
            yield batch

    def _batch(self, rows: np.ndarray, epoch: int, positions: np.ndarray) -> Batch:
        """positions: of these frames in the order of the epoch, which is the same for any number of ranks."""
        if len(rows) == 0:
            batch = self.dataset.blank()
            rows, positions = np.array([int(self.dataset.n_atoms.argmin())]), np.zeros(1, dtype=np.int64)
            if self.noise is not None:
                batch["denoise"] = batch["positions"].new_full(batch["positions"].shape, float("nan"))
        elif self.noise is None:
            batch = self.dataset.batch(rows)
        elif self.noise.fixed:
            batch = self.dataset.noised_evaluation_batch(rows, self.noise)
        else:
            batch = self.dataset.noised_training_batch(rows, self.noise, epoch, positions)
        if self.keys is not None:
            batch["frame_key"] = torch.from_numpy(frame_keys(self.keys, epoch, positions))
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self.pin else batch


def prepared_ahead(prepare: Callable[[int], T], n: int, workers: int, ahead: int) -> Iterator[T]:
    """prepare(0), prepare(1), ... in this order, made by `workers` threads, up to `ahead` of the consumer."""
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="batch")
    try:
        for step in range(n):
            waiting.append(pool.submit(prepare, step))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
