"""The edges of one frame: pairs of atoms within a cutoff, in one fixed order, and the options that select them.

There are three kinds of graph: all pairs within the cutoff; the same with a radius that grows around atoms that would be
isolated (`adaptive_cutoff`, smooth by construction); or only the nearest neighbours of each atom (`max_neighbours`, which is
not smooth: the energy jumps when two neighbours exchange ranks).

Both backends are called with a slightly larger cutoff, and their pairs are filtered with one distance formula, so that vesin
and matscipy give exactly the same edges. Axes that are not periodic get an auxiliary lattice vector, because neither backend
handles a zero row in the cell. Every pair is measured once and mirrored, which also gives the index of each reverse edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.models.potential import Potential

BACKENDS = ("auto", "vesin", "matscipy")
_SLACK = 1e-6  # A
_MANY_ATOMS = 5_000  # from here on vesin may use several threads


class Pairs(NamedTuple):
    """Each pair of atoms once, in no particular order; directed from `destination` to an image of `source`."""

    source: np.ndarray
    """(n_pairs,) int64."""
    destination: np.ndarray
    """(n_pairs,) int64."""
    shifts: np.ndarray
    """(n_pairs, 3) int64."""
    squares: np.ndarray
    """(n_pairs,) squared lengths, A^2."""

    def select(self, keep: np.ndarray) -> Pairs:
        """Those where `keep` (n_pairs,) is true."""
        return Pairs(*(column[keep] for column in self))


def neighbour_list(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float, backend: str = "auto"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Directed edges (source, destination, shifts) no longer than `cutoff`, A.

    positions: (n_atoms, 3), A, also outside the cell; cell: (3, 3), A, rows are lattice vectors; pbc: (3,) bool.
    An edge is the vector positions[source] + shifts @ cell - positions[destination]. Every pair
    comes in both directions; images of an atom itself are included, the atom itself (shift 0) never. `shifts`:
    (n_edges, 3) int64. Sorted by destination, then source, then shift.
    """
    pairs = neighbour_pairs(positions, cell, pbc, cutoff, backend)
    return both_directions(pairs, len(positions))[:3]


def neighbour_pairs(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float, backend: str = "auto"
) -> Pairs:
    """Pairs of atoms no further apart than `cutoff`, A, each once. Arguments as of `neighbour_list`."""
    if backend not in BACKENDS:
        raise ForgefieldError(f"data.neighbours={backend} is not known; choose one of {', '.join(BACKENDS)}")
    if not cutoff > 0:
        raise ForgefieldError(f"the cutoff is {cutoff}; it must be a positive length in A")
    positions = np.ascontiguousarray(positions, dtype=np.float64)
    cell = np.asarray(cell, dtype=np.float64)
    pbc = np.asarray(pbc, dtype=bool)
    box = _complete_cell(positions, cell, pbc, cutoff)
    search = _matscipy_pairs if backend == "matscipy" else _vesin_pairs
    destination, source, shifts = search(positions, box, pbc, cutoff + _SLACK)
    squares = squared_lengths(edge_vectors(positions, cell, source, destination, shifts))
    pairs = Pairs(source, destination, shifts, squares)
    keep = squares <= cutoff**2
    return pairs if keep.all() else pairs.select(keep)


def edge_vectors(
    positions: np.ndarray, cell: np.ndarray, source: np.ndarray, destination: np.ndarray, shifts: np.ndarray
) -> np.ndarray:
    """(n_edges, 3), A. Term by term, not through BLAS: the two directions of a pair are exact opposites."""
    vectors = positions.take(source, axis=0)
    vectors -= positions.take(destination, axis=0)
    if shifts.any():
        x, y, z = shifts.T.astype(np.float64)
        for axis in range(3):
            vectors[:, axis] += x * cell[0, axis] + y * cell[1, axis] + z * cell[2, axis]
    return vectors


def squared_lengths(vectors: np.ndarray) -> np.ndarray:
    """(n_edges,), A^2, added in one fixed order."""
    x, y, z = vectors.T
    return x * x + y * y + z * z


def both_directions(pairs: Pairs, n_atoms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every pair as two edges: source, destination, shifts and the number of each edge's reverse.

    Sorted as `neighbour_list` promises. Edge k of the unsorted list is pair k, edge n_pairs + k its mirror image.
    """
    n_pairs = len(pairs.source)
    source = np.concatenate([pairs.source, pairs.destination])
    destination = np.concatenate([pairs.destination, pairs.source])
    shifts = np.concatenate([pairs.shifts, -pairs.shifts])
    order = _sorting(source, destination, shifts, n_atoms)
    position = np.empty_like(order)
    position[order] = np.arange(2 * n_pairs)
    reverse = position[np.where(order < n_pairs, order + n_pairs, order - n_pairs)]
    return source[order], destination[order], shifts.take(order, axis=0), reverse


def _sorting(source: np.ndarray, destination: np.ndarray, shifts: np.ndarray, n_atoms: int) -> np.ndarray:
    """(n_edges,) the order by destination, then source, then shift; no two edges are the same.

    What an edge is sorted by and its number are packed into one integer where they fit: sorting plain integers is much
    faster than sorting numbers by them.
    """
    n_edges = len(source)
    if n_edges == 0:
        return np.zeros(0, dtype=np.int64)
    x, y, z = (np.ascontiguousarray(column) for column in shifts.T)
    low = int(min(x.min(), y.min(), z.min()))
    width = int(max(x.max(), y.max(), z.max())) - low + 1
    bits = (n_edges - 1).bit_length()
    distinct = n_atoms**2 * width**3
    if distinct >= 2**63:
        return np.lexsort((z, y, x, source, destination))
    key = ((((destination * n_atoms + source) * width + (x - low)) * width) + (y - low)) * width + (z - low)
    if (distinct - 1).bit_length() + bits > 63:
        return np.argsort(key)
    key <<= bits
    key |= np.arange(n_edges)
    key.sort()
    key &= (1 << bits) - 1
    return key


def _complete_cell(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float) -> np.ndarray:
    """Periodic rows as they are; the others orthogonal to them and long enough to hold all atoms."""
    if pbc.all():
        return np.ascontiguousarray(cell)
    if not pbc.any():
        return np.diag(positions.max(axis=0) - positions.min(axis=0) + 2 * cutoff)
    box = cell.copy()
    periodic = cell[pbc]
    # The last rows of Vt are an orthonormal basis of what the periodic lattice vectors do not span.
    free = np.linalg.svd(periodic, full_matrices=True)[2][len(periodic) :]
    extent = np.ptp(positions @ free.T, axis=0) + 2 * cutoff
    box[~pbc] = free * extent[:, None]
    return np.ascontiguousarray(box)


def _vesin_pairs(positions: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> tuple[np.ndarray, ...]:
    import vesin

    threads = 1 if len(positions) < _MANY_ATOMS else 0
    search = vesin.NeighborList(cutoff=cutoff, full_list=False, n_threads=threads)
    # Along our auxiliary vectors no image is within reach, and vesin takes minutes for a long box of mixed periodicity.
    periodic = np.full(3, pbc.any())
    pairs, shifts = search.compute(points=positions, box=box, periodic=periodic, quantities="PS", copy=False)
    return pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64), shifts.astype(np.int64)


def _matscipy_pairs(positions: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> tuple[np.ndarray, ...]:
    from matscipy.neighbours import neighbour_list as search

    first, second, shifts = search("ijS", positions=positions, cell=box, pbc=pbc, cutoff=cutoff)
    shifts = shifts.astype(np.int64).reshape(-1, 3)
    x, y, z = shifts.T
    forward = (x > 0) | ((x == 0) & ((y > 0) | ((y == 0) & (z > 0))))
    once = (first < second) | ((first == second) & forward)
    return first[once].astype(np.int64), second[once].astype(np.int64), shifts[once]


SWITCH_START = 0.7
"""Share of the cutoff up to which a neighbour counts fully for the coordination of an atom."""


LARGEST_CUTOFF = 100.0
"""A. Neighbour lists of crystals would not fit into memory with more."""


def check_cutoff(value: float, setting: str) -> None:
    """Refuse what cannot be meant as the radius of a neighbour list."""
    if not 0 < value < math.inf:
        raise ForgefieldError(f"{setting} must be a positive length in A, not {value}")
    if value > LARGEST_CUTOFF:
        raise ForgefieldError(
            f"{setting} must be a length of at most {LARGEST_CUTOFF:g} A, not {value:g}; most models use 4 to 8 A"
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
    """Maximum number of nearest neighbours of each atom."""

    def __post_init__(self) -> None:
        check_cutoff(self.cutoff, "data.cutoff")
        if self.neighbours not in BACKENDS:
            raise ForgefieldError(
                f"data.neighbours={self.neighbours} is not known; choose one of {', '.join(BACKENDS)}"
            )
        if self.adaptive_cutoff is not None and not self.cutoff < self.adaptive_cutoff < math.inf:
            raise ForgefieldError(
                f"data.adaptive_cutoff must be a length in A above data.cutoff={self.cutoff:g}, not {self.adaptive_cutoff}"
            )
        if self.max_neighbours is not None:
            if isinstance(self.max_neighbours, bool) or not self.max_neighbours >= 1:
                raise ForgefieldError(f"data.max_neighbours must be at least 1, not {self.max_neighbours}")
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
    return pairs.select((pairs.squares < radii * radii) | (pairs.squares <= cutoff**2))


def _nearest(destination: np.ndarray, squares: np.ndarray, count: int) -> np.ndarray:
    """(n_selected,) ascending numbers of the `count` shortest edges of every destination; ties by their order."""
    order = np.lexsort((squares, destination))
    ranks = np.arange(len(order)) - np.searchsorted(destination, destination, side="left")
    return np.sort(order[ranks < count])


def graph_of(model: Potential, neighbours: str = "auto") -> GraphOptions:
    """The graph that a model was made for."""
    return GraphOptions(model.cutoff, neighbours, model.adaptive_cutoff, model.max_neighbours)


def same_graph(graph: GraphOptions) -> GraphOptions:
    """The options without the choice of library, which does not change the edges."""
    return replace(graph, neighbours="auto")
