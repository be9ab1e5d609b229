"""Early stopping that says why: Lightning's, with the metric, its best value and when that was reached."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

from forgefield.training.run.formats import early_stopping_key


class EarlyStop(EarlyStopping):
    """notify: takes one sentence for the user. A resume takes over the count so far, but patience from the present config."""

    def __init__(self, monitor: str, *, patience: int, min_delta: float, notify: Callable[[str], None]) -> None:
        super().__init__(monitor, patience=patience, min_delta=min_delta, mode="min", check_finite=True)
        self.notify = notify
        self.best_epoch: int | None = None
        self.reason: str | None = None
        """Why the training was stopped; None while it is not."""

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

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.reason is not None:
            self.notify(self.reason)

    def _describe(self, trainer: L.Trainer) -> str:
        value, best = float(trainer.callback_metrics[self.monitor]), float(self.best_score)
        when = f" in epoch {self.best_epoch}" if self.best_epoch is not None else ""
        best_value = f"Its best value was {best:.6g}{when}." if math.isfinite(best) else "It never was finite."
        stopped = f"Stopped early after epoch {trainer.current_epoch + 1}"
        if not math.isfinite(value):
            return f"{stopped}: {self.monitor} is {value}. {best_value} Lower training.lr, or look at the data."
        by = f" by more than {abs(self.min_delta):g}" if self.min_delta else ""
        return (
            f"{stopped}: {self.monitor} has not improved{by} in the last {self.wait_count} validations "
            f"(training.early_stopping.patience={self.patience}); it is {value:.6g}. {best_value} To train further, raise the "
            "patience and run the same command again."
        )
