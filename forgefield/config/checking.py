"""Checks of a composed config: no key is unknown, and every value has the type and the limits that its option declares.

`unknown_key` answers for one dotted key; `typed_config` turns plain values into a config of the schema's types;
`check_values` refuses values that have the right type and are not allowed. Every message names the location, the key and what
would be right.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forgefield.config.nearest import did_you_mean, nearest
from forgefield.config.option import IMPORT_PATH, Limits, limits_of
from forgefield.config.peer_terms import KEYS
from forgefield.config.sources import Sources, check_choice, wrong
from forgefield.config.typed import alternatives, convert, field_types, is_optional, section_class, without_none
from forgefield.errors import ForgefieldError
from forgefield.ldos.options import PointTaskOptions
from forgefield.settings import Config, has_points
from forgefield.tasks.options import (
    BRANCHES,
    FIELDS,
    POINTS,
    TARGETS,
    BranchTaskOptions,
    FieldTargetOptions,
    TaskOptions,
    as_typed,
)

Section = typing.TypeVar("Section", bound="DataclassInstance")
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def unknown_key(key: str, fields: Collection[str] | None = None, *, points: bool = False) -> str | None:
    """None where the schema has this dotted key, else a hint: the nearest valid key, or the valid keys.

    fields: of the data, as far as the config names them. Without, any other name in `task` may be one of a store's, unless it
    resembles the name of a target. points: whether samples are grid points, which have other targets.
    """
    cls: type = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        cls = PointTaskOptions if points and cls is TaskOptions else cls
        kind = _kinds(cls).get(part)
        if kind is None and cls is TaskOptions and _may_be_field(part, fields):
            kind = FieldTargetOptions
        if kind is None:
            extra_outputs = list(fields or []) if cls is TaskOptions else []
            return _hint(parts, depth, [*_kinds(cls), *extra_outputs])
        if key.startswith("trainer."):
            return None if parts[1] in trainer_keys() else _hint(parts, 1, trainer_keys())
        inner = section_class(kind)
        if inner is None:
            rest = parts[depth + 1 :]
            opens = kind is Any or len(alternatives(kind)) > 1 or typing.get_origin(without_none(kind)) in (list, dict)
            return None if opens or not rest else f" '{'.'.join(parts[: depth + 1])}' has no keys below it."
        cls = inner
    return None


def _may_be_field(name: str, fields: Collection[str] | None) -> bool:
    if fields is not None:
        return name in fields
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None and nearest(name, TARGETS) is None


def check_keys(values: Mapping[str, Any], sources: Sources, *, variables: Sequence[str] = ()) -> None:
    """Refuse every key that the schema does not have. `variables` are top-level keys that the user defines."""
    fields, points = declared_fields(values), has_points(values)
    for key in _paths(values, Config, "", points=points):
        if key in variables:
            continue
        hint = unknown_key(key, fields, points=points)
        if hint is not None:
            raise ForgefieldError(f"{sources.where(key)}: unknown key '{key}'.{hint}")


def declared_fields(values: Mapping[str, Any]) -> list[str] | None:
    """Names of the fields in `data.labels.fields`, or None if it is not set."""
    value: object = values
    for part in ("data", "labels", "fields"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return [str(name) for name in value] if isinstance(value, Mapping) else None


def refuse_lists(content: Mapping[str, Any], sources: Sources) -> None:
    """Refuse lists where a section belongs, before Hydra tries to merge them."""
    for key, section in _schema().items():
        value: object = content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if section is not None and isinstance(value, (list, tuple)):
            raise wrong(sources, key, value, f"a section with the keys {', '.join(_kinds(section))}")


def typed_config(values: Mapping[str, Any], sources: Sources) -> Config:
    """A config from plain values whose keys have been checked; settings that are missing get their defaults."""
    config = Config()
    if "task" in values:
        values = {**values, "task": as_typed(values["task"], points=has_points(values))}
    _fill(config, values, "", sources)
    return config


def typed_section(cls: type[Section], values: Mapping[str, Any], sources: Sources) -> Section:
    """An options dataclass from plain values, whose keys, types and limits are checked."""
    _refuse_unknown(cls, values, "", sources)
    section = cls()
    _fill(section, values, "", sources)
    check_limits(section, "", sources)
    return section


def _refuse_unknown(cls: type, values: Mapping[str, Any], prefix: str, sources: Sources) -> None:
    kinds = field_types(cls)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in kinds:
            hint = did_you_mean(str(name), kinds) or f" Valid are: {', '.join(kinds)}."
            raise ForgefieldError(f"{sources.where(key)}: unknown key '{key}'.{hint}")
        inner = section_class(kinds[name])
        if inner is not None and isinstance(value, Mapping):
            _refuse_unknown(inner, value, f"{key}.", sources)


def stored_config(values: Mapping[str, Any], sources: Sources) -> Config:
    """The config of a run from the content of its `config.yaml`.

    Settings that this version does not have are left out; those that the version of the run did not have are at their defaults.
    """
    task = as_typed(values.get("task"), points=has_points(values))
    config = Config()
    _fill(config, _with_known_keys({**values, "task": task}, Config), "", sources)
    return config


def _with_known_keys(values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """The plain values of a section without those that the section does not have."""
    supported: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        if name not in values:
            continue
        value, inner = values[name], section_class(kind)
        of_each = section_class(typing.get_args(kind)[1]) if typing.get_origin(kind) is dict else None
        if inner is not None and isinstance(value, Mapping):
            value = _with_known_keys(value, inner)
        elif of_each is not None and isinstance(value, Mapping):
            sections = {key: item for key, item in value.items() if isinstance(item, Mapping)}
            value = {key: _with_known_keys(item, of_each) for key, item in sections.items()}
        supported[name] = value
    return supported


def check_values(config: Config, sources: Sources) -> None:
    """Refuse values outside of the declared limits, and settings that contradict each other or do not apply."""
    check_limits(config, "", sources)
    config.check(sources)


def check_limits(section: DataclassInstance, prefix: str, sources: Sources) -> None:
    """Refuse values outside the bounds and choices that the fields of a dataclass declare, and those of its sections.

    prefix: the dotted key of `section` with a dot at its end, as it is written in a config; empty at the top.
    """
    cls: type = type(section)
    types = field_types(cls)
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), f"{prefix}{field.name}"
        in_task = isinstance(section, TaskOptions)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_limits(value, prefix if in_task and field.name == POINTS else f"{key}.", sources)
        elif in_task and isinstance(value, dict):
            for name, item in value.items():
                check_limits(item, f"{prefix if field.name == FIELDS else key + '.'}{name}.", sources)
        elif value is not None:
            _check_limits_of(value, limits_of(field), is_optional(types[field.name]), key, sources)


def _check_limits_of(value: object, limits: Limits, optional: bool, key: str, sources: Sources) -> None:
    numbers = [value] if isinstance(value, (int, float)) else value if isinstance(value, list) else []
    if limits.has_bounds and not all(limits.allows(number) for number in numbers):
        raise wrong(sources, key, value, limits.expected or limits.describe())
    is_path = limits.open_choices == IMPORT_PATH and isinstance(value, str) and "." in value
    if limits.choices and not is_path and not isinstance(value, Mapping):
        others = [limits.open_choices] if limits.open_choices is not None else [None] if optional else []
        for item in value if isinstance(value, list) else [value]:
            if item not in limits.choices and limits.expected is not None:
                raise wrong(sources, key, item, limits.expected)
            check_choice(item, (*limits.choices, *others), key, sources)


@functools.cache
def trainer_keys() -> list[str]:
    """Everything `lightning.Trainer` takes."""
    from lightning import Trainer

    return list(inspect.signature(Trainer).parameters)


# --- keys


def _kinds(cls: type) -> dict[str, Any]:
    """Keys of a section as they are written, with the type of each."""
    hidden = (FIELDS, POINTS) if cls is TaskOptions else ()
    return {name: kind for name, kind in field_types(cls).items() if name not in hidden}


def _paths(values: Mapping[str, Any], cls: type | None, prefix: str, *, points: bool = False) -> Iterator[str]:
    """Dotted keys as deep as the schema goes."""
    cls = PointTaskOptions if points and cls is TaskOptions else cls
    for name, value in values.items():
        key = f"{prefix}{name}"
        yield key
        kind = _kinds(cls).get(str(name)) if cls is not None else None
        inner = FieldTargetOptions if kind is None and cls is TaskOptions else section_class(kind)
        if isinstance(value, Mapping) and (inner is not None or key == "trainer"):
            yield from _paths(value, inner, f"{key}.", points=points)


def schema_keys() -> list[str]:
    """All dotted keys of the schema."""
    return list(_schema())


@functools.cache
def _schema() -> dict[str, type | None]:
    """Dotted key -> dataclass of the section, or None for a plain setting."""

    def below(cls: type, prefix: str) -> Iterator[tuple[str, type | None]]:
        for name, kind in _kinds(cls).items():
            inner = section_class(kind)
            yield f"{prefix}{name}", inner
            if inner is not None:
                yield from below(inner, f"{prefix}{name}.")

    return dict(below(Config, ""))


def _hint(parts: list[str], depth: int, siblings: list[str]) -> str:
    """The nearest valid key: what another program calls it, the same word in another section, a close one here."""
    word, prefix = parts[depth], "".join(f"{part}." for part in parts[:depth])
    close = nearest(word, siblings)
    elsewhere = [key for key in schema_keys() if key.rpartition(".")[2] == word]
    if close is not None and close.lower() == word.lower():
        match = prefix + close
    elif word in KEYS:
        match = KEYS[word]
    elif len(elsewhere) == 1:
        match = elsewhere[0]
    elif close is not None:
        match = prefix + close
    elif parts[0] != "trainer" and word in trainer_keys():
        match = f"trainer.{word}"
    else:
        match = ""
    if match:
        return f" Did you mean '{match}'?"
    section = f"'{prefix[:-1]}' has" if prefix else "Valid are"
    return f" {section}: {', '.join(siblings)}."


# --- types


def _fill(section: object, values: Mapping[str, Any], prefix: str, sources: Sources) -> None:
    """Set fields of the dataclass `section` from plain values. prefix: its dotted key with a dot, or nothing at the top."""
    cls: type = type(section)
    for name, value in values.items():
        key, kind = f"{prefix}{name}", field_types(cls)[name]
        if isinstance(section, TaskOptions) and name == FIELDS:
            _fill_fields(section, value, prefix, sources)
            continue
        if isinstance(section, TaskOptions) and name == BRANCHES:
            _fill_branches(section, value, key, sources)
            continue
        if isinstance(section, TaskOptions) and name == POINTS and value is not None:
            section.points = PointTaskOptions()
            _fill(section.points, value, prefix, sources)
            continue
        inner = section_class(kind)
        if inner is None:
            setattr(section, name, _converted(value, kind, key, sources))
        elif value is None:
            # An empty section of the file is a section of defaults; an optional one is off.
            if is_optional(kind):
                setattr(section, name, None)
        elif isinstance(value, Mapping):
            if getattr(section, name) is None:
                setattr(section, name, inner())
            _fill(getattr(section, name), value, f"{key}.", sources)
        else:
            raise wrong(sources, key, value, f"a section with the keys {', '.join(field_types(inner))}")


def _fill_fields(task: TaskOptions, values: Mapping[str, Any], prefix: str, sources: Sources) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            task.fields[name] = FieldTargetOptions()
            _fill(task.fields[name], value, f"{prefix}{name}.", sources)
        elif value is not None:
            keys = ", ".join(field_types(FieldTargetOptions))
            raise wrong(sources, f"{prefix}{name}", value, f"a section with the keys {keys}")


def _fill_branches(task: TaskOptions, values: object, key: str, sources: Sources) -> None:
    """Targets of each branch of the model."""
    keys = ", ".join(field_types(BranchTaskOptions))
    if not isinstance(values, Mapping):
        raise wrong(sources, key, values, f"a section with a name for each branch, which has the keys {keys}")
    for branch, section in values.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", str(branch)):
            raise ForgefieldError(
                f"{sources.where(key)}: '{key}': the name of a branch is made of letters, digits, - and _."
            )
        if not isinstance(section, Mapping):
            raise wrong(sources, f"{key}.{branch}", section, f"a section with the keys {keys}")
        for path in _paths(section, BranchTaskOptions, ""):
            hint = unknown_key(f"task.{path}", ())
            if hint is not None:
                raise ForgefieldError(f"{sources.where(key)}: unknown key '{key}.{branch}.{path}'.{hint}")
        task.branches[branch] = BranchTaskOptions()
        _fill(task.branches[branch], section, f"{key}.{branch}.", sources)


def _converted(value: object, kind: object, key: str, sources: Sources) -> Any:
    try:
        return convert(value, kind)
    except ValueError as error:
        raise wrong(sources, key, value, _expected(kind)) from error


def _expected(kind: object) -> str:
    inner = without_none(kind)
    suffix = " or null" if is_optional(kind) else ""
    if typing.get_origin(inner) is list:
        return f"a list such as [H, O]{suffix}"
    if typing.get_origin(inner) is dict:
        return f"a mapping such as {{H: 1.0, O: 2.0}}{suffix}"
    return EXPECTED.get(inner, "another value") + suffix
