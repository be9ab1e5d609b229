"""Where each frame of an xyz file begins: one fast pass over its lines, remembered while the file stays as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class XyzIndex:
    offsets: np.ndarray
    """(n_frames,) byte at which each frame begins."""
    lines: np.ndarray
    """(n_frames,) number of lines before each frame."""


def xyz_index(path: Path) -> XyzIndex | None:
    """Index of all frames; None where the file is not a plain sequence of frames: who reads it will say why."""
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
