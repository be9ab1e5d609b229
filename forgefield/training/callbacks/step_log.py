"""Loss and learning rate every `trainer.log_every_n_steps` steps, and the settings of the run, for TensorBoard and loggers.

Rows of metrics, with errors and validation, are written by `metrics_log.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.training.callbacks.tensorboard import tensorboard_writers
from forgefield.training.optim.learning_rate import current_learning_rate


class StepLog(Callback):
    """settings: the resolved config, which loggers are given as hyperparameters. tensorboard: whether the run writes events of
    TensorBoard; the same on all ranks. from_step: where a resumed run begins."""

    def __init__(self, settings: Mapping[str, Any], *, tensorboard: bool, from_step: int) -> None:
        self.settings, self.tensorboard = settings, tensorboard
        self._seen = from_step

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and not getattr(trainer, "fast_dev_run", False):
            for logger in trainer.loggers:
                logger.log_hyperparams(dict(self.settings))
                logger.save()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 0)
        before, self._seen = self._seen, step
        if not (self.tensorboard or trainer.loggers) or not every or outputs is None:
            return
        if step // every == before // every:  # a batch may be many steps
            return
        # Lightning gives the share of this batch in an accumulation, and each rank has its share of the whole.
        loss = trainer.strategy.reduce(outputs["loss"] * trainer.accumulate_grad_batches, reduce_op="mean")
        if not trainer.is_global_zero:
            return
        values = {"step/loss": float(loss), "step/lr": current_learning_rate(trainer.optimizers[0])}
        for writer in tensorboard_writers(trainer):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": float(trainer.current_epoch), **values}, step=step)
