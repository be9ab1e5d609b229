"""DeePMD's perceptrons: layers with residuals where widths are equal or doubled; networks of one shape stand side by side.

Layer l of all networks is one set of tensors: `w` (networks, n_in, n_out), `b` and, with `resnet_dt`, `idt` (networks, n_out).
A layer gives idt * f(x w + b), plus x where the width stays, plus x twice side by side where it doubles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.grouping import Groups
from forgefield.models.interface import StackedNetworks


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
"""By DeePMD-kit's names; beside them `silut:T` and `custom_silu:T`, SiLU up to T and a tanh from there on."""


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name; raises ValueError where there is none."""
    word, _, threshold = name.lower().partition(":")
    if word in ("silut", "custom_silu"):
        return partial(_silu_then_tanh, threshold=float(threshold or 3.0))
    if word not in ACTIVATIONS or threshold:
        raise ValueError(f"no activation function '{name}'")
    return ACTIVATIONS[word]


def check_activation(key: str, name: str) -> None:
    """Raise for a name that is no activation function. key: for the message."""
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
        self.layers = layers  # type: ignore[assignment]
        for network in range(count):
            for layer in self.layers:
                layer.draw(network, generator)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].w.dtype

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """(..., sizes[0]) -> (..., sizes[-1]), in the layout of `groups`."""
        for layer in self.layers:
            x = layer(x, groups)
        return x


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Drawn in float64, so that weights are the same up to rounding in every precision."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)
