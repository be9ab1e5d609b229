"""Edge vectors from positions, and forces from derivatives in the edge vectors: one kernel each, instead of ten operations."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from torch import Tensor

from forgefield.ops.graph import EdgeGraph

EDGES = 128
"""Edges of one program."""


def vectors_by_kernel(
    positions: Tensor, cell: Tensor | None, frame: Tensor, edge_index: Tensor, edge_shift: Tensor
) -> Tensor:
    """(n_edges, 3) float64: neighbour minus centre, with periodic images. It has no gradient. cell: None without
    periodicity."""
    n_edges = edge_index.shape[1]
    result = positions.new_empty((n_edges, 3))
    if n_edges:
        _kernels().edge_vectors[(-(-n_edges // EDGES),)](
            positions=positions.contiguous(),
            cell=(positions if cell is None else cell).contiguous(),
            frame=frame.contiguous(),
            index=edge_index.contiguous(),
            shift=edge_shift.contiguous(),
            out=result,
            n_edges=n_edges,
            images=cell is not None,
            block=EDGES,
            num_warps=4,
        )
    return result


def forces_by_kernel(slope: Tensor, graph: EdgeGraph) -> Tensor:
    """(n_atoms, 3): sums of slope (n_edges, 3) over the edges of each atom minus those over the edges whose source it is, in a
    fixed order."""
    result = slope.new_empty((graph.n_atoms, 3))
    if graph.n_atoms:
        to, of = graph.by_destination, graph.by_source
        _kernels().edge_forces[(graph.n_atoms,)](
            slope=slope.contiguous(),
            pointers=to.pointers,
            order=of.order,
            pointers_of=of.pointers,
            out=result,
            block=32,
            num_warps=1,
        )
    return result


@cache
def _kernels() -> SimpleNamespace:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_edges"])
    def edge_vectors(positions, cell, frame, index, shift, out, n_edges, images: tl.constexpr, block: tl.constexpr):
        edge = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = edge < n_edges
        source = tl.load(index + edge, mask=inside, other=0)
        centre = tl.load(index + n_edges + edge, mask=inside, other=0)
        if images:
            box = cell + tl.load(frame + centre, mask=inside, other=0) * 9
            s0 = tl.load(shift + edge * 3, mask=inside, other=0).to(tl.float64)
            s1 = tl.load(shift + edge * 3 + 1, mask=inside, other=0).to(tl.float64)
            s2 = tl.load(shift + edge * 3 + 2, mask=inside, other=0).to(tl.float64)
        for i in tl.static_range(3):
            ahead = tl.load(positions + source * 3 + i, mask=inside, other=0.0)
            here = tl.load(positions + centre * 3 + i, mask=inside, other=0.0)
            vector = ahead - here
            if images:
                image = s0 * tl.load(box + i, mask=inside, other=0.0)
                image += s1 * tl.load(box + 3 + i, mask=inside, other=0.0)
                image += s2 * tl.load(box + 6 + i, mask=inside, other=0.0)
                vector += image
            tl.store(out + edge * 3 + i, vector, mask=inside)

    @triton.jit
    def edge_forces(slope, pointers, order, pointers_of, out, block: tl.constexpr):
        atom = tl.program_id(0).to(tl.int64)
        begin, end = tl.load(pointers + atom), tl.load(pointers + atom + 1)
        begin_of, end_of = tl.load(pointers_of + atom), tl.load(pointers_of + atom + 1)
        x = tl.zeros([block], tl.float64)
        y = tl.zeros([block], tl.float64)
        z = tl.zeros([block], tl.float64)
        for first in range(begin, end, block):
            edge = first + tl.arange(0, block)
            inside = edge < end
            x += tl.load(slope + edge * 3, mask=inside, other=0.0)
            y += tl.load(slope + edge * 3 + 1, mask=inside, other=0.0)
            z += tl.load(slope + edge * 3 + 2, mask=inside, other=0.0)
        for first in range(begin_of, end_of, block):
            number = first + tl.arange(0, block)
            inside = number < end_of
            edge = tl.load(order + number, mask=inside, other=0)
            x -= tl.load(slope + edge * 3, mask=inside, other=0.0)
            y -= tl.load(slope + edge * 3 + 1, mask=inside, other=0.0)
            z -= tl.load(slope + edge * 3 + 2, mask=inside, other=0.0)
        tl.store(out + atom * 3, tl.sum(x, 0))
        tl.store(out + atom * 3 + 1, tl.sum(y, 0))
        tl.store(out + atom * 3 + 2, tl.sum(z, 0))

    return SimpleNamespace(edge_vectors=edge_vectors, edge_forces=edge_forces)
