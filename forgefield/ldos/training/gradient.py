"""The gradient of the loss of a batch of points: written out, or by autograd; both give the same to rounding.

`Written` is what trainings use: a perceptron's derivatives are two products a layer, and without a graph to build and walk a
small step costs half. `ByAutograd` is its oracle, and what is compiled. Both leave gradients in tensors that stay where they
are, so that captured steps find them there, and read nothing back from the device.
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
"""Activations whose derivative is known from their value: nothing else of them is kept."""


class Gradient(Protocol):
    """Computes errors and gradients of one batch."""

    gradients: list[Tensor]
    """Of every parameter, in the order of `LDOSNetwork.parameters`."""

    def __call__(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None) -> Tensor:
        """Scaled inputs (n, f) and targets (n, t) -> errors of the loss added up for each level, (t,); gradients are left in
        `gradients`. factor: (t,), what slopes of errors are multiplied with. weight: (n,), 0 for points that do not count."""


class Written:
    """Derivatives written out."""

    def __init__(self, model: LDOSNetwork, loss: PointLoss) -> None:
        self.model, self.loss = model, loss
        self.gradients = [torch.zeros_like(p) for p in model.parameters()]
        n = len(model.weights)
        self._of_weights, self._of_biases = self.gradients[:n], self.gradients[n:]

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
        """Leave in `gradients` those of a function whose derivative by the outputs of every point is `slope`, (t,)."""
        values, before = self._forward(inputs)
        self._backward(slope.expand_as(values[-1]).contiguous(), values, before)

    def _forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Values of each layer, the inputs first, and what its activation was applied to, where that is needed again."""
        values, before = [x], []
        names = self._activations()
        for weight, bias, name in zip(self.model.weights, self.model.biases, names):
            x = product(x, weight.t()).add_(bias) if is_lowered(x) else F.linear(x, weight, bias)
            before.append(None if name is None or name in _IN_PLACE else x)
            if name is not None:
                x = _IN_PLACE[name](x) if name in _IN_PLACE else ACTIVATIONS[name](x)
            values.append(x)
        return values, before

    def _activations(self) -> list[str | None]:
        options = self.model.options
        return [options.activation] * (len(self.model.weights) - 1) + [options.output_activation]

    def _backward(self, slope: Tensor, values: list[Tensor], before: list[Tensor | None]) -> None:
        names, lowered = self._activations(), is_lowered(slope)
        for number in reversed(range(len(names))):
            slope = _through(names[number], slope, values[number + 1], before[number])
            below, weight = values[number], self.model.weights[number]
            if lowered:
                self._of_weights[number].copy_(product(slope.t(), below))
            else:
                torch.mm(slope.t(), below, out=self._of_weights[number])
            torch.sum(slope, 0, out=self._of_biases[number])
            if number:
                slope = product(slope, weight) if lowered else torch.mm(slope, weight)


def _through(name: str | None, slope: Tensor, value: Tensor, before: Tensor | None) -> Tensor:
    """The slope before an activation from that behind it. value: of the activation; before: what it was applied to."""
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


class ByAutograd:
    """Derivatives by autograd, of the step as it is or as `compiled` makes it of its trace.

    What is compiled is a trace without calls and derivatives, one for each shape and precision: torch's compiler would divide
    the step itself where `product` is lowered, and give up on the parts after some trainings in one process.
    """

    def __init__(self, model: LDOSNetwork, loss: PointLoss, compiled: Callable[[Any], Any] | None = None) -> None:
        self.model, self.loss, self.compiled = model, loss, compiled
        self.gradients = [torch.zeros_like(p) for p in model.parameters()]
        self._parameters = list(model.parameters())
        self._made: dict[Any, Callable[..., list[Tensor]]] = {}

    def __call__(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None) -> Tensor:
        arguments = [inputs, targets, factor, *([] if weight is None else [weight])]
        step = self._step if self.compiled is None else self._compiled_step(arguments)
        with torch.no_grad():
            by_level, *found = step(*arguments)
            torch._foreach_copy_(self.gradients, found)
        return by_level

    def outputs(self, inputs: Tensor) -> Tensor:
        """Scaled inputs (n, f) to scaled outputs (n, t)."""
        return self.model.network(inputs)

    def _compiled_step(self, arguments: list[Tensor]) -> Callable[..., list[Tensor]]:
        assert self.compiled is not None
        key = (count_lowered(), *((tuple(tensor.shape), tensor.stride()) for tensor in arguments))
        if key not in self._made:
            self._made[key] = self.compiled(make_fx(lambda *given: self._step(*given))(*arguments))
        return self._made[key]

    def _step(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None = None) -> list[Tensor]:
        with torch.enable_grad():
            difference = self.outputs(inputs) - targets
            if weight is not None:
                difference = difference * weight[:, None]
            by_level = self.loss.errors(difference).sum(0)
            found = torch.autograd.grad((by_level * factor).sum(), self._parameters)
        return [by_level.detach(), *found]
