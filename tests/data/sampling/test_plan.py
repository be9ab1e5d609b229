"""Plans of an epoch: each position once over steps and ranks, budgets kept, work balanced, resumable anywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgefield.data.sampling.plan import Budget, StepPlan, fitting
from forgefield.errors import ForgefieldError

RANKS = st.integers(1, 9)


@st.composite
def columns(draw, least=0, most=60):
    """Costs of frames as data have them: scattered, of a few sizes, or all alike."""
    n = draw(st.integers(0, 70))
    kind = draw(st.sampled_from(["scattered", "few", "alike"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if kind == "scattered":
        return rng.integers(least, most + 1, n)
    return rng.choice(rng.integers(least, most + 1, 3 if kind == "few" else 1), n)


@st.composite
def budgets(draw, costs):
    """A budget, and costs it admits."""
    kind = draw(st.sampled_from(["frames", "atoms", "edges"]))
    if kind == "frames":
        return Budget(kind, draw(st.integers(1, 9)))
    if draw(st.integers(0, 3)) == 0:
        return Budget(kind, draw(st.integers(1, 150)), bound="lower")
    oversized = draw(st.sampled_from(["error", "alone"]))
    least = max(1, int(costs.max(initial=1))) if oversized == "error" else 1
    return Budget(kind, draw(st.integers(least, least + 150)), oversized)


@st.composite
def plans(draw):
    """(costs, plan), with a start inside the epoch and with something to balance by now and then."""
    costs = draw(columns())
    balance = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 500, len(costs))
    start = draw(st.integers(0, len(costs)))
    budget = draw(budgets(costs))
    return costs, StepPlan(costs, budget, draw(RANKS), draw(st.sampled_from([None, balance])), start=start)


def shares(plan):
    """[[positions of rank 0, of rank 1, ...] of step 0, ...]"""
    return [[plan.share(step, rank) for rank in range(plan.world_size)] for step in range(len(plan))]


def longest_first(costs, world_size):
    """The slow and obvious dealing: largest first, each to the rank that has least; loads of the ranks."""
    loads = [0] * world_size
    for cost in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += cost
    return loads


@given(case=plans())
def test_every_position_is_served_once_and_a_step_is_one_stretch_of_the_order(case):
    costs, plan = case
    assert plan.bounds[-1] == len(costs)
    assert (np.diff(plan.bounds) >= 1).all()
    for step, parts in enumerate(shares(plan)):
        assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in parts)
        together = np.sort(np.concatenate(parts))
        np.testing.assert_array_equal(together, np.arange(plan.bounds[step], plan.bounds[step + 1]))
        assert [plan.n_frames_of_rank(step, rank) for rank in range(plan.world_size)] == [len(part) for part in parts]


@given(case=plans(), data=st.data())
def test_taking_an_epoch_up_anywhere_on_other_ranks_serves_each_frame_once(case, data):
    costs, plan = case
    done = data.draw(st.integers(0, len(plan)))
    served = list(itertools.chain.from_iterable(np.concatenate(parts) for parts in shares(plan)[:done]))
    rest = plan.from_position(int(plan.bounds[done]), data.draw(RANKS))
    served += list(itertools.chain.from_iterable(np.concatenate(parts) for parts in shares(rest)))
    assert sorted(served) == list(range(int(plan.bounds[0]), len(costs)))


@given(case=plans(), data=st.data())
def test_taking_an_epoch_up_on_as_many_ranks_changes_nothing(case, data):
    _, plan = case
    done = data.draw(st.integers(0, len(plan)))
    rest = plan.from_position(int(plan.bounds[done]))
    np.testing.assert_array_equal(rest.bounds, plan.bounds[done:])
    for before, after in zip(shares(plan)[done:], shares(rest), strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)


@given(case=plans(), data=st.data())
def test_a_share_is_the_same_whatever_was_requested_before(case, data):
    _, plan = case
    expected = shares(plan)
    asked = [(step, rank) for step in range(len(plan)) for rank in range(plan.world_size)]
    for step, rank in data.draw(st.permutations(asked)) if len(asked) < 40 else reversed(asked):
        np.testing.assert_array_equal(plan.share(step, rank), expected[step][rank])


@given(case=plans())
def test_the_budget_is_never_exceeded_and_an_oversized_frame_is_alone(case):
    costs, plan = case
    for parts in shares(plan):
        for part in parts:
            if plan.budget.kind == "frames":
                assert len(part) <= plan.budget.size
            elif costs[part].sum() > plan.budget.size and plan.budget.bound == "upper":
                assert plan.budget.oversized == "alone"
                assert len(part) == 1


@given(case=plans())
def test_no_rank_is_idle_while_another_has_two_frames(case):
    _, plan = case
    for step, parts in enumerate(shares(plan)):
        counts = [len(part) for part in parts]
        assert min(counts) > 0 or max(counts) <= 1
        if plan.budget.kind == "frames":
            assert max(counts) - min(counts) <= 1
            assert step == len(plan) - 1 or set(counts) == {plan.budget.size}


@given(costs=columns(least=1), ranks=RANKS, data=st.data())
def test_a_step_by_cost_ends_where_one_more_frame_could_not_be_dealt(costs, ranks, data):
    budget = Budget("atoms", data.draw(st.integers(costs.max(initial=1), 200)))
    plan = StepPlan(costs, budget, ranks)
    for step, (first, last) in enumerate(itertools.pairwise(plan.bounds)):
        loads = sorted(int(costs[plan.share(step, rank)].sum()) for rank in range(ranks))
        assert loads == sorted(longest_first(costs[first:last], ranks))
        if last < len(costs):
            assert max(longest_first(costs[first : last + 1], ranks)) > budget.size


@given(costs=columns(least=1), size=st.integers(60, 300))
def test_on_one_rank_a_step_is_filled_until_the_next_frame_does_not_fit(costs, size):
    ends, load = [0], 0
    for position, cost in enumerate(costs):
        if load + cost > size:
            ends.append(position)
            load = 0
        load += cost
    plan = StepPlan(costs, Budget("edges", size))
    assert plan.bounds.tolist() == ([*ends, len(costs)] if len(costs) else [0])


@given(costs=columns(), size=st.integers(1, 200), ranks=RANKS)
def test_loads_of_ranks_are_within_the_bound_of_longest_first(costs, size, ranks):
    plan = StepPlan(costs, Budget("edges", size, "alone"), ranks)
    worth = np.minimum(np.maximum(costs, 1), size)
    for parts in shares(plan):
        loads = [worth[part].sum() for part in parts]
        largest = max(worth[part].max(initial=0) for part in parts)
        assert max(loads) <= np.mean(loads) + (1 - 1 / plan.world_size) * largest + 1e-9


@given(costs=columns(), balance_seed=st.integers(0, 999), size=st.integers(1, 9), ranks=RANKS)
def test_equal_counts_differ_in_work_by_less_than_the_spread_of_a_round(costs, balance_seed, size, ranks):
    balance = np.random.default_rng(balance_seed).integers(1, 500, len(costs))
    plan = StepPlan(costs, Budget("frames", size), ranks, balance)
    for parts in shares(plan):
        loads = [balance[part].sum() for part in parts]
        sizes = np.sort(balance[np.concatenate(parts)])[::-1]
        sizes = np.append(sizes, np.zeros(-len(sizes) % ranks, dtype=np.int64)).reshape(-1, ranks)
        assert max(loads) - min(loads) <= (sizes[:, 0] - sizes[:, -1]).max()


def test_what_is_balanced_by_decides_among_dealings_that_keep_the_budget():
    atoms = np.array([10, 10, 10, 10, 10, 10, 10, 10])
    edges = np.array([90, 90, 90, 90, 10, 10, 10, 10])
    by_atoms = StepPlan(atoms, Budget("atoms", 40), 4, np.ones(8, dtype=int))
    by_edges = StepPlan(atoms, Budget("atoms", 40), 4, edges)
    assert by_atoms.bounds.tolist() == by_edges.bounds.tolist() == [0, 8]
    assert [int(edges[by_edges.share(0, rank)].sum()) for rank in range(4)] == [100] * 4


@given(costs=columns(least=1), ranks=st.integers(2, 6), seed=st.integers(0, 999))
def test_balancing_by_something_else_is_never_worse_at_it_than_dealing_by_cost(costs, ranks, seed):
    balance = np.random.default_rng(seed).integers(1, 500, len(costs))
    budget = Budget("atoms", int(costs.max(initial=1)) + 40)
    plain, balanced = StepPlan(costs, budget, ranks), StepPlan(costs, budget, ranks, balance)
    np.testing.assert_array_equal(plain.bounds, balanced.bounds)
    for one, other in zip(shares(plain), shares(balanced), strict=True):
        assert max(balance[part].sum() for part in other) <= max(balance[part].sum() for part in one)


def test_small_plans_are_as_worked_out_by_hand():
    plan = StepPlan(np.array([5, 3, 3, 2, 2, 6]), Budget("atoms", 8), 2)
    # 5 3 | 3 2 2 would be 15 of 16, dealt 5+2 and 3+3+2; with the 6 it is more than two ranks hold.
    assert plan.bounds.tolist() == [0, 5, 6]
    assert [part.tolist() for part in shares(plan)[0]] == [[0, 3], [1, 2, 4]]
    assert [part.tolist() for part in shares(plan)[1]] == [[5], []]
    frames = StepPlan(np.array([5, 3, 3, 2, 2, 6, 1]), Budget("frames", 2), 2)
    assert frames.bounds.tolist() == [0, 4, 7]
    assert [[part.tolist() for part in parts] for parts in shares(frames)] == [[[0, 3], [1, 2]], [[5], [4, 6]]]


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_frames_of_one_size_fill_every_rank_with_as_many_as_fit(ranks):
    plan = StepPlan(np.full(10 * 7 * ranks, 192), Budget("atoms", 7 * 192 + 100), ranks)
    assert np.diff(plan.bounds).tolist() == [7 * ranks] * 10
    assert {len(part) for parts in shares(plan) for part in parts} == {7}


def test_frames_without_edges_do_not_make_an_endless_step():
    plan = StepPlan(np.zeros(20, dtype=int), Budget("edges", 4), 2)
    assert np.diff(plan.bounds).tolist() == [8, 8, 4]


def test_an_oversized_frame_keeps_company_only_on_other_ranks():
    costs = np.array([3, 50, 4, 3, 50, 3])
    plan = StepPlan(costs, Budget("atoms", 10, "alone"), 2)
    assert plan.bounds.tolist() == [0, 4, 6]
    assert [part.tolist() for part in shares(plan)[0]] == [[1], [0, 2, 3]]
    assert [part.tolist() for part in shares(plan)[1]] == [[4], [5]]
    assert StepPlan(costs, Budget("atoms", 10, "alone")).bounds.tolist() == [0, 1, 2, 4, 5, 6]


def test_oversized_frames_are_refused_by_name_or_left_out_by_the_caller():
    costs = np.array([3, 50, 4, 11, 90, 3])
    budget = Budget("atoms", 10)
    with pytest.raises(
        ForgefieldError,
        match=r"3 of 6 frames have more atoms than data\.batch\.atoms=10; the largest, at position 4 .* has 90",
    ):
        StepPlan(costs, budget)
    with pytest.raises(ForgefieldError, match=r"the largest, frame 4 of a\.xyz, has 90; .*oversized to alone"):
        StepPlan(costs, budget, 3, name_of=lambda position: f"frame {position} of a.xyz")
    skip = Budget("atoms", 10, "skip")
    assert fitting(costs, skip).tolist() == [True, False, True, False, False, True]
    assert StepPlan(costs[fitting(costs, skip)], skip).bounds.tolist() == [0, 3]
    with pytest.raises(ValueError, match="left out before"):
        StepPlan(costs, skip)
    assert fitting(costs, Budget("frames", 1)).all()


@given(costs=columns(), size=st.integers(1, 200), ranks=RANKS, balanced=st.booleans())
def test_with_a_lower_bound_every_rank_reaches_it_with_as_few_frames_as_come(costs, size, ranks, balanced):
    balance = np.random.default_rng(1).integers(0, 500, len(costs)) if balanced else None
    plan = StepPlan(costs, Budget("atoms", size, bound="lower"), ranks, balance)
    costs = np.maximum(costs, 1)
    for step, parts in enumerate(shares(plan)):
        loads = [0] * ranks  # the slow and obvious count: each frame to the rank that has least, until all have enough
        taken = 0
        while min(loads) < size and plan.bounds[step] + taken < len(costs):
            loads[loads.index(min(loads))] += costs[plan.bounds[step] + taken]
            taken += 1
        assert plan.bounds[step + 1] - plan.bounds[step] == taken
        if min(loads) >= size:
            assert min(costs[part].sum() for part in parts) >= size
        else:
            assert step == len(plan) - 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Budget("atoms", 32, bound="lower"), {3: 11, 16: 2, 32: 1, 192: 1}),  # auto: ceil(32 / atoms)
        (Budget("atoms", 32, "alone"), {3: 10, 16: 2, 32: 1, 192: 1}),  # max:32, floor but at least one
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_frames_alike_make_the_batches_of_deepmd_kits_rules(rule, expected, ranks):
    for atoms, frames in expected.items():
        plan = StepPlan(np.full(20 * ranks * frames + 1, atoms), rule, ranks)
        assert len(plan) == 21
        for parts in shares(plan)[:-1]:
            assert [len(part) for part in parts] == [frames] * ranks


def test_budgets_that_make_no_sense_are_refused():
    with pytest.raises(ForgefieldError, match=r"data\.batch\.bound is 'least'; it must be one of upper, lower"):
        Budget("atoms", 3, bound="least")
    with pytest.raises(ForgefieldError, match=r"data\.batch\.bound is for a number of atoms or edges"):
        Budget("frames", 3, bound="lower")
    with pytest.raises(ForgefieldError, match=r"data\.batch\.oversized=skip does not apply to a lower bound"):
        Budget("atoms", 3, "skip", bound="lower")
    for size in (0, -3, 2.5, True, "8"):
        with pytest.raises(ForgefieldError, match=r"data\.batch\.edges is .*at least one edge"):
            Budget("edges", size)
    with pytest.raises(ForgefieldError, match=r"data\.eval_batch\.grams is not known; .* frames, atoms, edges"):
        Budget("grams", 3, setting="data.eval_batch")
    with pytest.raises(ForgefieldError, match=r"oversized is 'drop'; it must be one of error, alone, skip"):
        Budget("atoms", 3, "drop")
    assert Budget("atoms", np.int64(5)).size == 5


def test_plans_refuse_ranks_steps_and_positions_that_do_not_exist():
    plan = StepPlan(np.ones(5, dtype=int), Budget("frames", 2), 2)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        plan.share(0, 2)
    with pytest.raises(IndexError, match="no step 2 among 2"):
        plan.share(2, 0)
    with pytest.raises(ValueError, match="cannot start after frame 6"):
        plan.from_position(6)
    with pytest.raises(ValueError, match="no plan for 0 ranks"):
        plan.from_position(1, 0)
    with pytest.raises(ValueError, match="whole numbers"):
        StepPlan(np.ones(5), Budget("atoms", 2))
    with pytest.raises(ValueError, match="4 numbers to balance by do not go with 5 frames"):
        StepPlan(np.ones(5, dtype=int), Budget("atoms", 2), 2, np.ones(4, dtype=int))


def test_an_empty_rest_has_no_step():
    for kind in ("frames", "atoms"):
        for plan in (
            StepPlan(np.array([], dtype=int), Budget(kind, 4), 2),
            StepPlan(np.ones(9, dtype=int), Budget(kind, 4), 2, start=9),
        ):
            assert len(plan) == 0
            assert shares(plan) == []


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_a_long_epoch_keeps_its_budget_and_wastes_little_of_it(ranks):
    rng = np.random.default_rng(3)
    costs = np.clip(np.exp(rng.normal(3.2, 0.7, 50_000)).astype(int), 1, 300)
    size = 4000
    plan = StepPlan(costs, Budget("atoms", size), ranks)
    assert np.add.reduceat(costs, plan.bounds[:-1]).max() <= ranks * size
    last = len(plan) - 1
    assert costs[: plan.bounds[last]].sum() / (last * ranks * size) > 0.985
    for step in range(0, len(plan), max(1, len(plan) // 5)):
        assert max(costs[plan.share(step, rank)].sum() for rank in range(ranks)) <= size
