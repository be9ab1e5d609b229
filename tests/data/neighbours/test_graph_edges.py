"""The edges of a frame: the same as a slow search finds, each with its reverse, for every kind of graph."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forgefield.data.neighbours.graph import (
    Edges,
    GraphOptions,
    Pairs,
    both_directions,
    build_edges,
    edge_vectors,
    neighbour_list,
)
from forgefield.errors import ForgefieldError
from forgefield.ops.graph import reverse_edges


def random_structure(seed: int, n: int, pbc=(True, True, True), size: float = 4.0):
    """Atoms in and around a skewed cell; lattice vectors of axes that are not periodic are missing."""
    rng = np.random.default_rng(seed)
    cell = np.zeros((3, 3))
    while abs(np.linalg.det(cell)) < 0.1 * size**3:
        cell = np.diag(rng.uniform(0.6, 1.4, 3) * size) + 0.15 * size * rng.normal(size=(3, 3))
    pbc = np.array(pbc)
    return rng.uniform(-1.0, 2.0, (n, 3)) @ cell, np.where(pbc[:, None], cell, 0.0), pbc


def lengths_of(edges: Edges, positions, cell) -> np.ndarray:
    return np.linalg.norm(edge_vectors(positions, cell, edges.source, edges.destination, edges.shifts), axis=1)


structures = st.builds(
    random_structure,
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 9),
    pbc=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    size=st.sampled_from([2.0, 4.0, 9.0]),
)


@settings(max_examples=100, deadline=None)
@given(structure=structures, cutoff=st.floats(0.5, 5.0), backend=st.sampled_from(["vesin", "matscipy"]))
def test_plain_edges_are_the_neighbour_list_and_every_edge_knows_its_reverse(structure, cutoff, backend):
    positions, cell, pbc = structure
    edges = build_edges(positions, cell, pbc, GraphOptions(cutoff, backend))
    for ours, theirs in zip(
        (edges.source, edges.destination, edges.shifts), neighbour_list(positions, cell, pbc, cutoff, "matscipy")
    ):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == np.int64
    oracle = reverse_edges(
        torch.from_numpy(np.stack([edges.source, edges.destination])), torch.from_numpy(edges.shifts.astype(float))
    )
    np.testing.assert_array_equal(edges.reverse, oracle.numpy())
    lengths = lengths_of(edges, positions, cell)
    assert edges.shortest == (pytest.approx(lengths.min(), rel=1e-14) if len(edges) else np.inf)


@pytest.mark.parametrize("far", [0, 2**28, 2**40])
def test_the_order_does_not_depend_on_how_much_fits_into_an_integer(far):
    """Atom numbers and shifts so large that the sort key has to be wider than the packed one, or than 64 bits."""
    rng = np.random.default_rng(0)
    n_pairs, n_atoms = 200, 5 + far
    rows = np.unique(rng.integers(0, 5, (n_pairs, 5)), axis=0)
    rows = rows[rng.permutation(len(rows))]
    rows = rows[rows[:, 0] < rows[:, 1]]
    source, destination, shifts = rows[:, 0] + far, rows[:, 1] + far, rows[:, 2:] - 2
    result = both_directions(Pairs(source, destination, shifts, np.zeros(len(rows))), n_atoms)
    both = [(i, j, *s) for i, j, s in zip(destination, source, shifts)]
    both += [(j, i, *-s) for i, j, s in zip(destination, source, shifts)]
    assert [(i, j, *s) for j, i, s in zip(*result[:3])] == sorted(both)
    for k, back in enumerate(result[3]):
        assert sorted(both)[back] == (result[0][k], result[1][k], *-result[2][k])


def slow_adaptive_edges(positions, cell, pbc, cutoff, limit):
    """The definition, pair by pair."""

    def step(x):
        x = min(max(x, 0.0), 1.0)
        return 6 * x**5 - 15 * x**4 + 10 * x**3

    source, destination, shifts = neighbour_list(positions, cell, pbc, limit)
    lengths = np.linalg.norm(edge_vectors(positions, cell, source, destination, shifts), axis=1)
    isolation = []
    for atom in range(len(positions)):
        near = lengths[destination == atom]
        coordination = sum(1 - step((r - 0.7 * cutoff) / (0.3 * cutoff)) for r in near)
        isolation.append(1 - step(coordination))
    rows = []
    for j, i, s, r in zip(source, destination, shifts, lengths):
        radius = cutoff + (limit - cutoff) * (1 - (1 - isolation[i]) * (1 - isolation[j]))
        if abs(r - radius) < 1e-9:  # which side it is on is a matter of rounding
            return None
        if r < radius:
            rows.append((i, j, *s))
    return rows


@settings(max_examples=150, deadline=None)
@given(structure=structures, cutoff=st.floats(0.8, 3.0), extra=st.floats(0.1, 2.5))
def test_adaptive_edges_follow_the_definition(structure, cutoff, extra):
    positions, cell, pbc = structure
    expected = slow_adaptive_edges(positions, cell, pbc, cutoff, cutoff + extra)
    assume(expected is not None)
    edges = build_edges(positions, cell, pbc, GraphOptions(cutoff, adaptive_cutoff=cutoff + extra))
    assert [(i, j, *s) for j, i, s in zip(edges.source, edges.destination, edges.shifts)] == expected
    oracle = reverse_edges(
        torch.from_numpy(np.stack([edges.source, edges.destination])), torch.from_numpy(edges.shifts.astype(float))
    )
    np.testing.assert_array_equal(edges.reverse, oracle.numpy())


def test_the_radius_grows_for_a_lone_atom_only():
    positions = np.array([[0.0, 0, 0], [1.0, 0, 0], [0.5, 0.9, 0], [6.0, 0, 0], [20.0, 0, 0]])
    free = np.zeros((3, 3)), np.full(3, False)
    plain = build_edges(positions, *free, GraphOptions(3.0))
    assert set(plain.destination) == {0, 1, 2}
    adaptive = build_edges(positions, *free, GraphOptions(3.0, adaptive_cutoff=5.9))
    rows = list(zip(adaptive.destination, adaptive.source))
    assert [row for row in rows if 3 not in row] == list(zip(plain.destination, plain.source))
    assert [row for row in rows if 3 in row] == [(1, 3), (2, 3), (3, 1), (3, 2)]  # atom 0 is 6 A away, atom 4 further


@settings(max_examples=60, deadline=None)
@given(structure=structures, cutoff=st.floats(1.0, 4.5), count=st.integers(1, 12))
def test_max_neighbours_keeps_the_nearest_of_each_atom_in_the_order_of_the_list(structure, cutoff, count):
    positions, cell, pbc = structure
    whole = build_edges(positions, cell, pbc, GraphOptions(cutoff))
    edges = build_edges(positions, cell, pbc, GraphOptions(cutoff, max_neighbours=count))
    assert edges.reverse is None
    vectors = edge_vectors(positions, cell, whole.source, whole.destination, whole.shifts)
    squares = vectors[:, 0] ** 2 + vectors[:, 1] ** 2 + vectors[:, 2] ** 2
    kept = []
    for atom in range(len(positions)):
        own = np.flatnonzero(whole.destination == atom)
        kept += sorted(sorted(own, key=lambda k: (squares[k], k))[:count])
    np.testing.assert_array_equal(edges.source, whole.source[kept])
    np.testing.assert_array_equal(edges.destination, whole.destination[kept])
    np.testing.assert_array_equal(edges.shifts, whole.shifts[kept])


def test_ties_among_equally_near_neighbours_go_by_the_order_of_the_list():
    edges = build_edges(np.zeros((1, 3)), 2.0 * np.eye(3), np.full(3, True), GraphOptions(2.5, max_neighbours=4))
    assert edges.shifts.tolist() == [[-1, 0, 0], [0, -1, 0], [0, 0, -1], [0, 0, 1]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cutoff": 0.0}, r"data\.cutoff must be a positive length in A, not 0\.0"),
        ({"cutoff": float("nan")}, r"data\.cutoff must be .*, not nan"),
        ({"cutoff": 4.0, "neighbours": "ase"}, r"data\.neighbours=ase.*vesin"),
        ({"cutoff": 4.0, "adaptive_cutoff": 4.0}, r"data\.adaptive_cutoff must be .*above data\.cutoff=4, not 4\.0"),
        ({"cutoff": 4.0, "max_neighbours": 0}, r"data\.max_neighbours must be at least 1, not 0"),
        ({"cutoff": 4.0, "max_neighbours": 9, "adaptive_cutoff": 5.0}, "cannot be used together"),
    ],
)
def test_options_without_a_meaning_are_refused(options, sentence):
    with pytest.raises(ForgefieldError, match=sentence):
        GraphOptions(**options)


def test_no_edge_is_longer_than_the_reach():
    positions, cell, pbc = random_structure(1, 8, size=9.0)
    for options in (GraphOptions(3.0), GraphOptions(2.0, adaptive_cutoff=4.0), GraphOptions(3.0, max_neighbours=5)):
        edges = build_edges(positions, cell, pbc, options)
        assert len(edges) > 0
        assert lengths_of(edges, positions, cell).max() <= options.reach
        counts = np.bincount(edges.destination, minlength=8)
        assert options.max_neighbours is None or counts.max() <= options.max_neighbours


def test_atoms_in_another_image_of_the_cell_have_the_same_neighbours():
    positions, cell, pbc = random_structure(3, 7, size=5.0)
    moved = positions + np.random.default_rng(0).integers(-3, 4, (7, 3)) @ cell
    for options in (GraphOptions(3.0), GraphOptions(2.0, adaptive_cutoff=4.0)):
        lists = [
            (edges.destination, edges.source, np.sort(lengths_of(edges, where, cell)))
            for where, edges in ((p, build_edges(p, cell, pbc, options)) for p in (positions, moved))
        ]
        for a, b in itertools.islice(zip(*lists), 2):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(lists[0][2], lists[1][2], rtol=1e-10)


@pytest.mark.timeout(100)
def test_a_sparse_wire_in_a_long_box_takes_no_search_of_empty_space():
    """One periodic axis and atoms hundreds of A apart along the others: took the library minutes when asked plainly."""
    rng = np.random.default_rng(0)
    positions = rng.uniform(-200, 200, (30, 3)) * np.array([1.0, 0.02, 1.0])
    positions[15:] = positions[:15] + rng.uniform(0.5, 1.0, (15, 3))
    cell, pbc = np.diag([0.0, 9.0, 0.0]), np.array([False, True, False])
    edges = build_edges(positions, cell, pbc, GraphOptions(2.0))
    expected = neighbour_list(positions, cell, pbc, 2.0, "matscipy")
    for ours, theirs in zip((edges.source, edges.destination, edges.shifts), expected):
        np.testing.assert_array_equal(ours, theirs)
    assert len(edges) >= 30
