"""Rows of numbers in a text file, read in slices like an array, without holding the file."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from forgefield.data.readers.numerals import real_number
from forgefield.errors import ForgefieldError

STRIDE = 64
"""A place in the file is remembered every so many rows."""


def text_rows(path: Path) -> TextRows:
    """The rows of a file, which is gone through once and remembered while it stays as it is."""
    status = os.stat(path)
    return _indexed(path, str(path.resolve()), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _indexed(path: Path, *_: str | int) -> TextRows:
    return TextRows(path)


class TextRows:
    """`rows[a:b]` gives (b - a, width) float64; blank lines do not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dtype = np.dtype(np.float64)
        self._places: list[int] = []
        n_rows = at = width = 0
        with path.open("rb") as stream:
            for line in stream:
                if line.strip():
                    if n_rows % STRIDE == 0:
                        self._places.append(at)
                    width = width or len(line.split())
                    n_rows += 1
                at += len(line)
        self.shape = (n_rows, width)
        self.ndim = 2

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        if stop <= start:
            return np.zeros((0, self.shape[1]))
        with self.path.open("rb") as stream:
            stream.seek(self._places[start // STRIDE])
            lines = (line for line in stream if line.strip())
            words = [line.split() for line in islice(lines, start % STRIDE, start % STRIDE + stop - start)]
        for offset, row in enumerate(words):
            if len(row) != self.shape[1]:
                raise ForgefieldError(
                    f"{self.path}: row {start + offset + 1} has {len(row)} numbers, the first one has {self.shape[1]}"
                )
        if not any(b"_" in word for row in words for word in row):  # NumPy reads 1_0 as 10
            with suppress(ValueError):
                return np.array(words, dtype=np.float64)
        number, word = next((i, word) for i, row in enumerate(words) for word in row if not _is_number(word))
        raise ForgefieldError(f"{self.path}: row {start + number + 1}: {word!r:.40} is not a number")


def _is_number(word: bytes) -> bool:
    try:
        real_number(word.decode())
    except ValueError:
        return False
    return True
