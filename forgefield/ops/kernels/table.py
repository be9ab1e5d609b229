"""Radial weights as a table: cubic polynomials through a network's values and slopes at equally spaced lengths.

A kernel then reads four short rows for an edge where it would otherwise need hundreds of numbers of its own. Values and slopes
at the knots are float64, so that differences between neighbouring knots lose nothing. The gradient of the table is a sum over
the edges of each interval, in a fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from forgefield.ops.graph import Segments
from forgefield.ops.kernels.build import has_triton

SHARES = 4
"""Programs among which the edges of an interval are divided."""


def polynomials(values: Tensor, slopes: Tensor) -> Tensor:
    """(n_intervals, 4, n), lowest power first, of a place from 0 to 1 in an interval: values and slopes (n_intervals + 1, n) are
    met at both ends. slopes: by the length of an interval."""
    begin, end, s, t = values[:-1], values[1:], slopes[:-1], slopes[1:]
    rise = end - begin
    return torch.stack([begin, s, 3 * rise - 2 * s - t, s + t - 2 * rise], 1)


def table_gradient(to_w: Tensor, to_dw: Tensor, at: Segments, place: Tensor, d_place: Tensor) -> Tensor:
    """(n_intervals, 4, n): cotangent of the table from those of the weights of edges and of their tangents, (n_edges, n) both.

    at: edges by interval. place, d_place: (n_edges,) where an edge lies in it, and how that changes.
    """
    by = interval_sums_by_kernel if to_w.is_cuda and has_triton() else interval_sums_by_rows
    return by(to_w, to_dw, at, place, d_place)


def interval_sums_by_rows(to_w: Tensor, to_dw: Tensor, at: Segments, place: Tensor, d_place: Tensor) -> Tensor:
    """The same by plain operations."""
    u = place
    powers = torch.stack([torch.ones_like(u), u, u * u, u * u * u], 1)
    slopes = torch.stack([torch.zeros_like(u), torch.ones_like(u), 2 * u, 3 * u * u], 1) * d_place.unsqueeze(1)
    rows = powers.unsqueeze(2) * to_w.unsqueeze(1) + slopes.unsqueeze(2) * to_dw.unsqueeze(1)
    return to_w.new_zeros((at.count, 4, to_w.shape[1])).index_add_(0, at.index.long(), rows)


def interval_sums_by_kernel(to_w: Tensor, to_dw: Tensor, at: Segments, place: Tensor, d_place: Tensor) -> Tensor:
    """The same in a fixed order, on a GPU."""
    columns = to_w.shape[1]
    block = min(128, 1 << (columns - 1).bit_length())
    parts = to_w.new_empty((at.count, SHARES, 4, columns))
    grid = (at.count * SHARES, -(-columns // block))
    _kernel()[grid](
        to_w, to_dw, place, d_place, at.order, at.pointers, parts, columns, SHARES, block, EDGES, num_warps=1
    )
    return parts.sum(1)


EDGES = 8
"""That a program reads at a time."""


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def add_interval(
        to_w,
        to_dw,
        place,
        d_place,
        order,
        pointers,
        out,
        columns,
        shares: tl.constexpr,
        block: tl.constexpr,
        edges: tl.constexpr,
    ):
        program = tl.program_id(0)
        interval = program // shares
        share = program % shares
        c = tl.program_id(1) * block + tl.arange(0, block)
        inside = (c < columns)[None, :]
        first = tl.load(pointers + interval)
        count = tl.load(pointers + interval + 1) - first
        begin = first + count * share // shares
        end = first + count * (share + 1) // shares
        a0 = tl.zeros([block], to_w.dtype.element_ty)
        a1 = tl.zeros([block], to_w.dtype.element_ty)
        a2 = tl.zeros([block], to_w.dtype.element_ty)
        a3 = tl.zeros([block], to_w.dtype.element_ty)
        for number in range(begin, end, edges):
            some = number + tl.arange(0, edges)
            known = some < end
            edge = tl.load(order + some, mask=known, other=0)
            u = tl.load(place + edge, mask=known, other=0.0)[:, None]
            du = tl.load(d_place + edge, mask=known, other=0.0)[:, None]
            line = edge[:, None] * columns + c[None, :]
            read = known[:, None] & inside
            value = tl.load(to_w + line, mask=read, other=0.0)
            moved = tl.load(to_dw + line, mask=read, other=0.0) * du
            a0 += tl.sum(value, 0)
            a1 += tl.sum(u * value + moved, 0)
            a2 += tl.sum(u * (u * value + 2.0 * moved), 0)
            a3 += tl.sum(u * u * (u * value + 3.0 * moved), 0)
        where = out + program.to(tl.int64) * 4 * columns + c
        stored = c < columns
        tl.store(where, a0, mask=stored)
        tl.store(where + columns, a1, mask=stored)
        tl.store(where + 2 * columns, a2, mask=stored)
        tl.store(where + 3 * columns, a3, mask=stored)

    return add_interval
