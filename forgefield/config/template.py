"""Configs as commented YAML: the resolved one that a run keeps, and the first one that `forgefield init` writes.

Comments are the docstrings of the schema, written once there. What is written here loads again to exactly the same
config.
"""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from forgefield.config.option import allowed_values, class_doc, field_docs, limits_of
from forgefield.config.sources import YAML_SUFFIXES
from forgefield.config.typed import field_types, section_class
from forgefield.errors import ForgefieldError
from forgefield.ldos.options import FRAMES_ONLY, PointTaskOptions
from forgefield.settings import Config, as_dict, has_points
from forgefield.tasks.options import BRANCHES, DENOISE, TARGETS, FieldTargetOptions, TaskOptions

WIDTH = 110
"""Longest line with a comment."""


def commented_yaml(config: Config, *, header: str = "", notes: Mapping[str, str] | None = None) -> str:
    """`config` as YAML with a comment to each setting. `load_config` reads it back as the same config.

    notes: comments by dotted key, instead of the declared descriptions, as for options of a model. header: first lines.
    """
    values = as_dict(config)
    _drop_inapplicable(values["task"] or {})
    for key in FRAMES_ONLY if has_points(values) else ():
        _drop(values, key)
    return yaml_with_comments(values, header=header, notes=notes)


def yaml_with_comments(values: Mapping[str, Any], *, header: str = "", notes: Mapping[str, str] | None = None) -> str:
    """Any part of a config as commented YAML, in the order of its keys."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    task = PointTaskOptions if has_points(values) else TaskOptions
    for name, value in values.items():
        block = list(_emit(str(name), value, Config, "", 0, notes or {}, task))
        if len(block) > 1 and lines and lines[-1]:
            lines.append("")
        lines += block
        if len(block) > 1:
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def flow(value: object) -> str:
    """A value on one line of YAML, read back by OmegaConf as the same value."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()


def plain_yaml(values: Mapping[str, Any]) -> str:
    """Values as YAML without comments, one setting a line."""
    text: str = yaml.dump(values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
    return text


def require_config_path(path: Path, *, overwrite: bool) -> None:
    """Raise unless a config can be written to `path`."""
    if path.suffix not in YAML_SUFFIXES:
        raise ForgefieldError(f"{path}: a config ends in .yaml.")
    if not path.absolute().parent.is_dir():
        raise ForgefieldError(f"{path}: there is no folder {path.parent}.")
    if path.exists() and not overwrite:
        raise ForgefieldError(f"{path} exists already; --force overwrites it, -o FILE names another.")


def write_config(path: Path, text: str) -> Path:
    """Write the text of a config."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ForgefieldError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def _drop(values: object, key: str) -> None:
    """Take a dotted key out of nested mappings, where it is there."""
    section, _, rest = key.partition(".")
    if not isinstance(values, dict):
        return
    if rest:
        _drop(values.get(section), rest)
    else:
        values.pop(section, None)


def _drop_inapplicable(targets: Mapping[str, Any]) -> None:
    """Leave out settings of targets, also of those of branches, that cannot apply; writing them would be refused on reading."""
    for name, options in targets.items():
        if name == BRANCHES:
            for section in options.values():
                _drop_inapplicable(section)
        elif options is not None:
            _drop_inapplicable_to(name, options)


def _drop_inapplicable_to(target: str, options: dict[str, Any]) -> None:
    if target in ("forces", "stress"):
        options.pop("per_atom", None)
    if target != "forces":
        for name in ("species_weights", "direct", "net_zero"):
            options.pop(name, None)
    if options.get("loss") != "huber":
        options.pop("huber_delta", None)


def _emit(
    name: str, value: object, cls: type | None, prefix: str, indent: int, notes: Mapping[str, str], task: type
) -> Iterator[str]:
    """task: the options that the section of that name has."""
    key = f"{prefix}{name}"
    inner = task if key == "task" else _section(cls, name)
    comment = notes.get(key) or _comment(cls, name, inner)
    margin = " " * indent
    if isinstance(value, Mapping) and value and (inner is not None or key in ("model", "trainer")):
        yield from _above(comment, margin)
        yield f"{margin}{flow(name)}:"
        for below, content in value.items():
            yield from _emit(str(below), content, inner, f"{key}.", indent + 2, notes, task)
        return
    line = f"{margin}{flow(name)}: {flow(value)}"
    if comment and len(line) + len(comment) + 4 <= WIDTH:
        yield f"{line}  # {comment}"
    else:
        yield from _above(comment, margin)
        yield line


def _above(comment: str | None, margin: str) -> Iterator[str]:
    for part in textwrap.wrap(comment or "", WIDTH - len(margin) - 2, break_on_hyphens=False):
        yield f"{margin}# {part}"


def _comment(cls: type | None, name: str, inner: type | None) -> str | None:
    """The description of an option with its unit and, unless the description mentions them, the choices."""
    field = next((each for each in dataclasses.fields(cls) if each.name == name), None) if cls is not None else None
    description = field_docs(cls).get(name) if cls is not None else None
    if field is None or description is None or inner is not None:
        return description or (class_doc(inner) if inner is not None else None)
    limits = limits_of(field)
    unit = f" Unit: {limits.unit}." if limits.unit is not None else ""
    mentioned = all(str(choice).lower() in description for choice in limits.choices)
    return description + unit + ("" if mentioned else f" One of {allowed_values(limits, flow)}.")


def _section(cls: type | None, name: str) -> type | None:
    """The dataclass of the section `name` of `cls`."""
    if cls is TaskOptions and name not in (*TARGETS, BRANCHES, DENOISE):
        return FieldTargetOptions
    kind = field_types(cls).get(name) if cls is not None else None
    of_each = typing.get_args(kind)[1] if typing.get_origin(kind) is dict else kind
    return section_class(of_each)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes strings so that OmegaConf's reader, which knows more numbers than YAML 1.1, reads them as strings."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    plain = text.isprintable() and not _like_a_number(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _like_a_number(text: str) -> bool:
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True


_Dumper.add_representer(str, _represent_text)
