"""Writes the weights to deploy, `best.safetensors` after every improvement and `last.safetensors` at the end; early stopping.

Both files contain the averaged weights if there is an average. They are written while the training continues, before any later
checkpoint; of several improvements in a short time only the last may be written. A run is resumed from checkpoints, not from
these files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping

from forgefield.errors import ForgefieldError
from forgefield.training.module import training_module
from forgefield.training.run.checkpoint import early_stopping_key
from forgefield.training.run.writer import BackgroundWriter
from forgefield.weights import contiguous, digest, read_weights, write_weights


class BestModel(Callback):
    """Writes the weights with the lowest value of the metric `monitor`. Must come after the callback that writes metrics."""

    state_key = "best_model"

    def __init__(self, folder: Path, monitor: str, writer: BackgroundWriter) -> None:
        self.folder, self.writer = folder, writer
        self.monitor = monitor
        self.best: float | None = None
        self._epochs: int | None = None
        """Number of complete epochs; None until the training has ended in this process."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.monitor.startswith("train/"):
            self._write_if_better(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitor.startswith("train/") and epoch_is_complete(trainer):
            self._write_if_better(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._epochs = trainer.current_epoch - (0 if epoch_is_complete(trainer) else 1)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write files that do not exist yet. Also called if a finished training was only restored, after a crash."""
        if not trainer.is_global_zero:
            return
        self.writer.wait()
        if not _contains(self.folder / "last.safetensors", trainer):
            self._write("last", trainer)
        if not (self.folder / "best.safetensors").exists():
            if self.best is not None:
                raise ForgefieldError(
                    f"{self.folder / 'best.safetensors'} is missing and cannot be restored, because the last "
                    "checkpoint does not contain the best weights. Restore it from a backup, or copy last.safetensors to that "
                    "name to use the last weights as the best ones."
                )
            self._write("best", trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def _write_if_better(self, trainer: L.Trainer) -> None:
        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        if math.isfinite(value) and (self.best is None or value < self.best):
            self.best = value
            self._write("best", trainer)

    def _write(self, which: str, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        epoch = trainer.current_epoch if self._epochs is None else self._epochs
        about = {"step": trainer.global_step, "epoch": epoch, self.monitor: self.best}
        state = training_module(trainer.lightning_module).averaged_snapshot()
        path = self.folder / f"{which}.safetensors"
        self.writer.submit(which, lambda: write_weights(path, contiguous(state.content()), about))


def _contains(path: Path, trainer: L.Trainer) -> bool:
    """Whether a file contains the present weights, undamaged."""
    try:
        stored = read_weights(path)
    except ForgefieldError:
        return False
    state = contiguous(training_module(trainer.lightning_module).averaged_snapshot().content())
    return stored.about.get("step") == trainer.global_step and stored.sha256 == digest(state)


def epoch_is_complete(trainer: L.Trainer) -> bool:
    """Whether all batches of the epoch that ends were used; `max_steps` may end it earlier."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.completed >= trainer.num_training_batches


class EarlyStop(EarlyStopping):
    """Early stopping with a message. A resumed run restores the count, and uses the patience of the present config.

    notify: called with a sentence for the user.
    """

    def __init__(self, monitor: str, *, patience: int, min_delta: float, notify: Callable[[str], None]) -> None:
        super().__init__(monitor, patience=patience, min_delta=min_delta, mode="min", check_finite=True)
        self.notify = notify
        self.best_epoch: int | None = None
        self.reason: str | None = None
        """Why the training was stopped; None if it was not."""

    @property
    def state_key(self) -> str:
        return early_stopping_key(self.monitor)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best_epoch": self.best_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
        self.best_epoch = state_dict.get("best_epoch")

    def _run_early_stopping_check(self, trainer: L.Trainer) -> None:
        before, stopped = float(self.best_score), trainer.should_stop
        super()._run_early_stopping_check(trainer)
        if float(self.best_score) != before:
            self.best_epoch = trainer.current_epoch + 1
        if trainer.should_stop and not stopped:
            self.reason = self._describe(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.reason is not None:
            self.notify(self.reason)

    def _describe(self, trainer: L.Trainer) -> str:
        value, best = float(trainer.callback_metrics[self.monitor]), float(self.best_score)
        when = f" in epoch {self.best_epoch}" if self.best_epoch is not None else ""
        best_value = f"Its best value was {best:.6g}{when}." if math.isfinite(best) else "It was never finite."
        stopped = f"Stopped early after epoch {trainer.current_epoch + 1}"
        if not math.isfinite(value):
            return f"{stopped}: {self.monitor} is {value}. {best_value} Lower training.lr, or check the data."
        by = f" by more than {abs(self.min_delta):g}" if self.min_delta else ""
        return (
            f"{stopped}: {self.monitor} has not improved{by} in the last {self.wait_count} validations "
            f"(training.early_stopping.patience={self.patience}); it is {value:.6g}. {best_value} To train further, raise the "
            "patience and run the same command again."
        )
