"""Engines: how one training step is executed. All compute what `StepFunction` says; they differ in speed and in what they need.

`step` gives a loss whose `backward` brings the gradients to the weights, so that Lightning, its strategies and optimisers see
an ordinary training step whatever the engine is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.data.batch import SHAPES, Batch, Shapes, halves, is_memory_error
from forgefield.errors import ForgefieldError
from forgefield.training.engines.padding import sizes
from forgefield.training.engines.step import Differentiated, Measured, StepFunction

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


class SparingEngine(Engine):
    """inner: does the work. parts: into which every batch is cut. split: whether a batch that does not fit is cut further."""

    def __init__(
        self, inner: Engine, *, parts: int = 1, split: bool, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(inner.function, world_size=inner.world_size)
        self.inner, self.parts, self.split, self.notify = inner, parts, split, notify
        self.name = inner.name
        self.most_edges: int | None = None
        """Batches with more edges than this have not fitted."""

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        if self.split or self.parts > 1:
            return self._given(self.differentiate(batch, denominators))
        try:
            return self.inner.step(batch, denominators)
        except Exception as error:
            raise_if_memory(error, batch)
            raise

    def measure(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        if self.split or self.parts > 1:
            return super().measure(batch, denominators)
        try:
            return self.inner.measure(batch, denominators)
        except Exception as error:
            raise_if_memory(error, batch)
            raise

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        known = self.function.task.counts(batch) if denominators is None else denominators()
        results = [self._in_parts(part, known) for part in cut(batch, self.parts, self.function.shapes)]
        return functools.reduce(_added, results)

    def evaluate(self, batch: Batch) -> Measured:
        """In parts where memory runs out: what is measured are sums over frames."""
        try:
            return self.inner.evaluate(batch)
        except Exception as error:
            if not is_memory_error(error) or sizes(batch)[0] == 1:
                raise_if_memory(error, batch, evaluating=True)
                raise
        _give_back_memory()
        first, second = (self.evaluate(part) for part in halves(batch, self.function.shapes))
        return _both(first, second)

    def forget(self) -> None:
        self.inner.forget()

    def _in_parts(self, batch: Batch, known: Tensor) -> Differentiated:
        n_edges, n_frames = sizes(batch)[2], sizes(batch)[0]
        if self.most_edges is None or n_edges < self.most_edges or n_frames == 1:
            try:
                return _own(self.inner.differentiate(batch, lambda: known))
            except Exception as error:
                if not is_memory_error(error) or n_frames == 1 or not self.split:
                    raise_if_memory(error, batch)
                    raise
        _give_back_memory()
        if self.most_edges is None or n_edges < self.most_edges:
            self.most_edges = n_edges
            self.notify(
                f"A batch of {describe(batch)} does not fit into memory: it is computed in parts, with the same gradients."
            )
        first, second = (self._in_parts(part, known) for part in halves(batch, self.function.shapes))
        return _added(first, second)


def _give_back_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _own(result: Differentiated) -> Differentiated:
    """A copy that the next step does not overwrite."""
    return Differentiated(
        [None if gradient is None else gradient.clone() for gradient in result.gradients],
        result.loss.clone(),
        Measured(result.measured.sums.clone(), result.measured.errors.clone()),
    )


def _added(a: Differentiated, b: Differentiated) -> Differentiated:
    gradients = [x if y is None else y if x is None else x + y for x, y in zip(a.gradients, b.gradients)]
    return Differentiated(gradients, a.loss + b.loss, _both(a.measured, b.measured))


def _both(a: Measured, b: Measured) -> Measured:
    return Measured(a.sums + b.sums, a.errors + b.errors)


def cut(batch: Batch, parts: int, shapes: Shapes = SHAPES) -> list[Batch]:
    """The batch in so many parts, or in as many as it has frames, of about as many atoms each."""
    frames = batch["n_atoms"].shape[0]
    if parts <= 1 or frames == 1:
        return [batch]
    first, second = halves(batch, shapes)
    share = max(1, round(parts * first["positions"].shape[0] / batch["positions"].shape[0]))
    share = min(share, parts - 1)
    return [*cut(first, share, shapes), *cut(second, parts - share, shapes)]


def describe(batch: Batch) -> str:
    frames, atoms, edges = sizes(batch)
    return f"{frames} frames, {atoms} atoms and {edges} edges"


def raise_if_memory(error: BaseException, batch: Batch, *, evaluating: bool = False) -> None:
    """One sentence for an error that means that memory ran out; nothing for any other."""
    if not is_memory_error(error):
        return
    what = "data.eval_batch" if evaluating else "data.batch"
    more = (
        ""
        if evaluating
        else ", or have it computed in parts with the same gradients: training.memory.parts=2, or training.memory.split=true"
    )
    raise ForgefieldError(
        f"Memory ran out on a batch of {describe(batch)}. Make {what} smaller (by edges, {what}={{edges: ...}}, batches cost "
        f"alike){more}; forgefield bench CONFIG --plan estimates what fits."
    ) from error
