"""Text files: numbers, rows of large files, comment lines of extended xyz frames, positions of the frames in an xyz file.

Numbers are read strictly: Python also reads `1_0` as 10 and digits of other scripts, which no data file means. Comment lines
are `key=value` pairs, read as ASE reads them. A line without any pair is prose: `energy -76.1 Ha` is not a label. A key that
occurs twice with different values is an error, and so is a quote or bracket that is not closed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

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


_ITEM = re.compile(
    r"""(?P<key>[^\s="']+)(?:\s*=\s*(?:
        "(?P<double>(?:\\.|[^"\\])*)" | '(?P<single>(?:\\.|[^'\\])*)' | \{(?P<braces>[^}]*)\}
        | (?P<list>\[(?:[^\[\]]|\[[^\]]*\])*\]) | (?P<open>["'{\[]) | (?P<bare>\S+) ))?""",
    re.VERBOSE,
)
_NEEDED = ("Properties", "Lattice", "pbc")
"""Keys that say how the frame is to be read: without a value they are a mistake, not prose."""
_TELLING = re.compile("|".join((*_NEEDED, "energ", "forc", "stress", "virial", "weight")), re.IGNORECASE)
"""Keys that are labels or say how the frame is to be read: a line that has one must be read right."""


def parse_header(header: str, where: str) -> dict[str, Any]:
    """Key-value pairs of a comment line; numbers become floats or arrays, a key alone becomes True.

    where: file, frame and line, for errors.
    """
    texts: dict[str, str | None] = {}
    if "=" not in header:
        return {}
    end, stray = 0, False
    for match in _ITEM.finditer(header):
        kind, key = match.lastgroup or "key", match["key"]
        glued = match.start() == end > 0 or header[end : match.start()].strip()
        stray = bool(stray or glued or "{" in key or "[" in key or (kind == "bare" and _is_stray(match[kind])))
        end = match.end()
        text = None if kind == "key" else match[kind]
        if text is None and key in _NEEDED:
            raise ForgefieldError(f"{where}: {key} has no value; write {key}=...")
        if kind == "open":
            raise ForgefieldError(f"{where}: the value of {key} begins with {text} which is never closed")
        if texts.setdefault(key, text) != text:
            raise ForgefieldError(
                f"{where}: {key} is given twice, as {texts[key]!r:.40} and as {text!r:.40}; keep one of them"
            )
    if stray or header[end:].strip():
        suspect = next((key for key in texts if _TELLING.search(key)), None)
        if suspect is not None:  # else it is prose, with an apostrophe perhaps
            raise ForgefieldError(
                f"{where}: a quote, bracket or = stands where none is expected, so that {suspect} cannot be read with "
                'certainty; write values with blanks as key="a b"'
            )
    return {key: True if text is None else _value(text) for key, text in texts.items()}


def _is_stray(word: str) -> bool:
    """Whether a value without quotes holds a quote, or a bracket that opens and does not close."""
    return '"' in word or "'" in word or any(word.count(a) != word.count(b) for a, b in ("[]", "{}"))


def _value(text: str) -> Any:
    if is_plain(text):
        try:
            return float(text)
        except ValueError:
            pass
    if text.startswith("_JSON "):
        text = text[6:]
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    words = text.replace(",", " ").split()
    if len(words) > 1 and is_plain(text):
        try:
            return np.array([float(word) for word in words])
        except ValueError:
            pass
    return text


@dataclass(frozen=True)
class XyzIndex:
    offsets: np.ndarray
    """(n_frames,) byte at which each frame begins."""
    lines: np.ndarray
    """(n_frames,) number of lines before each frame."""


def xyz_index(path: Path) -> XyzIndex | None:
    """Index of all frames; None if the file is not a plain sequence of frames, which reading it reports."""
    status = os.stat(path)
    return _index(str(path.resolve()), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _index(path: str, size: int, mtime_ns: int) -> XyzIndex | None:
    offsets, lines = [], []
    at = line_number = 0
    with open(path, "rb", buffering=1 << 20) as stream:
        for count_line in stream:
            count = int(count_line) if count_line.strip().isdigit() and len(count_line) < 20 else 0
            if count < 1 or count > size:
                blank = not count_line.strip() and not any(line.strip() for line in stream)
                if not blank:
                    return None
                break
            offsets.append(at)
            lines.append(line_number)
            at += len(count_line) + sum(map(len, islice(stream, count + 1)))
            line_number += count + 2
    return XyzIndex(np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64))


def text_lines(path: Path, offset: int) -> Iterator[str]:
    """Lines of `path` from byte `offset` on, without their ends, \\n or \\r\\n.

    Bytes that are not UTF-8 become lone surrogates, as `surrogateescape` has it, so that who reads a line can refuse it.
    """
    with path.open("rb") as binary:
        binary.seek(offset)
        with open(
            binary.fileno(), encoding="utf-8", errors="surrogateescape", newline="\n", closefd=False, buffering=1 << 18
        ) as stream:
            for line in stream:
                yield line.rstrip("\n").removesuffix("\r")
