"""The one small message of a batch: how many labels all ranks hold together, and whether anybody wants to stop.

A loss of several terms has a denominator for each, and the backward pass must know them. They depend on labels only, so the
message is sent before the forward pass and read behind it: it travels while the model is evaluated. The wishes that travel
along are read one batch later, by which time every rank has the same answer without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class StepExchange:
    """wishes: gives this rank's flags, a tuple of numbers of fixed length, zero where there is nothing to say."""

    def __init__(self, wishes: Callable[[], tuple[float, ...]]) -> None:
        self._wishes = wishes
        self._flags: dict[tuple[float, ...], Tensor] = {}
        self._message: Tensor | None = None
        self._work: Any = None
        self._n_counts = 0
        self._heard: Tensor | None = None
        self._pinned = torch.empty(0)
        self._arrived: torch.cuda.Event | None = None
        self.mark: Callable[[str], None] = lambda moment: None
        """Called with `wait begins` and `wait ends` around the wait for the counts, for whoever measures it."""

    def send(self, counts: Tensor) -> None:
        """Start adding up `counts`, (n,) float64, over all ranks."""
        wishes = self._wishes()
        if wishes not in self._flags:  # once: a copy to the device makes the host wait
            self._flags[wishes] = torch.tensor(wishes, dtype=counts.dtype, device=counts.device)
        self._message = torch.cat([counts, self._flags[wishes]])
        self._n_counts = len(counts)
        self._work = dist.all_reduce(self._message, async_op=True)

    def counts(self) -> Tensor:
        """The counts of all ranks together. On a GPU the stream waits for them, not the host."""
        assert self._message is not None
        self.mark("wait begins")
        self._work.wait()
        self.mark("wait ends")
        self._heard = self._message[self._n_counts :]
        if self._heard.is_cuda:
            # On its way to the host while the step is computed, so that nobody has to wait for the whole step to read it.
            if self._arrived is None:
                self._pinned = torch.empty(self._heard.shape, dtype=self._heard.dtype, pin_memory=True)
                self._arrived = torch.cuda.Event()
            self._heard = self._pinned.copy_(self._heard, non_blocking=True)
            self._arrived.record()
        return self._message[: self._n_counts]

    def wishes(self) -> list[float]:
        """Flags of the latest message, added up over all ranks: the same on each. Empty before the first message."""
        if self._heard is None:
            return []
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._heard.tolist()
