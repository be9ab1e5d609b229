"""What follows the gradient of a step: averaging over ranks, clipping, the optimiser, the average of the weights.

Learning rates and shares of the average are tensors on the device where steps are captured, plain numbers elsewhere. The
optimiser is the one Lightning holds; only its way to compute (one fused kernel, step counts on the device) is changed, and
checkpoints do not know of it (`captured_update.portable_optimiser_states`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.captured_update import make_capturable

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class Update:
    """optimiser, average: what is updated. clip: largest norm and its kind (norm or value), or (None, ...). reduce: averages
    the gradients over ranks, in place of `grad`."""

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        average: WeightAverage | None,
        *,
        clip: tuple[float | None, str],
        reduce: Callable[[], None] | None,
    ) -> None:
        self.optimiser, self.average, self.clip, self.reduce = optimiser, average, clip, reduce
        self.calls = 0
        """Steps made since this was built."""
        self._parameters = [p for group in optimiser.param_groups for p in group["params"]]
        self._step = type(optimiser).step
        optimiser._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at
        if self._parameters[0].device.type == "cpu" and type(optimiser) in _FUSED:
            for group in optimiser.param_groups:
                if not group.get("foreach") and not group.get("differentiable"):
                    group["fused"] = True

    def use(self, gradients: Sequence[Tensor]) -> None:
        """Where the gradients of a step lie. Reducing them may put others in their place, so it is said before every step."""
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = gradient

    def __call__(self, rates: Sequence[Any] | None = None, share: Any = None) -> None:
        """One step. rates: learning rate of each group, where it is not the group's own; share: of the weights in the average,
        where it lies on the device."""
        self.calls += 1
        if self.reduce is not None:
            self.reduce()
        value, algorithm = self.clip
        if value:
            clip = torch.nn.utils.clip_grad_value_ if algorithm == "value" else torch.nn.utils.clip_grad_norm_
            clip(self._parameters, value)
        if rates is None:
            self._step(self.optimiser)
        else:
            self._step_with(rates)
        if self.average is not None:
            if share is None:
                self.average.update()
            else:
                self.average.take_in(share)

    def _step_with(self, rates: Sequence[Any]) -> None:
        groups = self.optimiser.param_groups
        kept = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        try:
            self._step(self.optimiser)
        finally:
            for group, rate in zip(groups, kept):
                group["lr"] = rate

    def average_and_weights(self) -> list[Tensor]:
        """Everything an update writes to but the state of the optimiser."""
        return [*self._parameters, *([] if self.average is None else self.average.average.values())]

    @property
    def has_states(self) -> bool:
        """Whether the optimiser has made its state, which it does in its first step."""
        return all(parameter in self.optimiser.state for parameter in self._parameters)

    def make_capturable(self) -> None:
        """Steps are captured from now on, but not all: some hold terms on snapshots, and torch need not warn of those."""
        self.optimiser._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
        make_capturable(self.optimiser, self._parameters[0].device)
