"""Edge vectors from positions, and forces from what edges exert, each in one kernel where plain operations take ten."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from forgefield.ops.graph import EdgeGraph

EDGES = 128
"""That one program takes."""


def vectors_by_kernel(
    positions: Tensor, cell: Tensor | None, frame: Tensor, edge_index: Tensor, edge_shift: Tensor
) -> Tensor:
    """(n_edges, 3) float64: neighbour minus centre, images shifted by whole cells. It has no gradient. cell: None for zero."""
    n_edges = edge_index.shape[1]
    result = positions.new_empty((n_edges, 3))
    if n_edges:
        given = (positions, positions if cell is None else cell, frame, edge_index, edge_shift)
        tensors = (tensor.contiguous() for tensor in given)
        _kernels()[0][(-(-n_edges // EDGES),)](*tensors, result, n_edges, cell is not None, EDGES, num_warps=4)
    return result


def forces_by_kernel(slope: Tensor, graph: EdgeGraph) -> Tensor:
    """(n_atoms, 3): sums over the edges of each atom less those over the edges that it is the neighbour in, in a fixed
    order."""
    result = slope.new_empty((graph.n_atoms, 3))
    if graph.n_atoms:
        to, of = graph.by_destination, graph.by_source
        _kernels()[1][(graph.n_atoms,)](slope.contiguous(), to.pointers, of.order, of.pointers, result, 32, num_warps=1)
    return result


@cache
def _kernels() -> tuple[Any, Any]:
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

    return edge_vectors, edge_forces
