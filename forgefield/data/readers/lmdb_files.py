"""LMDB files, opened for reading only: nothing is written beside them, not even a lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forgefield.errors import ForgefieldError

_open: dict[tuple[int, str], list[Any]] = {}
"""(process, path) -> [environment, users]: a process may open an environment only once at a time."""
_lock = threading.Lock()


@contextmanager
def open_lmdb(path: Path) -> Iterator[Any]:
    """A read transaction on an LMDB file, or on a folder that holds `data.mdb`."""
    key = os.getpid(), str(path.resolve())
    environment = _acquire(path, key)
    try:
        with environment.begin(buffers=False) as transaction:
            yield transaction
    finally:
        _release(key)


def frame_keys(transaction: Any) -> list[bytes]:
    """Keys that are whole numbers, in the order of these numbers; all others (`length`, `metadata`) are left out."""
    keys = transaction.cursor().iternext(keys=True, values=False)
    return sorted((key for key in keys if key.isdigit()), key=int)


def _acquire(path: Path, key: tuple[int, str]) -> Any:
    with _lock:
        if key not in _open:
            _open[key] = [_environment(path), 0]
        _open[key][1] += 1
        return _open[key][0]


def _release(key: tuple[int, str]) -> None:
    with _lock:
        entry = _open[key]
        entry[1] -= 1
        if entry[1] == 0:
            del _open[key]
            entry[0].close()


def _environment(path: Path) -> Any:
    try:
        import lmdb
    except ImportError:
        raise ForgefieldError(f"{path}: LMDB files need the package lmdb: pip install lmdb") from None
    if not os.access(path, os.R_OK):
        raise PermissionError(str(path))
    try:
        return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, create=False, max_readers=1024)
    except lmdb.Error as error:
        raise ForgefieldError(f"{path}: it could not be opened as LMDB; it is damaged or truncated ({error})") from None
