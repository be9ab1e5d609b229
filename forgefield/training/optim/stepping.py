"""Base of Forgefield's optimisers: a step with or without a closure, as torch defines it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch.optim import Optimizer


class SteppingOptimiser(Optimizer, ABC):
    """A subclass changes the weights in `take_step`, which has no gradients."""

    @abstractmethod
    def take_step(self) -> None:
        """Change the weights by their gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take_step()
        return loss
