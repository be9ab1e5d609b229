"""All pairs of atoms within a cutoff, periodic along each axis or not, in one fixed order.

Both backends are asked with a slightly larger cutoff and their pairs are then filtered by one distance formula, so
that vesin and matscipy give the same list to the last edge. Axes that are not periodic get an auxiliary lattice vector
of our own, because neither backend is right (or runs) when such a row of the cell is zero.
"""

from __future__ import annotations

import numpy as np

from forgefield.errors import ForgefieldError

BACKENDS = ("auto", "vesin", "matscipy")
_SLACK = 1e-6  # A


def neighbour_list(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float, backend: str = "auto"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Directed edges (source, destination, shifts) no longer than `cutoff`, A.

    positions: (n_atoms, 3), A, also outside the cell; cell: (3, 3), A, rows are lattice vectors; pbc: (3,) bool.
    An edge is the vector positions[source] + shifts @ cell - positions[destination]. Every pair
    comes in both directions; images of an atom itself are included, the atom itself (shift 0) never. `shifts`:
    (n_edges, 3) int64. Sorted by destination, then source, then shift.
    """
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
    keep = squared_lengths(edge_vectors(positions, cell, source, destination, shifts)) <= cutoff**2
    return _sorted(source[keep], destination[keep], shifts[keep], len(positions))


def edge_vectors(
    positions: np.ndarray, cell: np.ndarray, source: np.ndarray, destination: np.ndarray, shifts: np.ndarray
) -> np.ndarray:
    """(n_edges, 3), A. Term by term, not through BLAS: the two directions of a pair are exact opposites."""
    images = shifts[:, :1] * cell[0] + shifts[:, 1:2] * cell[1] + shifts[:, 2:] * cell[2]
    return positions[source] - positions[destination] + images


def squared_lengths(vectors: np.ndarray) -> np.ndarray:
    """(n_edges,), A^2, added in one fixed order."""
    return vectors[:, 0] ** 2 + vectors[:, 1] ** 2 + vectors[:, 2] ** 2


def _complete_cell(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float) -> np.ndarray:
    """Periodic rows as they are; the others orthogonal to them and long enough to hold all atoms."""
    if pbc.all():
        return np.ascontiguousarray(cell)
    box = cell.copy()
    periodic = cell[pbc]
    # The last rows of Vt are an orthonormal basis of what the periodic lattice vectors do not span.
    free = np.linalg.svd(periodic, full_matrices=True)[2][len(periodic) :] if len(periodic) else np.eye(3)
    extent = np.ptp(positions @ free.T, axis=0) + 2 * cutoff
    box[~pbc] = free * extent[:, None]
    return np.ascontiguousarray(box)


def _vesin_pairs(positions: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> tuple[np.ndarray, ...]:
    import vesin

    search = vesin.NeighborList(cutoff=cutoff, full_list=True)
    first, second, shifts = search.compute(points=positions, box=box, periodic=pbc, quantities="ijS")
    return first.astype(np.int64), second.astype(np.int64), shifts.astype(np.int64)


def _matscipy_pairs(positions: np.ndarray, box: np.ndarray, pbc: np.ndarray, cutoff: float) -> tuple[np.ndarray, ...]:
    from matscipy.neighbours import neighbour_list as search

    first, second, shifts = search("ijS", positions=positions, cell=box, pbc=pbc, cutoff=cutoff)
    return first.astype(np.int64), second.astype(np.int64), shifts.astype(np.int64).reshape(-1, 3)


def _sorted(
    source: np.ndarray, destination: np.ndarray, shifts: np.ndarray, n_atoms: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if len(source) == 0:
        return source, destination, shifts
    low = shifts.min(axis=0)
    widths = shifts.max(axis=0) - low + 1
    if float(n_atoms) ** 2 * float(np.prod(widths.astype(np.float64))) < 2.0**62:
        key = destination * n_atoms + source
        for axis in range(3):
            key = key * widths[axis] + (shifts[:, axis] - low[axis])
        order = np.argsort(key, kind="stable")
    else:
        order = np.lexsort((shifts[:, 2], shifts[:, 1], shifts[:, 0], source, destination))
    return source[order], destination[order], shifts[order]
