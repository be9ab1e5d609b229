"""Exponential moving average of the weights.

The average lives beside the model, never in its place: training always continues from the raw weights. For validation,
test and saving the two are exchanged inside a `with`, so that they cannot stay exchanged by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average <- d * average + (1 - d) * weights after every optimiser step, with d = min(decay, (1 + n) / (10 + n)).

    The second form of d keeps the first n steps from weighing down the average.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"the decay of a weight average lies between 0 and 1, not {decay}")
        self.decay = decay
        self.updates = 0
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        torch._foreach_lerp_(list(self.average.values()), list(self._weights.values()), self.next_share())

    def next_share(self) -> float:
        """Count one more update; the share of the present weights in it."""
        self.updates += 1
        return 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))

    @torch.no_grad()
    def take_in(self, share: Tensor) -> None:
        """An update whose share, from `next_share`, lies on the device."""
        averages = list(self.average.values())
        changes = torch._foreach_sub(list(self._weights.values()), averages)
        torch._foreach_mul_(changes, share)
        torch._foreach_add_(averages, changes)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the module holds the average; after it, exactly its own weights again."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        for name, weight in self._weights.items():
            kept = weight.clone()
            weight.copy_(self.average[name])
            self.average[name].copy_(kept)

    def to(self, device: torch.device) -> None:
        self.average = {name: tensor.to(device) for name, tensor in self.average.items()}

    def state_dict(self) -> dict[str, int | dict[str, Tensor]]:
        return {"updates": self.updates, "average": {name: t.clone() for name, t in self.average.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        if state["average"].keys() != self.average.keys():
            raise ValueError("the stored weight average belongs to a model with other parameters")
        self.updates = int(state["updates"])
        for name, tensor in state["average"].items():
            self.average[name].copy_(tensor)
