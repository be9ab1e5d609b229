"""The batched neighbour list in torch gives the edges of the host's list, in its order, for any mixture of frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.errors import ForgefieldError
from forgefield.ops.neighbour_lists import batched_neighbours
from tests.support.batched_edges import as_tensors, assert_same_edges, brute_force, on_the_host, random_frame

frame_kinds = st.tuples(
    st.integers(1, 7),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from([0.0, 0.2, 0.6]),
    st.sampled_from([1.5, 3.0, 8.0]),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 30.0]),
)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(frame_kinds, min_size=1, max_size=4),
    cutoff=st.floats(0.5, 4.0),
    candidates=st.sampled_from([1, 50, 2**22]),
)
def test_a_batch_has_the_edges_of_its_frames(seed, kinds, cutoff, candidates):
    rng = np.random.default_rng(seed)
    assert_same_edges([random_frame(rng, *kind) for kind in kinds], cutoff, candidates=candidates)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=frame_kinds, cutoff=st.floats(0.5, 3.5))
def test_one_frame_equals_brute_force(seed, kind, cutoff):
    n, pbc, skew, size, blank, spread = kind
    frame = random_frame(np.random.default_rng(seed), min(n, 4), pbc, skew, max(size, 2.0), blank, min(spread, 1.0))
    (source, destination), shifts, _ = batched_neighbours(*as_tensors([frame]), cutoff)
    found = [(int(i), int(j), *s) for i, j, s in zip(destination, source, shifts.tolist())]
    assert found == brute_force(*frame, cutoff)


def test_pairs_at_the_very_cutoff_are_in_or_out_as_on_the_host():
    """The cutoff is set to lengths that occur, where the last bit of a distance decides."""
    rng = np.random.default_rng(5)
    frames = [random_frame(rng, 6, (True, True, True), 0.2, 4.0, False, 1.0) for _ in range(3)]
    (source, destination), shifts, _ = (column.numpy() for column in batched_neighbours(*as_tensors(frames), 5.0))
    positions, cells = np.concatenate([f[0] for f in frames]), np.stack([f[1] for f in frames])
    images = np.einsum("ek,ekx->ex", shifts.astype(float), cells[destination // 6])
    lengths = np.linalg.norm(positions[source] - positions[destination] + images, axis=1)
    for length in lengths[::60]:
        for cutoff in (np.nextafter(length, 0), length, np.nextafter(length, 9)):
            assert_same_edges(frames, float(cutoff))


def test_a_perfect_crystal_with_atoms_on_the_faces_of_its_cell():
    grid = np.stack(np.meshgrid(*[np.arange(4.0)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    crystal = grid, 4.0 * np.eye(3), np.full(3, True)
    shell = 6 + 12 + 8 + 6 + 24 + 24
    assert assert_same_edges([crystal, (grid - 4.0, *crystal[1:])], 2.45) == 2 * 64 * shell


def test_lone_atoms_and_frames_without_neighbours():
    lone = np.zeros((1, 3)), np.zeros((3, 3)), np.full(3, False)
    small = np.array([[0.3, 0.4, 0.5]]), 2.0 * np.eye(3), np.full(3, True)
    wire = np.array([[9.0, 7.0, -50.0]]), np.diag([0.0, 0.0, 1.9]), np.array([False, False, True])
    assert assert_same_edges([lone], 4.1) == 0
    assert assert_same_edges([lone, small, wire, lone], 4.1) == 32 + 4


def test_no_atoms_at_all():
    empty = torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    found = batched_neighbours(*empty, torch.zeros(0, 3, 3).double(), torch.zeros(0, 3, dtype=torch.bool), 3.0)
    assert [tuple(column.shape) for column in found] == [(2, 0), (0, 3), (0,)]


def test_frames_without_atoms_between_others():
    rng = np.random.default_rng(0)
    frame = random_frame(rng, 5, (True, True, False), 0.2, 3.0, False, 0.5)
    positions, n_atoms, cell, pbc = as_tensors([frame])
    padded = batched_neighbours(
        positions, torch.tensor([0, 5, 0]), cell.expand(3, 3, 3).clone(), pbc.expand(3, 3).clone(), 3.0
    )
    for a, b in zip(padded, batched_neighbours(positions, n_atoms, cell, pbc, 3.0)):
        assert torch.equal(a, b)


def test_atoms_very_far_apart_need_no_more_memory():
    positions = np.array([[0.0, 0, 0], [1.0, 0, 0], [1e7, -1e7, 3e6], [1e7 + 1, -1e7, 3e6]])
    assert assert_same_edges([(positions, np.zeros((3, 3)), np.full(3, False))], 2.0) == 4


def test_shifts_that_do_not_fit_next_to_the_atoms_in_one_integer():
    """Neighbours tens of thousands of cells apart, so that the sort has to number the shifts that occur."""
    rng = np.random.default_rng(2)
    positions = rng.uniform(0, 3, (40, 3)) + 3.0 * rng.integers(-90_000, 90_000, (40, 3))
    frame = positions, 3.0 * np.eye(3), np.full(3, True)
    (source, destination), shifts, reverse = batched_neighbours(*as_tensors([frame]), 1.5)
    assert int(shifts.abs().max()) > 60_000
    expected = on_the_host([frame], 1.5)
    np.testing.assert_array_equal(torch.stack([source, destination]).numpy(), expected[0])
    np.testing.assert_array_equal(shifts.numpy(), expected[1])
    np.testing.assert_array_equal(reverse.numpy(), expected[2])


def test_bad_input_is_refused():
    rng = np.random.default_rng(0)
    good = random_frame(rng, 3, (True, True, True), 0.0, 3.0, False, 0.0)
    flat = good[0], np.diag([3.0, 3.0, 0.0]), np.full(3, True)
    with pytest.raises(ForgefieldError, match="frame 1 of the batch is periodic but its cell"):
        batched_neighbours(*as_tensors([good, flat]), 2.0)
    positions, *rest = as_tensors([good])
    with pytest.raises(ForgefieldError, match="float64"):
        batched_neighbours(positions.float(), *rest, 2.0)
    with pytest.raises(ForgefieldError, match="cutoff must be a positive length in A, not -1"):
        batched_neighbours(positions, *rest, -1.0)


def test_real_structures(shared):
    folder = shared / "water_dp" / "data_0" / "set.000"
    coordinates, boxes = np.load(folder / "coord.npy"), np.load(folder / "box.npy")
    frames = [
        (x.reshape(-1, 3).astype(np.float64), box.reshape(3, 3).astype(np.float64), np.full(3, True))
        for x, box in zip(coordinates[:3], boxes)
    ]
    assert assert_same_edges(frames, 6.0, candidates=100_000) > 50_000
