"""Sums of rows over row pointers, in a fixed order: on GPUs this replaces atomic additions, whose order changes.

The reference is PyTorch's embedding bag. `forgefield.kernels` registers faster implementations when it is imported
(`register_segment_kernels`); this package never imports kernels. In traces the sum is a single operator, for any sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PointerKernel = Callable[[Tensor, int], Tensor | None]
"""(sorted segment index of each row, number of segments) -> row pointers; None where the kernel is not to be used."""
SumKernel = Callable[[Tensor, Tensor | None, Tensor], Tensor | None]
"""(rows (n_rows, columns), order, pointers) -> sums (count, columns); None where the kernel cannot run."""


class _Registered:
    pointers: PointerKernel | None = None
    sums: SumKernel | None = None


_registered = _Registered()


def register_segment_kernels(*, pointers: PointerKernel, sums: SumKernel) -> None:
    """Use these kernels wherever they do not return None."""
    _registered.pointers, _registered.sums = pointers, sums


def row_pointers(index: Tensor, count: int, *, rows_are_sorted: bool) -> Tensor:
    """(count + 1,) int64: where each segment begins among rows sorted by segment. index: (n_rows,), the segment of each row."""
    if rows_are_sorted and _registered.pointers is not None:
        pointers = _registered.pointers(index, count)
        if pointers is not None:
            return pointers
    members = index.new_zeros(count + 1).index_add_(0, index + 1, torch.ones_like(index))
    return torch.cumsum(members, 0)


def sum_by_pointers(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    """Row k of the result is the sum of values[order[i]], i from pointers[k] to pointers[k + 1]; (count, ...).

    values: (n_rows, ...).
    order: (n_rows,); None where rows are sorted already.
    pointers: (count + 1,).
    """
    if isinstance(values.shape[0], torch.SymInt):
        return torch.ops.forgefield.sum_by_pointers(values, order, pointers)
    return _sum(values, order, pointers)


def _sum(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    count = pointers.shape[0] - 1
    if values.shape[0] == 0 or count == 0 or values.numel() == 0:
        return values.new_zeros((count, *values.shape[1:]))
    flat = values.reshape(values.shape[0], -1).contiguous()
    summed = None if _registered.sums is None else _registered.sums(flat, order, pointers)
    if summed is None:
        rows = torch.arange(flat.shape[0], device=flat.device) if order is None else order
        summed = torch.nn.functional.embedding_bag(rows, flat, pointers, mode="sum", include_last_offset=True)
    return summed.view(count, *values.shape[1:])


@torch.library.custom_op("forgefield::sum_by_pointers", mutates_args=())
def _operation(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    return _sum(values, order, pointers)


@_operation.register_fake
def _(values: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
    return values.new_empty((pointers.shape[0] - 1, *values.shape[1:]))
