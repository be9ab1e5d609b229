"""Conversion of any source to a store: in parallel, with progress, and resumable.

The frames of all sources are divided into parts. Each part is written completely or not at all, to `DST.partial`, by one of
several processes; when all are complete the manifest is written and the folder is renamed. The frames of a part depend on the
sources only, so the store is the same for any number of processes.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from forgefield._version import __version__
from forgefield.data.field_options import FieldOptions, field_options
from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Field, fields_of, merge_fields, select_fields
from forgefield.data.labels.label_reader import USUAL_NAMES, LabelReader, is_none
from forgefield.data.neighbours.graph import GraphOptions, same_graph
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import SourceFile, chunks, frame_count, frames_of, source_files
from forgefield.data.store.columns import EDGE_FIELDS, FIELDS
from forgefield.data.store.store import FORMAT, MANIFEST, VERSION, is_store, manifest_hash, open_store
from forgefield.data.store.table import FrameTable
from forgefield.data.store.writer import ABOUT, PartStatistics, PartWriter
from forgefield.errors import ForgefieldError, SourceUnreadable
from forgefield.files import write_atomically
from forgefield.processes import interrupts_blocked

PLAN, LOCK = "plan.json", ".lock"
CHUNK = 1000
"""Frames that are read in one go where a format can be divided."""
PARTS = 64
"""Approximate largest number of parts of a store, until parts reach `LARGEST_PART` frames."""
LARGEST_PART = 50_000
BLOCK, BLOCK_ATOMS = 256, 20_000
"""Frames held in memory at a time, and atoms: whichever is reached first."""

Progress = Callable[[int, int | None], None]
"""Called with the number of frames done, and of all frames or None."""


@dataclass(frozen=True)
class Unit:
    """A run of frames of one source. stop: None for all that follow, so that a damaged end is noticed."""

    file: SourceFile
    start: int
    stop: int | None
    expected: int | None
    """Number of frames; None if it is unknown before reading."""

    @property
    def frames(self) -> int:
        return CHUNK if self.expected is None else self.expected


@dataclass(frozen=True)
class Settings:
    labels: LabelOptions
    units: UnitOptions
    graph: GraphOptions | None
    fields: dict[str, Field] = field(default_factory=dict)
    """Additional values to store."""


def convert(
    spec: object,
    target: Path,
    *,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    graph: GraphOptions | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a store with all frames that `spec` names into the folder `target`. Returns its manifest.

    spec: as in a config, or a list of `SourceFile`.
    graph: also keep the neighbour lists of these options. workers: processes that read and write.
    """
    target = Path(target)
    if target.exists():
        raise ForgefieldError(f"{target} exists already; delete it or choose another name")
    labels, units, graph = (
        labels or LabelOptions(),
        units or UnitOptions(),
        None if graph is None else same_graph(graph),
    )
    files = spec if _are_files(spec) else source_files(spec)
    refuse_settings_for_stores(files, labels, units)
    requested = LabelReader(labels, units).requested
    fields = [] if requested is None else [("data.labels.fields", requested)]
    for file in files:
        if is_store(file.path):
            store = open_store(file.path)
            store.verify()  # damage must not be passed on with fresh hashes
            fields.append((str(file.path), select_fields(file.path, store.fields, requested)))
    settings = Settings(labels, units, graph, merge_fields(*fields))
    parts = _divide([unit for file in files for unit in units_of(file)])
    with _being_written(target) as partial:
        _begin(partial, parts, settings)
        _write_parts(partial, parts, settings, workers, progress)
        manifest = _finish(partial, len(parts), spec, settings)
        os.replace(partial, target)
    return manifest


def store_frames(frames: Iterable[Frame], target: Path, graph: GraphOptions | None = None) -> dict[str, Any]:
    """Write a store with just these frames, as one part. Returns its manifest. graph: also keep neighbour lists.

    Fields are stored too: those of a table, or those of the frames of a list.
    """
    target = Path(target)
    if target.exists():
        raise ForgefieldError(f"{target} exists already; delete it or choose another name")
    if not isinstance(frames, FrameTable):
        frames = list(frames)
    fields = dict(frames.fields) if isinstance(frames, FrameTable) else fields_of(frames)
    settings = Settings(LabelOptions(), UnitOptions(), None if graph is None else same_graph(graph), fields)
    with _being_written(target) as partial:
        _begin(partial, [], settings)
        writer = PartWriter(partial / _name(0), settings.graph, settings.fields)
        try:
            for block in _blocks(frames):
                writer.add(block)
            writer.finish(notes=LabelReader(settings.labels, settings.units).notes())
        except BaseException:
            writer.abandon()
            raise
        manifest = _finish(partial, 1, target, settings)
        os.replace(partial, target)
    return manifest


def refuse_settings_for_stores(files: Sequence[SourceFile], labels: LabelOptions, units: UnitOptions) -> None:
    """Refuse settings for reading files if all sources are stores, in which labels are selected and units converted already."""
    if not all(is_store(file.path) for file in files):
        return
    keys = asdict(labels)
    for name in USUAL_NAMES:
        if keys[name] is not None and not is_none(keys[name]):
            raise ForgefieldError(
                f"data.labels.{name}={keys[name]} does not apply to a store, whose labels were selected when it was written; "
                "leave it out, or set it to none to ignore the label"
            )
    defaults = asdict(FieldOptions())
    for name, options in field_options(labels.fields).items():
        for setting, value in asdict(options).items():
            if setting in ("key", "factor", "species", "cumulative", "values") and value != defaults[setting]:
                raise ForgefieldError(
                    f"data.labels.fields.{name}.{setting}={value} does not apply to a store, whose fields were selected when "
                    "it was written; leave it out"
                )
    defaults = asdict(UnitOptions())
    for name, value in asdict(units).items():
        if name in ("energy", "length", "forces", "stress") and value != defaults[name]:
            raise ForgefieldError(
                f"data.units.{name}={value} does not apply to a store, whose units are eV and A; leave it out"
            )


@contextmanager
def _being_written(target: Path) -> Iterator[Path]:
    """The folder that becomes `target`, held by one process. Bad data leaves nothing there, an interrupt what is done."""
    partial = target.with_name(target.name + ".partial")
    advice = f"what is done is kept in {partial}: run the same command again, or delete that folder"
    _refuse_foreign(partial)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(
            partial / LOCK, os.O_RDWR | os.O_CREAT
        )  # for writing: some network file systems lock nothing else
    except OSError as error:
        raise ForgefieldError(f"{target} could not be written ({error.strerror or error})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
    except BlockingIOError:
        raise ForgefieldError(f"{target} is being written by another process") from None
    except BrokenProcessPool as error:
        raise ForgefieldError(
            f"{target}: a process that converted a part of it was ended from outside, often for lack of memory; {advice}, "
            "with fewer workers"
        ) from error
    except OSError as error:
        raise ForgefieldError(f"{target} could not be written ({error.strerror or error}); {advice}") from error
    except SourceUnreadable as error:
        raise SourceUnreadable(f"{error}; {advice}") from error
    except ForgefieldError as error:
        if not isinstance(error.__cause__, OSError):  # the data has to be corrected, which changes every part
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _refuse_foreign(partial: Path) -> None:
    """What we did not make is not deleted."""
    if not partial.is_dir():
        return
    inside = [path.name for path in partial.iterdir() if not path.name.startswith(".")]
    if inside and PLAN not in inside and MANIFEST not in inside:
        raise ForgefieldError(f"{partial} is in the way and holds something else; move it, or choose another name")


def units_of(file: SourceFile) -> list[Unit]:
    """A source in runs of frames that can be read independently."""
    count = frame_count(file)
    if count is None:
        return [Unit(file, 0, None, None)]
    return [Unit(file, begin, end, (count if end is None else end) - begin) for begin, end in chunks(file, CHUNK)]


def frames_in(units: Iterable[Unit]) -> int | None:
    """Number of frames; None if it is unknown before reading."""
    counts = [unit.expected for unit in units]
    numbers = [count for count in counts if count is not None]
    return sum(numbers) if len(numbers) == len(counts) else None


def _are_files(spec: object) -> TypeGuard[list[SourceFile]]:
    return isinstance(spec, list) and all(isinstance(file, SourceFile) for file in spec)


def _divide(units: list[Unit]) -> list[list[Unit]]:
    """Consecutive units as parts of about equal size."""
    total = sum(unit.frames for unit in units)
    size = min(max(total // PARTS, CHUNK), LARGEST_PART)
    parts: list[list[Unit]] = []
    filled = 0
    for unit in units:
        if not parts or (filled + unit.frames > size and filled > 0):
            parts.append([])
            filled = 0
        parts[-1].append(unit)
        filled += unit.frames
    return parts


def _begin(partial: Path, parts: list[list[Unit]], settings: Settings) -> None:
    """Prepare the folder. Parts of an interrupted conversion of the same data with the same settings are kept."""
    plan = json.dumps(
        {
            "version": VERSION,
            "settings": asdict(settings),
            "sources": {str(file): file.state() for file in dict.fromkeys(u.file for part in parts for u in part)},
            "parts": [[[str(unit.file), unit.start, unit.stop] for unit in part] for part in parts],
        }
    )
    file = partial / PLAN
    goes_on = file.is_file() and file.read_text(encoding="utf-8") == plan
    for old in partial.iterdir():
        if old.name != LOCK and (not goes_on or old.name.startswith(".")):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    if not goes_on:
        write_atomically(file, plan)


def _name(number: int) -> str:
    return f"part-{number:05d}"


def _write_parts(
    partial: Path, parts: list[list[Unit]], settings: Settings, workers: int, progress: Progress | None
) -> None:
    total = frames_in([unit for part in parts for unit in part])
    missing = [number for number in range(len(parts)) if not (partial / _name(number) / ABOUT).is_file()]
    done = sum(_about(partial, number)["n_frames"] for number in range(len(parts)) if number not in missing)

    def report(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, total)

    report(0)
    if workers <= 1 or len(missing) <= 1:
        for number in missing:
            for n in write_part(partial / _name(number), parts[number], settings):
                report(n)
        return
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context, initializer=_end_with_parent) as pool:
        with interrupts_blocked():  # the processes are started here
            jobs = {pool.submit(_write_part, partial / _name(i), parts[i], settings): i for i in missing}
        try:
            for job in as_completed(jobs):
                report(job.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                if process not in others:
                    process.terminate()
            raise


def _end_with_parent() -> None:
    """Have this process end when the one that started it does, however that happens."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _write_part(target: Path, units: list[Unit], settings: Settings) -> int:
    return sum(write_part(target, units, settings))


def write_part(target: Path, units: list[Unit], settings: Settings) -> Iterator[int]:
    """Write one part; yields how many frames were added each time."""
    writer = PartWriter(target, settings.graph, settings.fields)
    reader = LabelReader(settings.labels, settings.units)
    try:
        for unit in units:
            for block in _blocks(frames_of(unit.file, reader, settings.units, unit.start, unit.stop)):
                writer.add(block)
                yield len(block)
        writer.finish(notes=reader.notes())
    except BaseException:
        writer.abandon()
        raise


def _blocks(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    block: list[Frame] = []
    n_atoms = 0
    for frame in frames:
        block.append(frame)
        n_atoms += len(frame)
        if len(block) >= BLOCK or n_atoms >= BLOCK_ATOMS:
            yield block
            block, n_atoms = [], 0
    if block:
        yield block


def _about(partial: Path, number: int) -> dict[str, Any]:
    return json.loads((partial / _name(number) / ABOUT).read_text(encoding="utf-8"))


def _finish(partial: Path, n_parts: int, spec: object, settings: Settings) -> dict[str, Any]:
    reader = LabelReader(settings.labels, settings.units)
    statistics = PartStatistics()
    parts = [_about(partial, number) for number in range(n_parts)]
    for part in parts:
        reader.merge(part.pop("notes"))
        statistics.merge(PartStatistics.from_dict(part.pop("statistics")))
    reader.finish(", ".join(file.name for file in spec) if _are_files(spec) else str(spec))
    columns = {name for part in parts for name in part["columns"]}
    all_fields = {**FIELDS, **EDGE_FIELDS, **settings.fields}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "forgefield": __version__,
        "n_frames": sum(part["n_frames"] for part in parts),
        "n_atoms": sum(part["n_atoms"] for part in parts),
        "n_edges": sum(part["n_edges"] for part in parts) if settings.graph is not None else None,
        "fields": {name: asdict(field) for name, field in all_fields.items() if name in columns},
        "graph": None if settings.graph is None else asdict(settings.graph),
        "statistics": statistics.to_dict(),
        "parts": parts,
    }
    manifest = json.loads(json.dumps(manifest))
    manifest["hash"] = manifest_hash(manifest)
    write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1))
    for name in (PLAN, LOCK):
        (partial / name).unlink()
    return manifest
