"""Radial weights as a table: cubic polynomials through a network's values and slopes at equally spaced lengths.

A kernel then reads a few short rows for an edge (`packing.py`) instead of hundreds of weights of that edge. The polynomials are
functions of the distance from the middle of an interval, so that higher coefficients contribute least. Values and slopes at the
knots are float64, so that differences between neighbouring knots are accurate. The gradient of the table is a sum over the
edges of each interval, in a fixed order.

Edges are sorted by interval with a stable counting sort: few launches, and the same order every time. Edges are divided into
blocks. In each block an edge counts its predecessors in the same interval; sums over blocks and then over intervals give its
position. Edges of the same interval keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forgefield.kernels.core.runtime import Concurrent, has_triton, use_kernels
from forgefield.ops.graph import sum_by_pointers

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
    intervals, order = torch.sort(at, stable=True)
    pointers = torch.searchsorted(intervals, torch.arange(count + 1, dtype=at.dtype, device=at.device))
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
        gradient = rows.new_zeros((self.edges.count, 4, self.n_weights)) if self._sums is None else self._sums
        return gradient.index_copy_(2, where.long(), total)

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
            valid = some < end
            edge = tl.load(order + some, mask=valid, other=0)
            u = tl.load(place + edge, mask=valid, other=0.0)[:, None]
            du = tl.load(d_place + edge, mask=valid, other=0.0)[:, None]
            line = edge[:, None] * columns + c[None, :]
            read = valid[:, None] & inside[None, :]
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


BLOCK, WIDTH = 128, 16
"""Edges of a block, and number of them that an edge is compared with at a time."""
BLOCKS, COLUMNS = 64, 16
"""Blocks that one program sums at a time, for this number of intervals."""
MOST_EDGES = 32768
"""More edges are sorted faster by PyTorch, which takes more launches."""
MOST_INTERVALS = 4096
"""Limit, since one program sums over all intervals."""


def sorted_by_kernels(at: Tensor, count: int, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, pointers, chunks and interval of `Intervals`, see `table.py`. at: (n_edges,) integers below `count`, which is
    `MOST_INTERVALS` at most. chunk: edges in a chunk."""
    n_edges = at.shape[0]
    n_blocks = -(-n_edges // BLOCK)
    integers: dict[str, Any] = {"dtype": torch.int64, "device": at.device}
    order = torch.empty(n_edges, **integers)
    pointers, chunks = torch.empty(2, count + 1, **integers)
    interval = torch.empty(count + n_edges // chunk, **integers)
    ranks = torch.empty(n_edges, dtype=torch.int32, device=at.device)
    totals = torch.empty(count, dtype=torch.int32, device=at.device)
    counts = torch.zeros((n_blocks, count), dtype=torch.int32, device=at.device)
    kernels = _sort_kernels()
    if n_blocks:
        edges = {"at": at, "ranks": ranks, "counts": counts, "n_edges": n_edges, "count": count, "block": BLOCK}
        kernels.rank[(n_blocks,)](**edges, width=WIDTH, num_warps=4)
    kernels.add_blocks[(-(-count // COLUMNS),)](
        counts=counts, totals=totals, n_blocks=n_blocks, count=count, rows=BLOCKS, columns=COLUMNS, num_warps=4
    )
    padded = 1 << (count - 1).bit_length()
    kernels.add_intervals[(1,)](
        totals=totals,
        pointers=pointers,
        chunks=chunks,
        interval=interval,
        count=count,
        n_listed=interval.shape[0],
        chunk=chunk,
        padded=padded,
        num_warps=max(4, padded // 128),
    )
    if n_blocks:
        kernels.place[(n_blocks,)](**edges, pointers=pointers, order=order, num_warps=4)
    return order, pointers, chunks, interval


@cache
def _sort_kernels() -> SimpleNamespace:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_edges"])
    def rank(at, ranks, counts, n_edges, count, block: tl.constexpr, width: tl.constexpr):
        program = tl.program_id(0).to(tl.int64)
        i = tl.arange(0, block)
        edge = program * block + i
        inside = edge < n_edges
        key = tl.load(at + edge, mask=inside, other=-1).to(tl.int32)
        before = tl.zeros([block], tl.int32)
        after = tl.zeros([block], tl.int32)
        for first in range(0, block, width):
            j = first + tl.arange(0, width)
            valid = program * block + j < n_edges
            other = tl.load(at + program * block + j, mask=valid, other=-2).to(tl.int32)
            same = (key[:, None] == other[None, :]).to(tl.int32)
            before += tl.sum(tl.where(j[None, :] < i[:, None], same, 0), 1)
            after += tl.sum(tl.where(j[None, :] > i[:, None], same, 0), 1)
        tl.store(ranks + edge, before, mask=inside)
        tl.store(counts + program * count + key, before + 1, mask=inside & (after == 0))

    @triton.jit(do_not_specialize=["n_blocks"])
    def add_blocks(counts, totals, n_blocks, count, rows: tl.constexpr, columns: tl.constexpr):
        column = tl.program_id(0) * columns + tl.arange(0, columns)
        inside = column < count
        total = tl.zeros([columns], tl.int32)
        for first in range(0, n_blocks, rows):
            row = (first + tl.arange(0, rows)).to(tl.int64)
            where = counts + row[:, None] * count + column[None, :]
            both = (row < n_blocks)[:, None] & inside[None, :]
            block_counts = tl.load(where, mask=both, other=0)
            tl.store(where, total[None, :] + tl.cumsum(block_counts, 0) - block_counts, mask=both)
            total += tl.sum(block_counts, 0)
        tl.store(totals + column, total, mask=inside)

    @triton.jit(do_not_specialize=["n_listed"])
    def add_intervals(totals, pointers, chunks, interval, count, n_listed, chunk: tl.constexpr, padded: tl.constexpr):
        k = tl.arange(0, padded)
        inside = k < count
        total = tl.load(totals + k, mask=inside, other=0).to(tl.int64)
        n_chunks = (total + chunk - 1) // chunk
        last = tl.cumsum(n_chunks, 0)
        tl.store(pointers + k + 1, tl.cumsum(total, 0), mask=inside)
        tl.store(chunks + k + 1, last, mask=inside)
        tl.store(pointers + k, 0, mask=k == 0)
        tl.store(chunks + k, 0, mask=k == 0)
        for number in range(tl.max(n_chunks, 0)):
            tl.store(interval + last - n_chunks + number, k, mask=number < n_chunks)
        for first in range(tl.sum(n_chunks, 0), n_listed, padded):
            tl.store(interval + first + k, count, mask=first + k < n_listed)

    @triton.jit(do_not_specialize=["n_edges"])
    def place(at, ranks, counts, pointers, order, n_edges, count, block: tl.constexpr):
        program = tl.program_id(0).to(tl.int64)
        edge = program * block + tl.arange(0, block)
        inside = edge < n_edges
        key = tl.load(at + edge, mask=inside, other=0).to(tl.int64)
        where = tl.load(pointers + key, mask=inside, other=0) + tl.load(ranks + edge, mask=inside, other=0)
        where += tl.load(counts + program * count + key, mask=inside, other=0)
        tl.store(order + where, edge, mask=inside)

    return SimpleNamespace(rank=rank, add_blocks=add_blocks, add_intervals=add_intervals, place=place)
