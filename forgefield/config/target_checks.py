"""The checks of the `task` section: values that have the right type and no meaning, settings that do not apply to a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forgefield.config import schema
from forgefield.config.refusals import check_choice, wrong
from forgefield.config.sources import Sources
from forgefield.config.targets import DENOISE, TARGETS
from forgefield.errors import ForgefieldError

Target = schema.TargetOptions | schema.FieldTargetOptions | schema.DenoiseOptions


def check_task(task: schema.TaskOptions, sources: Sources) -> None:
    """Refuse targets whose settings have no meaning."""
    given = [target for target in TARGETS if getattr(task, target) is not None]
    branches = {f"task.branches.{name}": section for name, section in task.branches.items()}
    if not given and not task.fields and not branches and task.denoise is None:
        raise ForgefieldError(
            f"{sources.where('task')}: 'task' trains nothing; give at least one of {', '.join((*TARGETS, DENOISE))}."
        )
    for section, prefix in ((task, "task"), *((section, key) for key, section in branches.items())):
        for target in TARGETS:
            options = getattr(section, target)
            if options is not None:
                _check_ours(options, target, prefix, sources)
    if task.denoise is not None:
        _check_denoise(task.denoise, f"task.{DENOISE}", sources)
    for name, options in task.fields.items():
        _check_target(options, f"task.{name}", schema.FieldTargetOptions(), sources)
        _check_field_target(options, f"task.{name}", sources)


def _check_ours(options: schema.TargetOptions, target: str, prefix: str, sources: Sources) -> None:
    """A target that every potential knows. prefix: the section that it stands in."""
    key = f"{prefix}.{target}"
    _check_target(options, key, schema.TargetOptions(), sources)
    _only_for("per_atom", ("energy", "virial"), target, options, sources, prefix)
    for name in ("species_weights", "direct", "net_zero"):
        _only_for(name, ("forces",), target, options, sources, prefix)
    if options.direct and prefix != "task":
        raise ForgefieldError(
            f"{sources.where(f'{key}.direct')}: '{key}.direct' does not apply: forces of a branch are slopes of its energy."
        )
    if options.net_zero is not None and not options.direct:
        raise ForgefieldError(
            f"{sources.where(f'{key}.net_zero')}: '{key}.net_zero' is for direct forces ({key}.direct=true); those that "
            "are derivatives of an energy add up to zero by themselves."
        )


def _check_target(options: Target, key: str, default: Target, sources: Sources) -> None:
    """What all targets have. default: the same without any setting."""
    if options.schedule is not None:
        _check_schedule(options.schedule, f"{key}.schedule", sources)
    delta = f"{key}.huber_delta"
    if options.loss != "huber" and (sources.explicit(delta) or options.huber_delta != default.huber_delta):
        raise ForgefieldError(
            f"{sources.where(delta)}: '{delta}' applies to loss huber only, and '{key}.loss' is {options.loss or 'mse'}."
        )


def _check_denoise(options: schema.DenoiseOptions, key: str, sources: Sources) -> None:
    _check_target(options, key, schema.DenoiseOptions(), sources)


def _check_field_target(options: schema.FieldTargetOptions, key: str, sources: Sources) -> None:
    if options.kind not in (None, "values"):
        _check_turning(options, key, sources)
    if options.per_atom is not None and options.reduce != "sum":
        raise ForgefieldError(
            f"{sources.where(f'{key}.per_atom')}: '{key}.per_atom' applies to extensive values only ({key}.reduce=sum)."
        )
    if options.classes is not None:
        _check_classes(options, key, sources)
    normalise = options.normalise
    if normalise is None or isinstance(normalise, str):
        check_choice(normalise, ("auto", "none", None), f"{key}.normalise", sources)
        return
    if not isinstance(normalise, Mapping) or set(normalise) != {"mean", "scale"}:
        raise wrong(sources, f"{key}.normalise", normalise, "auto, none or {mean: ..., scale: ...}")
    scale = normalise["scale"]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise wrong(sources, f"{key}.normalise.scale", scale, "a positive number: network outputs are multiplied by it")
    mean = normalise["mean"] if isinstance(normalise["mean"], (list, dict)) else [normalise["mean"]]
    for value in mean.values() if isinstance(mean, dict) else _leaves(mean):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(
                sources, f"{key}.normalise.mean", normalise["mean"], "a number, one for each component, or {H: ...}"
            )


def _check_turning(options: schema.FieldTargetOptions, key: str, sources: Sources) -> None:
    """What a vector or a tensor cannot have."""
    if options.classes is not None:
        raise ForgefieldError(f"{sources.where(f'{key}.kind')}: '{key}.kind' does not apply to classes.")
    if options.reduce in ("max", "attention"):
        raise ForgefieldError(
            f"{sources.where(f'{key}.reduce')}: '{key}.reduce' is sum or mean for a {options.kind}; {options.reduce} is for "
            "numbers that do not turn with the structure."
        )
    normalise = options.normalise
    mean = normalise.get("mean") if isinstance(normalise, Mapping) else 0
    if (options.kind == "vector" and mean != 0) or isinstance(mean, Sequence):
        allowed = (
            "0: any other vector would not turn with the structure"
            if options.kind == "vector"
            else ("one number (times the unit matrix), or one for each species: {H: ...}")
        )
        raise wrong(sources, f"{key}.normalise.mean", mean, allowed)


def _check_classes(options: schema.FieldTargetOptions, key: str, sources: Sources) -> None:
    given: Any = options.classes
    is_list = isinstance(given, list) and len(set(map(str, given))) == len(given) > 1
    numbers = is_list and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in given)
    several = isinstance(given, int) and not isinstance(given, bool) and given > 1
    if not (numbers or several or given == "auto"):
        raise wrong(sources, f"{key}.classes", given, "a number above 1, a list of different labels, or auto")
    fixed = {
        "loss": None,
        "reduce": ("mean", "max", "attention", None),
        "per_atom": None,
        "normalise": ("auto", "none", None),
    }
    for name, allowed in fixed.items():
        value = getattr(options, name)
        if value is not None and (allowed is None or value not in allowed):
            raise ForgefieldError(
                f"{sources.where(f'{key}.{name}')}: '{key}.{name}' does not apply to classes, whose cross-entropy is minimised."
            )


def _leaves(value: Any) -> Iterator[Any]:
    """The numbers of nested lists."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, list):
            yield from _leaves(item)
        else:
            yield item


_SCHEDULES = {
    "linear": ("unit", "begin", "end"),
    "cosine": ("unit", "begin", "end"),
    "sigmoid": ("unit", "begin", "end", "slope", "centre"),
    "step": ("unit", "at"),
    "lr": (),
}
"""Settings of each kind of schedule, beside `to`."""


def _check_schedule(schedule: schema.ScheduleOptions, key: str, sources: Sources) -> None:
    for name, value in vars(schedule).items():
        if value is not None and name not in ("kind", "to", *_SCHEDULES[schedule.kind]):
            raise ForgefieldError(
                f"{sources.where(f'{key}.{name}')}: '{key}.{name}' does not apply to kind {schedule.kind}, "
                f"which takes {', '.join(['to', *_SCHEDULES[schedule.kind]])}."
            )
    values = schedule.to if isinstance(schedule.to, Sequence) and not isinstance(schedule.to, str) else [schedule.to]
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < math.inf for v in values):
        raise wrong(sources, f"{key}.to", schedule.to, "the last value, zero or positive, and finite")
    if schedule.kind == "step":
        _check_places(schedule, list(values), key, sources)
    elif len(values) != 1 or values[0] is not schedule.to:
        raise wrong(sources, f"{key}.to", list(values), "one number; a list goes with kind step")
    begin = schedule.begin or 0
    if schedule.end is not None and schedule.end <= begin:
        raise wrong(sources, f"{key}.end", schedule.end, f"larger than {key}.begin, which is {begin}")


def _check_places(schedule: schema.ScheduleOptions, values: list[Any], key: str, sources: Sources) -> None:
    places = list(schedule.at or [])
    if not places or places != sorted(set(places)) or places[0] < 1:
        raise wrong(sources, f"{key}.at", places, "ascending positive whole numbers")
    if len(values) != len(places):
        raise wrong(
            sources, f"{key}.to", values, f"a list with one value for each of the {len(places)} places in {key}.at"
        )


def _only_for(
    name: str, targets: tuple[str, ...], target: str, options: schema.TargetOptions, sources: Sources, prefix: str
) -> None:
    key = f"{prefix}.{target}.{name}"
    if target not in targets and _is_set(key, getattr(options, name), name, sources):
        right = f"{prefix}.{targets[0]}.{name}"
        raise ForgefieldError(f"{sources.where(key)}: '{key}' does not apply to {target}. Did you mean '{right}'?")


def _is_set(key: str, value: Any, name: str, sources: Sources) -> bool:
    """Whether the user set this field of a target. Configs from Python may carry defaults that nobody wrote."""
    default = getattr(schema.TargetOptions(), name)
    return sources.explicit(key) or value != default
