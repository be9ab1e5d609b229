"""The sources that a setting names (a path, folder, glob, list or {path, weight, ...}), and their frames.

A source is a file, a group of an HDF5 file (`file.h5#/group`), or a folder that is read as one: a DeePMD system, an LMDB
environment, a store. Paths are relative to the working folder; the contents of a folder or a glob are sorted.

`read_frames` returns all frames that a setting names, checked, in eV and A; `frames_of` streams a range of the frames of one
source without holding the file in memory; `chunks` lists the ranges that can be read independently.
"""

from __future__ import annotations

import glob
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgefield.data.frame import Frame, RawBlock, RawFrame, even_ranges
from forgefield.data.labels.block_labels import block_frames
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.labels.source_settings import source_settings
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers.ase_files import raw_from_atoms
from forgefield.data.readers.base import ReadOptions, SourceFile, TypeMap
from forgefield.data.readers.registry import SUFFIXES, StoreReader, find_reader, reader_of
from forgefield.errors import ForgefieldError, SourceUnreadable

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


def _entries(spec: object) -> list[Any]:
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


def with_type_map(
    spec: object, type_map: tuple[str, ...] | None, type_names: Mapping[str, str] | None = None
) -> object:
    """`spec`, or its sources with the types of a training.

    type_map: elements of types 0, 1, ... in DeePMD systems that do not name them. type_names: elements of types with other
    names than those of elements.
    """
    if type_map is None and not type_names:
        return spec
    files, changed = source_files(spec), dict[SourceFile, SourceFile]()
    for file in files:
        reader = find_reader(file.path)
        if file.type_map is not None or reader is None or not reader.has_atom_types:
            continue
        if not reader.names_types(file):
            if type_map is not None:
                if not changed:
                    names = ", ".join(type_map)
                    log.info("%s: no type_map.raw; types 0, 1, ... are %s, as in the training", file.name, names)
                changed[file] = replace(file, type_map=type_map)
        elif type_names:
            changed[file] = replace(file, type_map=tuple(type_names.items()))
    return [changed.get(file, file) for file in files] if changed else spec


def _expand(spec: object, outer: SourceFile | None) -> list[SourceFile]:
    if isinstance(spec, SourceFile):
        return [spec]
    if isinstance(spec, (str, os.PathLike)):
        files = _named(os.fspath(spec))
        return files if outer is None else [replace(outer, path=file.path, group=file.group) for file in files]
    if isinstance(spec, Mapping):
        inside, settings = _settings(spec, outer)
        files = _expand(inside, settings)
        if settings.type_map is not None:
            _refuse_type_map(files)
        if settings.settings:
            _refuse_settings_of_stores(files)
        return files
    if isinstance(spec, Sequence) and spec:
        return [file for item in spec for file in _expand(item, outer)]
    raise ForgefieldError(
        f"{spec!r} is not a source of frames; give a file, a folder, a glob, or a list of these or of {{path, weight}}"
    )


def _settings(spec: Mapping[str, Any], outer: SourceFile | None) -> tuple[Any, SourceFile]:
    """The sources that a mapping names, with its settings."""
    outer = outer or SourceFile(Path())
    unknown = set(spec) - {"path", "weight", "share", "type_map", "branch", "labels", "units"}
    if unknown or "path" not in spec:
        raise ForgefieldError(
            "a source of frames must be {path: ..., weight: ..., share: ..., type_map: [...], branch: ..., labels: {...}, "
            f"units: {{...}}}}, not {dict(spec)!r}"
        )
    branch = spec.get("branch")
    if branch is not None and (not isinstance(branch, str) or outer.branch not in (None, branch)):
        raise ForgefieldError(f"the branch of {spec['path']} must be the name of one branch, not {branch!r}")
    weight, share, elements = spec.get("weight", 1.0), spec.get("share"), spec.get("type_map")
    for name, value in (("weight", weight), ("share", 0.0 if share is None else share)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise ForgefieldError(f"the {name} of {spec['path']} is {value!r}; it must be a number of at least 0")
    if share is not None and outer.share is not None:
        raise ForgefieldError(f"the share of {spec['path']} is given twice, by {{path, share}} within another of these")
    settings = source_settings(spec)
    if settings and outer.settings:
        raise ForgefieldError(
            f"the labels and units of {spec['path']} are given twice, by a source within another of these"
        )
    return spec["path"], SourceFile(
        Path(),
        weight=outer.weight * float(weight),
        share=outer.share if share is None else float(share),
        type_map=outer.type_map if elements is None else _elements(elements, spec["path"]),
        branch=branch or outer.branch,
        settings=settings or outer.settings,
    )


def _elements(names: object, path: object) -> TypeMap:
    from ase.data import atomic_numbers

    if not isinstance(names, (Sequence, Mapping)) or isinstance(names, str) or not names:
        raise ForgefieldError(
            f"the type_map of {path} must be a list of elements, such as [O, H], or the element of each name, such as "
            f"{{OW: O, HW: H}}, not {names!r}"
        )
    for name in names.values() if isinstance(names, Mapping) else names:
        if name not in atomic_numbers or name == "X":
            raise ForgefieldError(f"the type_map of {path} names {name!r}, which is not a chemical element")
    return tuple((str(key), str(names[key])) for key in names) if isinstance(names, Mapping) else tuple(names)


def _refuse_type_map(files: list[SourceFile]) -> None:
    for file in files:
        reader = find_reader(file.path)
        if reader is None or not reader.has_atom_types:
            raise ForgefieldError(f"{file.name}: a type_map was given, but only DeePMD systems have atom types to map")


def _refuse_settings_of_stores(files: list[SourceFile]) -> None:
    for file in files:
        if isinstance(find_reader(file.path), StoreReader):
            raise ForgefieldError(
                f"{file.name}: labels and units of a store were settled when it was written; leave them out for it"
            )


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
    paths = [
        match
        for match in matches
        if match in folders or (match.is_file() and not any(parent in folders for parent in match.parents))
    ]
    if not paths:
        raise ForgefieldError(f"{text}: no file matches this pattern (looked from {Path.cwd()})")
    return paths


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
    for current, folders, names in os.walk(folder, onerror=refuse):
        if "type.raw" in names:
            systems.append(Path(current))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(systems)


def read_frames(
    spec: object,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    *,
    required: bool = True,
    reader: LabelReader | None = None,
) -> list[Frame]:
    """All frames `spec` names: a path, folder, glob, {path, weight}, or a list of these. In eV and A, checked.

    required: a label that `labels` names must be in at least one frame. False where a model is used: labels named for
    its training may be missing then. reader: made of the same labels and units, where the caller wants to know what else was
    met.
    """
    labels, units = labels or LabelOptions(), units or UnitOptions()
    reader = reader or LabelReader(labels, units)
    frames: list[Frame] = []
    for file in source_files(spec):
        frames.extend(frames_of(file, reader, units))
    if required:
        reader.finish(str(spec))
    return frames


def frames_from_atoms(images: list[Any], labels: LabelOptions | None = None, source: str = "") -> list[Frame]:
    """ASE structures held in memory as frames."""
    reader = LabelReader(labels or LabelOptions(), UnitOptions())
    frames = [reader.frame(raw_from_atoms(atoms, source or "structures", i)) for i, atoms in enumerate(images)]
    reader.finish(source or "the given structures")
    return frames


def frames_of(
    file: SourceFile, reader: LabelReader, units: UnitOptions, start: int = 0, stop: int | None = None
) -> Iterator[Frame]:
    """Frames start to stop of one source, one after the other. An empty source is an error, an empty part is not."""
    n_frames = 0
    reader, units = _of_file(file, reader, units)
    with _reading(file):
        for frame in _frames(file, reader, units, start, stop):
            n_frames += 1
            yield _weighted(frame, file)
    if n_frames == 0 and start == 0 and stop is None:
        raise ForgefieldError(f"{file.name}: there are no frames in this file")


def _of_file(file: SourceFile, reader: LabelReader, units: UnitOptions) -> tuple[LabelReader, UnitOptions]:
    """Reader and units of a source, which may have names of labels or units of its own."""
    if not file.settings:
        return reader, units
    reader = reader.of_source(file.settings)
    return reader, reader.units


def frames_with_values(
    file: SourceFile, reader: LabelReader, units: UnitOptions
) -> Iterator[tuple[Frame, RawFrame | None]]:
    """Every frame of one source together with all values that the file holds for it; None for a store, whose frames hold all
    there is."""
    n_frames = 0
    reader, units = _of_file(file, reader, units)
    with _reading(file):
        for item in reader_of(file.path).read(file, _read_options(reader, units)):
            for raw in item.frames() if isinstance(item, RawBlock) else [item]:
                n_frames += 1
                yield (
                    (_weighted(reader.stored(raw), file), None) if isinstance(raw, Frame) else (reader.frame(raw), raw)
                )
    if n_frames == 0:
        raise ForgefieldError(f"{file.name}: there are no frames in this file")


def transformed_frames(
    file: SourceFile, reader: LabelReader, units: UnitOptions, transform: Callable[[RawFrame], RawFrame | None]
) -> Iterator[Frame]:
    """The frames of one source, each changed by `transform` before its labels are selected; without those of which it makes
    None."""
    n_frames = 0
    reader, units = _of_file(file, reader, units)
    with _reading(file):
        for item in reader_of(file.path).read(file, _read_options(reader, units)):
            if isinstance(item, Frame):
                raise ForgefieldError(
                    f"{file.name}: data.transforms cannot change the frames of a store; name the files that it was made from"
                )
            for raw in item.frames() if isinstance(item, RawBlock) else [item]:
                n_frames += 1
                changed = transform(raw)
                if changed is not None:
                    yield _weighted(reader.frame(changed), file)
    if n_frames == 0:
        raise ForgefieldError(f"{file.name}: there are no frames in this file")


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    """Errors of the operating system as one sentence that names the file."""
    try:
        _refuse_empty(file)
        yield
    except PermissionError:
        raise SourceUnreadable(f"{file.name}: no permission to read this file") from None
    except OSError as error:
        raise SourceUnreadable(f"{file.name}: it could not be read ({error.strerror or error})") from error


def chunks(file: SourceFile, size: int) -> list[tuple[int, int | None]]:
    """Ranges (start, stop) of about `size` frames, each of which `frames_of` reads without reading what is before.

    [(0, None)] where a format cannot be divided. The last range is open.
    """
    if size < 1:
        raise ForgefieldError(f"chunks must have at least 1 frame, not {size}")
    count = frame_count(file)
    return [(0, None)] if count is None else even_ranges(count, size)


def frame_count(file: SourceFile) -> int | None:
    """Number of frames where it is known quickly and any part can be read by itself; else None."""
    with _reading(file):
        return reader_of(file.path).count(file)


def _refuse_empty(file: SourceFile) -> None:
    if file.path.is_dir():
        return
    with file.path.open("rb") as stream:  # also keeps libraries from creating or repairing a file in place
        if not stream.read(1):
            raise ForgefieldError(f"{file.path}: the file is empty")


def _frames(file: SourceFile, reader: LabelReader, units: UnitOptions, start: int, stop: int | None) -> Iterator[Frame]:
    for item in reader_of(file.path).read(file, _read_options(reader, units), start, stop):
        if isinstance(item, Frame):
            yield reader.stored(item)
        elif isinstance(item, RawFrame):
            yield reader.frame(item)
        else:
            block = block_frames(item, reader)
            yield from map(reader.frame, item.frames()) if block is None else block


def _read_options(reader: LabelReader, units: UnitOptions) -> ReadOptions:
    keys = frozenset(field.key or name for name, field in reader.fields.items()) - set(reader.names.values())
    return ReadOptions(units, reader.requested, keys)


def _weighted(frame: Frame, file: SourceFile) -> Frame:
    return frame if file.weight == 1.0 else replace(frame, weight=frame.weight * file.weight)
