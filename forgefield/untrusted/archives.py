"""Arrays and zip archives from unknown sources: sizes are checked before anything is allocated, mapped or unpacked.

`check_expansion` limits what compressed data may unpack to. Headers of .npy arrays are text: the shape may be negative or
exceed any memory, the type an object (a pickle) or a record. An array is accepted only if it consists of plain numbers and
takes exactly the bytes that are there. Zip archives (npz files, models of other programs) must hold each member once.
"""

from __future__ import annotations

import errno
import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np

from forgefield.errors import ForgefieldError, SourceUnreadable

FREE_BYTES = 256 * 2**20
"""Content up to this size is unpacked however small the file is."""
LARGEST_RATIO = 100
"""Larger content may be this many times the size of the file. Compressed coordinates and forces stay below 10."""
FRAME_BYTES = 400
"""What a frame takes in memory in addition to its numbers, about."""


def check_expansion(declared: int, stored: int, name: str, remedy: str) -> None:
    """Refuse content of `declared` bytes that comes out of `stored` bytes on disk, where that is out of proportion.

    name: the file, for messages. remedy: how to write the same data so that it is accepted.
    """
    if declared > max(FREE_BYTES, LARGEST_RATIO * stored):
        raise ForgefieldError(
            f"{name}: its content would take {declared / 2**20:.0f} MiB of memory, more than {LARGEST_RATIO} times the "
            f"{_size(stored)} it has on disk; {remedy}"
        )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes} bytes"


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


MAPPED_ABOVE = 1 << 16
"""Arrays of more bytes than this are mapped where they are not compressed."""


def is_system_error(error: Exception) -> bool:
    """Whether the system cannot read a file, whatever it holds. Impossible offsets (EINVAL) are the fault of the content."""
    return isinstance(error, OSError) and bool(error.errno) and error.errno != errno.EINVAL


@contextmanager
def open_archive(source: Path | bytes, name: str, kind: str, remedy: str) -> Iterator[zipfile.ZipFile]:
    """A zip archive; every error while it is in use becomes one that names the file.

    source: a file, or its content. name, kind: what it is and what it should be, for messages. remedy: how to write the file so
    that it is accepted, where it would unpack to too much.
    """
    try:
        stored = len(source) if isinstance(source, bytes) else os.stat(source).st_size
        with zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source) as archive:
            members = archive.infolist()
            if len({member.filename for member in members}) < len(members):
                raise ForgefieldError(
                    f"{name}: it holds several members of the same name, so it is ambiguous; write it again"
                )
            check_expansion(sum(member.file_size for member in members), stored, name, remedy)
            yield archive
    except ForgefieldError:
        raise
    except Exception as error:  # zipfile, zlib, struct, numpy and pickle each have their own
        if is_system_error(error):
            raise SourceUnreadable(f"{name}: it could not be read ({error})") from error
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise ForgefieldError(
            f"{name}: it could not be read as {kind}; it is damaged or truncated ({reason})"
        ) from error


def npz_arrays(path: Path, *, verify: bool = True, leave_out: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Arrays of an npz file by name. Large ones that are not compressed are mapped into memory.

    verify: compare mapped arrays with the checksums of the file; unpacked ones always are. leave_out: names not to read.
    """
    with open_archive(path, str(path), "npz", "write it with np.savez, which does not compress") as archive:
        members = {
            member.filename.removesuffix(".npy"): member
            for member in archive.infolist()
            if member.filename.endswith(".npy")
        }
        selected = {name: member for name, member in members.items() if name not in leave_out}
        return {name: _array(path, archive, member, verify) for name, member in selected.items()}


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, verify: bool) -> np.ndarray:
    name = f"{path}, array {member.filename.removesuffix('.npy')!r}"
    plain = member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1
    if plain and member.file_size > MAPPED_ABOVE:
        mapped = _mapped(path, member, name)
        if verify:
            _compare_checksum(archive, member)
        return mapped
    with archive.open(member) as stream:
        header = read_npy_header(stream, member.file_size, name)
        values = bytearray(stream.read())  # the checksum is compared at the end
    if len(values) != header.n_bytes:
        raise ForgefieldError(f"{name}: it has {len(values)} of {header.n_bytes} bytes; the file is damaged")
    return np.frombuffer(values, header.dtype).reshape(header.shape, order=header.order)


def _mapped(path: Path, member: zipfile.ZipInfo, name: str) -> np.ndarray:
    """An array stored as it is within the zip file, memory-mapped: nothing beyond the member can be reached."""
    with path.open("rb") as stream:
        stream.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", stream.read(4))
        begin = member.header_offset + 30 + name_length + extra_length
        if member.compress_size != member.file_size or begin + member.file_size > path.stat().st_size:
            raise ForgefieldError(f"{name}: it reaches beyond the end of the file, which is damaged or truncated")
        stream.seek(begin)
        header = read_npy_header(stream, member.file_size, name)
        if header.n_bytes == 0:
            return np.empty(header.shape, header.dtype)
        return np.memmap(path, header.dtype, "r", stream.tell(), header.shape, header.order)


def _compare_checksum(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    with archive.open(member) as stream:  # raises at the end of a member whose checksum is another
        while stream.read(1 << 20):
            pass
