"""The table of readers: one line for each format, and the way from a path to its reader."""

from __future__ import annotations

from pathlib import Path

from forgefield.data.readers.ase_files import AseDatabaseReader, AseReader
from forgefield.data.readers.base import Reader
from forgefield.data.readers.deepmd import DeepmdReader
from forgefield.data.readers.hdf5.reader import Hdf5Reader
from forgefield.data.readers.lmdb.aselmdb import AseLmdbReader
from forgefield.data.readers.lmdb.matsciml import MatscimlReader
from forgefield.data.readers.npz import NpzReader
from forgefield.data.readers.store_reader import StoreReader
from forgefield.data.readers.xyz.extxyz import ExtxyzReader

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
    """The reader of `path`; a file without a known name is left to ASE, which looks at its content."""
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
