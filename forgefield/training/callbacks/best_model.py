"""Keeps the weights to deploy: `best.safetensors` after every improvement, `last.safetensors` at the end.

Both hold the averaged weights where there is an average. They are for use; continuing a run takes a checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.errors import ForgefieldError
from forgefield.weights import digest, read_weights, write_weights


class BestModel(Callback):
    """Watches `monitor`, the smaller the better. Must come behind the callback that closes rows of metrics."""

    state_key = "best_model"

    def __init__(self, folder: Path, monitor: str) -> None:
        self.folder = folder
        self.monitor = monitor
        self.best: float | None = None
        self._epochs: int | None = None
        """Whole epochs, once training has ended in this process."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.monitor.startswith("train/"):
            self._judge(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor.startswith("train/") and epoch_is_whole(trainer):
            self._judge(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._epochs = trainer.current_epoch - (0 if epoch_is_whole(trainer) else 1)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Also called where a finished training was only restored, so that what a crash kept from being written is written."""
        if not trainer.is_global_zero:
            return
        if not _holds(self.folder / "last.safetensors", trainer.global_step, pl_module):
            self._write("last", trainer, pl_module)
        if not (self.folder / "best.safetensors").exists():
            if self.best is not None:
                raise ForgefieldError(
                    f"{self.folder / 'best.safetensors'} is missing and cannot be restored, because the last "
                    "checkpoint does not hold the best weights. Restore it from a backup, or copy last.safetensors to that "
                    "name to use the last weights as the best ones."
                )
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
        epoch = trainer.current_epoch if self._epochs is None else self._epochs
        about = {"step": trainer.global_step, "epoch": epoch, self.monitor: self.best}
        write_weights(self.folder / f"{which}.safetensors", pl_module.averaged_state(), about)


def _holds(path: Path, step: int, pl_module: Any) -> bool:
    """Whether a file holds the weights of this step, undamaged."""
    try:
        stored = read_weights(path)
    except ForgefieldError:
        return False
    return stored.about.get("step") == step and stored.sha256 == digest(pl_module.averaged_state())


def epoch_is_whole(trainer: L.Trainer) -> bool:
    """Whether the epoch that Lightning ends was run to its end; `max_steps` can cut it short."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.completed >= trainer.num_training_batches
