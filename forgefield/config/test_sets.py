"""Several test sets: `data.test: {300K: a.xyz, 600K: b.xyz}`.

Results of an unnamed test set are in `test.json` and `predictions/test.npz` of a run, those of a set NAME in `test-NAME.json`
and `predictions/test-NAME.npz`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

UNNAMED = "test"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
"""A name is part of file names."""
_OF_SOURCES = {"path", "indices", "inputs", "targets", "info"}
"""Keys of mappings that describe one set."""


def is_named(value: Any) -> bool:
    """Whether a value of `data.test` is a mapping of named sets."""
    return isinstance(value, Mapping) and not _OF_SOURCES & set(map(str, value))


def test_sets(value: Any) -> dict[str, Any]:
    """What each set consists of, by the name of its results: `test`, or `test-NAME` for a named one."""
    if is_named(value):
        return {f"{UNNAMED}-{name}": files for name, files in value.items()}
    return {UNNAMED: value}


def title(result: str) -> str:
    """How a table or figure names the set of a result: `test 300K` for `test-300K`."""
    return result.replace("-", " ", 1) if result.startswith(f"{UNNAMED}-") else result
