"""Captured steps of a training: gradient and update of one or several optimiser steps as one CUDA graph.

Frames and grid points share this engine. What a batch is, where its gradient goes and which sums it adds to is the work of an
adapter (`StepWork`). Contract: everything that changes from step to step (samples, learning rates, shares of the average) is in
tensors of fixed addresses that are written before a replay; the optimiser has created its state in a step before the first
capture; capturing changes nothing, because everything that the warm-up changes is restored.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from forgefield.inference.capture import Replays
from forgefield.training.optim.captured_update import CapturedUpdate

if TYPE_CHECKING:
    from torch.cuda.graphs import _POOL_HANDLE

    from forgefield.kernels.step.update import AdamStep

K = TypeVar("K", bound=Hashable, contravariant=True)


class StepWork(Protocol[K]):
    """The part of captured steps that depends on the kind of samples."""

    def launch(self, key: K, number: int) -> bool:
        """Launch the gradient of step `number` of the graph of a key, set `grad` of the weights, and add to the sums of loss
        and of errors. Returns whether the update is still to be done."""
        ...

    def changed(self) -> list[Tensor]:
        """Tensors that a step changes, except those of the update."""
        ...

    def refresh(self) -> None:
        """Called after weights were changed outside of this work."""
        ...


class CapturedSteps(Generic[K]):
    """Steps of `work` with an update, in one graph for each key: steps of a size, or a number of steps.

    warm_ups: executions before a capture. pool: memory that the graphs share, from `shared_pool`.
    """

    def __init__(
        self, work: StepWork[K], update: CapturedUpdate, *, warm_ups: int = 1, pool: _POOL_HANDLE | None = None
    ) -> None:
        self.work, self.update = work, update
        self._graphs: Replays[None] = Replays(update.device, warm_ups=warm_ups, pool=pool)
        self.kernels: dict[K, AdamStep | None] = {}
        """Kernels that graphs refer to."""
        self._settings = update.settings()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def captures(self) -> bool:
        return self._graphs.captures

    def run(self, key: K, n: int = 1) -> None:
        """Execute the `n` steps of a graph, whose inputs are in place. It is captured again after a change of a setting."""
        settings = self.update.settings()
        if settings != self._settings:
            self._settings = settings
            self.reset()
        if key not in self._graphs:
            self.capture(key, n)
        self._graphs.run(key)

    def capture(self, key: K, n: int = 1) -> None:
        """Capture the `n` steps of a graph, in place of an earlier one."""
        with self.state_restored():
            self._graphs.add(key, lambda: self._launch(key, n))
            if self.captures:
                self.kernels[key] = self.update.bind()

    def reset(self) -> None:
        """Discard what was captured."""
        self._graphs.clear()
        self.kernels.clear()

    def seconds(self, key: K, repeats: int = 4) -> float:
        """Shortest time of several replays on a GPU, which change nothing."""
        times: list[float] = []
        with self.state_restored():
            for _ in range(repeats):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self._graphs.run(key)
                stop.record()
                stop.synchronize()
                times.append(1e-3 * start.elapsed_time(stop))
        return min(times)

    @contextmanager
    def state_restored(self) -> Iterator[None]:
        """Restore at the end what steps change: weights, averages, the state of the optimiser, sums, the state of random
        numbers."""
        update = self.update.update
        tensors = [*update.changed(), *self.work.changed()]
        before, calls = [tensor.detach().clone() for tensor in tensors], update.calls
        try:
            with torch.random.fork_rng(devices=[self.update.device] if self.captures else []):
                yield
        finally:
            if self.captures:
                torch.cuda.synchronize()  # after an error another stream may still be writing
            with torch.no_grad():
                for tensor, value in zip(tensors, before):
                    tensor.copy_(value)
            update.calls = calls
            self.work.refresh()

    def _launch(self, key: K, n: int) -> None:
        """What is captured."""
        for number in range(n):
            if self.work.launch(key, number):
                self.update.launch(number)
                self.work.refresh()
