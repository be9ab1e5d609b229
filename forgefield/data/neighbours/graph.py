"""The edges of one frame: which pairs of atoms a model sees, from the options that say so.

Three kinds of graph: all pairs within the cutoff; the same with a radius that grows where an atom would be isolated
(`adaptive_cutoff`, smooth by construction); or the nearest neighbours of each atom only (`max_neighbours`, which is not
smooth: the energy jumps when two neighbours exchange their ranks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forgefield.data.neighbours.lists import (
    BACKENDS,
    Pairs,
    both_directions,
    edge_vectors,
    neighbour_pairs,
    squared_lengths,
)
from forgefield.errors import ForgefieldError

SWITCH_START = 0.7
"""Share of the cutoff up to which a neighbour counts fully for the coordination of an atom."""


LARGEST_CUTOFF = 100.0
"""A. Nobody means more, and neighbour lists of crystals would not fit into any memory."""


def check_cutoff(value: float, setting: str) -> None:
    """Refuse what cannot be meant as the radius of a neighbour list."""
    if not 0 < value < math.inf:
        raise ForgefieldError(f"{setting} is {value}; it should be a positive length in A")
    if value > LARGEST_CUTOFF:
        raise ForgefieldError(
            f"{setting} is {value:g}; it is a length in A, {LARGEST_CUTOFF:g} at most, and most models use 4 to 8"
        )


@dataclass(frozen=True)
class GraphOptions:
    """What makes two atoms neighbours."""

    cutoff: float
    """A."""
    neighbours: str = "auto"
    """Neighbour-list library: auto, vesin or matscipy."""
    adaptive_cutoff: float | None = None
    """Radius up to which an atom without neighbours within the cutoff looks for some, A."""
    max_neighbours: int | None = None
    """Only so many nearest neighbours of each atom."""

    def __post_init__(self) -> None:
        check_cutoff(self.cutoff, "data.cutoff")
        if self.neighbours not in BACKENDS:
            raise ForgefieldError(
                f"data.neighbours={self.neighbours} is not known; choose one of {', '.join(BACKENDS)}"
            )
        if self.adaptive_cutoff is not None and not self.cutoff < self.adaptive_cutoff < math.inf:
            raise ForgefieldError(
                f"data.adaptive_cutoff is {self.adaptive_cutoff}; it should be a length in A "
                f"above data.cutoff={self.cutoff:g}"
            )
        if self.max_neighbours is not None:
            if isinstance(self.max_neighbours, bool) or not self.max_neighbours >= 1:
                raise ForgefieldError(f"data.max_neighbours is {self.max_neighbours}; it should be at least 1")
            if self.adaptive_cutoff is not None:
                raise ForgefieldError(
                    "data.max_neighbours and data.adaptive_cutoff cannot be used together: "
                    "the radius would depend on neighbours that were left out; set one of them to null"
                )

    @property
    def reach(self) -> float:
        """No edge is longer than this, A."""
        return self.cutoff if self.adaptive_cutoff is None else self.adaptive_cutoff


@dataclass(frozen=True, eq=False)
class Edges:
    """Directed edges of one frame, sorted by destination, then source, then shift.

    An edge is the vector positions[source] + shifts @ cell - positions[destination].
    """

    source: np.ndarray
    """(n_edges,) int64, numbers of atoms in the frame: the neighbour."""
    destination: np.ndarray
    """(n_edges,) int64: the centre."""
    shifts: np.ndarray
    """(n_edges, 3) int64."""
    reverse: np.ndarray | None
    """(n_edges,) int64, number of the edge that leads back; None where not every edge has one (`max_neighbours`)."""
    shortest: float = math.inf
    """Length of the shortest edge, A; infinite where there is none."""

    def __len__(self) -> int:
        return len(self.source)


def build_edges(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, options: GraphOptions) -> Edges:
    """Edges of one frame. positions: (n_atoms, 3), A; cell: (3, 3), A, rows are lattice vectors; pbc: (3,) bool."""
    pairs = neighbour_pairs(positions, cell, pbc, options.cutoff, options.neighbours)
    if options.adaptive_cutoff is not None:
        isolated = _isolations_of_atoms(pairs, len(positions), options.cutoff)
        if isolated.any():  # else every radius is the cutoff
            pairs = neighbour_pairs(positions, cell, pbc, options.adaptive_cutoff, options.neighbours)
            pairs = _within_pair_radius(pairs, isolated, options.cutoff, options.adaptive_cutoff)
    shortest = float(np.sqrt(pairs.squares.min())) if len(pairs.squares) else math.inf
    source, destination, shifts, reverse = both_directions(pairs, len(positions))
    if options.max_neighbours is None:
        return Edges(source, destination, shifts, reverse, shortest)
    squares = squared_lengths(edge_vectors(np.asarray(positions), np.asarray(cell), source, destination, shifts))
    near = _nearest(destination, squares, options.max_neighbours)
    return Edges(source[near], destination[near], shifts[near], None, shortest)


def coordination_weights(lengths: np.ndarray, cutoff: float) -> np.ndarray:
    """How much a neighbour counts: 1 up to `SWITCH_START` of the cutoff, 0 from the cutoff on, twice smooth.

    lengths: (n,), A.
    """
    x = np.clip((lengths / cutoff - SWITCH_START) / (1 - SWITCH_START), 0.0, 1.0)
    return 1 - _smoothstep(x)


def isolations(coordination: np.ndarray) -> np.ndarray:
    """1 for an atom without neighbours, falling smoothly to 0 at a coordination of one. coordination: (n_atoms,)."""
    return 1 - _smoothstep(np.clip(coordination, 0.0, 1.0))


def pair_radii(isolated_i: np.ndarray, isolated_j: np.ndarray, cutoff: float, limit: float) -> np.ndarray:
    """Radius of each pair, A: the cutoff where neither atom is isolated, the limit where one is entirely."""
    return cutoff + (limit - cutoff) * (1 - (1 - isolated_i) * (1 - isolated_j))


def _smoothstep(x: np.ndarray) -> np.ndarray:
    """From 0 to 1 on [0, 1] with two vanishing derivatives at both ends."""
    return x * x * x * (10 - x * (15 - 6 * x))


def _isolations_of_atoms(pairs: Pairs, n_atoms: int, cutoff: float) -> np.ndarray:
    """(n_atoms,) from all pairs within the cutoff."""
    weights = coordination_weights(np.sqrt(pairs.squares), cutoff)
    coordination = np.bincount(pairs.destination, weights, minlength=n_atoms)
    coordination += np.bincount(pairs.source, weights, minlength=n_atoms)
    return isolations(coordination)


def _within_pair_radius(pairs: Pairs, isolated: np.ndarray, cutoff: float, limit: float) -> Pairs:
    radii = pair_radii(isolated[pairs.destination], isolated[pairs.source], cutoff, limit)
    return pairs.kept((pairs.squares < radii * radii) | (pairs.squares <= cutoff**2))


def _nearest(destination: np.ndarray, squares: np.ndarray, count: int) -> np.ndarray:
    """(n_kept,) ascending numbers of the `count` shortest edges of every destination; ties by their order."""
    order = np.lexsort((squares, destination))
    ranks = np.arange(len(order)) - np.searchsorted(destination, destination, side="left")
    return np.sort(order[ranks < count])


def graph_of(model: Any, neighbours: str = "auto") -> GraphOptions:
    """The graph that a model was made for, by its attributes; one that names only a cutoff sees all pairs within it."""
    return GraphOptions(
        float(model.cutoff),
        neighbours,
        getattr(model, "adaptive_cutoff", None),
        getattr(model, "max_neighbours", None),
    )


def same_graph(graph: GraphOptions) -> GraphOptions:
    """The options without the library that finds the edges: it makes no difference to them."""
    return replace(graph, neighbours="auto")
