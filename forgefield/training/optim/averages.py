"""Averages of the weights: an exponential moving average (EMA), the mean over the last part of a training (SWA), or the average
of a schedule-free optimiser.

The average is stored next to the weights: training always continues from the weights themselves. For validation, tests and
saving the two are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.training.optim.schedule_free import ScheduleFree
from forgefield.training.options import TrainingOptions, is_schedule_free


class WeightAverage:
    """average <- d * average + (1 - d) * weights after every optimiser step, with d = min(decay, (1 + n) / (10 + n)).

    The second form of d, for small numbers of steps n, reduces the influence of the initial weights.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"the decay of a weight average must be between 0 and 1, not {decay}")
        self.decay = decay
        self.updates = 0
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the present weights."""
        torch._foreach_lerp_(list(self.average.values()), list(self._weights.values()), self.next_share())

    def next_share(self) -> float:
        """Count an update, and return the factor 1 - d of the weights in it."""
        self.updates += 1
        return 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def update_with_share(self, share: Tensor) -> None:
        """Update the average. share: from `next_share`, on the device."""
        averages = list(self.average.values())
        changes = torch._foreach_sub(list(self._weights.values()), averages)
        torch._foreach_mul_(changes, share)
        torch._foreach_add_(averages, changes)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Weights and their averages, as the tensors themselves."""
        return ((weight, self.average[name]) for name, weight in self._weights.items())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the module has the averaged weights; afterwards exactly its weights from before."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange weights and average."""
        weights: list[Tensor] = list(self._weights.values())
        averages = [self.average[name] for name in self._weights]
        copies = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(copies, weights)
        torch._foreach_copy_(weights, averages)
        torch._foreach_copy_(averages, copies)

    def to(self, device: torch.device) -> None:
        self.average = {name: tensor.to(device) for name, tensor in self.average.items()}

    def state_dict(self) -> dict[str, int | dict[str, Tensor]]:
        return {"updates": self.updates, "average": {name: t.clone() for name, t in self.average.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["average"].keys() != self.average.keys():
            raise ValueError("the stored weight average belongs to a model with other parameters")
        self.updates = int(state["updates"])
        for name, tensor in state["average"].items():
            self.average[name].copy_(tensor)


class StochasticAverage(WeightAverage):
    """The mean of the weights at every N-th step from `start` on; before that, the weights themselves.

    start: a step or, below 1, a fraction of the training. every: number of steps N; None for one epoch.
    """

    def __init__(self, module: nn.Module, *, start: float, every: int | None = None) -> None:
        super().__init__(module, 0.5)
        self.start, self.every = start, every
        self.first_step = self.stride = 0

    def plan(self, *, steps: int, steps_of_epoch: int, quick: bool = False) -> None:
        """Determine the steps at which weights enter the mean.

        steps: of the training, -1 without limit.
        steps_of_epoch: of an epoch.
        quick: a trial of a few steps (`trainer.fast_dev_run`), which may end before the mean starts.
        """
        if self.start < 1 and steps < 0:
            raise ForgefieldError(
                f"training.swa.start={self.start:g} is a fraction of a training without limit; set trainer.max_epochs or "
                "max_steps, or a number of steps."
            )
        if self.stride:  # restored from a checkpoint
            return
        self.first_step = int(self.start * steps) if self.start < 1 else int(self.start)
        self.stride = self.every or max(steps_of_epoch, 1)
        if 0 <= steps <= self.first_step and not quick:
            raise ForgefieldError(
                f"training.swa.start={self.start:g}: the training ends at step {steps}, so nothing would be averaged."
            )

    def next_share(self) -> float:
        self.updates += 1
        since = self.updates - self.first_step
        if since <= 0:
            return 1.0
        count, remainder = divmod(since, self.stride)
        return 1.0 / count if remainder == 0 else (1.0 if count == 0 else 0.0)

    def state_dict(self) -> dict[str, int | dict[str, Tensor]]:
        return {**super().state_dict(), "first_step": self.first_step, "stride": self.stride}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.first_step, self.stride = int(state["first_step"]), int(state["stride"])


class ScheduleFreeAverage(WeightAverage):
    """The weights x of a schedule-free optimiser, in the place of a running average.

    Between two calls of `exchange` the module has x; the second one restores y exactly.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 0.5)
        self.average = {}
        self._optimiser: ScheduleFree | None = None
        self._kept: list[Tensor] = []

    def bind(self, optimiser: ScheduleFree) -> None:
        """Set the optimiser that trains the module."""
        self._optimiser = optimiser

    def update(self) -> None:
        self.updates += 1

    def next_share(self) -> float:
        self.updates += 1
        return 0.0

    def update_with_share(self, share: Tensor) -> None:
        """Nothing: the optimiser has updated the average."""

    @torch.no_grad()
    def exchange(self) -> None:
        weights: list[Tensor] = list(self._weights.values())
        if self._kept:
            torch._foreach_copy_(weights, self._kept)
            self._kept = []
            return
        if self._optimiser is None:
            return
        groups = {id(p): group for group in self._optimiser.param_groups for p in group["params"]}
        averages = [self._optimiser.averaged(groups[id(p)], p) if id(p) in groups else p.clone() for p in weights]
        self._kept = [weight.detach().clone() for weight in weights]
        torch._foreach_copy_(weights, averages)

    def to(self, device: torch.device) -> None:
        """Nothing: the state of the optimiser is on the device of the weights."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])


def weight_average(module: nn.Module, training: TrainingOptions) -> WeightAverage | None:
    """The average that the optimiser, `training.swa` or `training.ema` describes; None without any of them."""
    if is_schedule_free(training.optimizer):
        return ScheduleFreeAverage(module)
    if training.swa is not None:
        return StochasticAverage(module, start=training.swa.start, every=training.swa.every)
    return WeightAverage(module, training.ema) if training.ema else None
