"""Where sorted segments begin, in one kernel where plain operations take five, and sums over long segments of numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

ROWS = 256
"""That one program takes at a time."""


def pointers_by_kernel(index: Tensor, count: int) -> Tensor:
    """(count + 1,) int64: where each segment begins. index: (n_rows,), sorted."""
    pointers = index.new_empty(count + 1)
    n_rows = index.shape[0]
    _kernels()[0][(n_rows // ROWS + 1,)](index.contiguous(), pointers, n_rows, count, ROWS, num_warps=4)
    return pointers


def sums_by_kernel(values: Tensor, pointers: Tensor) -> Tensor:
    """(count,): sums of values (n_rows,) over sorted segments, in a fixed order. pointers: (count + 1,)."""
    count = pointers.shape[0] - 1
    result = values.new_empty(count)
    if count:
        _kernels()[1][(count,)](values.contiguous(), pointers, result, ROWS, num_warps=4)
    return result


@cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_rows", "count"], do_not_specialize_on_alignment=["index"])
    def row_pointers(index, pointers, n_rows, count, block: tl.constexpr):
        row = tl.program_id(0) * block + tl.arange(0, block)
        inside = row <= n_rows
        before = tl.load(index + row - 1, mask=(row > 0) & (row <= n_rows), other=-1)
        here = tl.load(index + row, mask=row < n_rows, other=0)
        here = tl.where(row < n_rows, here, count)
        # Segments that begin here: those after the one of the row before, which are more than one where some are empty.
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

    return row_pointers, segment_sums
