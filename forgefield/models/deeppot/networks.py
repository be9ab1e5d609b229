"""DeePMD's perceptrons: layers with residuals where widths are equal or doubled; networks of one shape are stacked.

Layer l of all networks is one set of tensors: `w` (networks, n_in, n_out), `b` and, with `resnet_dt`, `idt` (networks, n_out).
A layer gives idt * f(x w + b), plus x if the width does not change, plus x twice, concatenated, if it doubles.

Edges belong to the network of their species, atoms to that of theirs; `Groups` arranges rows so that each network is applied by
dense products. Where the sizes of the groups are known to the host (on a CPU) rows are sorted by group; elsewhere, and in
traces, each group is padded to complete blocks of a fixed number of rows; the number of blocks depends on sizes only, so that
nothing waits for the device and the layout is valid for any batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgefield.errors import ForgefieldError
from forgefield.models.interface import StackedNetworks
from forgefield.ops import products
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
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
        """The layout of rows that are sorted by group."""
        return cls(len(sizes), sizes=tuple(sizes))

    def spread(self, rows: Tensor) -> Tensor:
        """Rows (n_rows, ...) in the layout; empty slots are zero."""
        if self.slot is None:
            return rows
        if self.order is not None:
            result: Tensor = _Permute.apply(rows, self.order, self.slot)
            return result
        assert self.block_group is not None
        slot = torch.div(self.slot, self.block, rounding_mode="floor"), self.slot % self.block
        spread: Tensor = _Spread.apply(rows, slot, (self.block_group.shape[0], self.block))
        return spread

    def collect(self, values: Tensor) -> Tensor:
        """The rows (n_rows, ...) of values in the layout: inverse of `spread`."""
        if self.slot is None:
            return values
        if self.order is not None:
            result: Tensor = _Permute.apply(values, self.slot, self.order)
            return result
        slot = torch.div(self.slot, self.block, rounding_mode="floor"), self.slot % self.block
        collected: Tensor = _Collect.apply(values, slot)
        return collected

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


class _Permute(TypedFunction):
    """rows[order]; `back` is the inverse permutation."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.both = order, back
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        order, back = ctx.both
        return _Permute.apply(grad.contiguous(), back, order), None, None

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, order: None, back: None) -> Tensor:
        result: Tensor = _Permute.apply(tangent, *ctx.both)
        return result


class _Spread(TypedFunction):
    """Rows to their slots in blocks, zero elsewhere. slot: block and row in it, each (n_rows,); no two are the same."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, slot: tuple[Tensor, Tensor], shape: tuple[int, int]) -> Tensor:
        ctx.slot, ctx.shape = slot, shape
        return rows.new_zeros((*shape, *rows.shape[1:])).index_put_(slot, rows)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return _Collect.apply(grad, ctx.slot), None, None

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, slot: None, shape: None) -> Tensor:
        result: Tensor = _Spread.apply(tangent, ctx.slot, ctx.shape)
        return result


class _Collect(TypedFunction):
    """Rows from their slots in blocks."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, slot: tuple[Tensor, Tensor]) -> Tensor:
        ctx.slot, ctx.shape = slot, tuple(values.shape[:2])
        return values[slot]

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return _Spread.apply(grad, ctx.slot, ctx.shape), None

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, slot: None) -> Tensor:
        result: Tensor = _Collect.apply(tangent, ctx.slot)
        return result


def _silu_then_tanh(x: Tensor, threshold: float) -> Tensor:
    """SiLU up to the threshold, from there on a tanh that continues it with the same slope."""
    sigmoid = 1 / (1 + math.exp(-threshold))
    slope = sigmoid + threshold * sigmoid * (1 - sigmoid)
    end = torch.tanh(slope * (x - threshold)) + threshold * sigmoid
    return torch.where(x < threshold, functional.silu(x), end)


def _as_it_is(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": functional.relu,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "gelu": partial(functional.gelu, approximate="tanh"),
    "gelu_tf": partial(functional.gelu, approximate="tanh"),
    "relu6": functional.relu6,
    "silu": functional.silu,
    "linear": _as_it_is,
    "none": _as_it_is,
}
"""By DeePMD-kit's names; in addition `silut:T` and `custom_silu:T`, SiLU up to T and a tanh from there on."""


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name; raises ValueError if there is none."""
    word, _, threshold = name.lower().partition(":")
    if word in ("silut", "custom_silu"):
        return partial(_silu_then_tanh, threshold=float(threshold or 3.0))
    if word not in ACTIVATIONS or threshold:
        raise ValueError(f"no activation function '{name}'")
    return ACTIVATIONS[word]


def check_activation(key: str, name: str) -> None:
    """Raise for a name that is not an activation function. key: for the message."""
    try:
        activation_function(name)
    except ValueError as error:
        words = ", ".join([*ACTIVATIONS, "silut:T"])
        raise ForgefieldError(f"{key} is '{name}'; choose one of {words}.") from error


class Layer(StackedNetworks):
    """One layer of `count` networks; `residual`: whether x is added where widths allow it."""

    matrices = ("w",)
    idt: Tensor | None

    def __init__(
        self,
        count: int,
        n_in: int,
        n_out: int,
        *,
        activation: str,
        residual: bool = True,
        resnet_dt: bool = False,
        trainable: bool = True,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.activate = activation_function(activation)
        self.repeats = n_out // n_in if residual and n_out in (n_in, 2 * n_in) else 0
        self.w = nn.Parameter(torch.empty(count, n_in, n_out, dtype=dtype), requires_grad=trainable)
        self.b = nn.Parameter(torch.empty(count, n_out, dtype=dtype), requires_grad=trainable)
        timed = resnet_dt and n_out in (n_in, 2 * n_in)
        self.idt = nn.Parameter(torch.empty(count, n_out, dtype=dtype), requires_grad=trainable) if timed else None

    def draw(self, network: int, generator: torch.Generator) -> None:
        """Fill the weights of one network."""
        _, n_in, n_out = self.w.shape
        with torch.no_grad():
            self.w[network] = _normal((n_in, n_out), generator) / math.sqrt(n_in + n_out)
            self.b[network] = _normal((n_out,), generator)
            if self.idt is not None:
                self.idt[network] = 0.1 + 0.001 * _normal((n_out,), generator)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """x: (..., n_in) in the layout of `groups`; its precision is what is computed in."""
        y = self.activate(groups.affine(x, self.w.to(x.dtype), self.b.to(x.dtype)))
        if self.idt is not None:
            y = y * groups.per_row(self.idt.to(x.dtype))
        return self._residual(y, x)

    def single(self, network: int, x: Tensor) -> Tensor:
        """x: (n, n_in), all rows for one network."""
        y = self.activate(products.product(x, self.w[network].to(x.dtype)) + self.b[network].to(x.dtype))
        if self.idt is not None:
            y = y * self.idt[network].to(x.dtype)
        return self._residual(y, x)

    def _residual(self, y: Tensor, x: Tensor) -> Tensor:
        if self.repeats == 0:
            return y
        return y + x if self.repeats == 1 else y + torch.cat([x, x], -1)


class Networks(nn.Module):
    """`count` perceptrons of one shape: sizes[0] numbers in, sizes[-1] out. With `linear_out` the last layer is affine.

    trainable: of all layers, or of each.
    """

    layers: list[Layer]

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        *,
        activation: str,
        resnet_dt: bool = False,
        linear_out: bool = False,
        trainable: bool | Sequence[bool] = True,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.count, self.sizes, self.resnet_dt = count, tuple(sizes), resnet_dt
        n_layers = len(sizes) - 1
        flags = [trainable] * n_layers if isinstance(trainable, bool) else list(trainable)
        layers = nn.ModuleList()
        for number in range(n_layers):
            is_hidden = number < n_layers - 1 or not linear_out
            layers.append(
                Layer(
                    count,
                    sizes[number],
                    sizes[number + 1],
                    activation=activation if is_hidden else "linear",
                    residual=is_hidden,
                    resnet_dt=resnet_dt and is_hidden,
                    trainable=flags[number],
                    dtype=dtype,
                )
            )
        self.layers = cast(list[Layer], layers)
        for network in range(count):
            for layer in self.layers:
                layer.draw(network, generator)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].w.dtype

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """(..., sizes[0]) -> (..., sizes[-1]), in the layout of `groups`."""
        result: Tensor = self.layers[-1](self.hidden(x, groups), groups)
        return result

    def single(self, network: int, x: Tensor) -> Tensor:
        """(n, sizes[0]) -> (n, sizes[-1]), by one of the networks."""
        for layer in self.layers:
            x = layer.single(network, x)
        return x

    def hidden(self, x: Tensor, groups: Groups) -> Tensor:
        """(..., sizes[0]) -> (..., sizes[-2]), the input of the last layer."""
        for layer in self.layers[:-1]:
            x = layer(x, groups)
        return x


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Drawn in float64, so that weights are the same up to rounding in every precision."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)
