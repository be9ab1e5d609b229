"""Where rows of sorted segments begin, and sums over the atoms of frames, each in one kernel where plain operations take five."""

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


def frame_sums_by_kernel(values: Tensor, sizes: Tensor) -> Tensor:
    """(n_frames,): sums of values (n_atoms,) over the atoms of each frame, in a fixed order. sizes: (n_frames,), how many atoms
    each has."""
    n_frames = sizes.shape[0]
    result = values.new_empty(n_frames)
    if n_frames:
        _kernels()[1][(n_frames,)](values.contiguous(), sizes, result, ROWS, num_warps=4)
    return result


@cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_rows", "count"])
    def row_pointers(index, pointers, n_rows, count, block: tl.constexpr):
        row = tl.program_id(0) * block + tl.arange(0, block)
        inside = row <= n_rows
        before = tl.load(index + row - 1, mask=(row > 0) & (row <= n_rows), other=-1)
        here = tl.load(index + row, mask=row < n_rows, other=0)
        here = tl.where(row < n_rows, here, count)
        # Segments that begin here: those after the one of the row before, which are more than one where some are empty.
        gap = tl.where(inside, here - before, 0)
        for number in range(0, tl.max(gap, 0)):
            tl.store(pointers + before + 1 + number, row, mask=number < gap)

    @triton.jit
    def frame_sums(values, sizes, out, block: tl.constexpr):
        frame = tl.program_id(0)
        begin = tl.zeros([block], tl.int64)
        for first in range(0, frame, block):
            other = first + tl.arange(0, block)
            begin += tl.load(sizes + other, mask=other < frame, other=0)
        start = tl.sum(begin, 0)
        end = start + tl.load(sizes + frame)
        total = tl.zeros([block], values.dtype.element_ty)
        for first in range(start, end, block):
            atom = first + tl.arange(0, block)
            total += tl.load(values + atom, mask=atom < end, other=0.0)
        tl.store(out + frame, tl.sum(total, 0))

    return row_pointers, frame_sums
