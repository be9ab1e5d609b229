"""Files that the section `data` of a config names: absolute paths, and several validation or test sets by name.

A relative path is looked up in the working directory first and then next to the config file, so that a config can be used from
anywhere and a loaded config means the same everywhere.

`data.test: {300K: a.xyz, 600K: b.xyz}` are named test sets. Results of an unnamed set are in `test.json` and
`predictions/test.npz` of a run, those of a set NAME in `test-NAME.json` and `predictions/test-NAME.npz`. Named sets of
`data.val` are validated together (`val/forces_mae`) and one by one (`val-NAME/forces_mae`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from forgefield.files import find_path

SLICE = re.compile(r"^-?\d*:-?\d*(:-?\d*)?$")
UNNAMED = "test"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
"""A name is part of file names."""
_OF_SOURCES = {"path", "indices", "inputs", "targets", "info"}
"""Keys of mappings that describe one set."""


def is_named(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value of `data.val` or `data.test` is a mapping of named sets."""
    return isinstance(value, Mapping) and not _OF_SOURCES & set(map(str, value))


def test_sets(value: object) -> dict[str, Any]:
    """What each set consists of, by the name of its results: `test`, or `test-NAME` for a named one."""
    if is_named(value):
        return {f"{UNNAMED}-{name}": files for name, files in value.items()}
    return {UNNAMED: value}


def validation_sets(value: object) -> dict[str, Any]:
    """What each validation set consists of, by the name of its metrics: `val`, or `val-NAME` for a named one."""
    return {f"val-{name}": files for name, files in value.items()} if is_named(value) else {"val": value}


def title(result: str) -> str:
    """How a table or figure names the set of a result: `test 300K` for `test-300K`."""
    return result.replace("-", " ", 1) if result.startswith(f"{UNNAMED}-") else result


def absolute(value: object, folders: Sequence[Path]) -> Any:
    """A file, pattern, list or mapping of them with absolute paths."""
    if isinstance(value, str):
        return value if SLICE.match(value) else find_path(value, folders)
    if isinstance(value, list):
        return [absolute(item, folders) for item in value]
    if isinstance(value, Mapping):
        paths = ("path", "indices", "inputs", "targets", "info")
        return {key: absolute(item, folders) if key in paths else item for key, item in value.items()}
    return value
