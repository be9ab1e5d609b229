"""LMDB files, opened for reading only: nothing is written beside them, not even a lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

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


def file_state(path: Path, transaction: Any) -> tuple[str, int, int, int]:
    """What changes when a file does: its place, size, time, and the number of its last write."""
    status = os.stat(path / "data.mdb" if path.is_dir() else path)
    return str(path.resolve()), status.st_size, status.st_mtime_ns, transaction.id()


def frame_keys(path: Path, transaction: Any) -> np.ndarray:
    """Keys that are whole numbers, in the order of these numbers; all others (`length`, `metadata`) are left out.

    They are listed once, and remembered while the file stays as it is.
    """
    return _listed(*file_state(path, transaction))


@lru_cache(maxsize=4)
def _listed(path: str, *_: int) -> np.ndarray:
    """(n_frames,) of bytes."""
    with open_lmdb(Path(path)) as transaction:
        keys = transaction.cursor().iternext(keys=True, values=False)
        return np.array(sorted((key for key in keys if key.isdigit()), key=int), dtype=bytes)


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
