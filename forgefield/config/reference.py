"""The reference of all options as Markdown, made from their declarations: docs/options.md.

python -m forgefield.config.reference > docs/options.md
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from forgefield.config import schema
from forgefield.config.fielddocs import class_doc, field_docs
from forgefield.config.option import limits_of
from forgefield.config.point_options import PointTaskOptions
from forgefield.config.targets import BRANCHES, FIELDS, POINTS
from forgefield.config.template import flow
from forgefield.config.typed import alternatives, field_types, is_optional, section_class

HEADER = """# All options

Every option of a config with its type, default, allowed values, unit and meaning. Options of models are on the pages of the
models; `trainer` takes whatever `lightning.Trainer` takes. How configs are written and overridden: [config.md](config.md).

This page is generated from the declarations in the code: `make docs/options.md`.
"""
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}


def reference() -> str:
    """The whole page."""
    pages: dict[type, list[str]] = {}
    notes: dict[type, str] = {}
    for key, cls, note in _sections(schema.Config, "", ""):
        pages.setdefault(cls, []).append(key)
        notes.setdefault(cls, note)
    sections = "\n".join(_section(keys, cls, notes[cls] if len(keys) == 1 else "") for cls, keys in pages.items())
    return f"{HEADER}\n{sections}"


def _sections(cls: type, key: str, note: str) -> Iterator[tuple[str, type, str]]:
    """Dotted key, dataclass and description of every section, outer ones first."""
    yield key, cls, note
    docs = field_docs(cls)
    for name, kind in field_types(cls).items():
        inner, below = section_class(kind), f"{key}.{name}" if key else name
        if cls is schema.TaskOptions and name == POINTS:
            assert inner is not None
            yield from _sections(inner, key, "")
        elif cls is schema.TaskOptions and name in (FIELDS, BRANCHES):
            of_each = section_class(typing.get_args(kind)[1])
            assert of_each is not None
            yield from _sections(of_each, f"{key}.NAME" if name == FIELDS else f"{below}.NAME", docs.get(name, ""))
        elif inner is not None:
            yield from _sections(inner, below, docs.get(name, ""))


def _section(keys: list[str], cls: type, note: str) -> str:
    """The table of a section. keys: all sections that have these options."""
    docs = field_docs(cls)
    shown = [key for key in keys if not key.startswith("task.branches.")] or keys
    title = ", ".join(f"`{key}`" if key else "Top level" for key in shown)
    title += " of grid points (`data.points`)" if cls is PointTaskOptions else ""
    about = " ".join(text for text in (note, class_doc(cls)) if text)
    lines = [f"## {title}", "", *([about, ""] if about else [])]
    lines += ["| option | type | default | allowed | unit | meaning |", "|---|---|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        kind = field_types(cls)[field.name]
        if cls is schema.TaskOptions and field.name in (FIELDS, BRANCHES, POINTS):
            continue
        inner, limits = section_class(kind), limits_of(field)
        if inner is not None:
            row = [
                "section",
                "null" if is_optional(kind) else "",
                "",
                "",
                docs.get(field.name) or class_doc(inner) or "",
            ]
        else:
            choices = [flow(choice) for choice in limits.choices]
            choices += [limits.open_choices] if limits.open_choices is not None else []
            allowed = ", ".join(choices) or limits.describe()
            row = [_type(kind), f"`{flow(_default(field))}`", allowed, limits.unit or "", docs.get(field.name, "")]
        cells = [f"`{field.name}`", *row]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _type(kind: Any) -> str:
    names = [_type_name(each) for each in alternatives(kind)]
    return ", ".join(names) + (" or null" if is_optional(kind) else "")


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return "list" if arguments[0] is Any else f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    return _NAMES[kind]


if __name__ == "__main__":
    print(reference(), end="")
