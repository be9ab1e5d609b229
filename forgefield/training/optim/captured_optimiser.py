"""An optimiser whose update is captured without the gradient, because something has to be done between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.training.engines.captured import CapturedSteps
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.captured_update import CapturedUpdate
from forgefield.training.optim.update import Clip, Update, mark_stepped, restore_settings

T = TypeVar("T")
Addresses = tuple[int | None, ...]


class CapturedOptimiser:
    """Replaces the `step` of an optimiser that can be captured (`capture_refusal`), which Lightning calls. Callbacks have to
    read gradients before it.

    average: updated with the weights, if any.
    static_gradients: whether gradients are in the same tensors in every step; if not, they are copied to such tensors first.
    """

    def __init__(
        self,
        optimiser: torch.optim.Optimizer,
        average: WeightAverage | None,
        *,
        static_gradients: Callable[[], bool] = lambda: True,
    ) -> None:
        self.optimiser, self.average, self.static_gradients = optimiser, average, static_gradients
        self.update = CapturedUpdate(Update(optimiser, average, clip=(None, None), reduce=None), by_kernel=True)
        self.steps: CapturedSteps[Addresses] = CapturedSteps(self, self.update)
        """By the addresses of gradients, which differ between sizes of batches."""
        self._copies: dict[Tensor, Tensor] = {}
        """Copies of gradients that are not static, by weight."""
        self.update.make_capturable()
        vars(optimiser)["step"] = self.step

    @property
    def clip(self) -> Clip:
        return self.update.update.clip

    @clip.setter
    def clip(self, clip: Clip) -> None:
        self.update.update.clip = clip

    def step(self, closure: Callable[[], T] | None = None) -> T | None:
        """One step, as `torch.optim.Optimizer.step`."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        mark_stepped(self.optimiser)
        groups = self.optimiser.param_groups
        weights = [p for group in groups for p in group["params"] if p.grad is not None]
        shares = self.update.next_shares(1)
        if not weights:  # a callback removed the gradients: the step counts and changes nothing
            return result
        if len(groups) != len(self.update.rates):
            raise ForgefieldError(
                "training.engine=graphs: a group of parameters was added to the optimiser during the training, which captured "
                "steps do not support; use training.engine=compile or eager."
            )
        self.update.write([[group["lr"] for group in groups]], shares)
        if not all(weight in self.optimiser.state for weight in weights):
            self._first_update()
        else:
            if not self.static_gradients():
                self._copy_gradients(weights)
            self.steps.run(tuple(None if p.grad is None else p.grad.data_ptr() for g in groups for p in g["params"]))
        return result

    @torch.no_grad()
    def _copy_gradients(self, weights: Sequence[Tensor]) -> None:
        """Copy the gradients to tensors of this object."""
        for weight in weights:
            if weight not in self._copies:
                self._copies[weight] = torch.empty_like(weight)
        copies = [self._copies[weight] for weight in weights]
        torch._foreach_copy_(copies, [weight.grad for weight in weights if weight.grad is not None])
        for weight, copy in zip(weights, copies):
            weight.grad = copy

    @torch.no_grad()
    def _first_update(self) -> None:
        """The first step, in which the optimiser creates its state, is not captured; its step counts are exact."""
        restore_settings(self.optimiser)
        self.update.update([group["lr"] for group in self.optimiser.param_groups], self.update.shares[0])
        self.update.make_capturable()
        self.steps.reset()  # graphs refer to step counts that have been replaced

    # ---- the work of captured steps besides the update

    def launch(self, key: Addresses, number: int) -> bool:
        return True

    def changed(self) -> list[Tensor]:
        """Gradients, which torch clips in place."""
        return [p.grad for group in self.optimiser.param_groups for p in group["params"] if p.grad is not None]

    def refresh(self) -> None:
        """Weights have no copies here."""
