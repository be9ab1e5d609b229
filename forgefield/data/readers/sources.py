"""From what a setting says (`path`, folder, glob, list, {path, weight}) to a plain list of files.

Paths are relative to the working folder; the files of a folder or a glob come in sorted order.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from forgefield.errors import ForgefieldError

log = logging.getLogger(__name__)

XYZ_SUFFIXES = (".xyz", ".extxyz")
EXECUTABLE_FORMATS = ("bundletrajectory", "trj")
"""ASE formats that may hold pickles: reading them could run a stranger's code."""
PROSE_SUFFIXES = (".md", ".txt", ".log", ".html", ".py", ".csv")
"""Left out of folders: ASE claims some of them, but what lies beside data under these names is seldom data."""


@dataclass(frozen=True)
class SourceFile:
    path: Path
    weight: float = 1.0


def plain(value: Any) -> Any:
    """`value` with OmegaConf containers turned into dicts and lists."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def source_files(spec: Any) -> list[SourceFile]:
    """All files `spec` names, each of which exists and may be read."""
    files = _expand(plain(spec), 1.0)
    seen: set[Path] = set()
    for file in files:
        real = file.path.resolve()
        if real in seen:
            raise ForgefieldError(f"{file.path} is named twice by {plain(spec)!r}; its frames would count twice")
        seen.add(real)
    return files


def _expand(spec: Any, weight: float) -> list[SourceFile]:
    if isinstance(spec, (str, os.PathLike)):
        return [SourceFile(path, weight) for path in _paths(os.fspath(spec))]
    if isinstance(spec, Mapping):
        return _expand(*_path_and_weight(spec, weight))
    if isinstance(spec, Sequence) and spec:
        return [file for item in spec for file in _expand(item, weight)]
    raise ForgefieldError(
        f"{spec!r} is not a source of frames; give a file, a folder, a glob, or a list of these or of {{path, weight}}"
    )


def _path_and_weight(spec: Mapping[str, Any], outer: float) -> tuple[Any, float]:
    unknown = set(spec) - {"path", "weight"}
    if unknown or "path" not in spec:
        raise ForgefieldError(f"a source of frames is {{path: ..., weight: ...}}, not {dict(spec)!r}")
    weight = spec.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not weight >= 0:
        raise ForgefieldError(f"the weight of {spec['path']} is {weight!r}; it should be a number, not negative")
    return spec["path"], outer * float(weight)


def _paths(text: str) -> list[Path]:
    path = Path(text).expanduser()
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except PermissionError:
        raise ForgefieldError(f"{path}: no permission to look there") from None
    if is_folder:
        return _folder(path)
    if exists:
        return [path]
    if glob.has_magic(text):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file()]
        if not files:
            raise ForgefieldError(f"{text}: no file matches this pattern (looked from {Path.cwd()})")
        return files
    raise ForgefieldError(f"{text}: there is no such file or folder (looked from {Path.cwd()})")


def _folder(folder: Path) -> list[Path]:
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except PermissionError:
        raise ForgefieldError(f"{folder}: no permission to look into this folder") from None
    readable = [path for path in inside if path.suffix not in PROSE_SUFFIXES and file_format(path) is not None]
    skipped = [path.name for path in inside if path not in readable]
    if skipped:
        log.info("%s: not structure files by their names, left out: %s", folder, ", ".join(skipped))
    if not readable:
        raise ForgefieldError(f"{folder}: this folder holds no structure file (for folders within it, give a glob)")
    return readable


def file_format(path: Path) -> str | None:
    """Reader of `path` by its name: `extxyz`, `npz`, `db`, else the name of an ASE format, else None."""
    if path.suffix in XYZ_SUFFIXES:
        return "extxyz"
    if path.suffix in (".npz", ".db"):
        return path.suffix[1:]
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    try:
        name = filetype(str(path), read=False, guess=False)
    except UnknownFileTypeError:
        return None
    return name if name in ioformats and ioformats[name].can_read else None
