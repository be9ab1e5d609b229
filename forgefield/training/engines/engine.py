"""Engines: how one training step is executed. All compute what `StepFunction` says; they differ in speed and in what they need.

`step` gives a loss whose `backward` brings the gradients to the weights, so that Lightning, its strategies and optimisers see
an ordinary training step whatever the engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.training.engines.step import Differentiated, Measured, StepFunction

Batch = dict[str, Tensor]
Denominators = Callable[[], Tensor]
"""Gives the denominators of the loss over all ranks; asking may wait for a message of theirs."""


class OnlyOneSize(ForgefieldError):
    """A step can be traced, but only for batches of the size it was traced with."""


class Step(NamedTuple):
    """loss: to be differentiated. measured: sums of this batch."""

    loss: Tensor
    measured: Measured


class Engine:
    """Eager: operations are launched one by one, and autograd differentiates.

    world_size: the loss is multiplied by it, since strategies average gradients over ranks.
    """

    name = "eager"

    def __init__(self, function: StepFunction, *, world_size: int = 1) -> None:
        self.function, self.world_size = function, world_size
        self.given_denominators = world_size > 1
        """Whether steps come with denominators, which compiled code has to know beforehand."""

    def trial(self, batch: Batch) -> Differentiated:
        """As a step of the training will be, but for this batch alone, and with the gradients in hand."""
        if not self.given_denominators:
            return self.differentiate(batch)
        own = self.function.task.counts(batch)
        return self.differentiate(batch, lambda: own)

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        """denominators: None where this rank's own batch is all there is."""
        function = self.function
        if function.derivative != "double":
            return self._given(self.differentiate(batch, denominators))
        task, potential = function.task, function.potential
        with function.edge_setting():
            outputs = potential(batch, forces=task.needs_forces, stress=task.needs_stress)
        parts = task.loss(outputs, batch)
        measured = Measured(torch.stack([parts.sums, parts.counts]).detach(), function.errors.measure(outputs, batch))
        if denominators is None:
            return Step(parts.total, measured)
        return Step(task.combine(parts.sums, denominators()) * self.world_size, measured)

    def measure(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        """A step whose loss nobody differentiates: its gradients are asked for in another way, or not at all."""
        result = self.differentiate(batch, denominators)
        return Step(result.loss.clone(), result.measured)

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        """The same with explicit gradients."""
        return self.function.differentiate(*self._inputs(batch, denominators))

    def evaluate(self, batch: Batch) -> Measured:
        function = self.function
        return function.evaluate(function.trained_weights(), function.fixed_weights(), batch)

    def _inputs(self, batch: Batch, denominators: Denominators | None) -> tuple[Any, ...]:
        function = self.function
        weights = function.task.weights_on(batch["positions"].device)
        weights = weights if self.world_size == 1 else weights * self.world_size
        known = None if denominators is None else denominators()
        return function.trained_weights(), function.fixed_weights(), batch, weights, known

    def _given(self, result: Differentiated) -> Step:
        """A step whose gradients are known already."""
        return Step(with_gradients(result.loss, result.gradients, self.function.trained_weights()), result.measured)

    def forget(self) -> None:
        """Make everything anew from the next step on: a setting that compiled or captured code depends on has changed."""


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None, *torch._foreach_mul(ctx.gradients, grad.to(ctx.gradients[0].dtype))


def with_gradients(loss: Tensor, gradients: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """The loss as a function of `weights` whose gradients are those given; a weight without one gets none."""
    known = [(gradient, weight) for gradient, weight in zip(gradients, weights) if gradient is not None]
    if not known:
        return loss
    return _WithGradients.apply(loss, [gradient for gradient, _ in known], *(weight for _, weight in known))
