"""Zip archives (npz files, models of other programs) whose content is of a plausible size, each member once."""

from __future__ import annotations

import errno
import io
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from forgefield.errors import ForgefieldError, SourceUnreadable
from forgefield.untrusted.expansion import check_expansion
from forgefield.untrusted.npy import read_npy_header

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
        wanted = {name: member for name, member in members.items() if name not in leave_out}
        return {name: _array(path, archive, member, verify) for name, member in wanted.items()}


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
