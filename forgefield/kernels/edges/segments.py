"""Kernels for sums over segments, row pointers of sorted segments, edge vectors, and forces from edge forces.

`forgefield.ops.graph` uses the sums and pointers where they can run. One program sums the rows of one segment, a block of
columns at a time, in a fixed order; PyTorch's embedding bag does the same more slowly where rows are few and wide. Row pointers
take one kernel where reference operations take five; edge vectors and forces take one each instead of ten operations.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from forgefield.kernels.core.generation import Launchable
from forgefield.kernels.core.runtime import has_triton, use_kernels
from forgefield.ops.graph import EdgeGraph, sum_by_pointers

ROWS = 256
"""Rows that one program reads at a time."""


def pointers_where_used(index: Tensor, count: int) -> Tensor | None:
    """`pointers_by_kernel` where kernels are in use; None in traces and everywhere else."""
    if isinstance(index.shape[0], torch.SymInt) or not use_kernels(index):
        return None
    return pointers_by_kernel(index, count)


def pointers_by_kernel(index: Tensor, count: int) -> Tensor:
    """(count + 1,) int64: where each segment begins. index: (n_rows,), sorted."""
    pointers = index.new_empty(count + 1)
    n_rows = index.shape[0]
    _kernels().row_pointers[(n_rows // ROWS + 1,)](
        index=index.contiguous(), pointers=pointers, n_rows=n_rows, count=count, block=ROWS, num_warps=4
    )
    return pointers


def sums_by_kernel(values: Tensor, pointers: Tensor) -> Tensor:
    """(count,): sums of values (n_rows,) over sorted segments, in a fixed order. pointers: (count + 1,)."""
    count = pointers.shape[0] - 1
    result = values.new_empty(count)
    if count:
        _kernels().segment_sums[(count,)](
            values=values.contiguous(), pointers=pointers, out=result, block=ROWS, num_warps=4
        )
    return result


def row_sums_where_possible(rows: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor | None:
    """(count, columns): sums of rows (n_rows, columns) over segments; None where Triton or a GPU is missing."""
    if not (rows.is_cuda and has_triton()):
        return None
    return _row_sums(_kernels().add_rows, rows, order, pointers)


def sum_in_trace(values: Tensor, order: Tensor, pointers: Tensor) -> Tensor:
    """As `sum_by_pointers` for rows (n_rows, columns), inside of an operator: traces record the launch."""
    if not (values.is_cuda and has_triton()):
        return sum_by_pointers(values, order, pointers)
    return _row_sums(torch.library.wrap_triton(_kernels().add_rows), values, order, pointers)


def _row_sums(kernel: Launchable, rows: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    count, columns = pointers.shape[0] - 1, rows.shape[1]
    out = rows.new_empty(count, columns)
    block = min(256, max(32, 1 << (columns - 1).bit_length()))
    kernel[(count, -(-columns // block))](
        values=rows,
        order=rows if order is None else order,
        pointers=pointers,
        out=out,
        columns=columns,
        ordered=order is not None,
        block=block,
        num_warps=max(1, block // 64),
    )
    return out


@cache
def _kernels() -> SimpleNamespace:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_rows", "count"], do_not_specialize_on_alignment=["index"])
    def row_pointers(index, pointers, n_rows, count, block: tl.constexpr):
        row = tl.program_id(0) * block + tl.arange(0, block)
        inside = row <= n_rows
        before = tl.load(index + row - 1, mask=(row > 0) & (row <= n_rows), other=-1)
        here = tl.load(index + row, mask=row < n_rows, other=0)
        here = tl.where(row < n_rows, here, count)
        # All segments after that of the previous row begin here; they are several where some are empty.
        gap = tl.where(inside, here - before, 0)
        for number in range(tl.max(gap, 0)):
            tl.store(pointers + before + 1 + number, row, mask=number < gap)

    @triton.jit
    def segment_sums(values, pointers, out, block: tl.constexpr):
        segment = tl.program_id(0)
        begin, end = tl.load(pointers + segment), tl.load(pointers + segment + 1)
        total = tl.zeros([block], values.dtype.element_ty)
        for first in range(begin, end, block):
            row = first + tl.arange(0, block)
            total += tl.load(values + row, mask=row < end, other=0.0)
        tl.store(out + segment, tl.sum(total, 0))

    @triton.jit
    def add_rows(values, order, pointers, out, columns, ordered: tl.constexpr, block: tl.constexpr):
        segment = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < columns
        total = tl.zeros((block,), dtype=values.dtype.element_ty)
        begin = tl.load(pointers + segment)
        end = tl.load(pointers + segment + 1)
        for number in range(begin, end):
            row = tl.load(order + number) if ordered else number
            total += tl.load(values + row * columns + column, mask=inside, other=0.0)
        tl.store(out + segment * columns + column, total, mask=inside)

    return SimpleNamespace(row_pointers=row_pointers, segment_sums=segment_sums, add_rows=add_rows)


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
        _edge_kernels().edge_vectors[(-(-n_edges // EDGES),)](
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
        _edge_kernels().edge_forces[(graph.n_atoms,)](
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
def _edge_kernels() -> SimpleNamespace:
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
