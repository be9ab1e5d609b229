"""From what a setting names to a table of frames: read into memory, or left on disk.

Stores stay on disk; files are read into memory. `data.lazy` turns either around: files are converted once into a store
among the cached things, a store is read as a whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from forgefield.config.fields import field_options
from forgefield.config.schema import FieldOptions, LabelOptions, UnitOptions
from forgefield.data.labels.fields import Fields, chosen_fields
from forgefield.data.labels.label_reader import USUAL_NAMES, LabelReader, is_none
from forgefield.data.neighbours.graph import GraphOptions, same_graph
from forgefield.data.readers import SourceFile, frames_of, source_files
from forgefield.data.store.convert import convert
from forgefield.data.store.manifest import VERSION, is_store
from forgefield.data.store.store import open_store
from forgefield.data.store.table import FrameTable, Share
from forgefield.errors import ForgefieldError
from forgefield.files import cache_folder

log = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]


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
) -> FrameTable:
    """All frames that `spec` names, in eV and A, checked.

    lazy: True leaves everything on disk, False reads everything into memory, None leaves stores on disk. graph: neighbour lists
    that a store made here is to hold. required: a label that `labels` names must be in at least one frame. reader: made of
    the same labels and units, where the caller wants to know what else was met in files.
    The table has the fields that `labels` names, or those that the stores hold where it says nothing about fields.
    """
    labels, units = label_settings(labels), unit_settings(units)
    reader = reader or LabelReader(labels, units)
    table = FrameTable([])
    hidden = frozenset(
        label for label in ("energy", "forces", "stress", "weight") if is_none(getattr(labels, label) or "")
    )
    stores_only, in_memory = True, False
    for (in_store, share, branch), group in groupby(source_files(spec), key=_kind):
        files = list(group)
        if in_store:
            for file in files:
                store = open_store(file.path)
                fields = chosen_fields(file.path, store.fields, reader.asked, required=required)
                parts = store.table(factor=file.weight).parts
                opened = FrameTable([replace(part, hidden=hidden, chosen=fields) for part in parts])
                opened = FrameTable.from_frames(opened, fields) if lazy is False else opened
                table = table + _said(opened, share, branch)
        elif lazy:
            stores_only = False
            table = table + _said(_kept_on_disk(files, labels, units, graph, progress), share, branch)
        else:
            stores_only, in_memory = False, True
            frames = (frame for file in files for frame in frames_of(file, reader, units))
            table = table + _said(FrameTable.from_frames(frames, reader.asked or {}), share, branch)
    _ = table.fields  # refused here, where parts contradict each other
    if stores_only:
        _refuse_settings_for_files(labels, units)
    elif required and in_memory:  # what is converted has been asked for its labels then
        reader.finish(str(spec))
    return table


def _refuse_settings_for_files(labels: LabelOptions, units: UnitOptions) -> None:
    """In a store labels have been chosen and units converted already."""
    for name in USUAL_NAMES:
        value = getattr(labels, name)
        if value is not None and not is_none(value):
            raise ForgefieldError(
                f"data.labels.{name}={value} has no meaning for a store, whose labels were chosen when it was written; "
                "leave it out (none leaves the label out)"
            )
    for name, said in field_options(labels.fields).items():
        for setting in ("key", "factor", "species", "cumulative"):
            if getattr(said, setting) != getattr(FieldOptions(), setting):
                raise ForgefieldError(
                    f"data.labels.fields.{name}.{setting}={getattr(said, setting)} has no meaning for a store, whose fields "
                    "were chosen when it was written; leave it out"
                )
    for name in ("energy", "length", "forces", "stress"):
        if getattr(units, name) != getattr(UnitOptions(), name):
            raise ForgefieldError(
                f"data.units.{name}={getattr(units, name)} has no meaning for a store, which holds eV and A; leave it out"
            )


def label_settings(labels: LabelOptions | None, fields: Fields | None = None) -> LabelOptions:
    """A copy of `data.labels`. fields: what is carried where it says nothing about fields."""
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
    """What tells apart files that become different parts of a table."""
    return is_store(file.path), None if file.share is None else Share(file.entry, file.share), file.branch


def _said(table: FrameTable, share: Share | None, branch: str | None) -> FrameTable:
    return FrameTable([replace(part, share=share, branch=branch) for part in table.parts])


def _kept_on_disk(
    files: list[SourceFile],
    labels: LabelOptions,
    units: UnitOptions,
    graph: GraphOptions | None,
    progress: Progress | None,
) -> FrameTable:
    """Files as a store among the cached things, made by whichever process comes first."""
    names = [(str(file), file.state()) for file in files]
    said = {name: value for name, value in asdict(labels).items() if name != "fields" or value}
    settings = [VERSION, names, said, asdict(units), None if graph is None else asdict(same_graph(graph))]
    key = hashlib.blake2b(json.dumps(settings, default=str).encode(), digest_size=16).hexdigest()
    folder = cache_folder() / "stores" / key
    with _one_at_a_time(folder.with_suffix(".lock")):
        if not is_store(folder):
            log.info("data.lazy: the data is converted once, to %s (FORGEFIELD_CACHE sets another place)", folder)
            convert(files, folder, labels=labels, units=units, graph=graph, progress=progress)
    return open_store(folder).table()


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise ForgefieldError(
            f"{path.parent} cannot be written ({error.strerror}); FORGEFIELD_CACHE names another folder"
        ) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)
