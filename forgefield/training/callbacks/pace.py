"""Measures the times of a step on each rank, and reports ranks that are slower than the others.

A step is divided by these events: the batch is available, the wait for the counts of all ranks, the gradients are complete,
they are averaged, the weights are updated. Time without waiting and averaging is the work of a rank; a rank whose work takes
longer than that of the others is reported in the log. On a GPU these are CUDA events, which are read when a row of metrics is
written, without synchronisation during steps.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TypeAlias

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from forgefield.parallel.ranks import Ranks
from forgefield.parallel.reductions import StepExchange
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.training.run.journal import Journal
from forgefield.training.step_loop import ObservesSteps

BEHIND = 1.3
"""A rank is reported if its work takes this many times as long as that of the median rank."""
MAX_STEPS = 512
"""Maximum number of steps that are measured between two rows of metrics."""
Mark: TypeAlias = "torch.cuda.Event | float"
"""An event of a step: on a GPU, or a time in seconds."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step. `compute` includes communication if the strategy mixes the two (Lightning's ddp)."""

    data: float
    compute: float
    communication: float
    update: float

    @property
    def work(self) -> float:
        """Time without waiting for other ranks."""
        return self.data + self.compute

    @property
    def total(self) -> float:
        return self.data + self.compute + self.communication + self.update


class Pace(ObservesSteps):
    """Compares the speed of ranks. exchange: the message of every batch; waiting for it is not work of a rank."""

    def __init__(self, ranks: Ranks, journal: Journal, exchange: StepExchange | None = None) -> None:
        self.ranks = ranks
        self.journal = journal
        self.exchange = exchange
        self._on_gpu = False
        self._ready_at: float | None = None
        self._marks: dict[str, Mark] = {}
        self._reductions: list[tuple[Mark, Mark]] = []
        """Begin and end of the reductions of this batch except the last one: a batch may contain many steps."""
        self._data = 0.0
        self._steps: list[_MeasuredStep] = []
        self._reported: dict[int, float] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        self._on_gpu = strategy.root_device.type == "cuda"
        if isinstance(strategy, SimpleDDPStrategy):
            strategy.mark = self._mark
        if self.exchange is not None:
            self.exchange.mark = self._mark

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ready_at = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._data = time.perf_counter() - self._ready_at if self._ready_at is not None else 0.0
        self._marks, self._reductions = {}, []
        self._mark("begins")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if not isinstance(trainer.strategy, SimpleDDPStrategy):
            # Lightning's ddp sends gradients during the backward pass; only the time before it is certainly work of this rank.
            self._mark("reduction begins")
            self._marks["reduction ends"] = self._marks["reduction begins"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        self._mark("ends")
        if "reduction ends" in self._marks and len(self._steps) < MAX_STEPS:
            self._steps.append(_MeasuredStep(self._data, self._marks, self._reductions))
        self._ready_at = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._compare()
        self._ready_at = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compare()

    def take(self) -> StepTimes | None:
        """Mean times of the steps since the last call; None without steps."""
        steps, self._steps = self._steps, []
        if not steps:
            return None
        if self._on_gpu:
            torch.cuda.synchronize()
        return StepTimes(*(statistics.fmean(column) for column in zip(*(step.times() for step in steps))))

    def _mark(self, event: str) -> None:
        if event == "reduction begins" and "reduction ends" in self._marks:
            self._reductions.append((self._marks["reduction begins"], self._marks.pop("reduction ends")))
        if self._on_gpu:
            cuda_event = torch.cuda.Event(enable_timing=True)
            cuda_event.record()
            self._marks[event] = cuda_event
        else:
            self._marks[event] = time.perf_counter()

    def _compare(self) -> None:
        times = self.take()
        work = self.ranks.all_gather(times.work if times is not None else None)
        measured = sorted(value for value in work if value is not None)
        if not self.ranks.is_rank_zero or len(measured) < 2:
            return
        median = measured[(len(measured) - 1) // 2]
        for rank, value in enumerate(work):
            if value is None or value < BEHIND * median:
                continue
            ratio = value / median
            if ratio > 1.5 * self._reported.get(rank, 0.0):  # once, and again if it has become much worse
                self._reported[rank] = ratio
                self.journal.notify(
                    f"{self.ranks.describe(rank)} is slow: its work takes {1000 * value:.0f} ms per step, {ratio:.1f} times as "
                    "long as that of the median rank; all others wait for it."
                )


@dataclass(frozen=True)
class _MeasuredStep:
    """data: seconds until the batch was available. earlier_reductions: begin and end of all reductions except the last."""

    data: float
    marks: dict[str, Mark]
    earlier_reductions: list[tuple[Mark, Mark]]

    def times(self) -> tuple[float, float, float, float]:
        """Seconds: data, compute, communication, update."""
        waiting = self._between("wait begins", "wait ends")
        earlier = sum(_seconds(*pair) for pair in self.earlier_reductions)
        compute = self._between("begins", "reduction begins") - earlier
        after = self._between("reduction ends", "ends")
        # The counts of a batch are awaited before its gradients, the stop requests of a block after all its steps.
        if self._between("reduction ends", "wait begins") > 0:
            after -= waiting
        else:
            compute -= waiting
        return self.data, compute, waiting + earlier + self._between("reduction begins", "reduction ends"), after

    def _between(self, earlier: str, later: str) -> float:
        """Seconds between two events; 0 if one of them did not happen."""
        marks = self.marks
        return _seconds(marks[earlier], marks[later]) if earlier in marks and later in marks else 0.0


def _seconds(a: Mark, b: Mark) -> float:
    if isinstance(a, float) or isinstance(b, float):
        assert isinstance(a, float)
        assert isinstance(b, float)
        return b - a
    return float(a.elapsed_time(b)) / 1000
