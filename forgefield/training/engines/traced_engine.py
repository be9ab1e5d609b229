"""What engines that run a trace of the step have in common: two functions of flat tensors, one to train and one to evaluate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from forgefield.training.engines.blank import not_too_small
from forgefield.training.engines.engine import Denominators, Engine, Step
from forgefield.training.engines.step import Differentiated, Measured, StepFunction

Batch = dict[str, Tensor]
Flat = Callable[[list[Tensor], Batch], Any]


class MadeFunction(Protocol):
    """Code made of a function of static tensors and a batch."""

    def __call__(self, static: Sequence[Tensor], batch: Batch) -> Any: ...

    def forget(self) -> None: ...


class TracedEngine(Engine):
    """make: code of a function, named for messages. Batches that are too small for traced code are filled up."""

    def __init__(
        self, function: StepFunction, make: Callable[[Flat, str], MadeFunction], *, world_size: int = 1
    ) -> None:
        super().__init__(function, world_size=world_size)
        self.reach = function.potential.adaptive_cutoff or function.potential.cutoff
        n, m = len(function.trained), len(function.trained) + len(function.fixed)
        self.training = make(
            lambda static, batch: function.differentiate(
                static[:n], static[n:m], batch, static[m], static[m + 1] if len(static) > m + 1 else None
            ),
            "training step",
        )
        self.evaluation = make(lambda static, batch: function.evaluate(static[:n], static[n:], batch), "evaluation")

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        return self._given(self.differentiate(batch, denominators))

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        trained, fixed, batch, weights, known = self._inputs(self._not_too_small(batch), denominators)
        return self.training([*trained, *fixed, weights, *([] if known is None else [known])], batch)

    def evaluate(self, batch: Batch) -> Measured:
        trained, fixed, batch, _, _ = self._inputs(self._not_too_small(batch), None)
        return self.evaluation([*trained, *fixed], batch)

    def _not_too_small(self, batch: Batch) -> Batch:
        return not_too_small(batch, self.reach, self.function.shapes, self.function.task.outputs)

    def forget(self) -> None:
        self.training.forget()
        self.evaluation.forget()
