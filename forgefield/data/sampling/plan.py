"""Which rows of an epoch make step k of rank r.

A step takes the next stretch of the epoch's one order and deals it out to the ranks, so that none has much more to do than
another and none exceeds its budget. Where a step ends depends only on where it begins: an epoch can be taken up at any
position, by any number of ranks, and the rest of it is still served exactly once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from numbers import Integral
from typing import Protocol

import numpy as np

from forgefield.errors import ForgefieldError

KINDS = ("frames", "atoms", "edges")
OVERSIZED = ("error", "alone", "skip")
BOUNDS = ("upper", "lower")
KEPT_STEPS = 16
"""Steps whose dealing is remembered."""


@dataclass(frozen=True)
class Budget:
    """Amount of data of one rank in a step: `size` frames, or at most or at least `size` atoms or edges.

    oversized: what becomes of a frame that is larger than an upper bound: `error` (refused), `alone` (it is all its rank has
    in that step, the one case in which the bound is exceeded) or `skip` (left out; see `fitting`).
    setting: name of the option in messages. bound: whether atoms or edges are an `upper` or a `lower` bound.
    """

    kind: str
    size: int
    oversized: str = "error"
    setting: str = "data.batch"
    bound: str = "upper"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ForgefieldError(f"{self.setting}.{self.kind} is not known; a batch is counted in {', '.join(KINDS)}")
        if isinstance(self.size, bool) or not isinstance(self.size, Integral) or self.size < 1:
            raise ForgefieldError(
                f"{self.setting}.{self.kind} is {self.size}; a batch holds at least one {self.kind[:-1]}, and a whole number"
            )
        if self.oversized not in OVERSIZED:
            raise ForgefieldError(
                f"{self.setting}.oversized is {self.oversized!r}; it must be one of {', '.join(OVERSIZED)}"
            )
        if self.bound not in BOUNDS:
            raise ForgefieldError(f"{self.setting}.bound is {self.bound!r}; it must be one of {', '.join(BOUNDS)}")
        if self.bound == "lower" and self.kind == "frames":
            raise ForgefieldError(f"{self.setting}.bound is for a number of atoms or edges, and frames are given")
        if self.bound == "lower" and self.oversized == "skip":
            raise ForgefieldError(
                f"{self.setting}.oversized=skip does not apply to a lower bound; leave one of them out"
            )

    @property
    def limits_frames(self) -> bool:
        """Whether a frame can be too large for it."""
        return self.kind != "frames" and self.bound == "upper"


def fitting(costs: np.ndarray, budget: Budget) -> np.ndarray:
    """Which frames are not larger than the budget, (n,) bool. Every frame fits a number of frames or a lower bound."""
    costs = _whole_numbers(costs)
    return costs <= budget.size if budget.limits_frames else np.ones(len(costs), dtype=bool)


def refuse_oversized(costs: np.ndarray, budget: Budget, name_of: Callable[[int], str] | None = None) -> None:
    """Raise if frames of these costs exceed the budget and that is an error. name_of: describes the frame at a position."""
    oversized = np.flatnonzero(~fitting(costs, budget))
    if len(oversized) == 0 or budget.oversized == "alone":
        return
    kind, key = budget.kind, f"{budget.setting}.{budget.kind}"
    if budget.oversized == "skip":
        raise ValueError(f"{len(oversized)} frames exceed {key}; they are left out before a plan is made")
    largest = int(costs.argmax())
    name = name_of(largest) if name_of else f"at position {largest} of the epoch"
    raise ForgefieldError(
        f"{len(oversized)} of {len(costs)} frames have more {kind} than {key}={budget.size}; the largest, "
        f"{name}, has {costs[largest]}; raise {key} to that, or set {budget.setting}.oversized to alone (such "
        "a frame is a batch of its own) or skip (it is left out)"
    )


class EpochPlan(Protocol):
    """What a loader asks of a plan: where steps begin and end in the epoch's order, and which of it a rank has."""

    bounds: np.ndarray

    def __len__(self) -> int: ...

    def from_position(self, position: int, world_size: int | None = None) -> EpochPlan: ...

    def share(self, step: int, rank: int) -> np.ndarray: ...

    def n_frames_of_rank(self, step: int, rank: int) -> int: ...


class StepPlan:
    """The steps of an epoch, or of the rest of it from `start`, for every rank.

    costs:      (n,) atoms or edges of the frames in the order of the epoch. For a budget of frames only n matters.
    balance_by: (n,) what ranks should have equally much of, such as edges. Default: `costs`.
    name_of:    words for the frame at a position, for the message about a frame that is too large.

    Frames: a step takes the next `world_size * size`; ranks get equally many (in the last step they differ by one at most,
    and a rank may be left with none), dealt such that their sums of `balance_by` are nearly equal.

    Atoms, edges: a step takes as many of the next frames as can be dealt to the ranks, the largest first to the rank that
    has least, without exceeding `size` on any; at least one. A frame without edges counts as one edge. A rank is left with
    none only where there are fewer frames than ranks.

    With a lower bound it takes the next frames until every rank, each frame assigned to the one that has least, has reached
    `size`; the last step of an epoch may not reach it.
    """

    def __init__(
        self,
        costs: np.ndarray,
        budget: Budget,
        world_size: int = 1,
        balance_by: np.ndarray | None = None,
        *,
        start: int = 0,
        name_of: Callable[[int], str] | None = None,
    ) -> None:
        self._raw_costs = _whole_numbers(costs)
        self._balance = self._raw_costs if balance_by is None else _whole_numbers(balance_by)
        self._balanced_by_cost = self._balance is self._raw_costs
        n = len(self._raw_costs)
        if len(self._balance) != n:
            raise ValueError(f"{len(self._balance)} numbers to balance by do not go with {n} frames")
        if world_size < 1:
            raise ValueError(f"there is no plan for {world_size} ranks")
        if not 0 <= start <= n:
            raise ValueError(f"an epoch has {n} frames; it cannot start after frame {start}")
        self.budget, self.world_size = budget, int(world_size)
        self._name_of = name_of
        self._dealt: OrderedDict[int, np.ndarray] = OrderedDict()
        if budget.kind == "frames":
            stride = min(world_size * int(budget.size), max(n, 1))
            self.bounds = np.append(np.arange(start, n, stride), n)
        elif budget.bound == "lower":
            self._costs, self._size = np.maximum(self._raw_costs, 1), int(budget.size)
            self.bounds = np.array(_reaching_ends(self._costs, self._size, self.world_size, start), dtype=np.int64)
        else:
            refuse_oversized(self._raw_costs, budget, name_of)
            self._costs, self._size = _in_units(self._raw_costs, int(budget.size))
            self.bounds = np.array(_step_ends(self._costs, self._size, self.world_size, start), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def from_position(self, position: int, world_size: int | None = None) -> StepPlan:
        """The plan of the rest of the epoch after its first `position` frames, on the same or another number of ranks.

        Positions, in `bounds` and `share`, are still those of the whole epoch. From one of this plan's own `bounds`, on as
        many ranks, it has the same steps as this plan.
        """
        ranks = self.world_size if world_size is None else world_size
        return StepPlan(self._raw_costs, self.budget, ranks, self._balance, start=position, name_of=self._name_of)

    def share(self, step: int, rank: int) -> np.ndarray:
        """Positions in the epoch's order that this rank has in this step, ascending, int64."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank} among {self.world_size}")
        if not 0 <= step < len(self):
            raise IndexError(f"there is no step {step} among {len(self)}")
        return self.bounds[step] + np.flatnonzero(self._ranks(step) == rank)

    def n_frames_of_rank(self, step: int, rank: int) -> int:
        """How many frames this rank has in this step."""
        return len(self.share(step, rank))

    def _ranks(self, step: int) -> np.ndarray:
        """Rank of each frame of a step; those of the last requested steps are cached: some are prepared, others in use."""
        dealt = self._dealt.get(step)
        if dealt is None:
            dealt = self._dealt[step] = self._deal(slice(self.bounds[step], self.bounds[step + 1]))
            while len(self._dealt) > KEPT_STEPS:
                self._dealt.popitem(last=False)
        return dealt

    def _deal(self, stretch: slice) -> np.ndarray:
        balance = np.maximum(self._balance[stretch], 1)
        if self.world_size == 1:
            return np.zeros(len(balance), dtype=np.int64)
        if self.budget.kind == "frames":
            return _deal_equal_counts(balance, self.world_size)
        costs = self._costs[stretch]
        if self.budget.bound == "lower":
            return _deal_reaching(costs, balance, self.world_size, self._size)
        by_cost = _deal_within(costs, costs, self.world_size, self._size)
        assert by_cost is not None  # the step was ended where this is so
        if self._balanced_by_cost:
            return by_cost
        by_balance = _deal_within(costs, balance, self.world_size, self._size)
        if by_balance is None or _largest_load(by_cost, balance) < _largest_load(by_balance, balance):
            return by_cost
        return by_balance


class JoinedPlans:
    """Plans one after the other: no step has frames of two of them. Only for complete epochs."""

    def __init__(self, plans: Sequence[EpochPlan]) -> None:
        self.plans = list(plans)
        ends = np.cumsum([0, *(plan.bounds[-1] for plan in self.plans)])
        self.bounds = np.concatenate([[0], *(plan.bounds[1:] + end for plan, end in zip(self.plans, ends))])
        self._ends, self._steps = ends, np.cumsum([0, *map(len, self.plans)])

    def __len__(self) -> int:
        return int(self._steps[-1])

    def from_position(self, position: int, world_size: int | None = None) -> EpochPlan:
        raise ValueError("an epoch of several plans starts at its beginning")

    def plan_of(self, step: int) -> int:
        """Number of the plan to which a step belongs."""
        return int(np.searchsorted(self._steps, step, side="right")) - 1

    def share(self, step: int, rank: int) -> np.ndarray:
        number = self.plan_of(step)
        return self._ends[number] + self.plans[number].share(step - int(self._steps[number]), rank)

    def n_frames_of_rank(self, step: int, rank: int) -> int:
        return len(self.share(step, rank))


def _whole_numbers(values: np.ndarray) -> np.ndarray:
    column = np.asarray(values)
    if column.ndim != 1 or (column.size and column.dtype.kind not in "iu"):
        raise ValueError(f"costs of frames are one column of whole numbers, not {column.dtype} {column.shape}")
    return column.astype(np.int64, copy=False)


def _in_units(costs: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """Costs, at least 1 and at most the budget, and the budget, both in units of the costs' common divisor.

    The unit makes the upper bound by sums sharp where frames are alike: seven frames of 192 atoms, not 7.4, fit 1420.
    """
    costs = np.maximum(costs, 1)
    fits = costs[costs <= size]
    unit = int(np.gcd.reduce(fits)) if len(fits) else size
    costs = np.minimum(costs // unit, size // unit)
    return costs, min(size // unit, max(1, int(costs.sum())))


def _step_ends(costs: np.ndarray, size: int, world_size: int, start: int) -> list[int]:
    """Where steps end, beginning with `start`."""
    until = np.append(0, np.cumsum(costs))
    # No step from here can reach further than this, however it is dealt.
    furthest = (np.searchsorted(until, until[start:-1] + world_size * size, side="right") - 1).tolist()
    ends, n = [start], len(costs)
    if world_size == 1:
        while ends[-1] < n:
            ends.append(furthest[ends[-1] - start])
        return ends
    column = costs.tolist()
    while ends[-1] < n:
        at = ends[-1]
        ends.append(_step_end(column, at, furthest[at - start], size, world_size))
    return ends


def _step_end(costs: list[int], at: int, furthest: int, size: int, world_size: int) -> int:
    """The end of the step that begins at `at`: what it takes can be dealt, and with one frame more it could not.

    Looked for downwards in growing strides, then by halving; in steps of more than 512 frames to 1 in 256 of them.
    """
    least = min(at + world_size, furthest)
    if furthest == least or _can_be_dealt(costs[at:furthest], size, world_size):
        return furthest
    grain = max(1, (furthest - at) // 256)
    too_far, end, stride = furthest, max(furthest - grain, least), grain
    while end > least and not _can_be_dealt(costs[at:end], size, world_size):
        stride *= 2
        too_far, end = end, max(end - stride, least)
    while too_far - end > grain:
        middle = (end + too_far) // 2
        if _can_be_dealt(costs[at:middle], size, world_size):
            end = middle
        else:
            too_far = middle
    return end


def _reaching_ends(costs: np.ndarray, size: int, world_size: int, start: int) -> list[int]:
    """Where steps end, beginning with `start`, in each of which every rank reaches `size`."""
    ends, n = [start], len(costs)
    if world_size == 1:
        until = np.append(0, np.cumsum(costs))
        enough = np.minimum(np.searchsorted(until, until[start:-1] + size, side="left"), n).tolist()
        while ends[-1] < n:
            ends.append(enough[ends[-1] - start])
        return ends
    loads = [0] * world_size
    for at, cost in enumerate(costs[start:].tolist(), start + 1):
        heapreplace(loads, loads[0] + cost)
        if loads[0] >= size:
            ends.append(at)
            loads = [0] * world_size
    return ends if ends[-1] == n else [*ends, n]


def _deal_reaching(costs: np.ndarray, balance: np.ndarray, world_size: int, size: int) -> np.ndarray:
    """A rank for each frame: as balanced as every rank still reaches `size`. The last step may reach it in no way."""
    everything = int(costs.sum())
    by_balance = _deal_within(costs, balance, world_size, everything)
    by_cost = _deal_within(costs, costs, world_size, everything)
    assert by_balance is not None
    assert by_cost is not None
    for ranks in (by_balance, by_cost, _deal_in_turn(costs, world_size)):
        if np.bincount(ranks, weights=costs, minlength=world_size).min() >= size:
            return ranks
    return by_balance


def _deal_in_turn(costs: np.ndarray, world_size: int) -> np.ndarray:
    """A rank for each frame, as they come: the one that has least so far, as `_reaching_ends` counts."""
    ranks = np.empty(len(costs), dtype=np.int64)
    loads = [(0, rank) for rank in range(world_size)]
    for frame, cost in enumerate(costs.tolist()):
        load, rank = loads[0]
        heapreplace(loads, (load + cost, rank))
        ranks[frame] = rank
    return ranks


def _can_be_dealt(costs: list[int], size: int, world_size: int) -> bool:
    """Whether no rank exceeds `size` when these are dealt largest first, each to the rank that has least."""
    costs.sort(reverse=True)
    loads = costs[:world_size][::-1]  # ascending, hence already a heap
    for cost in costs[world_size:]:
        load = loads[0] + cost
        if load > size:
            return False
        heapreplace(loads, load)
    return True


def _deal_within(costs: np.ndarray, balance: np.ndarray, world_size: int, size: int) -> np.ndarray | None:
    """A rank for each frame: largest `balance` first, each to the rank that has least of it and room for its cost.

    None if that leaves a frame without a rank. Every balance is positive, so that empty ranks come first.
    """
    ranks = np.empty(len(costs), dtype=np.int64)
    order = np.argsort(-balance, kind="stable")
    room, smallest = [size] * world_size, int(costs.min(initial=size))
    loads = list(range(world_size))  # load * world_size + rank: ties go to the lower rank
    for frame, cost, share in zip(order.tolist(), costs[order].tolist(), (balance[order] * world_size).tolist()):
        full = []
        while loads and room[loads[0] % world_size] < cost:
            load = heappop(loads)
            if room[load % world_size] >= smallest:  # else it is full for good
                full.append(load)
        if not loads:
            return None
        rank = loads[0] % world_size
        heapreplace(loads, loads[0] + share)
        for load in full:
            heappush(loads, load)
        room[rank] -= cost
        ranks[frame] = rank
    return ranks


def _deal_equal_counts(balance: np.ndarray, world_size: int) -> np.ndarray:
    """A rank for each frame, equally many on each: rounds of one frame a rank, the largest to the rank that has least."""
    ranks = np.empty(len(balance), dtype=np.int64)
    loads = np.zeros(world_size, dtype=np.int64)
    order = np.argsort(-balance, kind="stable")
    for first in range(0, len(order), world_size):
        turn = order[first : first + world_size]
        least = np.argsort(loads, kind="stable")[: len(turn)]
        ranks[turn] = least
        loads[least] += balance[turn]
    return ranks


def _largest_load(ranks: np.ndarray, balance: np.ndarray) -> float:
    return float(np.bincount(ranks, weights=balance).max())
