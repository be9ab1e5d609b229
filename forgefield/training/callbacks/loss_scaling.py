"""Weights of a loss that change over a training, as a Lightning callback with the names and arguments of Open MatSciML.

It works with any LightningModule that keeps its weights in a mapping `task_loss_scaling`; ours does too. A value is a function
of the trainer's own step or epoch count: the first step has exactly the first value, the last step exactly the last one, on any
number of ranks, and a resumed training goes on where it was.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.tasks.schedules import sigmoid_progress
from forgefield.training.trainer import epochs_of_fit, steps_of_fit

Frequency = Literal["step", "epoch"]
Level = Literal["DEBUG", "INFO", "WARNING", "CRITICAL"]


class ScalingSchedule(ABC):
    """key: of the target in `task_loss_scaling`. Values go from `initial_value` to `end_value` (None: they stay).
    step_frequency: whether they change with every step of the optimiser or with every epoch."""

    def __init__(
        self, key: str, initial_value: float, end_value: float | None, step_frequency: Frequency = "epoch"
    ) -> None:
        if step_frequency not in ("step", "epoch"):
            raise ForgefieldError(f"step_frequency of the schedule of {key} is step or epoch, not {step_frequency!r}.")
        self.key, self.step_frequency = key, step_frequency
        self.initial_value = float(initial_value)
        self.end_value = self.initial_value if end_value is None else float(end_value)

    def value(self, place: int, length: int) -> float:
        """Of a step or epoch, counted from 0, of so many in all."""
        if place <= 0:
            return self.initial_value
        if place >= length - 1:
            return self.end_value
        return self.initial_value + (self.end_value - self.initial_value) * self.progress(place / (length - 1))

    @abstractmethod
    def progress(self, share: float) -> float:
        """How far the value has come after this share of the training; 0 at 0 and 1 at 1."""

    def __repr__(self) -> str:
        words = f"{self.initial_value:g} to {self.end_value:g} by {self.step_frequency}"
        return f"{type(self).__name__}({self.key}: {words})"


class LinearScalingSchedule(ScalingSchedule):
    """Evenly from the first value to the last."""

    def __init__(
        self, key: str, initial_value: float, end_value: float | None = None, step_frequency: Frequency = "epoch"
    ) -> None:
        super().__init__(key, initial_value, end_value, step_frequency)

    def progress(self, share: float) -> float:
        return share


class SigmoidScalingSchedule(ScalingSchedule):
    """A logistic curve: half way at `center_frac` of the training, the steeper the smaller `curvature` (its slope is minus the
    logarithm of that), stretched so that both ends are reached exactly."""

    def __init__(
        self,
        key: str,
        initial_value: float,
        end_value: float,
        center_frac: float,
        curvature: float = 5e-7,
        step_frequency: Frequency = "step",
    ) -> None:
        super().__init__(key, initial_value, end_value, step_frequency)
        if not 0 < center_frac < 1:
            raise ForgefieldError(f"center_frac of the schedule of {key} lies between 0 and 1, it is {center_frac}.")
        if not 0 < curvature < 1:
            raise ForgefieldError(f"curvature of the schedule of {key} lies between 0 and 1, it is {curvature}.")
        self.center_frac, self.curvature = float(center_frac), float(curvature)

    def progress(self, share: float) -> float:
        return sigmoid_progress(share, slope=-math.log(self.curvature), centre=self.center_frac)


class LossScalingScheduler(Callback):
    """Sets `task_loss_scaling[key]` of the module before every batch. log_level: of what it tells at the start of epochs."""

    def __init__(self, *schedules: ScalingSchedule, log_level: Level = "INFO") -> None:
        if not schedules:
            raise ForgefieldError("LossScalingScheduler needs at least one schedule.")
        keys = [schedule.key for schedule in schedules]
        for key in keys:
            if keys.count(key) > 1:
                raise ForgefieldError(
                    f"LossScalingScheduler has two schedules for {key}; a weight has one value at a time."
                )
        self.schedules = schedules
        self._logger = logging.getLogger("forgefield.loss_scaling")
        self._logger.setLevel(log_level)
        self._lengths: dict[str, int] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = _weights(pl_module)
        for schedule in self.schedules:
            if schedule.key not in weights:
                hint = did_you_mean(schedule.key, list(weights)) or f" It has: {', '.join(weights)}."
                raise ForgefieldError(f"LossScalingScheduler: task_loss_scaling has no '{schedule.key}'.{hint}")
        self._lengths = {name: _length(trainer, name) for name in {s.step_frequency for s in self.schedules}}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        places = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        weights = _weights(pl_module)
        for schedule in self.schedules:
            frequency = schedule.step_frequency
            weights[schedule.key] = schedule.value(places[frequency], self._lengths[frequency])
            if batch_idx == 0:
                self._logger.info("epoch %d: %s = %g", trainer.current_epoch, schedule.key, weights[schedule.key])


def _weights(module: L.LightningModule) -> MutableMapping[str, float]:
    weights: Any = getattr(module, "task_loss_scaling", None)
    if not isinstance(weights, MutableMapping):
        raise ForgefieldError(
            f"LossScalingScheduler sets weights in the mapping task_loss_scaling of a module, and {type(module).__name__} has "
            "none; give it one, such as self.task_loss_scaling = {'energy': 1.0, 'forces': 10.0}."
        )
    return weights


def _length(trainer: L.Trainer, frequency: str) -> int:
    """Steps or epochs of the whole training."""
    found = steps_of_fit(trainer) if frequency == "step" else epochs_of_fit(trainer)
    if found <= 0:
        raise ForgefieldError(
            f"LossScalingScheduler: schedules by {frequency} end with the training, which has no end; set max_epochs or "
            "max_steps of the trainer."
        )
    return found
