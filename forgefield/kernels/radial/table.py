"""Radial weights as a table: cubic polynomials through a network's values and slopes at equally spaced lengths.

A kernel then reads a few short rows for an edge (`packing.py`) instead of hundreds of weights of that edge. The polynomials are
functions of the distance from the middle of an interval, so that higher coefficients contribute least. Values and slopes at the
knots are float64, so that differences between neighbouring knots are accurate. The gradient of the table is a sum over the
edges of each interval, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forgefield.kernels.core.availability import has_triton, use_kernels
from forgefield.kernels.core.streams import Concurrent
from forgefield.kernels.radial.intervals import MOST_EDGES, MOST_INTERVALS, sorted_by_kernels
from forgefield.ops.segment_sum import sum_by_pointers

CHUNK = 64
"""Largest number of edges of one interval that a program sums: bond lengths concentrate in few intervals."""
EDGES = 4
"""Edges that a program reads at a time."""


class SortedEdges(NamedTuple):
    """order: (n_edges,), edges sorted by interval. pointers: (count + 1,), first edge of each interval in `order`. chunks:
    (count + 1,), first chunk of each interval; chunks have at most `CHUNK` edges. interval: (at least n_chunks,), interval of
    each chunk, `count` after the last chunk."""

    order: Tensor
    pointers: Tensor
    chunks: Tensor
    interval: Tensor


class Intervals:
    """Intervals of a table that edges belong to. at: (n_edges,), interval of each edge. count: number of intervals. Edges are
    sorted concurrently with other work, from `sort` until `sorted` is called."""

    def __init__(self, at: Tensor, count: int) -> None:
        self.at, self.count = at, count
        self._sorting: Concurrent[SortedEdges] | None = None

    def sort(self) -> Intervals:
        at, count = self.at, self.count
        self._sorting = Concurrent("edges", lambda: _sorted(at, count))
        return self

    def sorted(self) -> SortedEdges:
        if self._sorting is None:
            self.sort()
        assert self._sorting is not None
        return self._sorting.result()


def _sorted(at: Tensor, count: int) -> SortedEdges:
    if use_kernels(at) and count <= MOST_INTERVALS and at.shape[0] <= MOST_EDGES:
        return SortedEdges(*sorted_by_kernels(at, count, CHUNK))
    found, order = torch.sort(at, stable=True)
    pointers = torch.searchsorted(found, torch.arange(count + 1, dtype=at.dtype, device=at.device))
    chunks = torch.zeros_like(pointers)
    torch.cumsum((pointers[1:] - pointers[:-1] + (CHUNK - 1)) // CHUNK, 0, out=chunks[1:])
    numbers = torch.arange(count + at.shape[0] // CHUNK, device=at.device)
    return SortedEdges(order, pointers, chunks, torch.searchsorted(chunks, numbers, right=True) - 1)


def polynomials(curves: Tensor) -> Tensor:
    """(n_intervals, 4, n): coefficients, lowest power first, of polynomials of a position from -1/2 to 1/2 in an interval,
    which interpolate curves (n_intervals + 1, 2, n), values and slopes at the knots. Slopes are per interval."""
    at_ends = torch.cat([curves[:-1], curves[1:]], 1)  # value and slope here, value and slope there
    return torch.matmul(_powers(curves.device).to(curves.dtype), at_ends)


@cache
def _powers(device: torch.device) -> Tensor:
    """(4, 4): from values and slopes at both ends of an interval to coefficients, lowest power first."""
    with _disable_current_modes():  # it outlives the trace that may be the first to need it
        rows = [[0.5, 0.125, 0.5, -0.125], [-1.5, -0.25, 1.5, -0.25], [0.0, -0.5, 0.0, 0.5], [2.0, 1.0, -2.0, 1.0]]
        return torch.tensor(rows, dtype=torch.float64, device=device)


def sums_by_kernel(place: Tensor) -> bool:
    """Whether gradients of tables are summed by a kernel."""
    return place.is_cuda and has_triton()


class TableGradient:
    """Cotangent of a table (n_intervals, 4, n_weights), from those of the weights of edges and of their tangents.

    place, d_place: (n_edges,), position of an edge in its interval, and its tangent; sums have their type, also where
        cotangents are stored in another.
    """

    def __init__(self, edges: Intervals, place: Tensor, d_place: Tensor, n_weights: int) -> None:
        self.edges, self.place, self.d_place, self.n_weights = edges, place, d_place, n_weights
        self.by_kernel = sums_by_kernel(place)
        self._sums: Tensor | None = None

    def add(self, to_w: Tensor, to_dw: Tensor, columns: Sequence[int] | None = None) -> None:
        """Add rows (n_edges, n) of all weights, or of some columns; each column is added once."""
        where = None if columns is None else _on(tuple(columns), self.place.device)
        self._sums = (self._by_kernel if self.by_kernel else self._by_rows)(to_w, to_dw, where)

    def result(self) -> Tensor:
        """The cotangent; can be called once."""
        sums, self._sums = self._sums, None  # sums of chunks are large
        assert sums is not None
        return sum_by_pointers(sums, None, self.edges.sorted().chunks) if self.by_kernel else sums

    def _by_rows(self, to_w: Tensor, to_dw: Tensor, where: Tensor | None) -> Tensor:
        """The sums, by reference operations."""
        u = self.place
        powers = torch.stack([torch.ones_like(u), u, u * u, u * u * u], 1)
        slopes = torch.stack([torch.zeros_like(u), torch.ones_like(u), 2 * u, 3 * u * u], 1) * self.d_place.unsqueeze(1)
        rows = powers.unsqueeze(2) * to_w.unsqueeze(1) + slopes.unsqueeze(2) * to_dw.unsqueeze(1)
        total = rows.new_zeros((self.edges.count, 4, to_w.shape[1])).index_add_(0, self.edges.at.long(), rows)
        if where is None:
            return total
        whole = rows.new_zeros((self.edges.count, 4, self.n_weights)) if self._sums is None else self._sums
        return whole.index_copy_(2, where.long(), total)

    def _by_kernel(self, to_w: Tensor, to_dw: Tensor, where: Tensor | None) -> Tensor:
        """Sums of chunks of edges, (n_chunks, 4, n_weights), in a fixed order, on a GPU; those of an interval follow each
        other."""
        by = self.edges.sorted()
        columns, n_chunks = to_w.shape[1], by.interval.shape[0]
        sums = self.place.new_empty((n_chunks, 4, self.n_weights)) if self._sums is None else self._sums
        block = 128 if columns % 256 == 128 else min(256, 1 << (columns - 1).bit_length())
        grid = (n_chunks, -(-columns // block))
        # A warp reads the columns of a block as 16 bytes a lane: with more warps sums over edges would go through memory.
        warps = max(1, block * to_w.element_size() // 512)
        _kernel()[grid](
            to_w=to_w,
            to_dw=to_dw,
            place=self.place,
            d_place=self.d_place,
            order=by.order,
            pointers=by.pointers,
            chunks=by.chunks,
            intervals=by.interval,
            out=sums,
            where=sums if where is None else where,
            count=self.edges.count,
            columns=columns,
            n_weights=self.n_weights,
            in_places=where is not None,
            chunk=CHUNK,
            block=block,
            edges=EDGES,
            num_warps=warps,
        )
        return sums


@cache  # never freed: captured graphs read it
def _on(columns: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(columns, dtype=torch.int32, device=device)


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def add_chunk(
        to_w,
        to_dw,
        place,
        d_place,
        order,
        pointers,
        chunks,
        intervals,
        out,
        where,
        count,
        columns,
        n_weights,
        in_places: tl.constexpr,
        chunk: tl.constexpr,
        block: tl.constexpr,
        edges: tl.constexpr,
    ):
        program = tl.program_id(0).to(tl.int64)
        interval = tl.load(intervals + program)
        none = interval >= count
        interval = tl.minimum(interval, count - 1)
        c = tl.program_id(1) * block + tl.arange(0, block)
        inside = c < columns
        begin = tl.load(pointers + interval) + (program - tl.load(chunks + interval)) * chunk
        end = tl.where(none, begin, tl.minimum(begin + chunk, tl.load(pointers + interval + 1)))
        a0 = tl.zeros([block], out.dtype.element_ty)
        a1 = tl.zeros([block], out.dtype.element_ty)
        a2 = tl.zeros([block], out.dtype.element_ty)
        a3 = tl.zeros([block], out.dtype.element_ty)
        for number in range(begin, end, edges):
            some = number + tl.arange(0, edges)
            known = some < end
            edge = tl.load(order + some, mask=known, other=0)
            u = tl.load(place + edge, mask=known, other=0.0)[:, None]
            du = tl.load(d_place + edge, mask=known, other=0.0)[:, None]
            line = edge[:, None] * columns + c[None, :]
            read = known[:, None] & inside[None, :]
            value = tl.load(to_w + line, mask=read, other=0.0).to(out.dtype.element_ty)
            moved = tl.load(to_dw + line, mask=read, other=0.0).to(out.dtype.element_ty) * du
            a0 += tl.sum(value, 0)
            a1 += tl.sum(u * value + moved, 0)
            a2 += tl.sum(u * (u * value + 2.0 * moved), 0)
            a3 += tl.sum(u * u * (u * value + 3.0 * moved), 0)
        if in_places:
            c = tl.load(where + c, mask=inside, other=0)
        line = out + program * 4 * n_weights + c
        tl.store(line, a0, mask=inside)
        tl.store(line + n_weights, a1, mask=inside)
        tl.store(line + 2 * n_weights, a2, mask=inside)
        tl.store(line + 3 * n_weights, a3, mask=inside)

    return add_chunk
