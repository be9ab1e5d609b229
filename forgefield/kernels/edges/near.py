"""Kernels that select the edges within the cutoff from neighbour lists with a skin, and sums over the edges of atoms.

Neighbour lists are reused while atoms move; each evaluation selects those of their edges that are within the cutoff, entirely
on the device. The number of selected edges varies, but sizes of tensors in a captured graph do not: edges that are left over
belong to blank atoms at the end, as in `data/padding.py`, and change nothing.

The vectors of an edge and of its reverse are exact opposites, because both are computed by the same operations with opposite
signs; an edge is therefore selected if its reverse is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

EDGES = 256
"""Edges of one program that has no atom."""
MOVED, COINCIDE, COUNT, INVALID, TRAVEL = range(5)
"""Numbers of a status: of atoms that moved too far, of atoms that coincide with another, of selected edges; whether the lists
are invalid (not zero); and the largest distance that an atom has moved, in units of `UNIT` of what it may move."""
UNIT = 1e-6


@dataclass(frozen=True)
class SkinLists:
    """Neighbour lists of all atoms, with a skin, and the positions and cells from which they were built.

    pointers: (n_atoms + 1,) int64, first edge of each atom; the tensors of edges may be longer than the last of them.
    source: (n_edges,) int32. shift: (n_edges, 3) int16, images. reverse: (n_edges,) int32, number of the edge back.
    positions: (n_atoms, 3), A. cell, inverse: (n_frames, 3, 3), A and 1/A; the inverse is zero for frames whose cell must not
    change.
    """

    pointers: Tensor
    source: Tensor
    shift: Tensor
    reverse: Tensor
    positions: Tensor
    cell: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class NearEdges:
    """Edges within the cutoff, sorted by destination, then some that are left over, which connect blank atoms.

    index: (2, n_edges) int64, source and destination. vectors: (n_edges, 3) float64, A. reverse: (n_edges,) int64. status: (5,)
    int64, see `MOVED`; with a count above n_edges, or invalid lists, all edges are left over.
    pointers: (n_atoms + 1,) int64, first edge of each atom; edges from the last of them on belong to no atom.
    counts: (n_atoms,) int64, place: as many as the lists have edges, int32; intermediate results.
    """

    index: Tensor
    vectors: Tensor
    reverse: Tensor
    status: Tensor
    counts: Tensor
    pointers: Tensor
    place: Tensor

    @classmethod
    def empty(cls, n_atoms: int, n_listed: int, n_edges: int, device: torch.device) -> NearEdges:
        """All zero."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            index=zeros(2, n_edges),
            vectors=zeros(n_edges, 3, dtype=torch.float64),
            reverse=zeros(n_edges),
            status=zeros(5),
            counts=zeros(n_atoms),
            pointers=zeros(n_atoms + 1),
            place=zeros(n_listed, dtype=torch.int32),
        )


def select_near(
    lists: SkinLists,
    out: NearEdges,
    positions: Tensor,
    cell: Tensor,
    frame: Tensor,
    *,
    cutoff: float,
    skin: float,
    closest: float,
    first_blank: Tensor,
    invalid: Tensor,
) -> None:
    """Select the edges of `lists` within the cutoff (A) for new positions (n_atoms, 3) and cells (n_frames, 3, 3), A.

    frame: (n_atoms,) int64. skin: of the lists, A. closest: atoms within this distance coincide, A. first_blank: (1,) int64,
    number of the first blank atom; edges that are left over connect blank atoms with images of themselves beyond the cutoff.
    invalid: (1,) int64, not zero if the lists are invalid.
    """
    n_atoms, n_edges, n_listed = positions.shape[0], out.index.shape[1], lists.source.shape[0]
    out.status.zero_()
    common = {
        "positions": positions,
        "cell": cell,
        "frame": frame,
        "pointers": lists.pointers,
        "source": lists.source,
        "shift": lists.shift,
        "cutoff": cutoff,
    }
    _kernels().count_near[(n_atoms,)](
        **common,
        old_positions=lists.positions,
        old_cell=lists.cell,
        inverse=lists.inverse,
        counts=out.counts,
        status=out.status,
        skin=skin,
        unit=UNIT,
        closest=closest,
        block=32,
        num_warps=1,
    )
    ends = torch.cumsum(out.counts, 0)
    # Without room for all edges, or with invalid lists, none are selected: others would have no edge back.
    torch.mul(ends, (ends[-1:] <= n_edges) & (invalid == 0), out=out.pointers[1:])
    _kernels().fill_near[(n_atoms,)](
        **common,
        ends=ends,
        counts=out.counts,
        index=out.index,
        vectors=out.vectors,
        place=out.place,
        n_edges=n_edges,
        block=32,
        num_warps=1,
    )
    _kernels().finish_near[(-(-max(n_edges, n_listed) // EDGES),)](
        ends=ends,
        pointers=lists.pointers,
        list_reverse=lists.reverse,
        place=out.place,
        index=out.index,
        vectors=out.vectors,
        reverse=out.reverse,
        status=out.status,
        n_atoms=n_atoms,
        n_edges=n_edges,
        first_blank=first_blank,
        invalid=invalid,
        far=2 * cutoff,
        block=EDGES,
        num_warps=4,
    )


def sum_over_edges(
    slope: Tensor, vectors: Tensor, pointers: Tensor, reverse: Tensor, forces: Tensor, virials: Tensor
) -> None:
    """Write forces (n_atoms, 3), eV/A, and the virial of every atom's edges (n_atoms, 9), eV, from the derivative of the energy
    in edge vectors, slope (n_edges, 3). pointers: (n_atoms + 1,). reverse: (n_edges,). In a fixed order."""
    n_atoms = pointers.shape[0] - 1
    _kernels().atom_sums[(n_atoms,)](
        slope=slope,
        vectors=vectors,
        pointers=pointers,
        reverse=reverse,
        forces=forces,
        virials=virials,
        block=32,
        num_warps=1,
    )


def sum_over_frames(
    atomic: Tensor,
    virials: Tensor,
    first_atoms: Tensor,
    cell: Tensor,
    parts: Tensor,
    energy: Tensor,
    stress: Tensor,
) -> None:
    """Write energies of frames (n_frames,), eV, and stress (n_frames, 3, 3), eV/A^3, NaN without a volume.

    atomic: (n_atoms,), eV. virials: (n_atoms, 9), eV. first_atoms: (n_frames + 1,) int64. parts: (n_frames, n_shares, 10)
    float64, scratch: the atoms of a frame are summed by several programs, then their sums.
    """
    n_frames, n_shares = parts.shape[0], parts.shape[1]
    _kernels().share_sums[(n_frames, n_shares)](
        atomic=atomic, virials=virials, first_atoms=first_atoms, parts=parts, n_shares=n_shares, block=64, num_warps=4
    )
    _kernels().frame_sums[(n_frames,)](
        parts=parts, cell=cell, energy=energy, stress=stress, n_shares=n_shares, block=32, num_warps=2
    )


@cache
def _kernels() -> ModuleType:
    from forgefield.kernels.edges import near_source

    return near_source
