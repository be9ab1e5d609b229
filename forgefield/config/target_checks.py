"""The checks of the `task` section: values that have the right type and no meaning, settings that do not apply to a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from forgefield.config import schema
from forgefield.config.refusals import check_choice, wrong
from forgefield.config.sources import Sources
from forgefield.errors import ForgefieldError

TARGETS = tuple(field.name for field in dataclasses.fields(schema.TaskOptions))
LOSSES = ("mse", "mae", "huber")


def check_task(task: DictConfig, sources: Sources) -> None:
    """Refuse targets whose settings have no meaning."""
    given = [target for target in TARGETS if task[target] is not None]
    if not given:
        raise ForgefieldError(
            f"{sources.where('task')}: 'task' trains nothing; give at least one of {', '.join(TARGETS)}."
        )
    for target in given:
        options, key = task[target], f"task.{target}"
        if options.weight < 0:
            raise wrong(sources, f"{key}.weight", options.weight, "zero or positive")
        if options.huber_delta <= 0:
            raise wrong(sources, f"{key}.huber_delta", options.huber_delta, "a positive number")
        if "." not in options.loss:
            check_choice(options.loss, (*LOSSES, "an import path"), f"{key}.loss", sources)
        _only_for("per_atom", ("energy", "virial"), target, options, sources)
        if options.per_atom not in (True, False, "root"):
            raise wrong(sources, f"{key}.per_atom", options.per_atom, "true, false or root")
        if options.schedule is not None:
            _check_schedule(options.schedule, f"{key}.schedule", sources)
        _only_for("species_weights", ("forces",), target, options, sources)
        if options.loss != "huber" and _is_set(f"{key}.huber_delta", options.huber_delta, "huber_delta", sources):
            raise ForgefieldError(
                f"{sources.where(f'{key}.huber_delta')}: '{key}.huber_delta' applies to loss huber only, "
                f"and '{key}.loss' is {options.loss}."
            )


_SCHEDULES = {
    "linear": ("unit", "begin", "end"),
    "cosine": ("unit", "begin", "end"),
    "sigmoid": ("unit", "begin", "end", "slope", "centre"),
    "step": ("unit", "at"),
    "lr": (),
}
"""Settings of each kind of schedule, beside `to`."""


def _check_schedule(schedule: DictConfig, key: str, sources: Sources) -> None:
    check_choice(schedule.kind, tuple(_SCHEDULES), f"{key}.kind", sources)
    for name in map(str, schedule):
        if schedule[name] is not None and name not in ("kind", "to", *_SCHEDULES[schedule.kind]):
            raise ForgefieldError(
                f"{sources.where(f'{key}.{name}')}: '{key}.{name}' does not apply to kind {schedule.kind}, "
                f"which takes {', '.join(['to', *_SCHEDULES[schedule.kind]])}."
            )
    if schedule.unit is not None:
        check_choice(schedule.unit, ("step", "epoch"), f"{key}.unit", sources)
    values = schedule.to if isinstance(schedule.to, Sequence) and not isinstance(schedule.to, str) else [schedule.to]
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and v >= 0 for v in values):
        shown = OmegaConf.to_container(schedule.to) if OmegaConf.is_config(schedule.to) else schedule.to
        raise wrong(sources, f"{key}.to", shown, "the last value, zero or positive")
    if schedule.kind == "step":
        _check_places(schedule, list(values), key, sources)
    elif len(values) != 1 or values[0] is not schedule.to:
        raise wrong(sources, f"{key}.to", list(values), "one number; a list goes with kind step")
    begin = schedule.begin or 0
    if begin < 0 or (schedule.end is not None and schedule.end <= begin):
        raise wrong(sources, f"{key}.end", schedule.end, f"larger than {key}.begin, which is {begin}")
    if schedule.slope is not None and schedule.slope <= 0:
        raise wrong(sources, f"{key}.slope", schedule.slope, "a positive number")
    if schedule.centre is not None and not 0 <= schedule.centre <= 1:
        raise wrong(sources, f"{key}.centre", schedule.centre, "a number from 0 to 1")


def _check_places(schedule: DictConfig, values: list[Any], key: str, sources: Sources) -> None:
    places = list(schedule.at or [])
    if not places or places != sorted(set(places)) or places[0] < 1:
        raise wrong(sources, f"{key}.at", places, "ascending positive whole numbers")
    if len(values) != len(places):
        raise wrong(
            sources, f"{key}.to", values, f"a list with one value for each of the {len(places)} places in {key}.at"
        )


def _only_for(name: str, targets: tuple[str, ...], target: str, options: DictConfig, sources: Sources) -> None:
    key = f"task.{target}.{name}"
    if target not in targets and _is_set(key, options[name], name, sources):
        right = f"task.{targets[0]}.{name}"
        raise ForgefieldError(f"{sources.where(key)}: '{key}' does not apply to {target}. Did you mean '{right}'?")


def _is_set(key: str, value: Any, name: str, sources: Sources) -> bool:
    """Whether the user set this field of a target. Configs from Python may carry defaults that nobody wrote."""
    default = getattr(schema.TargetOptions(), name)
    return sources.explicit(key) or value != default
