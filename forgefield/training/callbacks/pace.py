"""Where the time of a step goes on each rank, and which rank keeps the others waiting.

A step is divided at these moments: the batch is there, the counts of all ranks are waited for, the gradients are complete, they
are averaged, the weights are updated. What is not waiting or averaging is a rank's own work; a rank that needs longer for it
than the others is named in the log. On a GPU the moments are events in its stream, read when a row of metrics is written, so
that nothing waits for them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from forgefield.parallel.ranks import Ranks
from forgefield.parallel.reductions import StepExchange
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.training.run.journal import Journal

BEHIND = 1.3
"""A rank is named when its own work takes this many times as long as that of the middle rank."""
KEPT = 512
"""Steps between two rows that are measured, the first ones."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step. `compute` holds communication as well where the strategy mixes the two (Lightning's ddp)."""

    data: float
    compute: float
    communication: float
    update: float

    @property
    def own(self) -> float:
        return self.data + self.compute

    @property
    def total(self) -> float:
        return self.data + self.compute + self.communication + self.update


class Pace(Callback):
    """ranks, journal: who is compared and who is told. exchange: the message of every batch, whose wait is not own work."""

    def __init__(self, ranks: Ranks, journal: Journal, exchange: StepExchange | None = None) -> None:
        self.ranks = ranks
        self.journal = journal
        self.exchange = exchange
        self._on_gpu = False
        self._ready_at: float | None = None
        self._marks: dict[str, Any] = {}
        self._reductions: list[tuple[Any, Any]] = []
        """Moments at which reductions of the batch begin and end, but for its last: a batch may be many steps."""
        self._data = 0.0
        self._steps: list[tuple[float, dict[str, Any]]] = []
        self._told: dict[int, float] = {}

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
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._data = time.perf_counter() - self._ready_at if self._ready_at is not None else 0.0
        self._marks, self._reductions = {}, []
        self._mark("begins")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        if not isinstance(trainer.strategy, SimpleDDPStrategy):
            # Lightning's ddp sends gradients while the backward pass runs; only what lies before it is certainly our own.
            self._mark("reduction begins")
            self._marks["reduction ends"] = self._marks["reduction begins"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._mark("ends")
        self._marks["earlier reductions"] = self._reductions
        if "reduction ends" in self._marks and len(self._steps) < KEPT:
            self._steps.append((self._data, self._marks))
        self._ready_at = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._compare()
        self._ready_at = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compare()

    def take(self) -> StepTimes | None:
        """Mean times of the steps since the last call; None where there was none."""
        steps, self._steps = self._steps, []
        if not steps:
            return None
        if self._on_gpu:
            torch.cuda.synchronize()
        return StepTimes(*(statistics.fmean(column) for column in zip(*(_parts(*step) for step in steps))))

    def _mark(self, moment: str) -> None:
        if moment == "reduction begins" and "reduction ends" in self._marks:
            self._reductions.append((self._marks["reduction begins"], self._marks.pop("reduction ends")))
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[moment] = event
        else:
            self._marks[moment] = time.perf_counter()

    def _compare(self) -> None:
        times = self.take()
        own = self.ranks.all_gather(times.own if times is not None else None)
        known = sorted(value for value in own if value is not None)
        if not self.ranks.is_rank_zero or len(known) < 2:
            return
        middle = known[(len(known) - 1) // 2]
        for rank, value in enumerate(own):
            if value is None or value < BEHIND * middle:
                continue
            ratio = value / middle
            if ratio > 1.5 * self._told.get(rank, 0.0):  # once, and again when it has become much worse
                self._told[rank] = ratio
                self.journal.notify(
                    f"{self.ranks.describe(rank)} falls behind: its own work takes {1000 * value:.0f} ms a step, "
                    f"{ratio:.1f} times as long as the middle rank's; all others wait for it."
                )


def _parts(data: float, marks: dict[str, Any]) -> tuple[float, float, float, float]:
    """data, compute, communication, update of one step."""

    def since(earlier: str, later: str) -> float:
        return _between(marks[earlier], marks[later]) if earlier in marks else 0.0

    waiting = since("wait begins", "wait ends")
    before = sum(_between(*pair) for pair in marks.get("earlier reductions", ()))
    compute = since("begins", "reduction begins") - before
    after = since("reduction ends", "ends")
    # The counts of a batch are waited for before its gradients, the wishes of a block behind all its steps.
    late = (
        "wait begins" in marks
        and "reduction ends" in marks
        and _between(marks["reduction ends"], marks["wait begins"]) > 0
    )
    compute, after = (compute, after - waiting) if late else (compute - waiting, after)
    return data, compute, waiting + before + since("reduction begins", "reduction ends"), after


def _between(a: Any, b: Any) -> float:
    return a.elapsed_time(b) / 1000 if isinstance(a, torch.cuda.Event) else b - a
