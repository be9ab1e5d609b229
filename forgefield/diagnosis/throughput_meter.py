"""`ThroughputMeter`: frames and atoms per second, time per step, time spent waiting for data, and memory.

It uses `Throughput`, which excludes validation and checkpoints. Nothing is read from the device within a row; at the end of a
row the host waits for the device once, so that times are those of completed work. Times are not part of a checkpoint; a
resumed run starts a new row.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import Protocol, runtime_checkable

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from forgefield.data.sampling.loader import FrameLoader
from forgefield.diagnosis.callback import Diagnosis
from forgefield.errors import ForgefieldError
from forgefield.training.module import Throughput

COLUMNS = ("step", "frames_per_second", "atoms_per_second", "median_ms", "slow_ms", "data_share", "memory_mb")


class ThroughputMeter(Diagnosis):
    """Writes a table of speeds, and reports a training that waits for its data.

    every: steps in a row of the table. waiting: share of the time spent waiting for data above which it is reported.
    """

    name = "throughput"
    measures_time = True

    def __init__(self, every: int = 100, waiting: float = 0.3) -> None:
        super().__init__()
        if every < 1 or not 0 < waiting <= 1:
            raise ForgefieldError("ThroughputMeter: every is at least 1, waiting between 0 and 1.")
        self.every, self.waiting = every, waiting
        self.numbers = {"rows": {name: [] for name in COLUMNS}, "device": ""}
        self._throughput = Throughput()
        self._steps: list[float] = []
        self._data = 0.0
        self._since: float | None = None
        self._row_step = 0
        """Step of the last row. A batch may be many steps, and with accumulation many batches are one."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.numbers["device"] = str(pl_module.device)
        self._throughput, self._steps, self._data = Throughput(), [], 0.0
        self._row_step = trainer.global_step
        _reset_peak(pl_module.device)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._throughput.resume()
        self._since = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._throughput.resume()
        if self._since is not None:
            self._data += time.perf_counter() - self._since
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        n_frames, n_atoms = _sizes(trainer, batch, batch_idx)
        self._throughput.count(frames=n_frames, atoms=n_atoms)
        self._since = time.perf_counter()
        self._steps.append(self._since - self._begin)
        if trainer.global_step // self.every > self._row_step // self.every:
            self._row(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._throughput.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._steps:
            self._row(trainer, pl_module)
        super().on_train_end(trainer, pl_module)

    def _row(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type != "cpu":
            torch.get_device_module(pl_module.device).synchronize()
        self._throughput.pause()
        counted = self._throughput.take()
        self._throughput.resume()
        seconds = counted["seconds"] or 0.0
        frames, atoms = _over_ranks(pl_module.device, counted["frames"] or 0, counted["atoms"] or 0)
        ordered = sorted(self._steps)
        data_share = min(self._data / seconds, 1.0) if seconds > 0 else 0.0
        values = (
            trainer.global_step,
            frames / seconds if seconds > 0 else None,
            atoms / seconds if atoms and seconds > 0 else None,
            1000 * statistics.median(ordered),
            1000 * ordered[int(0.95 * (len(ordered) - 1))],
            data_share,
            peak_memory_mb(pl_module.device),
        )
        for name, value in zip(COLUMNS, values):
            self.numbers["rows"][name].append(value)
            if name != "step" and value is not None:
                self.scalar(trainer, name, float(value))
        self._steps, self._data = [], 0.0
        self._row_step = trainer.global_step
        if min(self.numbers["rows"]["data_share"][-3:]) > self.waiting and len(self.numbers["rows"]["step"]) > 3:
            self.find(
                trainer,
                pl_module,
                "waiting for data",
                f"{100 * data_share:.0f} % of the time is spent waiting for batches.",
                "Give the loader threads (data.workers), or convert the data into a store (forgefield data convert).",
            )


def peak_memory_mb(device: torch.device) -> float | None:
    """Peak memory in MiB: of the device, or of this process where the device is a CPU; None if it is not available."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "xpu":
        return torch.xpu.max_memory_allocated(device) / 2**20
    if device.type == "mps":  # current memory only
        return torch.mps.driver_allocated_memory() / 2**20
    return None


@runtime_checkable
class _Graphs(Protocol):
    """A batch of PyTorch Geometric."""

    num_graphs: int
    num_nodes: int


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "xpu":
        torch.xpu.reset_peak_memory_stats(device)


def _sizes(trainer: L.Trainer, batch: object, batch_idx: int) -> tuple[int, int]:
    """Number of frames and atoms in the batch of this rank; 0 atoms if the number is not available."""
    if isinstance(batch, dict) and "n_atoms" in batch and "positions" in batch:
        loader = trainer.train_dataloader
        frames = loader.own_frames(batch_idx) if isinstance(loader, FrameLoader) else batch["n_atoms"].shape[0]
        return frames, batch["positions"].shape[0] if frames else 0
    if isinstance(batch, _Graphs):
        return batch.num_graphs, batch.num_nodes
    values = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
    first = next((value for value in values if isinstance(value, Tensor) and value.dim()), None)
    return (0 if first is None else first.shape[0]), 0


def _over_ranks(device: torch.device, *counts: float) -> list[float]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return list(counts)
    total = torch.tensor(counts, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()
