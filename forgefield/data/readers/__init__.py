"""Frames from files: extxyz, npz, ASE databases, and everything else ASE reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgefield.config.schema import LabelOptions, UnitOptions
from forgefield.data.frame import Frame, RawFrame
from forgefield.data.labels import LabelReader
from forgefield.data.readers.ase_files import raw_from_atoms, read_ase_database, read_ase_file
from forgefield.data.readers.extxyz import read_extxyz
from forgefield.data.readers.npz import read_npz
from forgefield.data.readers.sources import SourceFile, file_format, plain, source_files
from forgefield.errors import ForgefieldError

__all__ = ["SourceFile", "frames_from_atoms", "plain", "read_frames", "source_files"]


def read_frames(
    spec: Any, labels: LabelOptions | None = None, units: UnitOptions | None = None, *, required: bool = True
) -> list[Frame]:
    """All frames `spec` names: a path, folder, glob, {path, weight}, or a list of these. In eV and A, checked.

    required: a label that `labels` names must be in at least one frame. False where a model is used: labels named for
    its training may be missing then.
    """
    labels, units = labels or LabelOptions(), units or UnitOptions()
    reader = LabelReader(labels, units)
    frames: list[Frame] = []
    for file in source_files(spec):
        frames.extend(_read_file(file, reader, units))
    if required:
        reader.finish(str(plain(spec)))
    return frames


def frames_from_atoms(images: list[Any], labels: LabelOptions | None = None, source: str = "") -> list[Frame]:
    """ASE structures held in memory as frames."""
    reader = LabelReader(labels or LabelOptions(), UnitOptions())
    frames = [reader.frame(raw_from_atoms(atoms, source or "structures", i)) for i, atoms in enumerate(images)]
    reader.finish(source or "the given structures")
    return frames


def _read_file(file: SourceFile, reader: LabelReader, units: UnitOptions) -> list[Frame]:
    path = file.path
    try:
        with path.open("rb") as stream:  # also keeps libraries from creating or repairing a file in place
            if not stream.read(1):
                raise ForgefieldError(f"{path}: the file is empty")
        frames = [reader.frame(raw) for raw in _raw_frames(path, units)]
    except PermissionError:
        raise ForgefieldError(f"{path}: no permission to read this file") from None
    except OSError as error:
        raise ForgefieldError(f"{path}: it could not be read ({error.strerror or error})") from error
    if not frames:
        raise ForgefieldError(f"{path}: there are no frames in this file")
    if file.weight != 1.0:
        frames = [replace(frame, weight=frame.weight * file.weight) for frame in frames]
    return frames


def _raw_frames(path: Path, units: UnitOptions) -> Iterator[RawFrame]:
    kind = file_format(path)
    if kind == "extxyz":
        return read_extxyz(path)
    if kind == "npz":
        return read_npz(path, units)
    if kind == "db":
        return read_ase_database(path)
    return read_ase_file(path, kind)
