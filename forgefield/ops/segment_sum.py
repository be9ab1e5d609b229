"""Sums of rows over row pointers, in a fixed order: what accelerators do instead of adding atomically.

Where Triton is there one program adds the rows of one segment, a block of columns at a time; elsewhere torch's embedding bag
does the same, more slowly where rows are few and wide. The sum is one operation that traces hold for any sizes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def sum_by_pointers(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    """Row k of the result is the sum of values[order[i]], i from pointers[k] to pointers[k + 1]; (count, ...).

    values: (n_rows, ...). order: (n_rows,); None where rows lie in order. pointers: (count + 1,).
    """
    if isinstance(values.shape[0], torch.SymInt):
        return torch.ops.forgefield.sum_by_pointers(values, order, pointers)
    return _sum(values, order, pointers)


def _sum(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    count = pointers.shape[0] - 1
    if values.shape[0] == 0 or count == 0 or values.numel() == 0:
        return values.new_zeros((count, *values.shape[1:]))
    flat = values.reshape(values.shape[0], -1).contiguous()
    kernel = _kernel() if values.is_cuda else None
    summed = _with_bags(flat, order, pointers) if kernel is None else _with_triton(kernel, flat, order, pointers)
    return summed.view(count, *values.shape[1:])


def _with_bags(flat: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    rows = torch.arange(flat.shape[0], device=flat.device) if order is None else order
    return torch.nn.functional.embedding_bag(rows, flat, pointers, mode="sum", include_last_offset=True)


def _with_triton(kernel: Any, flat: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    count, columns = pointers.shape[0] - 1, flat.shape[1]
    out = flat.new_empty(count, columns)
    block = min(256, max(32, 1 << (columns - 1).bit_length()))
    grid = (count, -(-columns // block))
    kernel[grid](
        flat,
        flat if order is None else order,
        pointers,
        out,
        columns,
        order is not None,
        block,
        num_warps=max(1, block // 64),
    )
    return out


def sum_in_trace(values: Tensor, order: Tensor, pointers: Tensor) -> Tensor:
    """As `sum_by_pointers` for rows (n_rows, columns), inside of an operator: what is launched is seen by traces of it."""
    kernel = _kernel() if values.is_cuda else None
    if kernel is None:
        return _sum(values, order, pointers)
    return _with_triton(torch.library.wrap_triton(kernel), values, order, pointers)


@cache
def _kernel() -> Any:
    """The Triton kernel, None where there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

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

    return add_rows


@torch.library.custom_op("forgefield::sum_by_pointers", mutates_args=())
def _operation(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    return _sum(values, order, pointers)


@_operation.register_fake
def _(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    return values.new_empty((pointers.shape[0] - 1, *values.shape[1:]))
