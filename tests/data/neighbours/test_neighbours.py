"""Neighbour lists equal a brute-force search, for all periodicities, cells and backends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forgefield.data.neighbours.graph import edge_vectors, neighbour_list
from forgefield.errors import ForgefieldError
from tests.support.batched_edges import brute_force

BACKENDS = ["vesin", "matscipy"]


def as_rows(source, destination, shifts):
    return [(int(i), int(j), *map(int, s)) for j, i, s in zip(source, destination, shifts)]


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 5),
    pbc=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    skew=st.sampled_from([0.0, 0.6, 1.5]),
    cutoff=st.floats(0.5, 4.5),
    left_handed=st.booleans(),
    blank=st.booleans(),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_edge_and_no_other_in_sorted_order(backend, seed, n, pbc, skew, cutoff, left_handed, blank):
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(1.2, 6.0, 3)) + skew * rng.normal(size=(3, 3))
    assume(abs(np.linalg.det(cell)) > 2.0)
    if left_handed:
        cell = cell[[1, 0, 2]]
    pbc = np.array(pbc)
    positions = rng.uniform(-1.5, 2.5, (n, 3)) @ cell  # also outside the cell
    if blank:  # lattice vectors of axes that are not periodic may be missing
        cell = np.where(pbc[:, None], cell, 0.0)
    found = as_rows(*neighbour_list(positions, cell, pbc, cutoff, backend))
    assert found == brute_force(positions, cell, pbc, cutoff)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lone_atom_sees_its_images_in_a_small_cell_and_nothing_in_a_box(backend):
    position = np.array([[0.3, 0.4, 0.5]])
    source, destination, shifts = neighbour_list(position, 2.0 * np.eye(3), np.full(3, True), 4.1, backend)
    lengths = np.linalg.norm(shifts @ (2.0 * np.eye(3)), axis=1)
    assert len(source) == 32  # 6 at 2, 12 at 2.83, 8 at 3.46, 6 at 4
    assert lengths.min() == 2.0
    assert (source == 0).all()
    assert (destination == 0).all()
    assert len(neighbour_list(position, np.zeros((3, 3)), np.full(3, False), 4.1, backend)[0]) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_exactly_at_the_cutoff_come_in_both_directions(backend):
    rng = np.random.default_rng(3)
    positions = rng.uniform(0, 4, (6, 3))
    cell = np.diag([4.0, 4.3, 4.7]) + 0.1 * rng.normal(size=(3, 3))
    pbc = np.full(3, True)
    source, destination, shifts = neighbour_list(positions, cell, pbc, 5.0, backend)
    for length in np.linalg.norm(edge_vectors(positions, cell, source, destination, shifts), axis=1)[::40]:
        edges = set(as_rows(*neighbour_list(positions, cell, pbc, float(length), backend)))
        assert edges == {(j, i, -a, -b, -c) for i, j, a, b, c in edges}


def test_backends_agree_on_a_real_sized_slab():
    rng = np.random.default_rng(0)
    cell = np.diag([12.0, 13.0, 0.0])
    positions = rng.uniform(0, 1, (200, 3)) * [12.0, 13.0, 9.0] + [0, 0, -30]
    lists = [neighbour_list(positions, cell, np.array([True, True, False]), 5.0, b) for b in BACKENDS]
    for a, b in zip(*lists):
        np.testing.assert_array_equal(a, b)
    assert len(lists[0][0]) > 5000


def test_unknown_backend_and_senseless_cutoff_are_refused():
    args = np.zeros((1, 3)), np.eye(3), np.full(3, True)
    with pytest.raises(ForgefieldError, match=r"data\.neighbours=ase.*vesin"):
        neighbour_list(*args, 3.0, "ase")
    with pytest.raises(ForgefieldError, match="cutoff"):
        neighbour_list(*args, 0.0)
