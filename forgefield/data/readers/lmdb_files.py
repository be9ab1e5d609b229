"""LMDB files, read page by page.

The lmdb library maps the file into memory and trusts every page number in it: a truncated or damaged file ends the process
with SIGBUS. Here pages are read with `pread` and each is checked before it is used, so that damage is an error that names the
file. Nothing is written, not even a lock.

The format (version 1, 64 bits, little-endian): pages 0 and 1 describe the state of the last two writes; the newer one names the
root of a B+ tree. Branch pages hold page numbers, leaf pages hold keys with values or with the numbers of overflow pages.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from forgefield.errors import ForgefieldError

_HEADER = struct.Struct("<QHHHH")
"""Page number, padding, flags, end of the list of nodes (`lower`), start of the nodes (`upper`)."""
_META = struct.Struct("<IIQQ")
"""Magic number, version, address, size of the map; the free list's tree, the main tree, last page and write follow."""
_TREE = struct.Struct("<IHHQQQQQ")
"""Page size (of the free list's tree), flags, depth, branch pages, leaf pages, overflow pages, entries, root."""
_LAST = struct.Struct("<QQ")
_NODE = struct.Struct("<HHHH")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_BIG_VALUE, _SUBTREE, _DUPLICATES = 1, 2, 4
_NO_ROOT = 2**64 - 1
_DEEPEST = 32
_ALLOWED_PAGES = tuple(2**n for n in range(8, 17))


@dataclass(frozen=True)
class _Index:
    """Where the values of one file are: of frames, whose keys are whole numbers, and of all other keys."""

    keys: np.ndarray
    """(n_frames,) of bytes, in the order of the numbers they stand for."""
    offsets: np.ndarray
    """(n_frames,) bytes from the start of the file."""
    sizes: np.ndarray
    """(n_frames,) bytes."""
    others: dict[bytes, tuple[int, int]]


class LmdbFile:
    """An LMDB file opened for reading."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        status = os.fstat(descriptor)
        write = _Tree(path, descriptor).write
        self.state = (str(path.resolve()), status.st_size, status.st_mtime_ns, write)
        """Changes when the file does."""

    @property
    def keys(self) -> np.ndarray:
        """(n_frames,) keys that are whole numbers, in the order of these numbers; others (`length`) are left out."""
        return self._index.keys

    def value(self, position: int) -> bytes:
        """The value of `keys[position]`."""
        index = self._index
        return _read(self._descriptor, self.path, int(index.offsets[position]), int(index.sizes[position]))

    def other(self, key: bytes) -> bytes | None:
        """The value of a key that is not a whole number; None where the file does not have it."""
        location = self._index.others.get(key)
        return None if location is None else _read(self._descriptor, self.path, *location)

    @cached_property
    def _index(self) -> _Index:
        return _listed(*self.state)


@contextmanager
def open_lmdb(path: Path) -> Iterator[LmdbFile]:
    """An LMDB file, or the folder with `data.mdb`."""
    descriptor = os.open(path / "data.mdb" if path.is_dir() else path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield LmdbFile(path, descriptor)
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4)
def _listed(path: str, *_: int) -> _Index:
    """The index of a file, made once and remembered while the file stays as it is."""
    with open_lmdb(Path(path)) as file:
        entries = _Tree(file.path, file._descriptor).entries()
    frames, others = [], {}
    for key, offset, size in entries:
        if key.isdigit():
            frames.append((key, offset, size))
        else:
            others[key] = (offset, size)
    try:
        frames.sort(key=lambda entry: int(entry[0]))
    except ValueError as error:  # more digits than Python converts
        raise ForgefieldError(f"{path}: it has a key that is not the number of a frame ({error})") from None
    return _Index(
        np.array([key for key, _, _ in frames], dtype=bytes),
        np.array([offset for _, offset, _ in frames], dtype=np.int64),
        np.array([size for _, _, size in frames], dtype=np.int64),
        others,
    )


class _Tree:
    """The main tree of a file, walked from its root. Every page is visited once, and all counts must agree."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self._size = os.fstat(descriptor).st_size
        self._seen: set[int] = set()
        self._page_size, self.write, tree, self._last = self._newest_state()
        _, self._flags, self._depth, *self._counts, self._entries, self._root = tree

    def entries(self) -> list[tuple[bytes, int, int]]:
        """Key, offset and size of every value, by key."""
        entries: list[tuple[bytes, int, int]] = []
        if self._root != _NO_ROOT:
            if not 1 <= self._depth <= _DEEPEST:
                raise self._damaged(f"its tree has the impossible depth {self._depth}")
            self._visited = [0, 0, 0]
            self._walk(self._root, 1, entries)
            if self._visited != self._counts:
                raise self._damaged(f"it should have {sum(self._counts)} pages of data and has {sum(self._visited)}")
        if len(entries) != self._entries:
            raise self._damaged(f"it should have {self._entries} entries and has {len(entries)}")
        if self._flags == 0 and any(one[0] >= two[0] for one, two in pairwise(entries)):
            raise self._damaged("its keys are not in order")
        return entries

    def _newest_state(self) -> tuple[int, int, tuple[int, ...], int]:
        """Page size, number of the write, main tree and last page of the newer of the two states."""
        first = self._state(0)
        page_size = first[0]
        if page_size not in _ALLOWED_PAGES:
            raise self._damaged(f"its page size is {page_size}")
        second = self._state(page_size)
        if second[0] != page_size:
            raise self._damaged("its first two pages contradict each other")
        return max(first, second, key=lambda state: state[1])  # equal: the first, as lmdb does

    def _state(self, offset: int) -> tuple[int, int, tuple[int, ...], int]:
        """Page size, number of the write, main tree and last page, as one of the first two pages states them."""
        room = _HEADER.size + _META.size + 2 * _TREE.size + _LAST.size
        data = os.pread(self._descriptor, room, offset)
        if len(data) < room:
            raise ForgefieldError(f"{self.path}: it could not be opened as LMDB; it is damaged or truncated")
        magic, version, _, _ = _META.unpack_from(data, _HEADER.size)
        if magic != _MAGIC or version != _VERSION or not _HEADER.unpack_from(data)[2] & _META_PAGE:
            raise ForgefieldError(
                f"{self.path}: it could not be opened as LMDB; it is damaged, or not an LMDB file of a 64-bit machine"
            )
        start = _HEADER.size + _META.size
        page_size = _TREE.unpack_from(data, start)[0]
        tree = _TREE.unpack_from(data, start + _TREE.size)
        last, write = _LAST.unpack_from(data, start + 2 * _TREE.size)
        return page_size, write, tree, last

    def _walk(self, number: int, depth: int, entries: list[tuple[bytes, int, int]]) -> None:
        page, kind, nodes = self._page(number)
        if kind == _LEAF and depth == self._depth:
            self._visited[1] += 1
            entries.extend(self._entry(page, number, node) for node in nodes)
        elif kind == _BRANCH and depth < self._depth:
            self._visited[0] += 1
            for node in nodes:
                low, middle, high, _ = _NODE.unpack_from(page, node)
                self._walk(low | middle << 16 | high << 32, depth + 1, entries)
        else:
            raise self._damaged(f"page {number} is of the wrong kind")

    def _page(self, number: int) -> tuple[bytes, int, tuple[int, ...]]:
        """Content, kind and offsets of the nodes of a page."""
        page = self._pages(number, 1)
        stated, _, flags, lower, upper = _HEADER.unpack_from(page)
        kind = flags & (_BRANCH | _LEAF | _OVERFLOW | _META_PAGE)
        if stated != number or not _HEADER.size <= lower <= upper <= self._page_size or flags & ~0x1F:
            raise self._damaged(f"page {number} is not a page of its tree")
        nodes = struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", page, _HEADER.size)
        if any(not upper <= node <= self._page_size - _NODE.size for node in nodes):
            raise self._damaged(f"page {number} has an entry outside of the page")
        return page, kind, nodes

    def _entry(self, page: bytes, number: int, node: int) -> tuple[bytes, int, int]:
        low, high, flags, key_size = _NODE.unpack_from(page, node)
        size, start = low | high << 16, node + _NODE.size + key_size
        stored = 8 if flags & _BIG_VALUE else size
        if start + stored > self._page_size or flags & ~(_BIG_VALUE | _SUBTREE | _DUPLICATES):
            raise self._damaged(f"page {number} has an entry that reaches beyond the page")
        key = page[node + _NODE.size : start]
        if flags & (_SUBTREE | _DUPLICATES) and key.isdigit():
            raise ForgefieldError(
                f"{self.path}: the key {key.decode()} holds several values; one for each frame is read"
            )
        if not flags & _BIG_VALUE:
            return key, number * self._page_size + start, size
        (first,) = struct.unpack_from("<Q", page, start)
        return key, self._overflow(first, size), size

    def _overflow(self, number: int, size: int) -> int:
        """Offset of a value on overflow pages."""
        count = -(-(_HEADER.size + size) // self._page_size)
        header = self._pages(number, count, _HEADER.size)
        stated, _, flags, low, high = _HEADER.unpack(header)
        if stated != number or not flags & _OVERFLOW or low | high << 16 != count:
            raise self._damaged(f"page {number} does not hold the value that it should")
        self._visited[2] += count
        return number * self._page_size + _HEADER.size

    def _pages(self, number: int, count: int, size: int | None = None) -> bytes:
        """The first `size` bytes (default: all) of pages that exist and have not been met before."""
        if number < 2 or number + count - 1 > self._last or (number + count) * self._page_size > self._size:
            raise self._damaged(f"it refers to page {number + count - 1}, which does not exist")
        if number in self._seen:
            raise self._damaged(f"it refers to page {number} twice")
        self._seen.add(number)
        return _read(self._descriptor, self.path, number * self._page_size, size or count * self._page_size)

    def _damaged(self, reason: str) -> ForgefieldError:
        return ForgefieldError(
            f"{self.path}: the LMDB file is damaged or was copied incompletely ({reason}); copy or write it again"
        )


def _read(descriptor: int, path: Path, offset: int, size: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    while len(data) < size:  # at most 2 GiB come at once
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise ForgefieldError(f"{path}: the file became shorter while it was read")
        data += more
    return data
