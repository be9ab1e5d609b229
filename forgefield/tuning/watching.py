"""A callback that reports the progress of a training to an Optuna trial, and ends a training that is not promising."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.training.callbacks.best_model import epoch_is_whole

if TYPE_CHECKING:
    from optuna import Trial


class ReportTrial(Callback):
    """Reports `monitor` at every validation, counted from 0. The reported values are part of checkpoints, so that a training
    resumed by another trial reports all of them again. may_end: whether the training may be ended early."""

    state_key = "report_trial"

    def __init__(self, trial: Trial, monitor: str, *, may_end: bool) -> None:
        self.trial, self.monitor, self.may_end = trial, monitor, may_end
        self.values: list[float] = []

    @property
    def best(self) -> float:
        """The smallest finite value; NaN where there is none."""
        finite = [value for value in self.values if math.isfinite(value)]
        return min(finite, default=math.nan)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for number, value in enumerate(self.values):
            self._report(value, number)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.monitor.startswith("train/"):
            self._take(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitor.startswith("train/") and epoch_is_whole(trainer):
            self._take(trainer)

    def state_dict(self) -> dict[str, list[float]]:
        return {"values": list(self.values)}

    def load_state_dict(self, state_dict: dict[str, list[float]]) -> None:
        self.values = list(state_dict["values"])

    def _take(self, trainer: L.Trainer) -> None:
        """Store and report the present value, and end the training where Optuna advises it."""
        import optuna

        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        self.values.append(value)
        self._report(value, len(self.values) - 1)
        if self.may_end and self.trial.should_prune():
            raise optuna.TrialPruned

    def _report(self, value: float, number: int) -> None:
        if self.may_end and math.isfinite(value):
            self.trial.report(value, number)
