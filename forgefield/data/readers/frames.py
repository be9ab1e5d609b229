"""Frames from sources of any format: whatever the reader of a format gives becomes checked frames in eV and A.

`read_frames` returns all frames that a setting names; `frames_of` streams a part of one source without holding the file in
memory; `chunks` lists the parts of a source that can be read on their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from forgefield.config.schema import LabelOptions, UnitOptions
from forgefield.data.frame import Frame, RawFrame
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.readers.ase_files import raw_from_atoms
from forgefield.data.readers.base import ReadOptions, SourceFile
from forgefield.data.readers.block_labels import block_frames
from forgefield.data.readers.blocks import RawBlock, even_ranges
from forgefield.data.readers.registry import reader_of
from forgefield.data.readers.sources import source_files
from forgefield.errors import ForgefieldError, SourceUnreadable


def read_frames(
    spec: object,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    *,
    required: bool = True,
    reader: LabelReader | None = None,
) -> list[Frame]:
    """All frames `spec` names: a path, folder, glob, {path, weight}, or a list of these. In eV and A, checked.

    required: a label that `labels` names must be in at least one frame. False where a model is used: labels named for
    its training may be missing then. reader: made of the same labels and units, where the caller wants to know what else was
    met.
    """
    labels, units = labels or LabelOptions(), units or UnitOptions()
    reader = reader or LabelReader(labels, units)
    frames: list[Frame] = []
    for file in source_files(spec):
        frames.extend(frames_of(file, reader, units))
    if required:
        reader.finish(str(spec))
    return frames


def frames_from_atoms(images: list[Any], labels: LabelOptions | None = None, source: str = "") -> list[Frame]:
    """ASE structures held in memory as frames."""
    reader = LabelReader(labels or LabelOptions(), UnitOptions())
    frames = [reader.frame(raw_from_atoms(atoms, source or "structures", i)) for i, atoms in enumerate(images)]
    reader.finish(source or "the given structures")
    return frames


def frames_of(
    file: SourceFile, reader: LabelReader, units: UnitOptions, start: int = 0, stop: int | None = None
) -> Iterator[Frame]:
    """Frames start to stop of one source, one after the other. An empty source is an error, an empty part is not."""
    n_frames = 0
    with _reading(file):
        for frame in _frames(file, reader, units, start, stop):
            n_frames += 1
            yield _weighted(frame, file)
    if n_frames == 0 and start == 0 and stop is None:
        raise ForgefieldError(f"{file.name}: there are no frames in this file")


def frames_with_values(
    file: SourceFile, reader: LabelReader, units: UnitOptions
) -> Iterator[tuple[Frame, RawFrame | None]]:
    """Every frame of one source together with all values that the file holds for it; None for a store, whose frames hold all
    there is."""
    n_frames = 0
    with _reading(file):
        for item in reader_of(file.path).read(file, _read_options(reader, units)):
            for raw in item.frames() if isinstance(item, RawBlock) else [item]:
                n_frames += 1
                yield (
                    (_weighted(reader.stored(raw), file), None) if isinstance(raw, Frame) else (reader.frame(raw), raw)
                )
    if n_frames == 0:
        raise ForgefieldError(f"{file.name}: there are no frames in this file")


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    """Errors of the operating system as one sentence that names the file."""
    try:
        _refuse_empty(file)
        yield
    except PermissionError:
        raise SourceUnreadable(f"{file.name}: no permission to read this file") from None
    except OSError as error:
        raise SourceUnreadable(f"{file.name}: it could not be read ({error.strerror or error})") from error


def chunks(file: SourceFile, size: int) -> list[tuple[int, int | None]]:
    """Ranges (start, stop) of about `size` frames, each of which `frames_of` reads without reading what is before.

    [(0, None)] where a format cannot be divided. The last range is open.
    """
    if size < 1:
        raise ForgefieldError(f"chunks of {size} frames were asked for; it should be at least 1")
    count = frame_count(file)
    return [(0, None)] if count is None else even_ranges(count, size)


def frame_count(file: SourceFile) -> int | None:
    """Number of frames where it is known quickly and any part can be read by itself; else None."""
    with _reading(file):
        return reader_of(file.path).count(file)


def _refuse_empty(file: SourceFile) -> None:
    if file.path.is_dir():
        return
    with file.path.open("rb") as stream:  # also keeps libraries from creating or repairing a file in place
        if not stream.read(1):
            raise ForgefieldError(f"{file.path}: the file is empty")


def _frames(file: SourceFile, reader: LabelReader, units: UnitOptions, start: int, stop: int | None) -> Iterator[Frame]:
    for item in reader_of(file.path).read(file, _read_options(reader, units), start, stop):
        if isinstance(item, Frame):
            yield reader.stored(item)
        elif isinstance(item, RawFrame):
            yield reader.frame(item)
        else:
            block = block_frames(item, reader)
            yield from map(reader.frame, item.frames()) if block is None else block


def _read_options(reader: LabelReader, units: UnitOptions) -> ReadOptions:
    keys = frozenset(field.key or name for name, field in reader.fields.items()) - set(reader.names.values())
    return ReadOptions(units, reader.asked, keys)


def _weighted(frame: Frame, file: SourceFile) -> Frame:
    return frame if file.weight == 1.0 else replace(frame, weight=frame.weight * file.weight)
