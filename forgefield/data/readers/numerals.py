"""Numbers in text files, read strictly: Python also reads `1_0` as 10 and digits of other scripts, which no data file means.

`text_rows` gives random access to the rows of a large text file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from forgefield.errors import ForgefieldError


def is_plain(text: str) -> bool:
    """Whether `float` and `int` read numbers in this text the way other programs do: ASCII, without underscores."""
    return text.isascii() and "_" not in text


def whole_number(word: str) -> int:
    """The integer that `word` spells. Raises ValueError for anything else, `1_0` and `²` among them."""
    if not is_plain(word):
        raise ValueError(f"{word!r} is not an integer")
    return int(word)


def real_number(word: str) -> float:
    """The number that `word` spells. Raises ValueError for anything else, `1_0` among them."""
    if not is_plain(word):
        raise ValueError(f"{word!r} is not a number")
    return float(word)


def whole_numbers(words: Iterable[str]) -> list[int]:
    """`whole_number` of each word."""
    return [whole_number(word) for word in words]


def read_text(path: Path) -> str:
    """The text of a small file, which must be UTF-8 without NUL bytes."""
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ForgefieldError(f"{path}: line {line} is not UTF-8 text; save the file as UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ForgefieldError(f"{path}: line {line} contains a NUL byte; the file is damaged or not text")
    return text


STRIDE = 64
"""The offset of every 64th row is remembered."""


def text_rows(path: Path) -> TextRows:
    """The rows of a file. It is indexed once; the index is kept while the file stays as it is."""
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
        self._offsets: list[int] = []
        n_rows = at = width = 0
        with path.open("rb") as stream:
            for line in stream:
                if line.strip():
                    if n_rows % STRIDE == 0:
                        self._offsets.append(at)
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
            stream.seek(self._offsets[start // STRIDE])
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
