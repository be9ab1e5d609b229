"""A callback that tells a trial of Optuna how its training goes, and ends the training when the trial has no hope."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.training.callbacks.best_model import epoch_is_whole


class ReportTrial(Callback):
    """Reports `monitor` at every validation, counted from 0. Checkpoints keep what was reported, so that a training that goes
    on in another trial tells it all. may_end: whether the training may be ended early."""

    state_key = "report_trial"

    def __init__(self, trial: Any, monitor: str, *, may_end: bool) -> None:
        self.trial, self.monitor, self.may_end = trial, monitor, may_end
        self.values: list[float] = []

    @property
    def best(self) -> float:
        """The smallest value, NaN where there is none."""
        finite = [value for value in self.values if math.isfinite(value)]
        return min(finite, default=math.nan)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for number, value in enumerate(self.values):
            self._tell(value, number)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.monitor.startswith("train/"):
            self._report(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.monitor.startswith("train/") and epoch_is_whole(trainer):
            self._report(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = list(state_dict["values"])

    def _report(self, trainer: L.Trainer) -> None:
        import optuna

        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        self.values.append(value)
        self._tell(value, len(self.values) - 1)
        if self.may_end and self.trial.should_prune():
            raise optuna.TrialPruned

    def _tell(self, value: float, number: int) -> None:
        if self.may_end and math.isfinite(value):
            self.trial.report(value, number)
