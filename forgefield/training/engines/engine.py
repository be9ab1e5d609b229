"""Engines: how one training step is executed. All of them compute the same `StepFunction`.

`step` returns a loss whose `backward` sets the gradients of the weights, so that a step of any engine is an ordinary training
step for Lightning, its strategies and optimisers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forgefield.data.batch import SHAPES, Batch, Shapes, halves, is_memory_error
from forgefield.data.padding import sizes
from forgefield.errors import ForgefieldError
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.tasks.metrics import merged
from forgefield.training.engines.step import Differentiated, Measured, StepFunction

Denominators = Callable[[], Tensor]
"""Returns the denominators of the loss over all ranks, (n_targets,); the call may wait for the other ranks."""


class FixedSizeError(ForgefieldError):
    """A step can be traced, but only for batches of one size."""


class Step(NamedTuple):
    """loss: to be differentiated. measured: sums of this batch."""

    loss: Tensor
    measured: Measured


class Engine:
    """The eager engine: operations are launched one by one, and autograd differentiates.

    world_size: factor of the loss, because strategies average gradients over ranks.
    """

    name = "eager"

    def __init__(self, function: StepFunction, *, world_size: int = 1) -> None:
        self.function, self.world_size = function, world_size
        self.external_denominators = world_size > 1
        """Whether steps get denominators as an argument; compiled code depends on it."""

    def trial(self, batch: Batch) -> Differentiated:
        """Gradients of this batch, computed as in a step of the training but with the denominators of this batch only."""
        if not self.external_denominators:
            return self.differentiate(batch)
        counts = self.function.task.counts(batch)
        return self.differentiate(batch, lambda: counts)

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        """The loss of a batch, to be differentiated. denominators: None for those of this batch."""
        function = self.function
        if function.derivative != "double":
            return self._as_step(self.differentiate(batch, denominators))
        task, potential = function.task, function.potential
        with function.code_setting():
            outputs = potential(batch, forces=task.needs_forces, stress=task.needs_stress)
        parts = task.loss(outputs, batch)
        measured = Measured(torch.stack([parts.sums, parts.counts]).detach(), function.errors.measure(outputs, batch))
        if denominators is None:
            return Step(parts.total, measured)
        return Step(task.combine(parts.sums, denominators()) * self.world_size, measured)

    def measure(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        """A step whose loss is not differentiated: its gradients are read in another way, or not at all."""
        result = self.differentiate(batch, denominators)
        return Step(result.loss.clone(), result.measured)

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        """The gradients of a step."""
        return self.function.differentiate(*self._inputs(batch, denominators))

    def evaluate(self, batch: Batch) -> Measured:
        """Loss sums and errors of a batch in validation."""
        function = self.function
        return function.evaluate(function.trained_weights(), function.fixed_weights(), batch)

    def _inputs(
        self, batch: Batch, denominators: Denominators | None
    ) -> tuple[list[Tensor], list[Tensor], Batch, Tensor, Tensor | None]:
        """Arguments of `StepFunction.differentiate`."""
        function = self.function
        weights = function.task.weights_on(batch["positions"].device)
        weights = weights if self.world_size == 1 else weights * self.world_size
        values = None if denominators is None else denominators()
        return function.trained_weights(), function.fixed_weights(), batch, weights, values

    def _as_step(self, result: Differentiated) -> Step:
        """A step whose gradients have been computed already."""
        return Step(with_gradients(result.loss, result.gradients, self.function.trained_weights()), result.measured)

    def reset(self) -> None:
        """Discard compiled and captured code, because a setting on which it depends has changed."""


class _WithGradients(TypedFunction):
    @staticmethod
    def forward(ctx: AutogradContext, loss: Tensor, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return None, None, *torch._foreach_mul(ctx.gradients, grad.to(ctx.gradients[0].dtype))


def with_gradients(loss: Tensor, gradients: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """The loss as a function of `weights` with these gradients; None for a weight on which it does not depend."""
    pairs = [(gradient, weight) for gradient, weight in zip(gradients, weights) if gradient is not None]
    if not pairs:
        return loss
    result: Tensor = _WithGradients.apply(loss, [gradient for gradient, _ in pairs], *(weight for _, weight in pairs))
    return result


class MemoryLimitedEngine(Engine):
    """Computes batches in parts where memory is limited.

    inner: the engine that computes.
    parts: number of parts into which every batch is split.
    split: whether a batch that does not fit into memory is split further.
    """

    def __init__(
        self, inner: Engine, *, parts: int = 1, split: bool, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(inner.function, world_size=inner.world_size)
        self.inner, self.parts, self.split, self.notify = inner, parts, split, notify
        self.name = inner.name
        self.too_many_edges: int | None = None
        """The smallest number of edges that did not fit into memory."""

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        if self.split or self.parts > 1:
            return self._as_step(self.differentiate(batch, denominators))
        try:
            return self.inner.step(batch, denominators)
        except Exception as error:
            raise_memory_error(error, batch)
            raise

    def measure(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        if self.split or self.parts > 1:
            return super().measure(batch, denominators)
        try:
            return self.inner.measure(batch, denominators)
        except Exception as error:
            raise_memory_error(error, batch)
            raise

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        values = self.function.task.counts(batch) if denominators is None else denominators()
        results = [self._in_parts(part, values) for part in split_batch(batch, self.parts, self.function.shapes)]
        return functools.reduce(_add, results)

    def evaluate(self, batch: Batch) -> Measured:
        """In parts if memory runs out; the results are sums over frames."""
        try:
            return self.inner.evaluate(batch)
        except Exception as error:
            if not is_memory_error(error) or sizes(batch)[0] == 1:
                raise_memory_error(error, batch, evaluating=True)
                raise
        _empty_cache()
        first, second = (self.evaluate(part) for part in halves(batch, self.function.shapes))
        return _add_measured(first, second)

    def reset(self) -> None:
        self.inner.reset()

    def _in_parts(self, batch: Batch, denominators: Tensor) -> Differentiated:
        n_frames, _, n_edges = sizes(batch)
        fits = self.too_many_edges is None or n_edges < self.too_many_edges
        if fits or n_frames == 1:
            try:
                return _copied(self.inner.differentiate(batch, lambda: denominators))
            except Exception as error:
                if not is_memory_error(error) or n_frames == 1 or not self.split:
                    raise_memory_error(error, batch)
                    raise
        _empty_cache()
        if fits:
            self.too_many_edges = n_edges
            self.notify(
                f"A batch of {describe(batch)} does not fit into memory: it is computed in parts, with the same gradients."
            )
        first, second = (self._in_parts(part, denominators) for part in halves(batch, self.function.shapes))
        return _add(first, second)


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _copied(result: Differentiated) -> Differentiated:
    """A copy that the next step does not overwrite."""
    return Differentiated(
        [None if gradient is None else gradient.clone() for gradient in result.gradients],
        result.loss.clone(),
        Measured(result.measured.sums.clone(), result.measured.errors.clone()),
    )


def _add(a: Differentiated, b: Differentiated) -> Differentiated:
    gradients = [x if y is None else y if x is None else x + y for x, y in zip(a.gradients, b.gradients)]
    return Differentiated(gradients, a.loss + b.loss, _add_measured(a.measured, b.measured))


def _add_measured(a: Measured, b: Measured) -> Measured:
    return Measured(a.sums + b.sums, merged(a.errors, b.errors))


def split_batch(batch: Batch, parts: int, shapes: Shapes = SHAPES) -> list[Batch]:
    """The batch in `parts` parts of about the same number of atoms, or in single frames if there are fewer."""
    frames = batch["n_atoms"].shape[0]
    if parts <= 1 or frames == 1:
        return [batch]
    first, second = halves(batch, shapes)
    share = max(1, round(parts * first["positions"].shape[0] / batch["positions"].shape[0]))
    share = min(share, parts - 1)
    return [*split_batch(first, share, shapes), *split_batch(second, parts - share, shapes)]


def describe(batch: Batch) -> str:
    frames, atoms, edges = sizes(batch)
    return f"{frames} frames, {atoms} atoms and {edges} edges"


def raise_memory_error(error: BaseException, batch: Batch, *, evaluating: bool = False) -> None:
    """Raise ForgefieldError with advice if the error means that memory ran out; do nothing for any other."""
    if not is_memory_error(error):
        return
    key = "data.eval_batch" if evaluating else "data.batch"
    in_parts = (
        ""
        if evaluating
        else ", or compute batches in parts with the same gradients: training.memory.parts=2, or training.memory.split=true"
    )
    raise ForgefieldError(
        f"Memory ran out on a batch of {describe(batch)}. Reduce {key} (batches limited by edges, {key}={{edges: ...}}, need "
        f"about the same memory){in_parts}; forgefield bench CONFIG --plan estimates what fits."
    ) from error
