"""Whole steps on frames: the gradient of the `graphs` engine, sums and update in one graph for each size of batches.

The host only writes addresses of the batch, and numbers that have changed, before a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from forgefield.data.batch import Batch
from forgefield.data.padding import Size, sizes
from forgefield.kernels.core.runtime import joined
from forgefield.training.engines.captured import CapturedSteps
from forgefield.training.engines.graphs import GraphsEngine, StaticInputs
from forgefield.training.engines.step import Differentiated
from forgefield.training.optim.captured_update import CapturedUpdate


class Sums(Protocol):
    """Accumulated sums of a loss or of errors."""

    sums: Tensor


class FrameSteps:
    """Whole steps of an engine. Nothing can be done between gradient and update.

    meters: to which sums and errors are added, in this order. setting: context in which gradients are computed.
    """

    def __init__(
        self,
        engine: GraphsEngine,
        update: CapturedUpdate,
        meters: Sequence[Sums],
        setting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.engine, self.update, self.meters, self.setting = engine, update, meters, setting
        self.steps: CapturedSteps[Size] = CapturedSteps(self, update, pool=engine.pool)
        self._inputs: dict[Size, StaticInputs] = {}
        self._results: dict[Size, Differentiated] = {}
        self._first: dict[Size, tuple[Tensor, Tensor]] = {}
        """The first weight that has a gradient, and its gradient."""
        self._sums: list[Tensor] = []
        """The accumulators that captured steps add to."""
        self._has_states = False

    @property
    def can_run(self) -> bool:
        """Whether the optimiser has its state, which it creates in its first step, and the groups that it had then."""
        optimiser = self.update.optimiser
        if not self._has_states:
            weights = [
                weight for group in optimiser.param_groups for weight in group["params"] if weight.grad is not None
            ]
            self._has_states = bool(weights) and all(weight in optimiser.state for weight in weights)
        return self._has_states and len(optimiser.param_groups) == len(self.update.rates)

    def run(self, batch: Batch) -> Tensor:
        """Take a step; returns the loss, which the next step overwrites."""
        size = self.engine.plan.fit(*sizes(batch))
        if size not in self._inputs:
            self._inputs[size] = self.engine.inputs_for_step(size, batch, None)
        self._use_accumulators()
        self._inputs[size].load(batch, None)
        self.update.write([[group["lr"] for group in self.update.optimiser.param_groups]], self.update.next_shares(1))
        self.steps.run(size)
        result = self._results[size]
        weight, gradient = self._first[size]
        if weight.grad is not gradient:  # set by steps of another size, or in parts: a replay sets nothing
            self._assign(result)
        return result.loss

    def _use_accumulators(self) -> None:
        """Let the meters add to the tensors of captured steps."""
        if not self._sums:
            device = self.update.device
            self._sums = [torch.empty_like(meter.sums, device=device) for meter in self.meters]
        for meter, sums in zip(self.meters, self._sums):
            if meter.sums is not sums:  # it was reset, or has added a batch in another way
                sums.copy_(meter.sums)
                meter.sums = sums

    def reset(self) -> None:
        """Discard what was captured."""
        self.steps.reset()
        self._inputs.clear()
        self._results.clear()
        self._first.clear()

    def _assign(self, result: Differentiated) -> None:
        """Set `grad` of the weights."""
        for weight, gradient in zip(self.engine.function.trained_weights(), result.gradients):
            weight.grad = gradient

    # ---- the work of captured steps

    def launch(self, key: Size, number: int) -> bool:
        inputs = self._inputs[key]
        with self.setting(), joined():
            inputs.launch()
            result = self._results[key] = self.engine.differentiated(inputs)
        pairs = zip(self.engine.function.trained_weights(), result.gradients)
        self._first[key] = next((weight, gradient) for weight, gradient in pairs if gradient is not None)
        for sums, measured in zip(self._sums, result.measured):
            sums.add_(measured)
        self._assign(result)
        return True

    def changed(self) -> list[Tensor]:
        return self._sums

    def refresh(self) -> None:
        """Weights have no copies here."""
