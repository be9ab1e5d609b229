"""Edges sorted by their interval of a table with a stable counting sort: few launches, and the same order every time.

Edges are divided into blocks. In each block an edge counts its predecessors in the same interval; sums over blocks and then
over intervals give its position. Edges of the same interval keep their order.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

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
    kernels = _kernels()
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
def _kernels() -> SimpleNamespace:
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
            known = program * block + j < n_edges
            other = tl.load(at + program * block + j, mask=known, other=-2).to(tl.int32)
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
            found = tl.load(where, mask=both, other=0)
            tl.store(where, total[None, :] + tl.cumsum(found, 0) - found, mask=both)
            total += tl.sum(found, 0)
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
