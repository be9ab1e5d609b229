"""Data sets written to files and stores: a conversion of all frames, or a small representative sample of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forgefield.data.frame import Frame
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import SourceFile, frames_of, source_files
from forgefield.data.readers.registry import file_format
from forgefield.data.reading import read_table
from forgefield.data.splits import representative_rows
from forgefield.data.store.convert import (
    Progress,
    convert,
    frames_in,
    refuse_settings_for_stores,
    store_frames,
    units_of,
)
from forgefield.data.store.export import is_writable, writable_suffixes, write_frames
from forgefield.data.store.store import is_store, open_store
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.processes import usable_cores
from forgefield.text import counted, size_text

MOST_WORKERS = 8
"""Largest number of processes that convert data unless more are requested."""
SHOWN = 10
"""Number of sources, and of frames of each, that a message lists."""


@dataclass(frozen=True)
class WrittenData:
    """A file or store that was written."""

    path: Path
    n_frames: int
    n_atoms: int
    n_bytes: int

    def __str__(self) -> str:
        counts = f"{counted(self.n_frames, 'frame')}, {counted(self.n_atoms, 'atom')}, {size_text(self.n_bytes)}"
        return f"{self.path}: {counts}"


@dataclass(frozen=True)
class Sample:
    """A representative sample of a data set, and the file or store to which it was written."""

    frames: FrameTable
    n_available: int
    """Number of frames in the data set."""
    written: WrittenData

    def __str__(self) -> str:
        """The frames of the sample by source: `water.extxyz: frames 0, 4, 8`."""
        by_source: dict[str, list[int]] = {}
        for frame in self.frames:
            by_source.setdefault(frame.source, []).append(frame.index)
        is_all = len(self.frames) == self.n_available
        lines = [f"{len(self.frames)} of {self.n_available} frames" + (": all there are" if is_all else "")]
        for source, indices in list(by_source.items())[:SHOWN]:
            numbers = ", ".join(map(str, indices[:SHOWN]))
            numbers += f", ... ({len(indices)} in all)" if len(indices) > SHOWN else ""
            lines.append(f"  {source}: {'frame' if len(indices) == 1 else 'frames'} {numbers}")
        if len(by_source) > SHOWN:
            others = list(by_source.values())[SHOWN:]
            lines.append(f"  and {sum(map(len, others))} frames of {len(others)} more")
        return "\n".join(lines)


def convert_data(
    source: object,
    target: str | os.PathLike[str],
    *,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    graph: GraphOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> WrittenData:
    """Convert data of any format to a store, or to a file if the name of the target ends in .extxyz, .xyz, .traj or .db.

    Parameters
    ----------
    source
        A file, folder, glob or store, or a list of them.
    target
        The store or file to write; it must not exist.
    labels, units
        Names of the labels in the source, and its units; default: the usual names, eV and A.
    graph
        Neighbour lists to store, for a store.
    workers
        Number of processes that write a store; default: the usable cores, up to 8.
    progress
        Called with the number of frames done, and of all frames if it is known.
    """
    target, labels, units = Path(target), labels or LabelOptions(), units or UnitOptions()
    if workers is not None and workers < 1:
        raise ForgefieldError(f"workers must be at least 1, not {workers}")
    if becomes_store(target, graph):
        workers = workers or min(usable_cores(), MOST_WORKERS)
        manifest = convert(source, target, labels=labels, units=units, graph=graph, workers=workers, progress=progress)
        return WrittenData(target, manifest["n_frames"], manifest["n_atoms"], open_store(target).n_bytes)
    if workers is not None:
        raise ForgefieldError(f"workers applies to stores; {target} is written by one process")
    files = source_files(source)
    refuse_settings_for_stores(files, labels, units)
    total = frames_in([unit for file in files for unit in units_of(file)])
    name = ", ".join(map(str, source)) if isinstance(source, list) else str(source)
    frames = _frames(files, name, LabelReader(labels, units), units)
    n_frames, n_atoms = write_frames(frames, target, None if progress is None else lambda done: progress(done, total))
    return WrittenData(target, n_frames, n_atoms, target.stat().st_size)


def sample_data(
    source: object,
    number: int,
    target: str | os.PathLike[str],
    *,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    graph: GraphOptions | None = None,
) -> Sample:
    """Write `number` representative frames of a data set to a store or file; the other parameters are those of
    `convert_data`."""
    target = Path(target)
    to_store = becomes_store(target, graph)
    table = read_table(source, labels, units)
    frames = table.select(representative_rows(table, number))
    if to_store:
        store_frames(frames, target, graph)
    else:
        write_frames(frames, target)
    n_bytes = open_store(target).n_bytes if to_store else target.stat().st_size
    return Sample(frames, len(table), WrittenData(target, len(frames), int(frames.n_atoms.sum()), n_bytes))


def becomes_store(target: Path, graph: GraphOptions | None) -> bool:
    """Whether data written to `target` becomes a store; raises if nothing can be written there."""
    if target.exists() or target.is_symlink():
        raise ForgefieldError(f"{target} exists already; delete it or choose another name")
    if is_writable(target):
        if graph is not None:
            raise ForgefieldError(
                f"neighbour lists (cutoff) were requested, and {target} cannot hold any; only a store can"
            )
        if not target.absolute().parent.is_dir():
            raise ForgefieldError(f"{target}: the folder {target.parent} does not exist")
        return False
    if file_format(target) is not None:
        raise ForgefieldError(
            f"{target}: files ending in '{target.suffix}' are read but not written; use one of {writable_suffixes()}, or "
            "a name without ending for a store"
        )
    return True


def _frames(files: list[SourceFile], what: str, reader: LabelReader, units: UnitOptions) -> Iterator[Frame]:
    """All frames in order; raises at the end if a label that was named was in none of them."""
    for file in files:
        if is_store(file.path):  # many frames are read together there
            yield from map(reader.stored, open_store(file.path).table(factor=file.weight))
        else:
            yield from frames_of(file, reader, units)
    reader.finish(what)
