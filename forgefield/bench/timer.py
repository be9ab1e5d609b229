"""The timer of `forgefield bench`: a Lightning callback that times steps and their parts, and the measurement it writes."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer

from forgefield.data.batch import Batch
from forgefield.data.sampling.loader import FrameLoader
from forgefield.files import write_atomically
from forgefield.parallel.reductions import StepExchange
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.training.callbacks.pace import StepTimes
from forgefield.training.engines.engine import Engine, MemoryLimitedEngine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.module import TrainingModule
from forgefield.training.run.summary import device_name

PARTS = tuple(field.name for field in fields(StepTimes))
"""Where the time of a step goes: data, compute, communication, update."""


@dataclass(frozen=True)
class Measurement:
    """Times of `steps` optimiser steps of `ranks` processes. Counts are over all ranks; times of parts are in ms per step.

    seconds: of all steps, on the slowest rank. mean_ms, max_ms: by part, over ranks. waiting_ms: the part of the communication
    spent waiting for the last rank, mean over ranks. marks_synchronised: whether the parts were timed in separate steps, see
    `StepTimer`. message_bytes: gradients of one step. full_batches: whether every rank had as many frames in a step as the
    config specifies. core_share: processor time relative to the time spent computing, of the rank with the smallest value;
    below one, other programs used its cores; None with a GPU. memory_bytes: peak memory of tensors on the GPU of rank 0.
    resident_bytes: peak memory of the process of rank 0. first_step_seconds: from when the first batch is ready until the
    end of its step, including compilation, on the slowest rank. engine, derivative: those in use. captured:
    the engine whose step CUDA graphs replay.
    """

    ranks: int
    steps: int
    seconds: float
    samples: int
    atoms: int
    edges: int
    mean_ms: dict[str, float]
    max_ms: dict[str, float]
    waiting_ms: float
    communication_in_compute: bool
    marks_synchronised: bool
    message_bytes: int
    parameters: int
    frames_per_rank: int
    accumulate: int
    full_batches: bool
    strategy: str
    backend: str
    threads: int
    device: str
    nodes: int
    core_share: float | None
    memory_bytes: int | None
    resident_bytes: int
    first_step_seconds: float
    engine: str
    captured: str | None
    derivative: str
    precision: str

    @property
    def step_ms(self) -> float:
        return 1000 * self.seconds / self.steps

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def atoms_per_second(self) -> float:
        return self.atoms / self.seconds

    @property
    def edges_per_second(self) -> float:
        return self.edges / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """All fields and the rates, as JSON values."""
        return {
            **asdict(self),
            "step_ms": self.step_ms,
            "samples_per_second": self.samples_per_second,
            "atoms_per_second": self.atoms_per_second,
            "edges_per_second": self.edges_per_second,
            "seconds_per_100_samples": 100 / self.samples_per_second,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


class StepTimer(Callback):
    """Times `steps` steps after `warmup` others, ends the training, and has rank 0 write the measurement to `file`.

    The host runs ahead of a GPU, so times on the host are not those of the device. There, complete steps are timed first
    without synchronisation, and then the same number again with the device synchronised at each mark, to time the parts. On a
    CPU one pass gives both.
    """

    def __init__(self, file: str, steps: int, warmup: int) -> None:
        self.file = Path(file)
        self.steps, self.warmup = steps, warmup
        self.on_cpu = True
        self.full_batches = True
        self.seconds = self.processor_seconds = 0.0
        self.n_timed = self.frames = self.atoms = self.edges = 0
        self.parts: list[StepTimes] = []
        self.message_bytes = 0
        self.first_step_seconds: float | None = None
        self._ready: float | None = None
        self._n_warm = 0
        self._is_timed = self._is_marked = False
        self._since: tuple[float, float] | None = None
        self._mark = 0.0
        self._current = dict.fromkeys(PARTS, 0.0)

    # ---- marks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        self.on_cpu = strategy.root_device.type == "cpu"
        self.full_batches = _is_full(trainer, 0)
        for source in (strategy, _run_module(pl_module).exchange):
            if isinstance(source, (SimpleDDPStrategy, StepExchange)):
                source.mark = _both(source.mark, self._at)
        # The module's hook runs after those of callbacks, and what it does (the average of weights) is part of the update.
        module_hook = pl_module.on_train_batch_end

        def hook(outputs: STEP_OUTPUT, batch: Batch, batch_idx: int) -> None:
            module_hook(outputs, batch, batch_idx)
            self._end_batch(trainer, batch, batch_idx)

        pl_module.on_train_batch_end = hook  # type: ignore[method-assign]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _run_module(pl_module).ranks.barrier()  # a rank that has written files must not look slow in its next step
        self._begin_step(trainer, 0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._ready is None:
            self._ready = self._now()
        self._charge("data")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._charge("compute")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not self.message_bytes:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.message_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)

    def _at(self, event: str) -> None:
        """Called by the strategy or the exchange when communication begins or ends."""
        self._charge("communication" if event.endswith("ends") else "compute")

    def _charge(self, part: str) -> None:
        """Add the time since the last mark to this part of the step."""
        if not self._is_marked:
            return
        now = self._now()
        self._current[part] += now - self._mark
        self._mark = now

    def _now(self) -> float:
        """The time at which the device has completed all work."""
        if not self.on_cpu:
            torch.accelerator.synchronize()
        return time.perf_counter()

    # ---- steps

    def _begin_step(self, trainer: L.Trainer, batch: int) -> None:
        """Decide how to time the step that begins with this batch of the epoch."""
        is_due = self._n_warm >= self.warmup and (not self.full_batches or _is_full(trainer, batch))
        self._is_timed = is_due and self.n_timed < self.steps
        self._is_marked = is_due and (self._is_timed if self.on_cpu else not self._is_timed)
        if not self._is_timed:
            self._stop_clock()
        elif self._since is None:
            self._since = self._now(), time.process_time()
        if self._is_marked:
            self._current = dict.fromkeys(PARTS, 0.0)
            self._mark = self._now()

    def _end_batch(self, trainer: L.Trainer, batch: Batch, batch_idx: int) -> None:
        self._charge("update")
        if self._is_timed:
            n_frames = _loader(trainer).own_frames(batch_idx)
            self.frames += n_frames
            self.atoms += batch["positions"].shape[0] if n_frames else 0
            self.edges += batch["edge_index"].shape[1] if n_frames else 0
        epoch_ends = trainer.is_last_batch
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not epoch_ends:
            return
        if self.first_step_seconds is None and self._ready is not None:
            self.first_step_seconds = self._now() - self._ready
        self._n_warm += self._n_warm < self.warmup
        self.n_timed += self._is_timed
        if self._is_marked:
            self.parts.append(StepTimes(**self._current))
        if len(self.parts) == self.steps:
            trainer.should_stop = True
        if trainer.should_stop or epoch_ends:
            self._stop_clock()
        else:
            self._begin_step(trainer, batch_idx + 1)

    def _stop_clock(self) -> None:
        if self._since is not None:
            self.seconds += self._now() - self._since[0]
            self.processor_seconds += time.process_time() - self._since[1]
            self._since = None

    # ---- result

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = _run_module(pl_module)
        ranks = module.ranks
        counts = (self.frames, self.atoms, self.edges)
        computing = sum(times.total - times.communication for times in self.parts)
        parts = [astuple(times) for times in self.parts]
        share = self.processor_seconds / computing
        gathered = ranks.gather((self.seconds, counts, parts, share, self.first_step_seconds))
        if ranks.is_rank_zero:
            measurement = self._measurement(trainer, module, gathered)
            write_atomically(self.file, json.dumps(measurement.as_dict(), indent=1) + "\n")

    def _measurement(self, trainer: L.Trainer, module: TrainingModule, gathered: Sequence[Any]) -> Measurement:
        """gathered: from each rank, (seconds, (frames, atoms, edges), parts of each step, share of a core, seconds of the
        first step)."""
        strategy, ranks = trainer.strategy, module.ranks
        device = strategy.root_device
        seconds, counts, steps, shares, first_steps = zip(*gathered)
        engine = module.engine
        assert isinstance(engine, Engine)
        engine = (
            engine.inner if isinstance(engine, MemoryLimitedEngine) else engine
        )  # without the wrapper for low memory
        frames, atoms, edges = (sum(column) for column in zip(*counts))
        by_rank = [[1000 * statistics.fmean(column) for column in zip(*parts)] for parts in steps]
        exchanges = [[step[PARTS.index("communication")] for step in parts] for parts in steps]
        averages_itself = ranks.world_size > 1 and not isinstance(strategy, SimpleDDPStrategy)
        kinds = dict(kind.split(":") for kind in ranks.backend.split(",") if ":" in kind)
        return Measurement(
            ranks=ranks.world_size,
            steps=self.n_timed,
            seconds=max(seconds),
            samples=frames,
            atoms=atoms,
            edges=edges,
            mean_ms={part: statistics.fmean(row[i] for row in by_rank) for i, part in enumerate(PARTS)},
            max_ms={part: max(row[i] for row in by_rank) for i, part in enumerate(PARTS)},
            waiting_ms=1000 * _waiting(exchanges),
            communication_in_compute=averages_itself,
            marks_synchronised=not self.on_cpu,
            message_bytes=self.message_bytes,
            parameters=sum(p.numel() for p in module.executor.model.parameters()),
            frames_per_rank=_loader(trainer).frames_per_rank,
            accumulate=trainer.accumulate_grad_batches,
            full_batches=self.full_batches,
            strategy=type(strategy).__name__,
            backend=kinds.get(device.type, ranks.backend),
            threads=torch.get_num_threads(),
            device=device_name(device),
            nodes=len(ranks.nodes),
            core_share=min(shares) if self.on_cpu else None,
            memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            resident_bytes=resident_bytes(),
            first_step_seconds=max(first_steps),
            engine=engine.name,
            captured=engine.inner.name if isinstance(engine, GraphsEngine) else None,
            derivative=engine.function.derivative,
            precision=str(module.options.precision),
        )


def resident_bytes() -> int:
    """Peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _waiting(communication: Sequence[Sequence[float]]) -> float:
    """Mean over ranks and steps of the time that a rank spent in the exchange before the last one arrived.

    communication: (ranks, steps). The rank that arrives last spends the shortest time in it.
    """
    return statistics.fmean(statistics.fmean(step) - min(step) for step in zip(*communication))


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    def both(event: str) -> None:
        first(event)
        second(event)

    return both


def _loader(trainer: L.Trainer) -> FrameLoader:
    loader = trainer.train_dataloader
    assert isinstance(loader, FrameLoader)
    return loader


def _run_module(pl_module: L.LightningModule) -> TrainingModule:
    assert isinstance(pl_module, TrainingModule)
    return pl_module


def _is_full(trainer: L.Trainer, batch: int) -> bool:
    """Whether all ranks have as many frames as configured, in every batch of the step that begins with this one."""
    loader, accumulate = _loader(trainer), trainer.accumulate_grad_batches
    steps = range(batch, batch + accumulate)
    return steps[-1] < len(loader) and all(loader.is_full(step) for step in steps)
