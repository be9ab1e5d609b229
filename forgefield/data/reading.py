"""The frames that a setting names, as a table: in memory, or on disk.

Stores stay on disk and files are read into memory, unless `data.lazy` is set: with true, files are converted once into a store
in the cache folder; with false, stores are read into memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Fields, select_fields
from forgefield.data.labels.label_reader import LabelReader, is_none
from forgefield.data.neighbours.graph import GraphOptions, same_graph
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import SourceFile, frames_of, source_files
from forgefield.data.readers.sources import transformed_frames
from forgefield.data.store.convert import Progress, convert, refuse_settings_for_stores
from forgefield.data.store.store import VERSION, is_store, open_store
from forgefield.data.store.table import FrameTable, Share
from forgefield.data.transforms import FrameTransform
from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder

log = logging.getLogger(__name__)


def read_table(
    spec: object,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    *,
    lazy: bool | None = None,
    graph: GraphOptions | None = None,
    required: bool = True,
    progress: Progress | None = None,
    reader: LabelReader | None = None,
    transform: FrameTransform | None = None,
) -> FrameTable:
    """All frames that `spec` names, in eV and A, checked.

    lazy: True leaves everything on disk, False reads everything into memory, None leaves stores on disk. graph: options of
    neighbour lists for stores that are written here. required: a label that `labels` names must be in at least one frame.
    reader: of the same labels and units, for callers that need to know which other values the files have.
    transform: changes frames before their labels are selected (`data.transforms`).
    The table has the fields that `labels` names, or if it names none, those of the stores.
    """
    labels, units = label_settings(labels), unit_settings(units)
    reader = reader or LabelReader(labels, units)
    table = FrameTable([])
    keys = {"energy": labels.energy, "forces": labels.forces, "stress": labels.stress, "weight": labels.weight}
    hidden = frozenset(label for label, key in keys.items() if is_none(key or ""))
    sources, in_memory = source_files(spec), False
    for (in_store, share, branch), group in groupby(sources, key=_kind):
        files = list(group)
        if transform is not None and (in_store or lazy):
            raise ForgefieldError(
                f"{files[0].name}: data.transforms are for files that are read into memory, not for stores or data.lazy; name "
                "the files themselves"
            )
        if in_store:
            for file in files:
                store = open_store(file.path)
                fields = select_fields(file.path, store.fields, reader.requested, required=required)
                parts = store.table(factor=file.weight).parts
                opened = FrameTable([replace(part, hidden=hidden, chosen=fields) for part in parts])
                opened = FrameTable.from_frames(opened, fields) if lazy is False else opened
                table = table + _assigned(opened, share, branch)
        elif lazy:
            table = table + _assigned(_cached_store(files, labels, units, graph, progress), share, branch)
        else:
            in_memory = True
            frames = (frame for file in files for frame in _frames(file, reader, units, transform))
            table = table + _assigned(FrameTable.from_frames(frames, reader.requested or {}), share, branch)
    _ = table.fields  # raises if the fields of different parts contradict each other
    refuse_settings_for_stores(sources, labels, units)
    if required and in_memory:  # a conversion checks it itself
        reader.finish(str(spec))
    return table


def _frames(
    file: SourceFile, reader: LabelReader, units: UnitOptions, transform: FrameTransform | None
) -> Iterator[Frame]:
    if transform is None:
        return frames_of(file, reader, units)
    return transformed_frames(file, reader, units, transform)


def label_settings(labels: LabelOptions | None, fields: Fields | None = None) -> LabelOptions:
    """A copy of `data.labels`. fields: used if it does not name any."""
    settings = replace(labels) if labels is not None else LabelOptions()
    if settings.fields is None and fields:
        settings.fields = {
            name: {"per": field.per, "shape": list(field.shape), "unit": field.unit} for name, field in fields.items()
        }
    return settings


def unit_settings(units: UnitOptions | None) -> UnitOptions:
    """A copy of `data.units`."""
    return replace(units) if units is not None else UnitOptions()


def _kind(file: SourceFile) -> tuple[bool, Share | None, str | None]:
    """Distinguishes files that become different parts of a table."""
    return is_store(file.path), None if file.share is None else Share(file.entry, file.share), file.branch


def _assigned(table: FrameTable, share: Share | None, branch: str | None) -> FrameTable:
    """The table with a sampling share and a branch."""
    return FrameTable([replace(part, share=share, branch=branch) for part in table.parts])


def _cached_store(
    files: list[SourceFile],
    labels: LabelOptions,
    units: UnitOptions,
    graph: GraphOptions | None,
    progress: Progress | None,
) -> FrameTable:
    """The store of these files in the cache folder, written by the first process that needs it."""
    names = [(str(file), file.state()) for file in files]
    label_keys = {name: value for name, value in asdict(labels).items() if name != "fields" or value}
    settings = [VERSION, names, label_keys, asdict(units), None if graph is None else asdict(same_graph(graph))]
    key = hashlib.blake2b(json.dumps(settings, default=str).encode(), digest_size=16).hexdigest()
    folder = cache_folder() / "stores" / key
    with locked(folder.with_suffix(".lock")):
        if not is_store(folder):
            log.info("data.lazy: the data is converted once, to %s (FORGEFIELD_CACHE sets another folder)", folder)
            convert(files, folder, labels=labels, units=units, graph=graph, progress=progress)
    return open_store(folder).table()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, after waiting for other processes to release it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise ForgefieldError(
            f"{path.parent} cannot be written ({error.strerror}); set FORGEFIELD_CACHE to another folder"
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)
