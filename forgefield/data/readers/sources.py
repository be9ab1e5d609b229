"""From what a setting says (`path`, folder, glob, list, {path, weight, ...}) to a plain list of sources.

A source is a file, a group of an HDF5 file (`file.h5#/group`), or a folder that is one thing: a DeePMD system, an LMDB
environment, a store. Paths are relative to the working folder; what a folder or a glob holds comes in sorted order.
"""

from __future__ import annotations

import glob
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgefield.data.readers.base import SourceFile
from forgefield.data.readers.registry import SUFFIXES, find_reader
from forgefield.errors import ForgefieldError

log = logging.getLogger(__name__)

DESCRIPTION = "metadata.json"
"""Accompanies the HDF5 files of Open MatSciML."""
PROSE_SUFFIXES = (".md", ".txt", ".log", ".html", ".py", ".csv")
"""Skipped in folders: ASE reads some of them, but files with these names next to data are seldom data."""


def source_files(spec: object) -> list[SourceFile]:
    """All sources `spec` names, each of which exists and may be read."""
    files = [replace(file, entry=entry) for entry, part in enumerate(_entries(spec)) for file in _expand(part, None)]
    _refuse_overlap(files, spec)
    return files


def _entries(spec: Any) -> list[Any]:
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return [entry for item in spec for entry in _entries(item)] or [spec]
    return [spec]


def _refuse_overlap(files: list[SourceFile], spec: object) -> None:
    seen: dict[tuple[str | None, Path], list[str]] = {}
    for file in files:
        groups = seen.setdefault((file.branch, file.path.resolve()), [])
        mine = (file.group or "").rstrip("/") + "/"
        if any(mine.startswith(other) or other.startswith(mine) for other in groups):
            raise ForgefieldError(f"{file.name} is named twice by {spec!r}; its frames would count twice")
        groups.append(mine)


def _expand(spec: object, outer: SourceFile | None) -> list[SourceFile]:
    if isinstance(spec, (str, os.PathLike)):
        files = _named(os.fspath(spec))
        return files if outer is None else [replace(outer, path=file.path, group=file.group) for file in files]
    if isinstance(spec, Mapping):
        inside, settings = _settings(spec, outer)
        files = _expand(inside, settings)
        if settings.type_map is not None:
            _refuse_type_map(files)
        return files
    if isinstance(spec, Sequence) and spec:
        return [file for item in spec for file in _expand(item, outer)]
    raise ForgefieldError(
        f"{spec!r} is not a source of frames; give a file, a folder, a glob, or a list of these or of {{path, weight}}"
    )


def _settings(spec: Mapping[str, Any], outer: SourceFile | None) -> tuple[Any, SourceFile]:
    """What a mapping names, and a source that carries its settings."""
    outer = outer or SourceFile(Path())
    unknown = set(spec) - {"path", "weight", "share", "type_map", "branch"}
    if unknown or "path" not in spec:
        raise ForgefieldError(
            f"a source of frames is {{path: ..., weight: ..., share: ..., type_map: [...], branch: ...}}, not {dict(spec)!r}"
        )
    branch = spec.get("branch")
    if branch is not None and (not isinstance(branch, str) or outer.branch not in (None, branch)):
        raise ForgefieldError(f"the branch of {spec['path']} is {branch!r}; it should be the name of one branch")
    weight, share, elements = spec.get("weight", 1.0), spec.get("share"), spec.get("type_map")
    for name, value in (("weight", weight), ("share", 0.0 if share is None else share)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise ForgefieldError(f"the {name} of {spec['path']} is {value!r}; it should be a number, not negative")
    if share is not None and outer.share is not None:
        raise ForgefieldError(f"the share of {spec['path']} is given twice, by {{path, share}} within another of these")
    return spec["path"], SourceFile(
        Path(),
        weight=outer.weight * float(weight),
        share=outer.share if share is None else float(share),
        type_map=outer.type_map if elements is None else _elements(elements, spec["path"]),
        branch=branch or outer.branch,
    )


def _elements(names: object, path: object) -> tuple[str, ...]:
    from ase.data import atomic_numbers

    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise ForgefieldError(f"the type_map of {path} is {names!r}; it should be a list of elements, such as [O, H]")
    for name in names:
        if name not in atomic_numbers or name == "X":
            raise ForgefieldError(f"the type_map of {path} names {name!r}, which is not a chemical element")
    return tuple(names)


def _refuse_type_map(files: list[SourceFile]) -> None:
    for file in files:
        reader = find_reader(file.path)
        if reader is None or not reader.has_atom_types:
            raise ForgefieldError(f"{file.name}: a type_map was given, but only DeePMD systems have atom types to map")


def _named(text: str) -> list[SourceFile]:
    path = Path(text).expanduser()
    before, mark, group = text.rpartition("#")
    if not mark or path.exists():
        return [SourceFile(path) for path in _paths(text)]
    group = "/" + group.strip("/")
    files = [SourceFile(path, group=None if group == "/" else group) for path in _paths(before)]
    for file in files:
        reader = find_reader(file.path)
        if reader is None or not reader.has_groups:
            raise ForgefieldError(f"{text}: only HDF5 files have groups, and {file.path} is not one by its name")
    return files


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
        return _matches(text, path)
    if path.with_name(path.name + ".partial").is_dir():
        raise ForgefieldError(
            f"{text}: its conversion was not finished ({path.name}.partial); run the same `forgefield data convert` again"
        )
    raise ForgefieldError(f"{text}: there is no such file or folder (looked from {Path.cwd()})")


def _matches(text: str, pattern: Path) -> list[Path]:
    """Files that match, and folders that are sources; not the files such a folder is made of."""
    matches = sorted(Path(match) for match in glob.glob(str(pattern), recursive=True))
    folders = {match for match in matches if match.is_dir() and find_reader(match) is not None}
    found = [
        match
        for match in matches
        if match in folders or (match.is_file() and not any(parent in folders for parent in match.parents))
    ]
    if not found:
        raise ForgefieldError(f"{text}: no file matches this pattern (looked from {Path.cwd()})")
    return found


def _folder(folder: Path) -> list[Path]:
    if find_reader(folder) is not None:
        return [folder]
    try:
        inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except PermissionError:
        raise ForgefieldError(f"{folder}: no permission to look into this folder") from None
    files = [path for path in inside if path.is_file()]
    prose = [path for path in files if path.suffix in PROSE_SUFFIXES or path.name == DESCRIPTION]
    readable = [path for path in files if path not in prose and find_reader(path) is not None]
    readable += [path for path in inside if path.suffix in SUFFIXES and path.is_dir() and find_reader(path)]
    skipped = [path.name for path in files if path not in readable]
    if skipped:
        log.info("%s: not structure files by their names, left out: %s", folder, ", ".join(skipped))
    readable = sorted(readable) or _systems_below(folder)
    if not readable:
        raise ForgefieldError(
            f"{folder}: this folder holds no structure file and no DeePMD system below it "
            "(for other files in folders within it, give a glob)"
        )
    return readable


def _systems_below(folder: Path) -> list[Path]:
    """DeePMD systems at any depth, sorted by path."""

    def refuse(error: OSError) -> None:
        raise ForgefieldError(f"{error.filename}: no permission to look into this folder") from None

    systems = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        if "type.raw" in names:
            systems.append(Path(place))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(systems)
