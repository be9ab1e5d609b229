"""The `task` section in its two forms: as written, where all targets stand side by side, and as typed, where those that are
fields of the data are in `fields` and those of grid points in `points`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from forgefield.config import schema

FIELDS = "fields"
BRANCHES = "branches"
DENOISE = "denoise"
POINTS = "points"
_APART = (FIELDS, BRANCHES, DENOISE, POINTS)
TARGETS = tuple(item.name for item in dataclasses.fields(schema.TaskOptions) if item.name not in _APART)
"""Targets that every potential knows; all others are fields, but for `denoise`, which needs no label."""


def quantity(name: str) -> str:
    """What is meant by the name of a target or an error: `energy` for `energy`, and for `water.energy` of the branch water."""
    return name.rpartition(".")[2]


def has_points(values: Any) -> bool:
    """Whether samples are grid points, of a plain config."""
    data = values.get("data") if isinstance(values, Mapping) else None
    return isinstance(data, Mapping) and data.get(POINTS) is not None


def as_typed(task: Any, *, points: bool = False) -> Any:
    """The plain section with its fields in `fields`; of grid points, with all of it in `points`."""
    if not isinstance(task, Mapping):
        return task
    if points:
        return {POINTS: {name: value for name, value in task.items() if name not in TARGETS}}
    known = {name: value for name, value in task.items() if name in (*TARGETS, BRANCHES, DENOISE)}
    return {**known, FIELDS: {name: value for name, value in task.items() if name not in known}}


def as_written(task: Any) -> Any:
    """The plain section with all targets side by side."""
    if not isinstance(task, Mapping):
        return task
    if isinstance(task.get(POINTS), Mapping):
        return dict(task[POINTS])
    if not isinstance(task.get(FIELDS, {}), Mapping):
        return task
    known = {
        name: value for name, value in task.items() if name not in (FIELDS, POINTS) and (name != BRANCHES or value)
    }
    return {**known, **task.get(FIELDS, {})}


def as_dict(config: schema.Config) -> dict[str, Any]:
    """A config as plain values, in the form in which files have it."""
    return {key: as_written(value) if key == "task" else value for key, value in dataclasses.asdict(config).items()}


def given_targets(task: Any) -> dict[str, Any]:
    """Options of every target that is on, of a typed section or a `TaskOptions`: ours in their order, then fields by name, then
    those of branches as `branch.target`, by branch."""
    known = {name: getattr(task, name, None) for name in (*TARGETS, DENOISE)}
    extra_outputs = getattr(task, FIELDS, None) or {}
    return (
        {name: value for name, value in known.items() if value is not None}
        | {str(name): extra_outputs[name] for name in sorted(extra_outputs) if extra_outputs[name] is not None}
        | _of_branches(getattr(task, BRANCHES, None) or {})
    )


def _of_branches(branches: Any) -> dict[str, Any]:
    return {
        f"{branch}.{name}": getattr(branches[branch], name)
        for branch in sorted(branches)
        for name in TARGETS
        if getattr(branches[branch], name, None) is not None
    }
