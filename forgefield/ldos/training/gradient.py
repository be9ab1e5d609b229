"""The gradient of the loss of a batch of points: explicit formulas, or autograd; both agree to rounding.

Trainings use `ManualGradient`: the derivatives of a perceptron are two products per layer, and a small step takes half the time
without an autograd graph. `AutogradGradient` is its oracle, and the version that is compiled. Both write gradients to fixed
tensors, as captured steps require, and read nothing back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from forgefield.ldos.loss import PointLoss
from forgefield.ldos.model import ACTIVATIONS, LDOSNetwork
from forgefield.ops.products import count_lowered, is_lowered, product

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu_, "tanh": torch.tanh_, "sigmoid": torch.sigmoid_}
"""Activations whose derivative follows from their value, so that nothing else is stored."""


class Gradient(Protocol):
    """Computes errors and gradients of one batch."""

    gradients: list[Tensor]
    """Of every parameter, in the order of `LDOSNetwork.parameters`."""

    def __call__(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None) -> Tensor:
        """Scaled inputs (n, f) and targets (n, t) -> errors of the loss summed for each level, (t,); gradients are written to
        `gradients`. factor: (t,), factors of the slopes of errors. weight: (n,), 0 for padding points."""


class ManualGradient:
    """Gradients by explicit formulas."""

    def __init__(self, model: LDOSNetwork, loss: PointLoss) -> None:
        self.model, self.loss = model, loss
        self.gradients = [torch.zeros_like(p) for p in model.parameters()]
        n = len(model.weights)
        self._weight_gradients, self._bias_gradients = self.gradients[:n], self.gradients[n:]

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None) -> Tensor:
        values, before = self._forward(inputs)
        difference = values[-1] - targets
        if weight is not None:
            difference *= weight[:, None]
        by_level = self.loss.errors(difference).sum(0)
        slope = self.loss.slopes(difference).mul_(factor)
        self._backward(slope, values, before)
        return by_level

    @torch.no_grad()
    def pull_back(self, inputs: Tensor, slope: Tensor) -> None:
        """Write to `gradients` those of a function whose derivative by the outputs of every point is `slope`, (t,)."""
        values, before = self._forward(inputs)
        self._backward(slope.expand_as(values[-1]).contiguous(), values, before)

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Values of each layer, the inputs first, and the arguments of activations where derivatives need them."""
        values, before = [x], []
        names = self.model.options.activations
        for weight, bias, name in zip(self.model.weights, self.model.biases, names):
            x = product(x, weight.t()).add_(bias) if is_lowered(x) else F.linear(x, weight, bias)
            before.append(None if name is None or name in _IN_PLACE else x)
            if name is not None:
                x = _IN_PLACE[name](x) if name in _IN_PLACE else ACTIVATIONS[name](x)
            values.append(x)
        return values, before

    def _backward(self, slope: Tensor, values: list[Tensor], before: list[Tensor | None]) -> None:
        names, lowered = self.model.options.activations, is_lowered(slope)
        for number in reversed(range(len(names))):
            slope = _activation_backward(names[number], slope, values[number + 1], before[number])
            below, weight = values[number], self.model.weights[number]
            if lowered:
                self._weight_gradients[number].copy_(product(slope.t(), below))
            else:
                torch.mm(slope.t(), below, out=self._weight_gradients[number])
            torch.sum(slope, 0, out=self._bias_gradients[number])
            if number:
                slope = product(slope, weight) if lowered else torch.mm(slope, weight)


def _activation_backward(name: str | None, slope: Tensor, value: Tensor, before: Tensor | None) -> Tensor:
    """Backpropagate a slope through an activation. value: of the activation; before: its argument."""
    aten = torch.ops.aten
    if name is None:
        return slope
    if name == "relu":
        return aten.threshold_backward(slope, value, 0)
    if name == "tanh":
        return aten.tanh_backward(slope, value)
    if name == "sigmoid":
        return aten.sigmoid_backward(slope, value)
    assert before is not None
    if name == "leakyrelu":
        return aten.leaky_relu_backward(slope, before, 0.01, False)
    if name == "silu":
        return aten.silu_backward(slope, before)
    if name == "gelu":
        return aten.gelu_backward(slope, before)
    if name == "softplus":
        return aten.softplus_backward(slope, before, 1, 20)
    return aten.elu_backward(slope, 1, 1, 1, False, before)


class AutogradGradient:
    """Gradients by autograd. compiled: compiles the traced step; None: run it directly.

    The compiled function is a trace without calls and derivatives, one for each shape and precision: torch.compile would split
    the step itself where `product` is lowered, and reach its recompilation limit after some trainings in one process.
    """

    def __init__(self, model: LDOSNetwork, loss: PointLoss, compiled: Callable[[Any], Any] | None = None) -> None:
        self.model, self.loss, self.compiled = model, loss, compiled
        self.gradients = [torch.zeros_like(p) for p in model.parameters()]
        self._parameters = list(model.parameters())
        self._compiled_steps: dict[Any, Callable[..., list[Tensor]]] = {}

    def __call__(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None) -> Tensor:
        arguments = [inputs, targets, factor, *([] if weight is None else [weight])]
        step = self._step if self.compiled is None else self._compiled_step(arguments)
        with torch.no_grad():
            by_level, *gradients = step(*arguments)
            torch._foreach_copy_(self.gradients, gradients)
        return by_level

    def outputs(self, inputs: Tensor) -> Tensor:
        """Scaled inputs (n, f) to scaled outputs (n, t)."""
        return self.model.network(inputs)

    def _compiled_step(self, arguments: list[Tensor]) -> Callable[..., list[Tensor]]:
        assert self.compiled is not None
        key = (count_lowered(), *((tuple(tensor.shape), tensor.stride()) for tensor in arguments))
        if key not in self._compiled_steps:
            self._compiled_steps[key] = self.compiled(make_fx(lambda *tensors: self._step(*tensors))(*arguments))
        return self._compiled_steps[key]

    def _step(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None = None) -> list[Tensor]:
        with torch.enable_grad():
            difference = self.outputs(inputs) - targets
            if weight is not None:
                difference = difference * weight[:, None]
            by_level = self.loss.errors(difference).sum(0)
            gradients = torch.autograd.grad((by_level * factor).sum(), self._parameters)
        return [by_level.detach(), *gradients]
