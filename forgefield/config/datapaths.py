"""Files named in the `data` section, made absolute.

A relative path is looked for in the current working directory first and then beside the config file, so that a config
can be used from anywhere and a loaded config means the same from everywhere.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgefield.config.schema import DataOptions
from forgefield.config.test_sets import is_named

SLICE = re.compile(r"^-?\d*:-?\d*(:-?\d*)?$")


def absolute_data_paths(data: DataOptions, folders: Sequence[Path]) -> None:
    """Rewrite `train`, `val`, `test`, `indices` and the folder of pseudopotentials in place; numbers, slices and lists of
    numbers stay as they are."""
    for key in ("train", "val", "test", "indices"):
        value = getattr(data, key)
        if key == "test" and is_named(value):
            setattr(data, key, {name: absolute(files, folders) for name, files in value.items()})
        else:
            setattr(data, key, absolute(value, folders))
    if data.points is not None and data.points.pseudopotentials is not None:
        data.points.pseudopotentials = find_path(data.points.pseudopotentials, folders)


def find_path(path: str, folders: Sequence[Path]) -> str:
    """`path` in the first of `folders` where it (or, for a pattern, a match) exists; in the first one if nowhere."""
    text = str(Path(path).expanduser())
    candidates = [str((folder / text).absolute()) for folder in folders]
    for candidate in candidates:
        file = candidate.partition("#")[0]  # what follows is a group within the file
        if Path(candidate).exists() or Path(file).is_file() or glob.glob(candidate, recursive=True):
            return candidate
    return candidates[0]


def absolute(value: Any, folders: Sequence[Path]) -> Any:
    """A file, pattern, list or mapping of them with absolute paths."""
    if isinstance(value, str):
        return value if SLICE.match(value) else find_path(value, folders)
    if isinstance(value, list):
        return [absolute(item, folders) for item in value]
    if isinstance(value, Mapping):
        paths = ("path", "indices", "inputs", "targets", "info")
        return {key: absolute(item, folders) if key in paths else item for key, item in value.items()}
    return value
