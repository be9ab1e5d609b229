"""Changes to the bytes of a file: what disks, transfers, editors and attackers do to it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1)
WORDS = (
    *(b"", b"nan", b"-inf", b"1e999", b"-1", b"0", b"29.7", b"1_0", b"1e5", b"99999999999", b"0x10", b"true", b"null"),
    *(b"[]", b"{}", b'"x"', b"\xc2\xb2", b"\x00", b"\xff\xfe", b"T", b"../../x", b"[[[[", b"1 2", b"-0.0", b"#", b'"'),
)
_NUMBER = re.compile(rb"-?\d+\.?\d*(?:[eE][-+]?\d+)?")
_TOKEN = re.compile(rb"[^\s,:=\[\]{}]+")


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """`content` after one to four changes."""
    for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
        content = MUTATIONS[int(rng.integers(len(MUTATIONS)))](content, rng)
    return content


def _place(content: bytes, rng: np.random.Generator) -> int:
    """Any place; more often near the beginning, where headers are."""
    if rng.random() < 0.4:
        return int(rng.integers(min(len(content), 256) + 1))
    return int(rng.integers(len(content) + 1))


def flip(content: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(content)
    if data:
        data[min(_place(content, rng), len(data) - 1)] ^= 1 << int(rng.integers(8))
    return bytes(data)


def truncate(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: _place(content, rng)]


def insert(content: bytes, rng: np.random.Generator) -> bytes:
    at, n = _place(content, rng), int(rng.choice([1, 2, 8, 100]))
    return content[:at] + rng.bytes(n) + content[at:]


def delete(content: bytes, rng: np.random.Generator) -> bytes:
    at = _place(content, rng)
    return content[:at] + content[at + int(rng.choice([1, 2, 8, 100])) :]


def repeat(content: bytes, rng: np.random.Generator) -> bytes:
    at, n = _place(content, rng), int(rng.choice([4, 32, 512, 4096]))
    return content[: at + n] + content[at : at + n] + content[at + n :]


def overwrite(content: bytes, rng: np.random.Generator) -> bytes:
    """A number of 1, 2, 4 or 8 bytes by one at the edge of what such numbers can be."""
    width, kind = [(1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")][int(rng.integers(4))]
    value = NUMBERS[int(rng.integers(len(NUMBERS)))] % 2 ** (8 * width)
    at = _place(content, rng)
    return content[:at] + struct.pack(kind, value) + content[at + width :]


def move(content: bytes, rng: np.random.Generator) -> bytes:
    """A piece from elsewhere in the same file."""
    source, target, n = _place(content, rng), _place(content, rng), int(rng.choice([8, 64, 4096]))
    piece = content[source : source + n]
    return content[:target] + piece + content[target + len(piece) :]


def replace_number(content: bytes, rng: np.random.Generator) -> bytes:
    return _replace(_NUMBER, content, rng)


def replace_token(content: bytes, rng: np.random.Generator) -> bytes:
    return _replace(_TOKEN, content, rng)


def _replace(pattern: re.Pattern[bytes], content: bytes, rng: np.random.Generator) -> bytes:
    start = _place(content, rng)
    match = pattern.search(content, start) or pattern.search(content)
    if match is None:
        return content
    return content[: match.start()] + WORDS[int(rng.integers(len(WORDS)))] + content[match.end() :]


MUTATIONS: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
    *(flip, flip, truncate, insert, delete, repeat, overwrite, overwrite, move),
    *(replace_number, replace_number, replace_token),
)
