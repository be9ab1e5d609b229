"""Order of points: a computed permutation, splits by index arithmetic, windows for streaming."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.errors import ForgefieldError
from forgefield.ldos.data import find_snapshots, split_points
from forgefield.ldos.data.permutation import Permutation
from forgefield.ldos.data.stream import ShuffledBlocks


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_a_permutation_has_everything_once_and_an_inverse(n, seed, epoch):
    permutation, all_of = Permutation(n, seed, epoch), torch.arange(n)
    assert torch.equal(permutation(all_of).sort().values, all_of)
    assert torch.equal(permutation.inverse(permutation(all_of)), all_of)
    streams = torch.tensor([[3], [11]]).expand(2, n)
    many = permutation(all_of.expand(2, n), streams)
    assert torch.equal(many.sort(dim=1).values, all_of.expand(2, n))
    assert torch.equal(permutation.inverse(many, streams), all_of.expand(2, n))


def test_large_permutations_are_computed_anywhere_and_are_exact():
    permutation = Permutation(2**49 + 12345, 7)
    places = torch.randint(0, 2**49, (5000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(permutation.inverse(permutation(places)), places)


def test_permutations_look_drawn():
    """Neighbours, epochs, seeds and streams are unrelated: correlations as small as chance would have them."""
    n = 40_000
    all_of = torch.arange(n)

    def centred(values):
        return (values.to(torch.float64) - (n - 1) / 2) / (n / 12**0.5)

    base = centred(Permutation(n, 1, 0)(all_of))
    others = [
        centred(all_of),
        centred(Permutation(n, 1, 1)(all_of)),
        centred(Permutation(n, 2, 0)(all_of)),
        centred(Permutation(n, 1, 0)(all_of, torch.ones_like(all_of))),
        *(base.roll(shift) for shift in (1, 2, 199, 200, 201)),
    ]
    for other in others:
        assert abs((base * other).mean()) < 5 / n**0.5
    halves = (base.view(-1, 100) > 0).sum(dim=1).to(torch.float64)  # of 100 neighbours, how many are in the upper half
    assert 0.75 < halves.var() / 25 < 1.25


@given(st.integers(3, 4000), st.floats(0.001, 0.95), st.integers(0, 5), st.booleans())
@settings(max_examples=80, deadline=None)
def test_splits_share_out_every_point_once(n, share, seed, with_test):
    shares = {"val": share, "test": 0.04} if with_test else {"val": share}
    if sum(max(1, round(n * s)) for s in shares.values()) >= n:
        return
    parts = split_points(n, shares, seed)
    rows = {name: part.rows(torch.arange(part.n)) for name, part in parts.items()}
    assert torch.equal(torch.cat(list(rows.values())).sort().values, torch.arange(n))
    assert all((part.diff() > 0).all() for part in rows.values())
    assert parts["val"].n == max(1, round(n * share))


def test_a_split_is_fixed_by_its_seed_and_evenly_drawn():
    one, again, other = (split_points(10_000, {"val": 0.1}, seed)["val"] for seed in (4, 4, 5))
    rows = one.rows(torch.arange(1000))
    assert torch.equal(rows, again.rows(torch.arange(1000)))
    assert (rows == other.rows(torch.arange(1000))).float().mean() < 0.2
    assert torch.bincount(rows % 10, minlength=10).min() > 60  # no offset within a stretch of ten is favoured
    with pytest.raises(ForgefieldError, match="fraction of the points between 0 and 1"):
        split_points(100, {"val": 1.5}, 0)


def _order(plan, n):
    found, start = [], 0
    for window, end in enumerate(plan.ends):
        room = np.full(end - start, -1)
        for stretch in plan.row_ranges(window, 0, 1):
            room[stretch.at : stretch.at + stretch.stop - stretch.start] = np.arange(stretch.start, stretch.stop)
        found.append(room[plan.buffer_rows(window, range(start, end)).numpy()])
        start = end
    assert start == n
    return np.concatenate(found)


@given(st.integers(1, 2000), st.integers(40, 2500), st.integers(1, 100), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_windows_hold_every_point_once(n, window, blocks, epoch):
    plan = ShuffledBlocks(n, window, 9, epoch, blocks)
    assert np.array_equal(np.sort(_order(plan, n)), np.arange(n))
    assert len(plan.ends) == 1 or plan.ends[-1] - plan.ends[-2] <= max(plan.blocks * plan.n_windows, window + blocks)


def test_streamed_batches_scatter_like_those_of_a_full_shuffle(be2):
    """Batch means of the real LDOS, with a window of an eighth of the points; as they lie they scatter 100 times as much."""
    values = np.concatenate([snapshot.read(dtype=np.float64)[1] for snapshot in find_snapshots(str(be2))])
    values = (values - values.mean(axis=0)) / values.std(axis=0)
    n, batch = len(values), 250

    def scatter(order):
        means = values[order[: n // batch * batch]].reshape(-1, batch, values.shape[1]).mean(axis=1)
        return (means**2).mean() * batch

    streamed = np.mean([scatter(_order(ShuffledBlocks(n, n // 8, 1, epoch), n)) for epoch in range(4)])
    assert 0.5 < streamed < 1.25
    assert scatter(np.arange(n)) > 20
