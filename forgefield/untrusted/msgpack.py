"""MessagePack, read without extensions: numbers, text, bytes, lists and mappings, with a limit on nesting.

The number of entries that a list or mapping announces is compared with the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import struct
from typing import Any

DEEPEST = 32
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_SIZED = {
    **dict(zip((0xC4, 0xC5, 0xC6), ((bytes, 1), (bytes, 2), (bytes, 4)))),
    **dict(zip((0xD9, 0xDA, 0xDB), ((str, 1), (str, 2), (str, 4)))),
    0xDC: (list, 2),
    0xDD: (list, 4),
    0xDE: (dict, 2),
    0xDF: (dict, 4),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpack(data: bytes) -> Any:
    """The value that `data` holds, all of it; raises ValueError for anything else."""
    try:
        value, end = _value(memoryview(data), 0, 0)
    except (struct.error, IndexError) as error:
        raise ValueError("it ends too early") from error
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes follow its value")
    return value


def _value(data: memoryview, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a byte, and where it ends."""
    code = data[at]
    at += 1
    if code < 0x80 or code >= 0xE0:
        return (code if code < 0x80 else code - 0x100), at
    if code in _CONSTANTS:
        return _CONSTANTS[code], at
    if code in _NUMBERS:
        form = _NUMBERS[code]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if code in _SIZED:
        kind, width = _SIZED[code]
        if at + width > len(data):
            raise ValueError("it ends too early")
        size, at = int.from_bytes(data[at : at + width], "big"), at + width
    elif code < 0xC0:
        kind, size = (dict, code & 0x0F) if code < 0x90 else (list, code & 0x0F) if code < 0xA0 else (str, code & 0x1F)
    else:
        raise ValueError(f"it contains the code {code:#x}, an extension or unknown")
    if size * (2 if kind is dict else 1) > len(data) - at:
        raise ValueError("it ends too early")
    if kind in (bytes, str):
        content = bytes(data[at : at + size])
        return (content if kind is bytes else content.decode("utf-8")), at + size
    if depth >= DEEPEST:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    return _list(data, at, size, depth + 1) if kind is list else _mapping(data, at, size, depth + 1)


def _list(data: memoryview, at: int, size: int, depth: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(size):
        item, at = _value(data, at, depth)
        items.append(item)
    return items, at


def _mapping(data: memoryview, at: int, size: int, depth: int) -> tuple[dict[Any, Any], int]:
    entries = {}
    for _ in range(size):
        key, at = _value(data, at, depth)
        if not isinstance(key, (str, bytes, int)):
            raise ValueError(f"a mapping has the key {key!r:.40}")
        entries[key.decode("utf-8") if isinstance(key, bytes) else key], at = _value(data, at, depth)
    return entries, at
