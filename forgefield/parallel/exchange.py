"""One small all_reduce per batch: the numbers of labels on all ranks, and flags such as a request to stop.

A loss of several terms has a denominator for each, which the backward pass needs. They depend on labels only, so the
reduction is started before the forward pass and read after it: it runs while the model is evaluated. The flags are read one
batch later, when every rank has the same values without waiting for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


class StepExchange:
    """own_flags: returns the flags of this rank, a tuple of fixed length of zeros and ones."""

    def __init__(self, own_flags: Callable[[], tuple[float, ...]]) -> None:
        self._own_flags = own_flags
        self._flag_tensors: dict[tuple[float, ...], Tensor] = {}
        self._message: Tensor | None = None
        self._work: dist.Work | None = None
        self._n_counts = 0
        self._received: Tensor | None = None
        self._pinned = torch.empty(0)
        self._arrived: torch.cuda.Event | None = None
        self.mark: Callable[[str], None] = lambda event: None
        """Called with `wait begins` and `wait ends` around the wait for the counts, for time measurements."""

    def send(self, counts: Tensor) -> None:
        """Start adding up `counts`, (n,) float64, over all ranks."""
        flags = self._own_flags()
        if flags not in self._flag_tensors:  # once: a copy to the device makes the host wait
            self._flag_tensors[flags] = torch.tensor(flags, dtype=counts.dtype, device=counts.device)
        self._message = torch.cat([counts, self._flag_tensors[flags]])
        self._n_counts = len(counts)
        self._work = dist.all_reduce(self._message, async_op=True)

    def counts(self) -> Tensor:
        """The counts summed over all ranks. On a GPU the stream waits for them, not the host."""
        assert self._message is not None
        assert self._work is not None
        self.mark("wait begins")
        self._work.wait()
        self.mark("wait ends")
        self._received = self._message[self._n_counts :]
        if self._received.is_cuda:
            # On its way to the host while the step is computed, so that reading it does not wait for the whole step.
            if self._arrived is None:
                self._pinned = torch.empty(self._received.shape, dtype=self._received.dtype, pin_memory=True)
                self._arrived = torch.cuda.Event()
            self._received = self._pinned.copy_(self._received, non_blocking=True)
            self._arrived.record()
        return self._message[: self._n_counts]

    def flags(self) -> list[float]:
        """Flags of the latest message, summed over all ranks: the same on each. Empty before the first message."""
        if self._received is None:
            return []
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._received.tolist()
