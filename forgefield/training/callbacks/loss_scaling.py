"""Schedules of loss weights as a Lightning callback, with the names and arguments of Open MatSciML.

It works with any LightningModule that has its loss weights in a mapping `task_loss_scaling`, as Forgefield's has. A value is a
function of the trainer's step or epoch: the first step has exactly the first value and the last step exactly the last one, on
any number of ranks and in resumed trainings.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Literal

import lightning as L
from lightning.pytorch.callbacks import Callback

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.tasks.schedules import sigmoid_progress
from forgefield.training.trainer import epochs_of_fit, steps_of_fit

Frequency = Literal["step", "epoch"]
Level = Literal["DEBUG", "INFO", "WARNING", "CRITICAL"]


class ScalingSchedule(ABC):
    """The weight of one target, from `initial_value` to `end_value` (None: constant).

    key: of the target in `task_loss_scaling`.
    step_frequency: whether the weight changes with every optimiser step or every epoch.
    """

    def __init__(
        self, key: str, initial_value: float, end_value: float | None, step_frequency: Frequency = "epoch"
    ) -> None:
        if step_frequency not in ("step", "epoch"):
            raise ForgefieldError(
                f"step_frequency of the schedule of {key} must be step or epoch, not {step_frequency!r}."
            )
        self.key, self.step_frequency = key, step_frequency
        self.initial_value = float(initial_value)
        self.end_value = self.initial_value if end_value is None else float(end_value)

    def value(self, index: int, length: int) -> float:
        """The weight. index: of the step or epoch, from 0. length: number of steps or epochs."""
        if index <= 0:
            return self.initial_value
        if index >= length - 1:
            return self.end_value
        return self.initial_value + (self.end_value - self.initial_value) * self.progress(index / (length - 1))

    @abstractmethod
    def progress(self, share: float) -> float:
        """Progress of the value after this fraction of the training, from 0 to 1."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.key}: {self.initial_value:g} to {self.end_value:g} by {self.step_frequency})"
        )


class LinearScalingSchedule(ScalingSchedule):
    """Linear from the first value to the last."""

    def __init__(
        self, key: str, initial_value: float, end_value: float | None = None, step_frequency: Frequency = "epoch"
    ) -> None:
        super().__init__(key, initial_value, end_value, step_frequency)

    def progress(self, share: float) -> float:
        return share


class SigmoidScalingSchedule(ScalingSchedule):
    """A logistic curve, scaled and shifted such that both ends are reached exactly.

    center_frac: fraction of the training at which half of the change is reached.
    curvature: the slope is minus its logarithm.
    """

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
            raise ForgefieldError(f"center_frac of the schedule of {key} must be between 0 and 1, not {center_frac}.")
        if not 0 < curvature < 1:
            raise ForgefieldError(f"curvature of the schedule of {key} must be between 0 and 1, not {curvature}.")
        self.center_frac, self.curvature = float(center_frac), float(curvature)

    def progress(self, share: float) -> float:
        return sigmoid_progress(share, slope=-math.log(self.curvature), centre=self.center_frac)


class LossScalingScheduler(Callback):
    """Sets `task_loss_scaling[key]` of the module before every batch. log_level: of its logger."""

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
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        indices = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        weights = _weights(pl_module)
        for schedule in self.schedules:
            frequency = schedule.step_frequency
            weights[schedule.key] = schedule.value(indices[frequency], self._lengths[frequency])
            if batch_idx == 0:
                self._logger.info("epoch %d: %s = %g", trainer.current_epoch, schedule.key, weights[schedule.key])


def _weights(module: L.LightningModule) -> MutableMapping[str, float]:
    weights: object = getattr(module, "task_loss_scaling", None)
    if not isinstance(weights, MutableMapping):
        raise ForgefieldError(
            f"LossScalingScheduler: {type(module).__name__} has no mapping task_loss_scaling of loss weights; define it, for "
            "example self.task_loss_scaling = {'energy': 1.0, 'forces': 10.0}."
        )
    return weights


def _length(trainer: L.Trainer, frequency: str) -> int:
    """Number of steps or epochs of the training."""
    length = steps_of_fit(trainer) if frequency == "step" else epochs_of_fit(trainer)
    if length <= 0:
        raise ForgefieldError(
            f"LossScalingScheduler: schedules by {frequency} need a training with a limit; set max_epochs or max_steps of the "
            "trainer."
        )
    return length
