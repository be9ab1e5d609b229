"""Dataclasses as configs: the types of their fields, plain values converted to these types, and settings by dotted key."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

TRUE, FALSE = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")
"""Texts that are read as booleans, in any capitalisation; variables of the environment are always text."""


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Type of each field of a dataclass."""
    kinds = typing.get_type_hints(cls)
    return {field.name: kinds[field.name] for field in dataclasses.fields(cls)}


def alternatives(kind: object) -> tuple[Any, ...]:
    """X and Y of X | Y | None; (X,) of any other type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(arg for arg in typing.get_args(kind) if arg is not type(None))
    return (kind,)


def is_optional(kind: object) -> bool:
    """Whether None is a value of this type."""
    return type(None) in typing.get_args(kind) and typing.get_origin(kind) in (typing.Union, types.UnionType)


def without_none(kind: object) -> Any:
    """X of X | None; any other type as it is."""
    inner = alternatives(kind)
    return inner[0] if len(inner) == 1 else kind


def section_class(kind: object) -> type | None:
    """The dataclass of a section, which may be optional; None for a plain setting."""
    inner = without_none(kind)
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def convert(value: object, kind: object) -> Any:
    """`value` as an instance of `kind`; raises ValueError where it is not one.

    Numbers may be written as text, and any scalar is text where text is expected. Values of unions of several types,
    and containers of anything, are returned as they are: the checks of their section decide.
    """
    arguments = typing.get_args(without_none(kind))
    if kind is Any or len(alternatives(kind)) > 1 or (arguments and arguments[-1] is Any):
        return value
    if value is None:
        if is_optional(kind):
            return None
        raise ValueError("null")
    kind = without_none(kind)
    origin = typing.get_origin(kind)
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise ValueError("not a list")
        return [convert(item, arguments[0]) for item in value]
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError("not a mapping of names")
        return {key: convert(item, arguments[1]) for key, item in value.items()}
    return _scalar(value, kind)


def _scalar(value: object, kind: object) -> Any:
    if isinstance(value, (Mapping, list, tuple, bytes)):
        raise ValueError("not a scalar")
    if kind is bool:
        text = str(value).lower()
        if isinstance(value, int):
            return bool(value)
        if not isinstance(value, str) or text not in (*TRUE, *FALSE):
            raise ValueError("not a boolean")
        return text in TRUE
    if kind is int and isinstance(value, (int, str)) and not isinstance(value, bool):
        return int(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        return float(value)
    if kind is str:
        return str(value)
    raise ValueError(f"not of type {kind}")


def select(config: object, key: str, default: object = None) -> Any:
    """The setting with a dotted key in dataclasses and mappings; `default` where it or a section above is missing or None."""
    for part in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(part)
        elif dataclasses.is_dataclass(config):
            config = getattr(config, part, None)
        else:
            return default
        if config is None:
            return default
    return config


def update(values: dict[str, Any], key: str, value: object) -> None:
    """Set the setting with a dotted key in nested dicts; sections that are missing are added."""
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[name] = value
