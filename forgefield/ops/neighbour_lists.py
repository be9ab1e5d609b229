"""Neighbour lists of a whole batch at once, in torch, on any device: the same edges in the same order as on the host.

Atoms are moved into their cell, copied to every image that could be within reach of an atom, and sorted into bins as
wide as the cutoff; candidates come from the neighbouring bins, a bounded number at a time. Whether a candidate is an
edge is decided by the distance formula of `forgefield.data.neighbours.graph`, operation by operation, so that the two lists
agree to the last edge. No gradient flows through any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError

SLACK = 1e-6
"""A. By so much further candidates are looked for, since moving atoms into their cell rounds."""
MOST_BINS = 2**13
"""Along one axis of a frame; bins become wider than the cutoff where there would be more."""
CANDIDATES = 2**22
"""Pairs whose distance is computed at a time."""


@torch.no_grad()
def batched_neighbours(
    positions: Tensor, n_atoms: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, candidates: int = CANDIDATES
) -> tuple[Tensor, Tensor, Tensor]:
    """All edges no longer than `cutoff` within each frame: edge_index (2, n_edges), edge_shift and edge_reverse, int64.

    positions: (n, 3) float64, A, frames one after the other; n_atoms: (n_frames,); cell: (n_frames, 3, 3), A, rows are
    lattice vectors, rows of axes that are not periodic do not matter; pbc: (n_frames, 3) bool. edge_index: row 0 source,
    row 1 destination, numbers of atoms in the batch; edge_shift: (n_edges, 3) images; edge_reverse: (n_edges,) number of
    the edge that leads back. Sorted by destination, source, shift. candidates: bound on the memory used.
    """
    if not cutoff > 0:
        raise ForgefieldError(f"the cutoff must be a positive length in A, not {cutoff}")
    if positions.dtype != torch.float64 or cell.dtype != torch.float64:
        raise ForgefieldError(f"neighbours are found in float64; positions are {positions.dtype}, cells {cell.dtype}")
    device = positions.device
    if positions.shape[0] == 0:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return empty.expand(2, 0).clone(), empty.reshape(0, 3), empty
    frame = torch.repeat_interleave(n_atoms, output_size=positions.shape[0])
    inverse, heights = _lattice(cell, pbc)
    atoms = _wrapped(positions, frame, cell, inverse, heights, pbc)
    low, high = _extents(atoms.heights, frame, n_atoms.shape[0])
    reach = cutoff + SLACK
    images, image_heights = _images(atoms, cell, heights, pbc, low, high, reach)
    images, first, count = _in_bins(atoms, images, image_heights, low, high, reach)
    parts = []
    for begin, end in _chunks(count.sum(1), candidates):
        centre, image = _close(atoms, images, *_expand(first, count, begin, end), reach)
        parts.append(_edges(positions, cell, atoms, images, centre, image, cutoff))
    source, destination, shift = (torch.cat(columns) for columns in zip(*parts))
    return _in_order(source, destination, shift, n_atoms)


@dataclass(frozen=True)
class _Atoms:
    frame: Tensor
    """(n,) int64."""
    positions: Tensor
    """(n, 3), A: moved into the cell."""
    heights: Tensor
    """(n, 3), A: the same along the normal of each pair of faces."""
    cells: Tensor
    """(n, 3) int64: the cell it was moved from."""


@dataclass(frozen=True)
class _Images:
    atom: Tensor
    """(n_images,) int64; sorted by bin once the bins are known."""
    image: Tensor
    """(n_images, 3) int64: index of its cell, relative to the one into which all atoms were moved."""
    positions: Tensor
    """(n_images, 3), A."""


def complete_lattice(cell: Tensor, pbc: Tensor) -> Tensor:
    """Cells (n_frames, 3, 3), A, whose lattice vectors along axes that are not periodic are replaced by unit vectors orthogonal
    to those that are."""
    a, b, c = cell.unbind(1)
    free = ~pbc
    n_free = free.sum(1)
    one = torch.where(pbc[:, 0:1], a, torch.where(pbc[:, 1:2], b, c))  # the periodic one, if there is one only
    shortest_component = torch.nn.functional.one_hot(one.abs().argmin(1), 3).to(cell.dtype)
    across = _unit(torch.linalg.cross(one, shortest_component))
    upright = _unit(torch.linalg.cross(one, across))
    second = free.cumsum(1) == 2
    beside_one = torch.where(second.unsqueeze(2), upright.unsqueeze(1), across.unsqueeze(1))
    normals = torch.stack([_unit(torch.linalg.cross(*pair)) for pair in ((b, c), (c, a), (a, b))], dim=1)
    identity = torch.eye(3, dtype=cell.dtype, device=cell.device).expand_as(cell)
    filling = torch.where((n_free == 1).view(-1, 1, 1), normals, beside_one)
    filling = torch.where((n_free == 3).view(-1, 1, 1), identity, filling)
    return torch.where(free.unsqueeze(2), filling, cell)


def _lattice(cell: Tensor, pbc: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse cells, completed where they are not periodic, and the distances between opposite faces, (n_frames, 3, 3) and
    (n_frames, 3), A."""
    box = complete_lattice(cell, pbc)
    inverse, failed = torch.linalg.inv_ex(box)
    if bool(failed.any()) or not bool(torch.isfinite(inverse).all()):
        bad = int((failed.bool() | ~torch.isfinite(inverse).all(2).all(1)).nonzero()[0])
        raise ForgefieldError(f"frame {bad} of the batch is periodic but its cell {cell[bad].tolist()} has no volume")
    return inverse, 1 / torch.linalg.vector_norm(inverse, dim=1)


def _unit(vectors: Tensor) -> Tensor:
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


def _wrapped(positions: Tensor, frame: Tensor, cell: Tensor, inverse: Tensor, heights: Tensor, pbc: Tensor) -> _Atoms:
    fractions = (positions.unsqueeze(1) @ inverse.index_select(0, frame)).squeeze(1)
    cells = torch.where(pbc.index_select(0, frame), fractions.floor(), torch.zeros_like(fractions))
    moved = positions - (cells.unsqueeze(1) @ cell.index_select(0, frame)).squeeze(1)
    return _Atoms(frame, moved, (fractions - cells) * heights.index_select(0, frame), cells.long())


def _extents(heights: Tensor, frame: Tensor, n_frames: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest atom of each frame along each normal, (n_frames, 3), A; zero for a frame without atoms."""
    where = frame.unsqueeze(1).expand_as(heights)
    blank = heights.new_zeros(n_frames, 3)
    low = blank.scatter_reduce(0, where, heights, "amin", include_self=False)
    high = blank.scatter_reduce(0, where, heights, "amax", include_self=False)
    return low, high


def _images(
    atoms: _Atoms, cell: Tensor, steps: Tensor, pbc: Tensor, low: Tensor, high: Tensor, reach: float
) -> tuple[_Images, Tensor]:
    """Copies of the atoms within `reach` of the extent of the atoms of their frame, and their heights."""
    steps, pbc = steps.index_select(0, atoms.frame), pbc.index_select(0, atoms.frame)
    below = ((low.index_select(0, atoms.frame) - reach - atoms.heights) / steps).ceil()
    above = ((high.index_select(0, atoms.frame) + reach - atoms.heights) / steps).floor()
    below, above = (torch.where(pbc, bound, torch.zeros_like(bound)).long() for bound in (below, above))
    counts = above - below + 1
    copies = counts.prod(1)
    atom = torch.repeat_interleave(copies)
    number = torch.arange(atom.shape[0], device=atom.device) - (copies.cumsum(0) - copies).index_select(0, atom)
    counts = counts.index_select(0, atom)
    digits = []
    for axis in (2, 1, 0):
        digits.append(number % counts[:, axis])
        number = number // counts[:, axis]
    image = torch.stack(digits[::-1], dim=1) + below.index_select(0, atom)
    lattice = cell.index_select(0, atoms.frame).index_select(0, atom)
    away = (image.to(cell.dtype).unsqueeze(1) @ lattice).squeeze(1)
    heights = atoms.heights.index_select(0, atom) + image * steps.index_select(0, atom)
    return _Images(atom, image, atoms.positions.index_select(0, atom) + away), heights


def _in_bins(
    atoms: _Atoms, images: _Images, image_heights: Tensor, low: Tensor, high: Tensor, reach: float
) -> tuple[_Images, Tensor, Tensor]:
    """Images sorted by bin, and where among them the candidates of each atom are: first and count, (n, 9).

    Bins are `reach` wide at least, so what is within reach of an atom lies in its bin or in one of the 26 around it; three
    of these in a row hold consecutive images.
    """
    width = ((high - low + 2 * reach) / MOST_BINS).clamp(min=reach)
    n_0, n_1, n_2 = (int(n) for n in (((high - low + 2 * reach) / width).amax(0) + 4).tolist())

    def bins(heights: Tensor, frame: Tensor) -> Tensor:
        b = ((heights - low.index_select(0, frame) + reach) / width.index_select(0, frame)).floor().long() + 1
        return ((frame * n_0 + b[:, 0]) * n_1 + b[:, 1]) * n_2 + b[:, 2]

    filled, order = torch.sort(bins(image_heights, atoms.frame.index_select(0, images.atom)))
    one = torch.arange(-1, 2, device=low.device)
    rows = ((one.unsqueeze(1) * n_1 + one) * n_2).reshape(1, 9) + bins(atoms.heights, atoms.frame).unsqueeze(1)
    first = torch.searchsorted(filled, rows - 1)
    count = torch.searchsorted(filled, rows + 1, right=True) - first
    images = _Images(images.atom[order], images.image[order], images.positions[order])
    return images, first, count


def _chunks(counts: Tensor, most: int) -> list[tuple[int, int]]:
    """Ranges of atoms with no more than `most` candidates together, or of one atom. counts: (n,)."""
    total = counts.cumsum(0).cpu()
    ranges, begin, taken = [], 0, 0
    while begin < len(total):
        end = max(int(torch.searchsorted(total, taken + most, right=True)), begin + 1)
        ranges.append((begin, end))
        begin, taken = end, int(total[end - 1])
    return ranges


def _expand(first: Tensor, count: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """Every candidate of the atoms from `begin` to `end`: number of the atom and of the image."""
    start, length = first[begin:end].reshape(-1), count[begin:end].reshape(-1)
    row = torch.repeat_interleave(length)
    offset = start - (length.cumsum(0) - length)
    image = torch.arange(row.shape[0], device=row.device) + offset.index_select(0, row)
    return row // count.shape[1] + begin, image


def _close(atoms: _Atoms, images: _Images, centre: Tensor, image: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """The candidates within `reach`, a little further than the cutoff; quicker than the formula that decides."""
    vectors = images.positions.index_select(0, image) - atoms.positions.index_select(0, centre)
    near = (vectors.square().sum(1) <= reach**2).nonzero().squeeze(1)
    return centre.index_select(0, near), image.index_select(0, near)


def squared_lengths(
    positions: Tensor, cell: Tensor, frame: Tensor, source: Tensor, destination: Tensor, shift: Tensor
) -> Tensor:
    """(n_edges,), A^2: squared distances between atoms `destination` and images `shift` (n_edges, 3) of atoms `source`.

    positions: (n, 3), A; cell: (n_frames, 3, 3), A; frame: (n,) frame of each atom.
    """
    lattice = cell.index_select(0, frame.index_select(0, destination))
    x, y, z = shift.to(cell.dtype).unsqueeze(2).unbind(1)
    # Each operation by itself and in this order: nothing is fused, so every device rounds as the host does.
    images_of = x * lattice[:, 0] + y * lattice[:, 1]
    images_of = images_of + z * lattice[:, 2]
    vectors = positions.index_select(0, source) - positions.index_select(0, destination)
    vectors = vectors + images_of
    a, b, c = vectors.unbind(1)
    squares = a * a + b * b
    return squares + c * c


def _edges(
    positions: Tensor, cell: Tensor, atoms: _Atoms, images: _Images, centre: Tensor, image: Tensor, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Source, destination and shift of those candidates that are edges."""
    source = images.atom.index_select(0, image)
    shift = images.image.index_select(0, image) - atoms.cells.index_select(0, source)
    shift = shift + atoms.cells.index_select(0, centre)
    squares = squared_lengths(positions, cell, atoms.frame, source, centre, shift)
    itself = (source == centre) & (shift == 0).all(1)
    keep = ((squares <= cutoff**2) & ~itself).nonzero().squeeze(1)
    return source[keep], centre[keep], shift[keep]


def _in_order(source: Tensor, destination: Tensor, shift: Tensor, n_atoms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted by destination, source, shift, and where the reverse of each edge then is."""
    n, largest = int(n_atoms.sum()), int(shift.abs().max()) if shift.shape[0] else 0
    span = 2 * largest + 1
    if span**3 >= 2**63:
        raise ForgefieldError("an atom is a million cells away from its neighbours; wrap the positions into the cell")
    x, y, z = (shift + largest).unbind(1)
    image, n_images = (x * span + y) * span + z, span**3
    if n * n * n_images >= 2**63:
        met, image = torch.unique(image, return_inverse=True)
        n_images = met.shape[0]
    # Shifts come with their negatives, so the key of the negative counts from the other end.
    key = (destination * n + source) * n_images + image
    back = (source * n + destination) * n_images + (n_images - 1 - image)
    key, order = torch.sort(key)
    reverse = torch.searchsorted(key, back.index_select(0, order))
    return torch.stack([source[order], destination[order]]), shift[order], reverse
