"""Row pointers of sorted segments, and sums over segments: kernels that `forgefield.ops.segment_sum` uses where they can run.

One program sums the rows of one segment, a block of columns at a time, in a fixed order; PyTorch's embedding bag does the same
more slowly where rows are few and wide. Row pointers take one kernel where reference operations take five.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.availability import has_triton, use_kernels
from forgefield.ops.segment_sum import sum_by_pointers

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


def _row_sums(kernel: Any, rows: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
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
