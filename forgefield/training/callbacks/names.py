"""Short names of the callbacks that a config may ask for."""

from __future__ import annotations

from typing import Any

from forgefield.config.components import own_class
from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

_HERE = "forgefield.training.callbacks"
CALLBACKS = {
    "gradient_check": f"{_HERE}.gradient_check.GradientCheck",
    "forward_nan": f"{_HERE}.forward_nan.ForwardNaNDetection",
    "training_helper": f"{_HERE}.training_helper.TrainingHelper",
    "autocorrelation": f"{_HERE}.autocorrelation.ModelAutocorrelation",
    "loss_spike": f"{_HERE}.loss_spike.LossSpike",
    "throughput": f"{_HERE}.throughput_meter.ThroughputMeter",
    "energy": f"{_HERE}.energy.EnergyMeter",
    "sam": f"{_HERE}.sam.SAM",
    "learning_curve": f"{_HERE}.lcurve.LearningCurve",
}


def short_callback(name: str) -> Any:
    """The class of one of Forgefield's callbacks by its short name."""
    if name not in CALLBACKS:
        raise ForgefieldError(
            f"callbacks: there is no '{name}'; there are {', '.join(CALLBACKS)}, and import paths such as "
            f"my_callbacks.Announce.{did_you_mean(str(name), CALLBACKS)}"
        )
    return own_class(CALLBACKS[name])
