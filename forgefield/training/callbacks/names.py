"""Short names of the callbacks that a config may ask for."""

from __future__ import annotations

from typing import Any

from forgefield.config.components import builtin_class
from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

CALLBACKS = {
    "gradient_check": "forgefield.diagnosis.gradient_check.GradientCheck",
    "forward_nan": "forgefield.diagnosis.forward_nan.ForwardNaNDetection",
    "training_helper": "forgefield.diagnosis.training_helper.TrainingHelper",
    "autocorrelation": "forgefield.diagnosis.autocorrelation.ModelAutocorrelation",
    "loss_spike": "forgefield.diagnosis.loss_spike.LossSpike",
    "throughput": "forgefield.diagnosis.throughput_meter.ThroughputMeter",
    "energy": "forgefield.diagnosis.energy.EnergyMeter",
    "sam": "forgefield.training.optim.sam.SAM",
    "learning_curve": "forgefield.training.callbacks.lcurve.LearningCurve",
}


def short_callback(name: str) -> Any:
    """The class of one of Forgefield's callbacks by its short name."""
    if name not in CALLBACKS:
        raise ForgefieldError(
            f"callbacks: there is no '{name}'; there are {', '.join(CALLBACKS)}, and import paths such as "
            f"my_callbacks.Announce.{did_you_mean(str(name), CALLBACKS)}"
        )
    return builtin_class(CALLBACKS[name])
