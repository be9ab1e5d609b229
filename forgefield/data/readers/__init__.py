"""Frames from files: extxyz, npz, DeePMD systems, LMDB, HDF5, ASE databases, stores, and everything else ASE reads.

`read_frames` gives all frames of a setting; `frames_of` streams a part of one source and never holds the file; `chunks`
says which parts of a source can be read by themselves.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.config.schema import LabelOptions, UnitOptions
from forgefield.data.fields import chosen_fields
from forgefield.data.frame import Frame, RawFrame
from forgefield.data.labels import LabelReader
from forgefield.data.readers.block_labels import block_frames
from forgefield.data.readers.blocks import RawBlock, even_ranges
from forgefield.data.readers.sources import SourceFile, file_format, source_files
from forgefield.errors import ForgefieldError, SourceUnreadable

if TYPE_CHECKING:
    from forgefield.data.store.store import Store

__all__ = [
    "SourceFile",
    "chunks",
    "frame_count",
    "frames_from_atoms",
    "frames_of",
    "frames_with_values",
    "read_frames",
    "source_files",
]

Raw = Iterator[RawFrame | RawBlock] | Iterator[RawFrame] | Iterator[RawBlock]


def read_frames(
    spec: Any,
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
    from forgefield.data.readers.ase_files import raw_from_atoms

    reader = LabelReader(labels or LabelOptions(), UnitOptions())
    frames = [reader.frame(raw_from_atoms(atoms, source or "structures", i)) for i, atoms in enumerate(images)]
    reader.finish(source or "the given structures")
    return frames


def frames_of(
    file: SourceFile, reader: LabelReader, units: UnitOptions, start: int = 0, stop: int | None = None
) -> Iterator[Frame]:
    """Frames start to stop of one source, one after the other. An empty source is an error, an empty part is not."""
    n_frames = 0
    with _reading(file):
        for frame in _frames(file, reader, units, start, stop):
            n_frames += 1
            yield frame if file.weight == 1.0 else replace(frame, weight=frame.weight * file.weight)
    if n_frames == 0 and start == 0 and stop is None:
        raise ForgefieldError(f"{file.name}: there are no frames in this file")


def frames_with_values(
    file: SourceFile, reader: LabelReader, units: UnitOptions
) -> Iterator[tuple[Frame, RawFrame | None]]:
    """Every frame of one source together with all values that the file holds for it; None for a store, whose frames hold all
    there is."""
    if file_format(file.path) == "store":
        yield from ((frame, None) for frame in frames_of(file, reader, units))
        return
    n_frames = 0
    with _reading(file):
        for part in _raw(file, units, _field_keys(reader), 0, None):
            for raw in [part] if isinstance(part, RawFrame) else part.frames():
                n_frames += 1
                yield reader.frame(raw), raw
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
        raise ForgefieldError(f"chunks of {size} frames were asked for; it should be at least 1")
    count = frame_count(file)
    return [(0, None)] if count is None else even_ranges(count, size)


def frame_count(file: SourceFile) -> int | None:
    """Number of frames where it is known quickly and any part can be read by itself; else None."""
    with _reading(file):
        return _count(file)


def _refuse_empty(file: SourceFile) -> None:
    if file.path.is_dir():
        return
    with file.path.open("rb") as stream:  # also keeps libraries from creating or repairing a file in place
        if not stream.read(1):
            raise ForgefieldError(f"{file.path}: the file is empty")


def _frames(file: SourceFile, reader: LabelReader, units: UnitOptions, start: int, stop: int | None) -> Iterator[Frame]:
    if file_format(file.path) == "store":
        store = _store(file.path)
        chosen_fields(file.path, store.fields, reader.asked, required=False)  # what never comes, `finish` will name
        yield from map(reader.stored, store.table()[start:stop])
        return
    for raw in _raw(file, units, _field_keys(reader), start, stop):
        if isinstance(raw, RawFrame):
            yield reader.frame(raw)
            continue
        block = block_frames(raw, reader)
        yield from map(reader.frame, raw.frames()) if block is None else block


def _field_keys(reader: LabelReader) -> frozenset[str]:
    return frozenset(said.key or name for name, said in reader.fields.items()) - set(reader.names.values())


def _store(path: Path) -> Store:
    """The store in a folder, opened and verified once, and kept open while its manifest stays as it is."""
    from forgefield.data.store.store import MANIFEST

    status = os.stat(path / MANIFEST)
    return _opened(path, str(path.resolve()), status.st_mtime_ns, status.st_ino, status.st_size)


@lru_cache(maxsize=1)  # an open store has as many open files as columns
def _opened(path: Path, *_: str | int) -> Store:
    from forgefield.data.store.store import open_store

    atexit.unregister(_opened.cache_clear)
    atexit.register(_opened.cache_clear)  # its files are closed before the interpreter is taken apart
    return open_store(path)


def _raw(file: SourceFile, units: UnitOptions, fields: frozenset[str], start: int, stop: int | None) -> Raw:
    """Frames start to stop as they stand in the file. fields: keys of fields. Readers are imported when a file needs them."""
    path, kind = file.path, file_format(file.path)
    if kind == "extxyz":
        from forgefield.data.readers.extxyz import read_extxyz

        return read_extxyz(path, start, stop)
    if kind == "npz":
        from forgefield.data.readers.npz import read_npz

        return read_npz(path, units, start, stop)
    if kind == "deepmd":
        from forgefield.data.readers.deepmd import open_folder, read_system

        return read_system(open_folder(path, file.type_map), start, stop)
    if kind == "hdf5":
        from forgefield.data.readers.hdf5 import read_hdf5

        return read_hdf5(path, units, start, stop, group=file.group, type_map=file.type_map, fields=fields)
    if kind == "lmdb":
        from forgefield.data.readers.matsciml import read_matsciml

        return read_matsciml(path, start, stop)
    if kind == "aselmdb":
        from forgefield.data.readers.aselmdb import read_aselmdb

        return read_aselmdb(path, start, stop)
    from forgefield.data.readers.ase_files import read_ase_database, read_ase_file

    return islice(read_ase_database(path) if kind == "db" else read_ase_file(path, kind), start, stop)


def _count(file: SourceFile) -> int | None:
    path, kind = file.path, file_format(file.path)
    if kind == "extxyz":
        from forgefield.data.readers.extxyz import count_extxyz

        return count_extxyz(path)
    if kind == "npz":
        from forgefield.data.readers.npz import count_npz

        return count_npz(path)
    if kind == "deepmd":
        from forgefield.data.readers.deepmd import open_folder

        return sum(open_folder(path, file.type_map).lengths())
    if kind == "hdf5":
        from forgefield.data.readers.hdf5 import count_hdf5

        return count_hdf5(path, group=file.group, type_map=file.type_map)
    if kind == "lmdb":
        from forgefield.data.readers.lmdb_files import open_lmdb

        with open_lmdb(path) as lmdb_file:
            return len(lmdb_file.keys)
    if kind == "aselmdb":
        from forgefield.data.readers.aselmdb import count_aselmdb

        return count_aselmdb(path)
    if kind == "store":
        return len(_store(path).table())
    return None
