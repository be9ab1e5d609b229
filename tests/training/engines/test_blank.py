"""Blank frames are inert: whatever is computed of the real frames is the same with and without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.data.padding import (
    MIN_SIZES,
    Size,
    SizePlan,
    blank_frames,
    join_batches,
    padded_to_minimum,
    plan_sizes,
    sizes,
)
from forgefield.training.engines.engine import Engine
from tests.support.engine_cases import labelled, step_function
from tests.support.structures import make_potential


def filled(batch, frames, atoms, edges):
    return join_batches(batch, blank_frames(batch, frames=frames, atoms=atoms, edges=edges, cutoff=3.0))


@pytest.mark.parametrize("model", [{}, {"zbl": True, "l_max": 2}])
def test_outputs_and_gradients_do_not_notice_blank_frames(model):
    potential = make_potential(**model)
    batch = labelled(5, 3)
    more = filled(batch, 3, 7, 200)
    potential.eval()
    alone, together = (potential(b, stress=True) for b in (batch, more))
    for name in ("energy", "forces", "stress"):
        torch.testing.assert_close(together[name][: len(alone[name])], alone[name], rtol=1e-13, atol=1e-13)
        assert bool(together[name].isfinite().all())
    engine = Engine(step_function(potential))
    a, b = engine.differentiate(batch), engine.differentiate(more)
    torch.testing.assert_close(a.measured.sums, b.measured.sums, rtol=1e-14, atol=0)
    torch.testing.assert_close(a.measured.errors, b.measured.errors, rtol=1e-14, atol=0)
    for x, y in zip(a.gradients, b.gradients):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def test_a_filled_batch_keeps_what_a_batch_promises():
    batch = filled(labelled(5, 3), 2, 9, 300)
    source, destination = batch["edge_index"]
    assert bool((destination.diff() >= 0).all())
    assert bool((batch["frame"].diff() >= 0).all())
    reverse = batch["edge_reverse"]
    assert torch.equal(source[reverse], destination)
    assert torch.equal(destination[reverse], source)
    assert torch.equal(batch["edge_shift"][reverse], -batch["edge_shift"])
    assert int(torch.bincount(destination[-300:]).max()) <= 64


@pytest.mark.parametrize("atoms", [(1,), (2,), (1, 1), (30, 40)])
def test_small_batches_get_a_blank_frame_and_others_stay_as_they_are(atoms):
    batch = labelled(*atoms, periodic=False, box=9.0)
    more = padded_to_minimum(batch, 3.0)
    assert all(size >= least for size, least in zip(sizes(more), MIN_SIZES.values()))
    assert (more is batch) == (len(atoms) == 2 and sum(atoms) >= 64)


def test_an_odd_number_of_blank_edges_cannot_be():
    with pytest.raises(ValueError):
        blank_frames(labelled(2), frames=1, atoms=1, edges=3, cutoff=3.0)


# ---- the plan of sizes


batches = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 500), st.integers(0, 9000)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(1, 5))
def test_every_batch_fits_its_size_and_sizes_are_few(rows, at_most):
    rows = np.array([(f, max(f, a), 2 * e) for f, a, e in rows])
    plan = plan_sizes(rows, at_most=at_most)
    assert 1 <= len(plan.sizes) <= at_most
    for f, a, e in rows.tolist():
        size = plan.fit(f, a, e)
        assert size.holds(f, a, e)
        assert size == plan.fit(f, a, e)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 100_000), st.integers(0, 2_000_000))
def test_batches_beyond_the_plan_have_sizes_of_a_series(frames, atoms, pairs):
    size = SizePlan(()).fit(frames, atoms, 2 * pairs)
    assert size.holds(frames, atoms, 2 * pairs)
    assert size.edges <= max(2 * pairs * 1.25, 64)
    assert size.edges % 2 == 0


def test_two_kinds_of_batches_get_two_sizes_and_equal_ones_get_one():
    equal = plan_sizes(np.array([[4, 40, 800]] * 20), at_most=4)
    assert len(equal.sizes) == 1
    assert equal.sizes[0].edges <= 840
    two = plan_sizes(np.array([[4, 40, 800]] * 20 + [[4, 400, 8000]] * 3), at_most=4)
    assert len(two.sizes) == 2
    assert two.fit(4, 40, 800).edges < 900


def test_a_size_holds_only_what_leaves_blank_atoms_for_blank_edges():
    size = Size(edges=1000, atoms=20, frames=3)
    assert size.holds(2, 19, 1000)
    assert not size.holds(2, 20, 1000)
    assert not size.holds(3, 10, 1000)
    assert not size.holds(2, 19, 800)
    assert size.holds(2, 16, 800)
