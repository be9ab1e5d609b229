"""Numbers in text files, read strictly: Python also takes `1_0` for 10 and digits of other scripts, which no file means."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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
