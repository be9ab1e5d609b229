"""Sums into fields, in a fixed order: of rows of edges over the edges whose source is an atom, and of the outputs of programs
that share the edges of an atom.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.convolution.form import Form
from forgefield.kernels.core.fields import Field
from forgefield.ops.graph import Segments

ROWS, COLUMNS = 2, 128
"""Edges of an atom, and columns of their rows, that a program reads at a time."""


def sum_into_field(
    rows: Tensor,
    segments: Segments,
    field: Field,
    place: int,
    first: int = 0,
    edges: tuple[int, int] | None = None,
) -> None:
    """Sum rows (n_rows, dim) over segments, one for each atom, into the values or tangents of a field.

    Rows hold all blocks of the field, or consecutive ones from offset `first` of an atom. place: VALUE or TANGENT.
    edges: rows are those of a range of edges, its first edge and its end; after the first range, sums are added to those
    before.
    """
    begin, end = (0, 0) if edges is None else edges
    columns = rows.shape[1]
    block = min(COLUMNS, max(32, 1 << (columns - 1).bit_length()))
    where = _columns(field.shape.blocks, rows.device)
    grid = (field.n_atoms, -(-columns // block))
    if field.n_atoms:
        _sum_kernel()[grid](
            rows=rows,
            order=segments.order,
            pointers=segments.pointers,
            out=field.flat,
            where=where,
            n_atoms=field.n_atoms,
            columns=columns,
            first=first,
            dim=field.shape.dim,
            begin_edge=begin,
            end_edge=end,
            ranged=edges is not None,
            adds=begin > 0,
            place=place,
            block=block,
            some=ROWS,
            num_warps=1,
        )


def add_shares(parts: Tensor, form: Form, out: Field, place: int) -> None:
    """Sum parts (n_shares, length of a field of outputs) into the values or tangents of a field, where paths write."""
    where = _written(form, parts.device)
    n_columns = where.shape[1]
    block = min(256, max(32, 1 << (n_columns - 1).bit_length()))
    grid = (out.n_atoms, -(-n_columns // block))
    if out.n_atoms:
        _shares_kernel()[grid](
            parts=parts,
            out=out.flat,
            where=where,
            stride=parts.shape[1],
            n_atoms=out.n_atoms,
            n_columns=n_columns,
            place=place,
            shares=parts.shape[0],
            block=block,
            num_warps=2,
        )


@cache  # never freed: captured graphs read it
def _written(form: Form, device: torch.device) -> Tensor:
    """(3, n) int64: for every element of an atom that a path writes, the offset of its block, the length of the block, and the
    offset in the block."""
    elements = []
    for path, channels in ((path, block.channels) for block in form.blocks for path in block.paths):
        for k in range(path.n_out):
            first = k * path.width + path.column
            elements += [(path.start, path.n_out * path.width, first + c) for c in range(channels)]
    return torch.tensor(sorted(elements), device=device).t().contiguous()


@cache
def _shares_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["stride", "n_atoms"])
    def sum_shares(
        parts,
        out,
        where,
        stride,
        n_atoms,
        n_columns,
        place: tl.constexpr,
        shares: tl.constexpr,
        block: tl.constexpr,
    ):
        atom = tl.program_id(0).to(tl.int64)
        number = tl.program_id(1) * block + tl.arange(0, block)
        inside = number < n_columns
        start = tl.load(where + number, mask=inside, other=0)
        length = tl.load(where + n_columns + number, mask=inside, other=0)
        line = n_atoms * (2 * start + place * length) + atom * length
        line += tl.load(where + 2 * n_columns + number, mask=inside, other=0)
        total = tl.load(parts + line, mask=inside, other=0.0)
        for share in tl.static_range(1, shares):
            total += tl.load(parts + share * stride.to(tl.int64) + line, mask=inside, other=0.0)
        tl.store(out + line, total, mask=inside)

    return sum_shares


@cache  # never freed: captured graphs read it
def _columns(blocks: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """(2, dim) int64: for every element of an atom, the offset and the length of its block."""
    starts, lengths, begin = [], [], 0
    for components, channels in blocks:
        length = components * channels
        starts += [begin] * length
        lengths += [length] * length
        begin += length
    return torch.tensor([starts, lengths], device=device)


@cache
def _sum_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_atoms", "first", "begin_edge", "end_edge"])
    def sum_rows(
        rows,
        order,
        pointers,
        out,
        where,
        n_atoms,
        columns,
        first,
        dim,
        begin_edge,
        end_edge,
        ranged: tl.constexpr,
        adds: tl.constexpr,
        place: tl.constexpr,
        block: tl.constexpr,
        some: tl.constexpr,
    ):
        atom = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < columns
        begin = tl.load(pointers + atom)
        end = tl.load(pointers + atom + 1)
        total = tl.zeros([block], out.dtype.element_ty)
        for next in range(begin, end, some):
            for number in tl.static_range(some):
                valid = next + number < end
                row = tl.load(order + next + number, mask=valid, other=0).to(tl.int64)
                if ranged:
                    valid = valid & (row >= begin_edge) & (row < end_edge)
                    row -= begin_edge
                values = tl.load(
                    rows + row * columns + column, mask=inside & valid, other=0.0, eviction_policy="evict_first"
                )
                total += values.to(out.dtype.element_ty)
        column += first
        start = tl.load(where + column, mask=inside, other=0)
        length = tl.load(where + dim + column, mask=inside, other=0)
        line = n_atoms * (2 * start + place * length) + atom * length + column - start
        if adds:
            total += tl.load(out + line, mask=inside, other=0.0)
        tl.store(out + line, total, mask=inside)

    return sum_rows
