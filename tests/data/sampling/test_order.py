"""Orders of an epoch: fixed by (seed, epoch), every frame once or by weight, exact in expectation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgefield.data.sampling.order import (
    EveryFrameOnce,
    WeightedDraws,
    epoch_permutation,
    seeded_permutation,
    system_probabilities,
)
from forgefield.errors import ForgefieldError

SEEDS, EPOCHS = st.integers(0, 2**40), st.integers(0, 10**6)


@st.composite
def cases(draw):
    """Systems of random sizes in random order of rows, some never drawn: (system_of_row, probabilities, draws)."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any))
    chances = [draw(st.floats(0, 5)) if size else 0.0 for size in sizes]
    if not sum(chances) > 0:
        chances = [float(size > 0) for size in sizes]
    rows = np.repeat(np.arange(len(sizes)), sizes)
    rows = rows[seeded_permutation(len(rows), draw(SEEDS))]
    return rows, np.array(chances) / sum(chances), draw(st.integers(1, 80))


@given(n=st.integers(0, 300), seed=SEEDS, epoch=EPOCHS)
def test_every_frame_comes_once_an_epoch_in_an_order_of_its_own(n, seed, epoch):
    order = EveryFrameOnce(n, seed, shuffle=True)
    rows = order.rows(epoch)
    assert order.draws == n
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == list(range(n))
    np.testing.assert_array_equal(rows, EveryFrameOnce(n, seed, shuffle=True).rows(epoch))
    if n > 30:
        assert (rows != order.rows(epoch + 1)).any()
        assert (rows != EveryFrameOnce(n, seed + 1, shuffle=True).rows(epoch)).any()
    assert EveryFrameOnce(n, seed, shuffle=False).rows(epoch).tolist() == list(range(n))


def test_the_orders_never_change_between_versions():
    assert epoch_permutation(8, 1, 2).tolist() == [7, 1, 3, 0, 4, 2, 6, 5]
    assert EveryFrameOnce(8, 1).rows(2).tolist() == [7, 1, 3, 0, 4, 2, 6, 5]
    weighted = WeightedDraws(np.array([0, 0, 0, 1, 1]), np.array([0.25, 0.75]), 10, 3)
    assert weighted.rows(4).tolist() == [2, 4, 4, 4, 3, 4, 3, 3, 1, 3]


def test_every_place_of_an_order_is_as_likely_for_every_row():
    n, epochs = 5, 4000
    seen = np.zeros((n, n))
    for epoch in range(epochs):
        seen[np.arange(n), EveryFrameOnce(n, seed=11).rows(epoch)] += 1
    # Six standard deviations of a binomial count.
    assert abs(seen - epochs / n).max() < 6 * np.sqrt(epochs * 0.2 * 0.8)


@given(case=cases(), seed=SEEDS, epoch=EPOCHS)
def test_systems_are_drawn_to_within_one_of_their_share(case, seed, epoch):
    system, chances, draws = case
    order = WeightedDraws(system, chances, draws, seed)
    rows = order.rows(epoch)
    assert order.draws == draws == len(rows)
    counts = np.bincount(system[rows], minlength=len(chances))
    np.testing.assert_array_equal(counts, order.counts(epoch))
    assert (abs(counts - draws * chances) < 1 + 1e-9).all()
    assert (counts[chances == 0] == 0).all()


@given(case=cases(), seed=SEEDS, epoch=EPOCHS)
def test_no_row_is_drawn_again_before_all_of_its_system_were(case, seed, epoch):
    system, chances, draws = case
    times = np.bincount(WeightedDraws(system, chances, draws, seed).rows(epoch), minlength=len(system))
    for s in np.unique(system):
        own = times[system == s]
        assert own.max() - own.min() <= 1


@given(case=cases(), seed=SEEDS, epochs=st.lists(EPOCHS, min_size=2, max_size=5, unique=True))
def test_an_epoch_is_the_same_whatever_was_requested_before(case, seed, epochs):
    used = WeightedDraws(*case, seed)
    forwards = [used.rows(epoch) for epoch in epochs]
    backwards = [used.rows(epoch) for epoch in reversed(epochs)]
    for epoch, one, other in zip(epochs, forwards, reversed(backwards)):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, WeightedDraws(*case, seed).rows(epoch))


def test_the_average_over_epochs_is_the_probability_for_systems_and_for_rows():
    system = np.repeat([0, 1, 2, 3], [7, 1, 3, 5])
    chances = np.array([0.05, 0.33, 0.62, 0.0])
    draws, epochs = 11, 6000
    order = WeightedDraws(system, chances, draws, seed=5)
    times = np.zeros(len(system))
    for epoch in range(epochs):
        times += np.bincount(order.rows(epoch), minlength=len(system))
    # A count is one of two neighbouring whole numbers: its variance is at most 1/4, so six deviations are 3 / sqrt(epochs).
    bound = 3 / np.sqrt(epochs)
    assert abs(np.bincount(system, weights=times) / epochs - draws * chances).max() < bound
    assert abs(times / epochs - (draws * chances / [7, 1, 3, 5])[system]).max() < bound


def test_shares_that_are_integers_are_drawn_exactly_in_every_epoch():
    system = np.repeat([0, 1, 2], [4, 10, 2])
    order = WeightedDraws(system, np.array([0.5, 0.25, 0.25]), 16, seed=9)
    for epoch in range(50):
        assert order.counts(epoch).tolist() == [8, 4, 4]
        times = np.bincount(order.rows(epoch), minlength=16)
        assert (times[:4] == 2).all()
        assert (times[14:] == 2).all()


def test_draws_of_a_system_are_spread_over_the_whole_epoch():
    order = WeightedDraws(np.repeat([0, 1], [500, 500]), np.array([0.5, 0.5]), 1000, seed=2)
    halves = (order.rows(0) >= 500).reshape(2, 500).sum(1)
    assert abs(halves - 250).max() < 6 * np.sqrt(1000) / 4


def test_a_hundred_thousand_systems_are_drawn_to_within_one_of_their_share():
    rng = np.random.default_rng(1)
    n, systems = 200_000, 100_000
    system = np.concatenate([np.arange(systems), rng.integers(0, systems, n - systems)])
    chances = rng.random(systems) / systems
    rows = WeightedDraws(system, chances, n, seed=1).rows(0)
    expected = n * chances / chances.sum()
    assert abs(np.bincount(system[rows], minlength=systems) - expected).max() < 1 + 1e-6


def test_draws_refuse_what_cannot_be_drawn():
    with pytest.raises(ForgefieldError, match=r"system 1, counted from 0, .* probability 0\.5 but has no frame"):
        WeightedDraws(np.array([0, 0]), np.array([0.5, 0.5]), 4)
    with pytest.raises(ForgefieldError, match="at least one draw, not 0"):
        WeightedDraws(np.array([0, 0]), np.array([1.0]), 0)
    with pytest.raises(ValueError, match=r"systems 0\.\.2; there are 2"):
        WeightedDraws(np.array([0, 2]), np.array([0.5, 0.5]), 4)
    for chances in ([0.0, 0.0], [np.nan, 1.0], [-1.0, 2.0]):
        with pytest.raises(ValueError, match="not all of them 0"):
            WeightedDraws(np.array([0, 1]), np.array(chances), 4)


SIZES = [10, 30, 20, 20, 40]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("uniform", [0.2] * 5),
        ("prob_uniform", [0.2] * 5),
        ("size", [1 / 12, 3 / 12, 2 / 12, 2 / 12, 4 / 12]),
        ("prob_sys_size", [1 / 12, 3 / 12, 2 / 12, 2 / 12, 4 / 12]),
        # A block's probabilities add up to its weight and are proportional to size inside, as DeePMD-kit documents.
        ("prob_sys_size;0:2:0.5;2:5:0.5", [0.125, 0.375, 0.125, 0.125, 0.25]),
        ("prob_sys_size; 2:5:0.8; 0:2:0.2", [0.05, 0.15, 0.2, 0.2, 0.4]),
        # Weights are relative: 0.4 and 1.6 mean 0.2 and 0.8.
        ("size;0:2:0.4;2:5:1.6", [0.05, 0.15, 0.2, 0.2, 0.4]),
        ("prob_sys_size;0:1:0;1:5:3", [0, 3 / 11, 2 / 11, 2 / 11, 4 / 11]),
        ([1, 4, 0, 0, 5], [0.1, 0.4, 0, 0, 0.5]),
        ([0.1, 0.4, 0.2, 0.2, 0.1], [0.1, 0.4, 0.2, 0.2, 0.1]),
        # Negative: a share of what is left, by size.
        ([0.4, -1, -1, 0, -2], [0.4, 0.2, 0.6 * 20 / 90, 0, 0.6 * 40 / 90]),
        ([-1] * 5, [1 / 12, 3 / 12, 2 / 12, 2 / 12, 4 / 12]),
    ],
)
def test_rules_give_the_probabilities_they_promise(rule, expected):
    np.testing.assert_allclose(system_probabilities(rule, SIZES), expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("rule", "shares", "expected"),
    [
        ("size", [None, 0.1, None, 0.5, None], [0.4 / 7, 0.1, 0.8 / 7, 0.5, 1.6 / 7]),
        ("uniform", [0, None, None, 0.4, None], [0, 0.2, 0.2, 0.4, 0.2]),
        ("uniform", [3, 1, 0, 0, 4], [0.375, 0.125, 0, 0, 0.5]),
        ("size", [None] * 5, [1 / 12, 3 / 12, 2 / 12, 2 / 12, 4 / 12]),
    ],
)
def test_shares_are_kept_and_the_rest_follows_the_rule(rule, shares, expected):
    np.testing.assert_allclose(system_probabilities(rule, SIZES, shares), expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("rule", "shares", "message"),
    [
        ("prob_size", None, r"data\.sampling='prob_size' is not a rule; it must be uniform, size"),
        (3, None, r"data\.sampling=3 is not a rule"),
        ([0.5, 0.5], None, "has 2 numbers for 5 systems"),
        ([0, 0, 0, 0, 0], None, "all systems would have probability 0"),
        ([1, 2, "x", 4, 5], None, "must be a list of finite numbers"),
        ([1, 2, float("nan"), 4, 5], None, "must be a list of finite numbers"),
        ([0.5, 0.5, -1, -1, 0], None, "add up to 1 and leave nothing for the 2 systems"),
        ([0.9, 0.5, -1, 0, 0], None, r"add up to 1\.4"),
        ("prob_sys_size;0:2:0.5", None, "system 2 is in no block"),
        ("prob_sys_size;0:3:0.5;2:5:0.5", None, "system 2 is in two blocks"),
        ("prob_sys_size;0:2:0.5;2:6:0.5", None, "'2:6:0.5' does not lie within the 5 systems"),
        ("prob_sys_size;2:2:0.5;0:5:1", None, "'2:2:0.5' does not lie within"),
        ("prob_sys_size;0:2;2:5:0.5", None, "'0:2' is not a block start:stop:weight"),
        ("prob_sys_size;0:5:x", None, "'0:5:x' is not a block"),
        ("prob_sys_size;0:5:inf", None, "'0:5:inf' is not a block"),
        ("prob_sys_size;0:2:-1;2:5:2", None, "'0:2:-1' has a negative weight"),
        ("prob_sys_size;0:2:0;2:5:0", None, "all systems would have probability 0"),
        ("prob_uniform;0:2:0.5;2:5:0.5", None, "is not a rule"),
        ("size", [None, -0.5, None, None, None], r"share=-0\.5 of system 1"),
        ("size", [0.5, 0.5, None, None, None], "leave nothing for the 3 systems"),
        ("size", [0.5, None], "share has 2 numbers for 5 systems"),
        ([1, 1, 1, 1, 1], [0.5, None, None, None, None], "contradict"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused_by_name(rule, shares, message):
    with pytest.raises(ForgefieldError, match=message):
        system_probabilities(rule, SIZES, shares)


def test_a_block_without_frames_and_an_empty_list_of_systems_are_refused():
    with pytest.raises(ForgefieldError, match=r"'0:1:0\.5' has a weight but no frame"):
        system_probabilities("prob_sys_size;0:1:0.5;1:2:0.5", [0, 4])
    np.testing.assert_array_equal(system_probabilities("prob_sys_size;0:1:0;1:2:0.5", [0, 4]), [0, 1])
    with pytest.raises(ForgefieldError, match="no system to draw from"):
        system_probabilities("uniform", [])


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20),
    cut=st.integers(0, 20),
    weights=st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)),
)
def test_blocks_get_their_weight_and_divide_it_by_size(sizes, cut, weights):
    cut = min(cut, len(sizes))
    pieces = [(a, b, w) for (a, b), w in zip([(0, cut), (cut, len(sizes))], weights) if a < b]
    got = system_probabilities("prob_sys_size;" + ";".join(f"{a}:{b}:{w!r}" for a, b, w in pieces), sizes)
    total = sum(w for _, _, w in pieces)
    for a, b, w in pieces:
        np.testing.assert_allclose(got[a:b], w / total * np.array(sizes[a:b]) / sum(sizes[a:b]), rtol=1e-12)
    assert got.sum() == pytest.approx(1, abs=1e-12)
