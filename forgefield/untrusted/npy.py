"""Headers of .npy arrays, checked before anything is allocated or mapped.

A header is a stranger's text: its shape may be negative or larger than any memory, its type an object (a pickle) or a record.
Here an array is accepted only if it is one of plain numbers and takes exactly the bytes that are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from forgefield.errors import ForgefieldError

PLAIN_KINDS = "biufcSU"
"""Kinds of numpy types that are values without structure or references."""


@dataclass(frozen=True)
class NpyHeader:
    shape: tuple[int, ...]
    dtype: np.dtype
    order: Literal["C", "F"]
    offset: int
    """Bytes before the first value, counted from the start of the array."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npy_header(stream: IO[bytes], size: int, name: str) -> NpyHeader:
    """The header at the start of `stream`, which is left at the first value.

    size: bytes of the array, header included. name: of the array, for messages.
    """
    start = stream.tell()
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version[0]}.{version[1]} of the format is not supported")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except OSError as error:
        if error.errno:  # the system cannot read it, whatever it holds
            raise
        raise ForgefieldError(f"{name}: this is not an array of the .npy format ({_brief(error)})") from None
    except Exception as error:  # the header is evaluated as a literal, which fails in many ways
        raise ForgefieldError(f"{name}: this is not an array of the .npy format ({_brief(error)})") from None
    if any(type(n) is not int or n < 0 for n in shape) or len(shape) > 32:
        raise ForgefieldError(f"{name}: its header states the impossible shape {shape!r:.80}; the file is damaged")
    if dtype.kind not in PLAIN_KINDS or dtype.subdtype is not None or dtype.itemsize == 0:
        raise ForgefieldError(f"{name}: it holds values of type {dtype}; only arrays of numbers or text are read")
    header = NpyHeader(tuple(shape), dtype, "F" if fortran else "C", stream.tell() - start)
    expected = header.offset + header.n_bytes
    if expected != size:
        wrong = "is cut off" if size < expected else "is longer than its header says"
        raise ForgefieldError(
            f"{name} {wrong}: shape {header.shape} and type {dtype} take {expected} bytes, but {size} are there; the file is "
            "damaged, write it again"
        )
    return header


def map_npy(path: Path) -> np.ndarray:
    """The array in a .npy file, mapped into memory for reading."""
    with path.open("rb") as stream:
        header = read_npy_header(stream, path.stat().st_size, str(path))
    if header.n_bytes == 0:
        return np.empty(header.shape, header.dtype)
    return np.memmap(path, header.dtype, "r", header.offset, header.shape, header.order)


def _brief(error: Exception) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or ["unknown error"])[0][:160]
