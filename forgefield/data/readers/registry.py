"""The readers of all formats, and which of them reads a path."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from forgefield.data.frame import Frame
from forgefield.data.labels.fields import select_fields
from forgefield.data.readers.ase_files import AseDatabaseReader, AseReader
from forgefield.data.readers.aselmdb import AseLmdbReader
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.data.readers.deepmd import DeepmdReader
from forgefield.data.readers.extxyz import ExtxyzReader
from forgefield.data.readers.hdf5 import Hdf5Reader
from forgefield.data.readers.matsciml import MatscimlReader
from forgefield.data.readers.npz import NpzReader
from forgefield.data.store.store import MANIFEST, Store, open_store


class StoreReader(Reader):
    name = "store"
    folder_marker = MANIFEST

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[Frame]:
        store = _store(source.path)
        select_fields(source.path, store.fields, options.fields, required=False)  # a missing one is refused at the end
        yield from store.table()[start:stop]

    def count(self, source: SourceFile) -> int:
        return len(_store(source.path).table())


def _store(path: Path) -> Store:
    """The store in a folder, opened and verified once, and cached until its manifest changes."""
    status = os.stat(path / MANIFEST)
    return _opened(path, str(path.resolve()), status.st_mtime_ns, status.st_ino, status.st_size)


@lru_cache(maxsize=1)  # an open store has as many open files as columns
def _opened(path: Path, *_: str | int) -> Store:
    atexit.unregister(_opened.cache_clear)
    atexit.register(_opened.cache_clear)  # close its files before the interpreter shuts down
    return open_store(path)


READERS: tuple[Reader, ...] = (
    StoreReader(),
    DeepmdReader(),
    MatscimlReader(),
    AseLmdbReader(),
    ExtxyzReader(),
    NpzReader(),
    Hdf5Reader(),
    AseDatabaseReader(),
)
"""In the order in which they are tried. Everything else is left to ASE."""

SUFFIXES = frozenset(suffix for reader in READERS for suffix in reader.suffixes)


def find_reader(path: Path) -> Reader | None:
    """The reader of `path` by its name, or by what a folder contains; None where nothing reads such a file."""
    if path.is_dir():
        return _folder_reader(path)
    for reader in READERS:
        if path.suffix in reader.suffixes:
            return reader
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    try:
        name = filetype(str(path), read=False, guess=False)
    except UnknownFileTypeError:
        return None
    return AseReader(name) if name in ioformats and ioformats[name].can_read else None


def reader_of(path: Path) -> Reader:
    """The reader of `path`; ASE reads files of unknown names, whose format it determines from the content."""
    return find_reader(path) or AseReader(None)


def file_format(path: Path) -> str | None:
    """Name of the reader of `path` or of its ASE format; None where nothing reads such a file."""
    reader = find_reader(path)
    if reader is None:
        return None
    return reader.format_name if isinstance(reader, AseReader) else reader.name


def _folder_reader(folder: Path) -> Reader | None:
    try:
        for reader in READERS:
            if reader.folder_marker is not None and (folder / reader.folder_marker).is_file():
                return reader
    except PermissionError:  # reported where the folder is listed
        pass
    return None
