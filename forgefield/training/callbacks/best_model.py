"""Keeps the weights to deploy: `best.safetensors` after every improvement, `last.safetensors` at the end.

Both hold the averaged weights where there is an average. They are for use; continuing a run takes a checkpoint.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from safetensors.torch import save as safetensors_bytes

from forgefield.files import write_whole


class BestModel(Callback):
    """Watches `monitor`, the smaller the better. Must come behind the callback that closes rows of metrics."""

    def __init__(self, folder: Path, monitor: str) -> None:
        self.folder = folder
        self.monitor = monitor
        self.best: float | None = None

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.monitor.startswith("train/"):
            self._judge(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor.startswith("train/") and epoch_is_whole(trainer):
            self._judge(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._write("last", trainer, pl_module)
        if trainer.is_global_zero and not (self.folder / "best.safetensors").exists():
            self._write("best", trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def _judge(self, trainer: L.Trainer, pl_module: Any) -> None:
        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        if math.isfinite(value) and (self.best is None or value < self.best):
            self.best = value
            self._write("best", trainer, pl_module)

    def _write(self, which: str, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        about = {"step": trainer.global_step, "epoch": trainer.current_epoch, self.monitor: self.best}
        # One entry: with several, safetensors writes them in random order, and equal runs would differ in bytes.
        content = safetensors_bytes(pl_module.averaged_state(), metadata={"about": json.dumps(about)})
        write_whole(self.folder / f"{which}.safetensors", content)


def epoch_is_whole(trainer: L.Trainer) -> bool:
    """Whether the epoch that Lightning ends was run to its end; `max_steps` can cut it short."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.completed >= trainer.num_training_batches
