"""A Lightning callback that times the epochs of a training, validation not counted; named by import path in configs."""

from __future__ import annotations

import time

import torch
from lightning.pytorch.callbacks import Callback

SECONDS: list[float] = []
"""Of every epoch: process CPU time on a CPU, wall time with the GPU waited for on a GPU."""


class EpochClock(Callback):
    def on_train_epoch_start(self, trainer, pl_module) -> None:
        self._since = self._now(pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx + 1 == trainer.num_training_batches:
            SECONDS.append(self._now(pl_module) - self._since)

    def _now(self, pl_module) -> float:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()
