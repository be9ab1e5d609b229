"""Where each setting comes from: a line of a YAML file, or an override on the command line.

YAML files are read here, and syntax errors and keys given twice are refused here. Every later message about a setting
gets its location from `Sources.where`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.untrusted.documents import compose_yaml_node

YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class SourceLine:
    file: Path
    line: int
    """Counted from 1."""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclass
class Sources:
    """Locations of all keys in files and overrides, by dotted key (`data.batch.frames`, `callbacks.0.name`)."""

    main: Path | None = None
    lines: dict[str, SourceLine] = field(default_factory=dict)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    """(dotted key, override as typed), in order."""
    scalars: list[str] = field(default_factory=list)
    """Every plain value in the files, as written."""
    missing: set[str] = field(default_factory=set)
    """Keys whose value is `???`, which must be overridden."""
    translated: bool = False
    """`main` is an input of another program: its keys are not those of a config."""

    def add_text(self, text: str, file: Path, package: str = "") -> None:
        """Record the keys of one YAML document that Hydra puts under `package`."""
        root = compose_yaml(text, file)
        if isinstance(root, yaml.MappingNode):
            self._walk(root, file, package)

    def add_override(self, key: str, value: object, text: str) -> None:
        """Record an override and every key inside the mapping it sets."""
        self.overrides.append((key, text))
        if isinstance(value, dict):
            for name, below in value.items():
                self.add_override(f"{key}.{name}", below, text)

    def in_files(self, key: str) -> bool:
        """Whether a file contains this key or one below it."""
        return any(_within(name, key) for name in self.lines)

    def explicit(self, key: str) -> bool:
        """Whether the user wrote this key or one below it, in a file or as an override."""
        return self.in_files(key) or any(_within(name, key) for name, _ in self.overrides)

    def where(self, key: str) -> str:
        """The location to name in a message about `key`: the override or line that set it, or the nearest one above."""
        for text in (text for name, text in reversed(self.overrides) if _within(name, key)):
            return f"command line ('{text}')"
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
            for text in (text for name, text in reversed(self.overrides) if name == key):
                return f"command line ('{text}')"
        if key:
            return str(self.lines[key])
        return str(self.main) if self.main is not None else "config"

    def _walk(self, node: yaml.Node, file: Path, prefix: str) -> None:
        if isinstance(node, yaml.ScalarNode):
            self.scalars.append(node.value)
        if isinstance(node, yaml.SequenceNode):
            for position, item in enumerate(node.value):
                self._note(f"{prefix}.{position}", item, item, file)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == "<<":
                    for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                        self._walk(merged, file, prefix)
            for key, value in node.value:
                if key.value != "<<":
                    self._note(f"{prefix}.{key.value}" if prefix else str(key.value), key, value, file)

    def _note(self, dotted: str, key: yaml.Node, value: yaml.Node, file: Path) -> None:
        self.lines[dotted] = SourceLine(file, key.start_mark.line + 1)
        self.missing.discard(dotted)
        if isinstance(value, yaml.ScalarNode) and value.value == "???":
            self.missing.add(dotted)
        self._walk(value, file, dotted)


class Located:
    """Base of configs. It is not a dataclass, so that this attribute is not a setting."""

    sources: Sources | None = None
    """Where the settings come from, for checks that are made after the config was loaded."""


@contextmanager
def naming_the_line(config: Located, section: str) -> Iterator[None]:
    """Inside, an error whose message begins with a key of `section` gets the location that set this key, if it is known."""
    try:
        yield
    except ForgefieldError as error:
        key = re.match(rf"{section}(\.\w+)*", str(error))
        sources = config.sources
        if key is None or sources is None or not sources.explicit(key[0]):
            raise
        raise ForgefieldError(f"{sources.where(key[0])}: {error}") from error


def wrong(sources: Sources, key: str, value: object, expected: str) -> ForgefieldError:
    """The error for a value that is not what was expected."""
    shown = "null" if value is None else repr(value)
    return ForgefieldError(f"{sources.where(key)}: '{key}' must be {expected}, not {shown}.")


def check_choice(value: object, choices: Sequence[Any], key: str, sources: Sources) -> None:
    """Refuse a value that is none of these."""
    if value not in choices:
        names = [
            "null" if choice is None else str(choice).lower() if isinstance(choice, bool) else str(choice)
            for choice in choices
        ]
        valid = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
        hint = did_you_mean(str(value), names)
        raise ForgefieldError(f"{sources.where(key)}: '{key}' must be {valid}, not {value!r}.{hint}")


def read_text(path: Path) -> str:
    """The text of a config file, or a sentence why there is none."""
    if path.is_dir():
        raise ForgefieldError(f"{path} is a folder, not a config file.{did_you_mean(path.stem, _configs_in(path))}")
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise ForgefieldError(f"config file {path} not found: there is no folder {folder}.")
        raise ForgefieldError(f"config file {path} not found.{did_you_mean(path.name, _configs_in(folder))}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ForgefieldError(f"{path} is not a text file in UTF-8, so it cannot be a YAML config.") from error
    except OSError as error:
        raise ForgefieldError(f"{path} cannot be read: {error.strerror}.") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a config file; interpolations are left as they are."""
    text = read_text(path)
    root = compose_yaml(text, path)
    if root is None:
        raise ForgefieldError(f"{path} is empty; `forgefield init DATA` writes a config to start from.")
    if not isinstance(root, yaml.MappingNode):
        raise ForgefieldError(
            f"{path}: a config must be a mapping of sections (data: ..., training: ...), not a {root.id}."
        )
    try:
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        raise ForgefieldError(f"{path}: {first_line(error)}.") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def compose_yaml(text: str, file: Path) -> yaml.Node | None:
    """The YAML node tree with its line marks; refuses bad syntax and keys given twice."""
    try:
        root = compose_yaml_node(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise ForgefieldError(f"{file}{line}: this is not valid YAML: {problem}.{_yaml_hint(text, problem)}") from error
    _refuse_duplicates(root, file, "")
    return root


def first_line(error: BaseException) -> str:
    """First line of an exception's text, without a full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


def _refuse_duplicates(node: yaml.Node | None, file: Path, prefix: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(item, file, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ForgefieldError(f"{file}, line {key.start_mark.line + 1}: a key must be a word, not a {key.id}.")
        dotted, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if key.value in lines:
            raise ForgefieldError(f"{file}, line {line}: '{dotted}' is given twice, first in line {lines[key.value]}.")
        lines[key.value] = line
        _refuse_duplicates(value, file, f"{dotted}.")


def _yaml_hint(text: str, problem: str) -> str:
    if "\\t" in problem and "\t" in text:
        return " Indent with spaces, not tabs."
    if "mapping values are not allowed" in problem:
        return " Check the indentation, and quote values that hold a colon."
    return ""


def _configs_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix in (*YAML_SUFFIXES, ".json"))


def _within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")
