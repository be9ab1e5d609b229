"""Inputs of earlier versions of DeePMD-kit, in the form of the present one.

Version 1 named the data in `training` itself and gave a decay rate; 3.1 had warm-up and optimiser in `training`. Values are not
changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.section import is_number
from forgefield.errors import ForgefieldError

DATA_OF_VERSION_1 = (
    "systems",
    "set_prefix",
    "batch_size",
    "sys_probs",
    "sys_prob",
    "sys_weights",
    "auto_prob",
    "auto_prob_style",
)
WARM_UP = ("warmup_steps", "warmup_ratio", "warmup_start_factor")
OPTIMISER = {
    "opt_type": "type",
    **{name: name for name in ("weight_decay", "adam_beta1", "adam_beta2", "momentum", "muon_momentum", "lr_adjust")},
    **{name: name for name in ("lr_adjust_coeff", "muon_2d_only", "min_2d_dim", "kf_blocksize")},
    **{f"kf_{end}_pref_{term}": f"kf_{end}_pref_{term}" for end in ("start", "limit") for term in ("e", "f")},
}
"""Keys of the optimiser that were keys of `training`, and what they are called now."""


def updated(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The input with everything where the present version has it."""
    content = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    training = content.get("training")
    if not isinstance(training, dict):
        return content
    if "systems" in training:
        _from_version_1(content, training, file)
    _move(content, training, {name: name for name in WARM_UP}, "learning_rate", file)
    _move(content, training, OPTIMISER, "optimizer", file)
    return content


def _from_version_1(content: dict[str, Any], training: dict[str, Any], file: Path) -> None:
    if "training_data" in training:
        raise ForgefieldError(
            f"{file}: 'training.systems' is the form of DeePMD-kit 1 and 'training.training_data' that of 2 and 3; keep one."
        )
    data = {name: training.pop(name) for name in DATA_OF_VERSION_1 if name in training}
    if "sys_prob" in data:
        data["sys_probs"] = data.pop("sys_prob")
    training["training_data"] = data
    if isinstance(content.get("learning_rate"), dict):
        _give_last_rate(content["learning_rate"], training.get("stop_batch", training.get("numb_steps")))


def _give_last_rate(rate: dict[str, Any], steps: object) -> None:
    """A constant decay rate gives the same curve as the last learning rate that it leads to."""
    numbers: list[Any] = [rate.get("start_lr"), rate.get("decay_rate"), steps, rate.get("decay_steps", 5000)]
    if all(is_number(number) and number > 0 for number in numbers):
        first, decay, length, every = numbers
        rate["stop_lr"] = float(first * decay ** (length / every))
        del rate["decay_rate"]


def _move(content: dict[str, Any], training: dict[str, Any], names: dict[str, str], section: str, file: Path) -> None:
    moved = {new: training.pop(old) for old, new in names.items() if old in training}
    if not moved:
        return
    target = content.get(section) or {}
    if not isinstance(target, Mapping):
        return  # which is refused soon
    for name in moved:
        if name in target:
            raise ForgefieldError(f"{file}: '{section}.{name}' is also given in 'training', its old place; keep one.")
    content[section] = {**target, **moved}
