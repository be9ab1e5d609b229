"""The checks of the `training` section: values that have the right type and no meaning, settings that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forgefield.config import schema
from forgefield.config.nearest import did_you_mean
from forgefield.config.refusals import check_choice, wrong
from forgefield.config.sources import Sources
from forgefield.errors import ForgefieldError

PRECISIONS = ("float64", "float32", "tf32", "bf16-mixed", "fp16-mixed")
SCHEDULE = ("start", "finish", "finish_epochs", "finish_steps")
"""Keys of a schedule of precisions."""


def check_training(config: schema.Config, sources: Sources) -> None:
    """Refuse settings of a training that have no meaning or do not apply."""
    training = config.training
    _check_kernels(training, sources)
    _check_edges(config, sources)
    for pattern, factor in (training.lr_groups or {}).items():
        if not 0 < factor < float("inf"):
            hint = f"; what is not to be trained goes into training.freeze=[{pattern}]" if factor == 0 else ""
            raise wrong(sources, f"training.lr_groups.{pattern}", factor, f"a positive factor of training.lr{hint}")
    if training.lora is not None and "from" not in (config.model if isinstance(config.model, Mapping) else {}):
        raise ForgefieldError(
            f"{sources.where('training.lora')}: 'training.lora' changes the matrices of a trained model (model.from); those of "
            "a new one are random."
        )
    _check_swa(training, sources)
    _check_precision(training.precision, sources)


def _check_kernels(training: schema.TrainingOptions, sources: Sources) -> None:
    """Settings of kernels that cannot be used are not ignored."""
    given, defaults = training.kernels, schema.KernelOptions()
    if all(getattr(given, key) == getattr(defaults, key) for key in ("radial", "knots", "storage")):
        return
    for key, value in (
        ("training.derivative", training.derivative),
        ("training.engine", training.engine),
    ):
        if value in ("double", "tangent", "compile", "script"):
            raise ForgefieldError(
                f"{sources.where('training.kernels')}: 'training.kernels' sets up generated kernels, which {key}={value} does "
                "not use; leave it out, or set training.derivative=kernels and training.engine=graphs."
            )
    if given.radial == "exact" and given.knots != defaults.knots:
        raise ForgefieldError(
            f"{sources.where('training.kernels.knots')}: 'training.kernels.knots' are intervals of a table, and "
            "training.kernels.radial=exact makes none; leave one of them out."
        )
    if given.storage == "bfloat16" and training.precision == "float64":
        raise ForgefieldError(
            f"{sources.where('training.kernels.storage')}: 'training.kernels.storage=bfloat16' would round what "
            "training.precision=float64 computes; leave one of them out."
        )


def _check_edges(config: schema.Config, sources: Sources) -> None:
    name = config.model.get("name") if isinstance(config.model, Mapping) else config.model
    if not config.training.kernels.edges and name not in (None, "allegro"):
        raise ForgefieldError(
            f"{sources.where('training.kernels.edges')}: 'training.kernels.edges' is about sums over edges that Allegro has, "
            f"and model.name is {name}; leave it out."
        )


def _check_swa(training: schema.TrainingOptions, sources: Sources) -> None:
    swa = training.swa
    if swa is None:
        return
    if training.ema is not None:
        raise ForgefieldError(
            f"{sources.where('training.swa')}: training.swa takes the place of training.ema={training.ema:g}; set "
            "training.ema=null."
        )


def _check_precision(value: Any, sources: Sources) -> None:
    key = "training.precision"
    if not isinstance(value, Mapping):
        check_choice(value, PRECISIONS, key, sources)
        return
    for name in value:
        if name not in SCHEDULE:
            hint = did_you_mean(str(name), SCHEDULE)
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}' has no key '{name}'; a schedule is written {{start: tf32, finish: float32, "
                f"finish_epochs: 10}}.{hint}"
            )
    # Weights keep their type through a run.
    for name in ("start", "finish"):
        if name in value or name == "start":
            check_choice(value.get(name), PRECISIONS[1:], f"{key}.{name}", sources)
    if value["start"] == value.get("finish", "float32"):
        raise wrong(sources, f"{key}.finish", value["start"], "another precision than start")
    last = {name: value[name] for name in SCHEDULE[2:] if value.get(name) is not None}
    if len(last) != 1:
        raise ForgefieldError(f"{sources.where(key)}: '{key}' needs one of finish_epochs and finish_steps.")
    for name, number in last.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise wrong(sources, f"{key}.{name}", number, "a positive whole number")
