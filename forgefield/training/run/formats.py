"""The format of checkpoints, and the migrations of its earlier versions.

Version 1, of Forgefield 0.1.0: states of callbacks under the names of their classes.
Version 2: states of callbacks under fixed names (`state_key`); the position inside the epoch as `forgefield_position`; the
measured choice of kernels of LDOS trainings as `fused_kernels`.
"""

from __future__ import annotations

from typing import Any

from forgefield.formats import Format

POSITION = "forgefield_position"
"""Where the training stands inside its epoch: samples seen, number of ranks, and the limits under which it ended, if it did."""
RANDOM = "forgefield_random"
"""States of the random number generators of each rank."""

_STATE_KEYS_OF_CLASSES = {
    "MetricsLog": "metrics_log",
    "BestModel": "best_model",
    "RunProgress": "progress",
    "LearningCurve": "learning_curve",
    "LossSpike": "loss_spike",
    "GradientCheck": "gradient_check",
    "TrainingHelper": "training_helper",
    "ForwardNaNDetection": "forward_nan",
    "ModelAutocorrelation": "autocorrelation",
    "ThroughputMeter": "throughput",
    "EnergyMeter": "energy",
    "ReportTrial": "report_trial",
}
_EARLY_STOPPING_OF_VERSION_1 = "_Patience{'monitor': '"


def early_stopping_key(monitor: str) -> str:
    """The name of the state of `training.early_stopping`; the state of one metric says nothing about another."""
    return f"early_stopping:{monitor}"


def _fixed_names(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Version 1 to version 2."""
    renamed = {"forgefield_place": POSITION}
    checkpoint = {renamed.get(key, key): value for key, value in checkpoint.items()}
    callbacks = checkpoint.get("callbacks", {})
    checkpoint["callbacks"] = {_state_key(name): state for name, state in callbacks.items()}
    state = dict(checkpoint.get("forgefield", {}))
    if "own_kernels" in state:
        state["fused_kernels"] = state.pop("own_kernels")
    return {**checkpoint, "forgefield": state}


def _state_key(name: str) -> str:
    if name.startswith(_EARLY_STOPPING_OF_VERSION_1):
        return early_stopping_key(name.removeprefix(_EARLY_STOPPING_OF_VERSION_1).partition("'")[0])
    return _STATE_KEYS_OF_CLASSES.get(name, name)


CHECKPOINT = Format("a checkpoint", (_fixed_names,))
