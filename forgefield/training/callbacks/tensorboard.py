"""TensorBoard events. Level 1: losses, errors and the learning rate; level 2: also weights and gradients as histograms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback


class TensorBoardLog(Callback):
    """folder: where event files go. from_step: events behind this step, left by a crash, are hidden. Rank 0 alone writes."""

    def __init__(self, folder: Path, level: int, from_step: int) -> None:
        self.folder = folder
        self.level = level
        self.from_step = from_step
        self._writer: Any = None
        self._gradients: dict[str, torch.Tensor] = {}

    @property
    def writer(self) -> Any:
        """TensorBoard's writer while a training runs, else None; diagnosis callbacks write there too."""
        return self._writer

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=self.from_step + 1 if self.from_step else None)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not pl_module.automatic_optimization:  # the gradients of the last step are still there
            self.on_before_optimizer_step(trainer, pl_module, None)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        last_of_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._writer is not None and self.level >= 2 and last_of_epoch:
            self._gradients = {
                name: parameter.grad.detach().clone()
                for name, parameter in pl_module.trained.named_parameters()
                if parameter.grad is not None
            }

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        metrics = dict(trainer.callback_metrics)
        if self._writer is None:
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), trainer.global_step)
        if self.level >= 2:
            for name, parameter in pl_module.trained.named_parameters():
                self._writer.add_histogram(f"weights/{name}", parameter.detach(), trainer.global_step)
            for name, gradient in self._gradients.items():
                self._writer.add_histogram(f"gradients/{name}", gradient, trainer.global_step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def tensorboard_writers(trainer: L.Trainer) -> list[Any]:
    """The writers of the run's TensorBoard events: one on rank 0 while it trains, else none."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [c.writer for c in callbacks if isinstance(c, TensorBoardLog) and c.writer is not None]
