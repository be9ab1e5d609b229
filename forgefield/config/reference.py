"""The reference of all options, made from their declarations: docs/reference/options.md, and the help of the command line."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import allowed_values, class_doc, field_docs, first_sentence, limits_of
from forgefield.config.template import flow
from forgefield.config.typed import alternatives, field_types, is_optional, section_class
from forgefield.errors import ForgefieldError
from forgefield.ldos.options import PointTaskOptions
from forgefield.settings import Config
from forgefield.tasks.options import BRANCHES, FIELDS, POINTS, TaskOptions

HEADER = """# Options of a config

Every option with its type, default, allowed values, unit and meaning. `forgefield train --help-options SECTION` prints the
same in a terminal. Options of models are in [Options of models](model-options.md); `trainer` takes any argument of
`lightning.Trainer`. How configs are written and overridden: [Write and change a config](../guides/configure.md).
"""
_NAMES: dict[object, tuple[str, str]] = {
    int: ("integer", "integers"),
    float: ("number", "numbers"),
    str: ("text", "text"),
    bool: ("true or false", "booleans"),
    Path: ("path", "paths"),
    os.PathLike: ("path", "paths"),
    Any: ("any value", "values"),
    list: ("list", "lists"),
    dict: ("mapping", "mappings"),
}
"""Types in the singular and in the plural."""
WIDTH = 100
"""Line length of the help in a terminal."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One option, or a section within a section (type `section`)."""

    name: str
    type: str
    default: str
    """As in YAML; empty for a section that always exists."""
    allowed: str
    unit: str
    description: str


@dataclasses.dataclass(frozen=True)
class Section:
    """The options of one dataclass. keys: all sections that have them, with NAME for a name that the user chooses."""

    cls: type
    keys: tuple[str, ...]
    about: str
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        shown = [key for key in self.keys if not key.startswith("task.branches.")] or self.keys
        suffix = " of grid points (data.points)" if self.cls is PointTaskOptions else ""
        return ", ".join(key or "Top level" for key in shown) + suffix


@cache
def sections() -> tuple[Section, ...]:
    """All sections of a config, outer ones first."""
    keys: dict[type, list[str]] = {}
    notes: dict[type, str] = {}
    for key, cls, note in _walk(Config, "", ""):
        keys.setdefault(cls, []).append(key)
        notes.setdefault(cls, note)
    return tuple(
        Section(cls, tuple(names), class_doc(cls) or (notes[cls] if len(names) == 1 else ""), _entries(cls))
        for cls, names in keys.items()
    )


def reference() -> str:
    """The page docs/reference/options.md."""
    return f"{HEADER}\n" + "\n".join(
        f"## {section.title}\n\n{_about(section)}{option_table(section.entries)}" for section in sections()
    )


def _about(section: Section) -> str:
    return f"{section.about}\n\n" if section.about else ""


def option_table(entries: Sequence[Entry]) -> str:
    """Options as a Markdown table."""
    lines = ["| option | value | meaning |", "|---|---|---|"]
    for entry in entries:
        default = f"default `{entry.default}`" if entry.default and entry.type != "section" else ""
        value = ", ".join(filter(None, [entry.type, default, entry.allowed, entry.unit]))
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{entry.name}`", value, entry.description)) + " |"
        )
    return "\n".join(lines) + "\n"


def options_of(cls: type) -> tuple[Entry, ...]:
    """The options that a dataclass declares."""
    return _entries(cls)


def option_help(key: str = "") -> str:
    """Help on a section (`training`, `data.batch`) or on one option (`training.lr`), as text for a terminal; without a key, the
    list of sections."""
    if not key:
        return "Sections of a config:\n\n" + "".join(map(_summary, sections()))
    parent, _, option = key.rpartition(".")
    matches = [section for section in sections() if key in section.keys]
    single = [(parent, entry) for section in sections() if parent in section.keys for entry in section.entries]
    lines = [line for section in matches for line in _section_lines(section, key)]
    lines += (
        [] if matches else [line for prefix, entry in single if entry.name == option for line in _lines(entry, prefix)]
    )
    if not lines:
        options = [
            f"{name}.{entry.name}" for section in sections() for name in section.keys for entry in section.entries
        ]
        names = [name for section in sections() for name in section.keys]
        raise ForgefieldError(
            f"'{key}' is not a section or an option of a config.{did_you_mean(key, [*names, *options])}"
        )
    return "\n".join(lines).strip("\n") + "\n"


def _summary(section: Section) -> str:
    about = _wrapped(f"{first_sentence(section.about)}.") if section.about else []
    return "\n".join([section.title, *about]) + "\n"


def _section_lines(section: Section, key: str) -> list[str]:
    about = textwrap.wrap(section.about, WIDTH)
    return [*about, "", *(line for entry in section.entries for line in _lines(entry, key)), ""]


def _lines(entry: Entry, section: str) -> list[str]:
    details = [entry.type, f"default {entry.default}" if entry.default else "", entry.allowed, entry.unit]
    key = f"{section}.{entry.name}" if section else entry.name
    return [f"{key}  ({'; '.join(filter(None, details))})", *_wrapped(entry.description)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")


def flag_help(cls: type, name: str, *, default: str | None = None) -> str:
    """The declaration of an option as the help of a command-line flag: description, unit, allowed values and default.

    default: what is used without the flag, if it is not the declared default.
    """
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    entry = _entry(cls, field)
    first = first_sentence(entry.description)
    text = first if first[:2].isupper() else first[:1].lower() + first[1:]
    text += f", {entry.unit}" if entry.unit and entry.unit not in text.split() else ""
    choices = [flow(choice) for choice in limits_of(field).choices]
    if entry.type.startswith("list") and not all(choice in text for choice in choices):
        text += f": {', '.join(choices)}"
    described = re.search(r"Default: (.*?)(?:(?<!\.)\. (?=[A-Z])|\.?$)", entry.description)
    if default is None and entry.default not in ("null", "[]", "false", "true"):
        default = entry.default
    default = default or (described[1] if described is not None else "")
    return (text + (f" (default: {default})" if default else "")).replace("%", "%%").replace("`", "")


def _walk(cls: type, key: str, note: str) -> Iterator[tuple[str, type, str]]:
    """Dotted key, dataclass and description of every section, outer ones first."""
    yield key, cls, note
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        name, kind = field.name, field_types(cls)[field.name]
        inner, below, details = section_class(kind), f"{key}.{name}" if key else name, limits_of(field).details
        if cls is TaskOptions and name == POINTS:
            assert inner is not None
            yield from _walk(inner, key, "")
        elif cls is TaskOptions and name in (FIELDS, BRANCHES):
            of_each = section_class(typing.get_args(kind)[1])
            assert of_each is not None
            yield from _walk(of_each, f"{key}.NAME" if name == FIELDS else f"{below}.NAME", docs.get(name, ""))
        elif inner is not None:
            yield from _walk(inner, below, docs.get(name, ""))
        elif details is not None:
            yield f"{below}.NAME" if name == FIELDS else below, details, docs.get(name, "")


def _entries(cls: type) -> tuple[Entry, ...]:
    hidden = (FIELDS, BRANCHES, POINTS) if cls is TaskOptions else ()
    return tuple(_entry(cls, field) for field in dataclasses.fields(cls) if field.name not in hidden)


def _entry(cls: type, field: dataclasses.Field[Any]) -> Entry:
    kind, limits, description = field_types(cls)[field.name], limits_of(field), field_docs(cls).get(field.name, "")
    inner = section_class(kind)
    if inner is not None:
        missing = "null" if is_optional(kind) else ""
        return Entry(field.name, "section", missing, "", "", description or class_doc(inner) or "")
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    allowed = ("one of " if limits.choices else "") + allowed_values(limits, flow)
    return Entry(field.name, _type(kind), flow(default), allowed, limits.unit or "", description)


def _type(kind: object) -> str:
    """A type in words, such as `number, list of numbers or null`."""
    names = [
        name for each in alternatives(kind) for name in (("true", "false") if each is bool else (_type_name(each),))
    ]
    names += ["null"] if is_optional(kind) else []
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _type_name(kind: object, *, plural: bool = False) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if len(alternatives(kind)) > 1:
        return " or ".join(_type_name(each, plural=plural) for each in alternatives(kind))
    if origin in (list, Sequence):
        items = "" if arguments[0] is Any else f" of {_type_name(arguments[0], plural=True)}"
        return _NAMES[list][plural] + items
    return _NAMES.get(origin or kind, _NAMES[dict])[plural]
