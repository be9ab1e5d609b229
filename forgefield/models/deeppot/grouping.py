"""Rows that belong to different networks, laid out so that each network is applied by dense products.

Edges belong to the network of their species, atoms to that of theirs. Where the sizes of the groups are known to the host
(on a CPU) rows are sorted by group; elsewhere, and in traces, each group is filled up to whole blocks of a fixed number of
rows, whose number depends on sizes alone: nothing waits for the device and the layout holds for any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.ops import products
from forgefield.ops.graph import Segments, cut, gather, is_traced, join

EDGE_BLOCK = 128
ATOM_BLOCK = 32
"""Rows of a block: each block multiplies a copy of its network's matrix, and the last block of a group is partly empty."""


@dataclass(frozen=True)
class Groups:
    """A layout of rows by group, made by `group_rows`.

    slot: (n_rows,) place of each row in the layout, None where that is its own. sizes: rows of each group, where the host
    knows them; the layout is then (n_rows, ...). block_group: (n_blocks,) group of each block otherwise; the layout is then
    (n_blocks, block, ...).
    """

    count: int
    slot: Tensor | None = None
    order: Tensor | None = None
    sizes: tuple[int, ...] | None = None
    block_group: Tensor | None = None
    block: int = 0

    @classmethod
    def in_order(cls, sizes: Sequence[int]) -> Groups:
        """Rows that lie in the order of their groups."""
        return cls(len(sizes), sizes=tuple(sizes))

    def spread(self, rows: Tensor) -> Tensor:
        """Rows (n_rows, ...) in the layout; empty places are zero."""
        if self.slot is None:
            return rows
        if self.order is not None:
            return _Permute.apply(rows, self.order, self.slot)
        assert self.block_group is not None
        place = torch.div(self.slot, self.block, rounding_mode="floor"), self.slot % self.block
        return _Spread.apply(rows, place, (self.block_group.shape[0], self.block))

    def collect(self, values: Tensor) -> Tensor:
        """The rows (n_rows, ...) of values in the layout: inverse of `spread`."""
        if self.slot is None:
            return values
        if self.order is not None:
            return _Permute.apply(values, self.slot, self.order)
        place = torch.div(self.slot, self.block, rounding_mode="floor"), self.slot % self.block
        return _Collect.apply(values, place)

    def affine(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """x W + b with each row's own network, in the layout. weight: (count, n_in, n_out); bias: (count, n_out)."""
        if self.count == 1:
            return products.product(x, weight.squeeze(0)) + bias.squeeze(0)
        if self.sizes is not None:
            parts = zip(cut(x, self.sizes, 0), weight.unbind(0), bias.unbind(0))
            return join([products.product(part, w) + b for part, w, b in parts], 0)
        assert self.block_group is not None
        by_block = Segments(self.block_group, self.count, rows_are_sorted=True)
        shift = gather(bias, by_block).unsqueeze(1)
        if products.is_lowered(x):
            mine = torch.nn.functional.one_hot(self.block_group, self.count).to(x.dtype)
            wide = (mine[:, None, :, None] * x.unsqueeze(2)).flatten(2)
            return products.product(wide, weight.flatten(0, 1)) + shift
        return torch.bmm(x, gather(weight.flatten(1), by_block).unflatten(1, tuple(weight.shape[1:]))) + shift

    def product(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x times its group's own matrix, where sizes are known. matrices: (count, n_in, n_out)."""
        assert self.sizes is not None
        return join([part @ matrix for part, matrix in zip(cut(x, self.sizes, 0), matrices.unbind(0))], 0)

    def per_row(self, values: Tensor) -> Tensor:
        """Values (count, n) of each group, as a factor of rows in the layout."""
        if self.count == 1:
            return values
        if self.sizes is not None:
            return join([row.expand(size, -1) for row, size in zip(values.unbind(0), self.sizes)], 0)
        assert self.block_group is not None
        return gather(values, Segments(self.block_group, self.count, rows_are_sorted=True)).unsqueeze(1)


def group_rows(kind: Tensor, count: int, block: int) -> Groups:
    """The layout of rows of these groups. kind: (n_rows,) int64, below `count`."""
    if count == 1:
        return Groups(1)
    if not kind.is_cuda and not is_traced(kind):
        order = torch.argsort(kind, stable=True)
        sizes = tuple(torch.bincount(kind, minlength=count).tolist())
        return Groups(count, slot=_inverse(order), order=order, sizes=sizes)
    members = kind.new_zeros(count).index_add_(0, kind, torch.ones_like(kind))
    blocks = (members + (block - 1)) // block
    last_block, last_row = torch.cumsum(blocks, 0), torch.cumsum(members, 0)
    n_blocks = kind.shape[0] // block + count
    numbers = torch.arange(n_blocks, device=kind.device)
    block_group = torch.searchsorted(last_block, numbers, right=True).clamp(max=count - 1)
    rank = _inverse(torch.argsort(kind, stable=True))
    first = (last_block - blocks) * block - (last_row - members)
    return Groups(count, slot=rank + first.index_select(0, kind), block_group=block_group, block=block)


def _inverse(order: Tensor) -> Tensor:
    numbers = torch.arange(order.shape[0], device=order.device)
    return torch.zeros_like(order).index_copy_(0, order, numbers)


class _Permute(torch.autograd.Function):
    """rows[order]; `back` is the inverse permutation."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.both = order, back
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor):
        order, back = ctx.both
        return _Permute.apply(grad.contiguous(), back, order), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, order: None, back: None) -> Tensor:
        return _Permute.apply(tangent, *ctx.both)


class _Spread(torch.autograd.Function):
    """Rows to their places in blocks, zero elsewhere. place: block and row in it, each (n_rows,); no two are the same."""

    @staticmethod
    def forward(ctx, rows: Tensor, place: tuple[Tensor, Tensor], shape: tuple[int, int]) -> Tensor:
        ctx.place, ctx.shape = place, shape
        return rows.new_zeros((*shape, *rows.shape[1:])).index_put_(place, rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Collect.apply(grad, ctx.place), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, place: None, shape: None) -> Tensor:
        return _Spread.apply(tangent, ctx.place, ctx.shape)


class _Collect(torch.autograd.Function):
    """Rows from their places in blocks."""

    @staticmethod
    def forward(ctx, values: Tensor, place: tuple[Tensor, Tensor]) -> Tensor:
        ctx.place, ctx.shape = place, tuple(values.shape[:2])
        return values[place]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Spread.apply(grad, ctx.place, ctx.shape), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, place: None) -> Tensor:
        return _Collect.apply(tangent, ctx.place)
