"""Captured steps of a training: gradient and update of one or several optimiser steps as one CUDA graph.

Frames and grid points share this engine. What a batch is, where its gradient goes and which sums it adds to is the work of an
adapter (`StepWork`). Contract: everything that changes from step to step (samples, learning rates, shares of the average) is in
tensors of fixed addresses that are written before a replay; the optimiser has created its state in a step before the first
capture; capturing changes nothing, because everything that the warm-up changes is restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.inference.capture import Replays
from forgefield.training.optim.captured_update import CapturedUpdate, constant_settings

WARM_UPS = 3
"""Executions of the steps before they are captured."""


class StepWork(Protocol):
    """The part of captured steps that depends on the kind of samples."""

    def launch(self, length: int, number: int) -> Sequence[Tensor] | None:
        """Launch step `number` of a graph of `length` steps: its gradient, and the sums of its loss and errors. Returns the
        gradients; None if the weights have been updated as well."""
        ...

    def changed(self) -> list[Tensor]:
        """Tensors that a step changes, except those of the update."""
        ...

    def refresh(self) -> None:
        """Called after weights were changed outside of captured steps."""
        ...


class CapturedSteps:
    """Steps of `work` with an update, captured in graphs of 1, n, n // 4, n // 16, ... of them. n: of `update`."""

    def __init__(self, work: StepWork, update: CapturedUpdate) -> None:
        self.work, self.update = work, update
        self.lengths: list[int] = [*(n for power in range(8) if (n := update.n // 4**power) > 1), 1]
        """Numbers of steps of graphs."""
        self._graphs: Replays[None] = Replays(update.device, warm_ups=WARM_UPS)
        self._settings = constant_settings(update.optimiser)

    @property
    def captures(self) -> bool:
        return self._graphs.captures

    def longest(self, n: int) -> int:
        """Number of steps of the longest graph of at most `n` steps."""
        return max(length for length in self.lengths if length <= max(n, 1))

    def run(self, length: int) -> None:
        """Execute `length` steps, whose inputs are in place."""
        if length not in self._graphs:
            self.capture(length)
        self._graphs.run(length)

    def capture(self, length: int) -> None:
        """Capture a graph of `length` steps, in place of an earlier one."""
        with self.state_restored():
            self._graphs.add(length, lambda: self._launch(length))

    def reset(self) -> None:
        """Discard what was captured."""
        self._graphs.clear()

    def require_same_settings(self) -> None:
        """Raise ForgefieldError if a setting that captured steps contain has been changed."""
        if constant_settings(self.update.optimiser) != self._settings:
            raise ForgefieldError(
                "training.engine: captured steps follow learning rates only, but a scheduler or callback has changed another "
                "setting of the optimiser (such as betas or weight_decay); use training.engine=eager, and with OneCycleLR and "
                "CyclicLR training.scheduler.cycle_momentum=false."
            )

    def seconds(self, length: int, repeats: int = 4) -> float:
        """Shortest time of several replays on a GPU, which change nothing."""
        times: list[float] = []
        with self.state_restored():
            for _ in range(repeats):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self._graphs.run(length)
                stop.record()
                stop.synchronize()
                times.append(1e-3 * start.elapsed_time(stop))
        return min(times)

    @contextmanager
    def state_restored(self) -> Iterator[None]:
        """Restore at the end what steps change: weights, averages, the state of the optimiser, sums."""
        update = self.update.update
        tensors = [*update.changed(), *self.work.changed()]
        before, calls = [tensor.detach().clone() for tensor in tensors], update.calls
        try:
            yield
        finally:
            if self.captures:
                torch.cuda.synchronize()  # after an error another stream may still be writing
            with torch.no_grad():
                for tensor, value in zip(tensors, before):
                    tensor.copy_(value)
            update.calls = calls
            self.work.refresh()

    def _launch(self, length: int) -> None:
        """What is captured."""
        for number in range(length):
            gradients = self.work.launch(length, number)
            if gradients is None:
                continue
            self.update.update.use(gradients)
            self.update.launch(number)
            self.work.refresh()
