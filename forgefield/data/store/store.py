"""A store: columns of frames as plain `.npy` files in a folder, described by a manifest.

    manifest.json            fields, units, parts, statistics, hashes
    part-00000/positions.npy, forces.npy, energy.npy, ...

Opening reads only the manifest. Columns of values per frame are mapped into memory; values of atoms and edges are read by
position, directly into the array of the batch. Memory use does not depend on the size of the store, a truncated file is an
error and not a crash, and other threads continue while one waits for the disk.

A change of the format adds to `STORE` the function that converts a manifest of the previous version to the next. Columns on
disk are not rewritten.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

import numpy as np

from forgefield.data.labels.fields import Field, FieldEntry, Fields, field_from_manifest
from forgefield.data.neighbours.graph import GraphOptions, same_graph
from forgefield.data.store.columns import EDGE_FIELDS, FIELDS, OPTIONAL, Columns
from forgefield.data.store.table import FrameTable, TablePart
from forgefield.errors import ForgefieldError
from forgefield.formats import Format
from forgefield.untrusted.documents import load_json

MANIFEST = "manifest.json"
FORMAT = "forgefield-store"
STORE = Format("a store", migrations=(), key="version")
VERSION = STORE.version
"""The format version that is written."""


class ColumnEntry(TypedDict):
    bytes: int
    hash: str


class PartEntry(TypedDict):
    """One part of a store, a folder of column files."""

    name: str
    n_frames: int
    n_atoms: int
    n_edges: int | None
    sources: list[str]
    columns: dict[str, ColumnEntry]


class Manifest(TypedDict):
    """fields: columns by name. graph: options of the neighbour lists, None without such lists. hash: of all other entries."""

    format: str
    version: int
    forgefield: str
    n_frames: int
    n_atoms: int
    n_edges: int | None
    fields: dict[str, FieldEntry]
    graph: dict[str, Any] | None
    statistics: dict[str, object]
    parts: list[PartEntry]
    hash: str


def is_store(path: Path) -> bool:
    """Whether this folder is a store."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`, of the current version, its hash verified."""
    file = folder / MANIFEST
    try:
        content = load_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ForgefieldError(f"{folder}: not a store: {MANIFEST} could not be read ({error.strerror})") from None
    except ValueError:
        raise ForgefieldError(f"{file}: not valid JSON; the store is damaged, convert the data again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ForgefieldError(f"{file}: not the manifest of a Forgefield store")
    upgraded = STORE.upgrade(content, file)
    if content.get("hash") != manifest_hash(content):
        raise ForgefieldError(f"{file}: the manifest does not match its own hash; it was edited or is damaged")
    return cast(Manifest, upgraded)


def manifest_hash(manifest: Mapping[str, object]) -> str:
    """Hash of all entries of a manifest, which include the hashes of all columns."""
    content = {key: value for key, value in manifest.items() if key != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


T = TypeVar("T")
HEADER = 256
"""Bytes before the numbers of a column file."""
VERIFIED_BELOW = 64 * 2**20
"""A store of fewer bytes is compared with its hashes whenever it is opened; larger ones by `forgefield data info`."""
ALL_FIELDS: dict[str, Field] = {**FIELDS, **EDGE_FIELDS}


class ColumnFile:
    """One column on disk. rows: how many values it holds, according to the manifest."""

    def __init__(self, path: Path, field: Field, size: int, digest: str) -> None:
        self.path, self.field, self.digest = path, field, digest
        self.dtype = np.dtype(field.dtype).newbyteorder("<")
        self.row_bytes = int(np.prod(field.shape, dtype=np.int64)) * self.dtype.itemsize
        self.rows = size // self.row_bytes
        try:
            n_bytes = path.stat().st_size
        except OSError:
            raise ForgefieldError(f"{path}: this file of the store is missing; convert the data again") from None
        if n_bytes != size + HEADER:
            raise ForgefieldError(
                f"{path}: the file holds {n_bytes} bytes and the manifest says {size + HEADER}: the store is damaged or was "
                "copied incompletely; copy or convert it again"
            )

    @cached_property
    def mapped(self) -> np.ndarray:
        """The column, mapped read-only."""
        if self.rows == 0:
            return np.zeros((0, *self.field.shape), dtype=self.dtype)
        pages = _with_room(self.path, lambda: _mapped(self.path))
        count = self.rows * self.row_bytes // self.dtype.itemsize
        return np.frombuffer(pages, self.dtype, count, HEADER).reshape(self.rows, *self.field.shape)

    @cached_property
    def _descriptor(self) -> int:
        return _with_room(self.path, lambda: os.open(self.path, os.O_RDONLY))

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens the file for itself."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_descriptor", "mapped")}

    def read(self, first: np.ndarray, counts: np.ndarray, out: np.ndarray, begins: np.ndarray) -> None:
        """Values first[k] to first[k] + counts[k] - 1, to begins[k] and on in `out`, which has the type of the column."""
        if out.size == 0:
            return
        size, descriptor, view = self.row_bytes, self._descriptor, out.reshape(-1).view(np.uint8).data
        for begin, offset, n in _runs(begins.tolist(), first.tolist(), counts.tolist()):
            piece, offset = view[begin * size : (begin + n) * size], HEADER + offset * size
            while len(piece):
                try:
                    done = os.preadv(descriptor, [piece], offset)
                except OSError as error:
                    raise ForgefieldError(f"{self.path}: it could not be read ({error.strerror})") from error
                if done == 0:
                    raise ForgefieldError(f"{self.path}: the file ends too early; it was changed while it was in use")
                piece, offset = piece[done:], offset + done

    def verify(self) -> None:
        """Compare every number with the hash in the manifest."""
        digest = hashlib.blake2b(digest_size=16)
        with self.path.open("rb") as stream:
            stream.seek(HEADER)
            while block := stream.read(2**22):
                digest.update(block)
        if digest.hexdigest() != self.digest:
            raise ForgefieldError(
                f"{self.path}: its content does not match the hash in the manifest; the store was changed or is damaged. "
                "Convert the data again, or copy the store again from where it is whole"
            )

    def close(self) -> None:
        if "_descriptor" in self.__dict__:
            os.close(self.__dict__.pop("_descriptor"))

    def __del__(self) -> None:
        if os is not None:  # the interpreter is ending otherwise, and closes everything itself
            self.close()


def _with_room(path: Path, action: Callable[[], T]) -> T:
    """The result of `action`, which opens the file. If too many files are open, the limit is raised as far as possible."""
    while True:
        try:
            return action()
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            full = error.errno == errno.EMFILE
            if not full or soft == hard:
                hint = "; raise the limit (ulimit -n), or convert several stores into one" if full else ""
                raise ForgefieldError(f"{path}: it could not be opened ({error.strerror}){hint}") from error
            more = 4 * soft if hard == resource.RLIM_INFINITY else min(4 * soft, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _runs(begins: list[int], first: list[int], counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """The same three of fewer, longer runs: those that follow each other on both sides joined."""
    target, start, n = begins[0], first[0], 0
    for begin, at, count in zip(begins, first, counts):
        if begin == target + n and at == start + n:
            n += count
        else:
            yield target, start, n
            target, start, n = begin, at, count
    yield target, start, n


class StoreColumns(Columns):
    """One part of a store. part: its entry in the manifest. graph: options of its neighbour lists, if it has any.

    fields: those in addition to the columns of every store.
    """

    def __init__(self, folder: Path, part: PartEntry, graph: GraphOptions | None, fields: Fields | None = None) -> None:
        self.graph, self.fields, self.origin = graph, fields or {}, str(folder.resolve())
        self._all_fields = {**ALL_FIELDS, **self.fields}
        try:
            self._n_frames = int(part["n_frames"])
            self.sources = part["sources"]
            if not re.fullmatch(r"[\w-]+", part["name"]):
                raise ValueError(part["name"])
            self._files = {
                name: ColumnFile(
                    folder / part["name"] / f"{name}.npy", self._all_fields[name], entry["bytes"], entry["hash"]
                )
                for name, entry in part["columns"].items()
            }
            self._refuse_contradictions(part)
        except (KeyError, TypeError, ValueError) as error:
            raise ForgefieldError(
                f"{folder / MANIFEST}: it contradicts itself ({type(error).__name__}: {error}); convert the data again"
            ) from error

    def _refuse_contradictions(self, part: PartEntry) -> None:
        """Refuse columns whose length differs from the number of frames, atoms, edges or components."""
        counts = {
            "frame": self._n_frames,
            "offsets": self._n_frames + 1,
            "atom": part["n_atoms"],
            "edge": part["n_edges"],
        }
        counts["component"] = self._files["element"].rows
        required = [name for name in FIELDS if name not in OPTIONAL]
        required += [name for name in EDGE_FIELDS if name != "edge_reverse"] if self.graph is not None else []
        for name in required:
            if name not in self._files:
                raise ValueError(f"{name} is missing")
        for name, file in self._files.items():
            if file.rows != counts[self._all_fields[name].per]:
                raise ValueError(f"{name} has {file.rows} values")

    @property
    def n_frames(self) -> int:
        return self._n_frames

    def has(self, name: str) -> bool:
        return name in self._files

    def column(self, name: str) -> np.ndarray:
        return self._files[name].mapped

    def copy(self, name: str, first: np.ndarray, counts: np.ndarray, out: np.ndarray, begins: np.ndarray) -> None:
        self._files[name].read(first, counts, out, begins)

    def verify(self) -> None:
        for file in self._files.values():
            file.verify()


def _fields(entries: dict[str, FieldEntry]) -> dict[str, Field]:
    """The fields among the columns that a manifest describes."""
    return {name: field_from_manifest(name, field) for name, field in entries.items() if name not in ALL_FIELDS}


class Store:
    """An opened store. fields: those in addition to the columns of every store."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.path = folder
        self.manifest = manifest
        try:
            graph, self.fields = self.graph, _fields(manifest["fields"])
            self.parts = [StoreColumns(folder, part, graph, self.fields) for part in manifest["parts"]]
        except (KeyError, TypeError) as error:
            raise ForgefieldError(f"{folder / MANIFEST}: it lacks {error}; convert the data again") from error
        except ValueError as error:
            raise ForgefieldError(f"{folder / MANIFEST}: {error}; convert the data again") from error

    @property
    def graph(self) -> GraphOptions | None:
        """Options of its neighbour lists."""
        options = self.manifest["graph"]
        return None if options is None else GraphOptions(**options)

    @property
    def n_bytes(self) -> int:
        return sum(entry["bytes"] for part in self.manifest["parts"] for entry in part["columns"].values())

    def table(self, *, factor: float = 1.0) -> FrameTable:
        """All its frames; their weights are multiplied by `factor`."""
        return FrameTable([TablePart(columns, factor) for columns in self.parts])

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compare all that is stored with its hashes."""
        for done, part in enumerate(self.parts):
            part.verify()
            if progress is not None:
                progress(done + 1, len(self.parts))


def open_store(path: str | Path) -> Store:
    """The store in this folder. Its manifest, and the sizes of its files, are checked; the content of small ones too."""
    folder = Path(path)
    store = Store(folder, read_manifest(folder))
    if store.n_bytes < VERIFIED_BELOW:
        store.verify()
    return store


def holds_graph(table: FrameTable, graph: GraphOptions) -> bool:
    """Whether all frames of a table come from stores that hold neighbour lists of these options."""
    return all(
        isinstance(part.columns, StoreColumns) and part.columns.graph == same_graph(graph) for part in table.parts
    )
