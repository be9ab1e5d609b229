"""All pairs of atoms within a cutoff, periodic along each axis or not, in one fixed order.

Both backends are asked with a slightly larger cutoff and their pairs are then filtered by one distance formula, so
that vesin and matscipy give the same list to the last edge. Axes that are not periodic get an auxiliary lattice vector
of our own, because neither backend is right (or runs) when such a row of the cell is zero. Every pair is measured once
and mirrored afterwards, which also gives the number of each edge's reverse.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forgefield.errors import ForgefieldError

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

    def kept(self, keep: np.ndarray) -> Pairs:
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
        raise ForgefieldError(f"the cutoff is {cutoff}; it should be a positive length in A")
    positions = np.ascontiguousarray(positions, dtype=np.float64)
    cell = np.asarray(cell, dtype=np.float64)
    pbc = np.asarray(pbc, dtype=bool)
    box = _complete_cell(positions, cell, pbc, cutoff)
    search = _matscipy_pairs if backend == "matscipy" else _vesin_pairs
    destination, source, shifts = search(positions, box, pbc, cutoff + _SLACK)
    squares = squared_lengths(edge_vectors(positions, cell, source, destination, shifts))
    pairs = Pairs(source, destination, shifts, squares)
    keep = squares <= cutoff**2
    return pairs if keep.all() else pairs.kept(keep)


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
    place = np.empty_like(order)
    place[order] = np.arange(2 * n_pairs)
    reverse = place[np.where(order < n_pairs, order + n_pairs, order - n_pairs)]
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
