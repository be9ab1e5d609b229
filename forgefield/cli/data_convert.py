"""Convert data of any format to a store or to a structure file.

A store is a memory-mapped folder of columns with hashes: it may be larger than memory, and trainings start quickly. With
--cutoff it also holds neighbour lists. A name that ends in .extxyz, .xyz, .traj or .db is written as such a file instead;
reading an .extxyz again gives exactly the same frames. Everything is in eV and A.

Run the same command again to resume an interrupted conversion to a store.

examples:
  forgefield data convert water_dp/ water --cutoff 6
  forgefield data convert 'rmd17/*.npz' rmd17 --energy-unit kcal/mol --workers 4
  forgefield data convert water water.extxyz
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.data_arguments import (
    add_graph,
    add_reading,
    counted,
    graph_of,
    progress_bar,
    reading_of,
    refuse_target,
    size_text,
    spec_of,
    usable_cores,
)
from forgefield.errors import ForgefieldError
from forgefield.processes import Terminated

if TYPE_CHECKING:
    from forgefield.data.frame import Frame
    from forgefield.data.neighbours.graph import GraphOptions
    from forgefield.data.options import LabelOptions, UnitOptions
    from forgefield.data.readers import SourceFile

SUMMARY = "convert data of any format to a store (may be larger than memory, starts quickly) or to a structure file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="SRC", help="files, folders, globs or stores")
    parser.add_argument("target", metavar="DST", help="store to write, or a file (.extxyz, .xyz, .traj, .db)")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of processes that write a store (default: the usable cores, up to 8)",
    )
    add_graph(parser)
    add_reading(parser)


def run(args: argparse.Namespace) -> int:
    target, graph = Path(args.target), graph_of(args)
    if args.workers is not None and args.workers < 1:
        raise ForgefieldError(f"--workers is {args.workers}; it should be at least 1")
    to_store = refuse_target(target, graph)
    if not to_store and args.workers is not None:
        raise ForgefieldError(f"--workers is for stores; {target} is written by one process")
    labels, units = reading_of(args)
    begin = time.monotonic()
    if to_store:
        return _to_store(args, target, labels, units, graph, begin)
    from forgefield.data.readers import source_files
    from forgefield.data.store.convert import frames_in, units_of
    from forgefield.data.store.export import write_frames

    files = source_files(spec_of(args.paths))
    with progress_bar("converting") as report:
        total = frames_in([unit for file in files for unit in units_of(file)])
        frames = _frames(files, ", ".join(args.paths), labels, units)
        n_frames, n_atoms = write_frames(frames, target, lambda done: report(done, total))
    print(summary(target, n_frames, n_atoms, target.stat().st_size, time.monotonic() - begin))
    return 0


def _to_store(
    args: argparse.Namespace,
    target: Path,
    labels: LabelOptions,
    units: UnitOptions,
    graph: GraphOptions | None,
    begin: float,
) -> int:
    from forgefield.data.store.convert import convert
    from forgefield.data.store.store import open_store

    try:
        with progress_bar("converting") as report:
            manifest = convert(
                spec_of(args.paths),
                target,
                labels=labels,
                units=units,
                graph=graph,
                workers=args.workers or usable_cores(),
                progress=report,
            )
    except (KeyboardInterrupt, Terminated) as stopped:
        how, code = ("interrupted", 130) if isinstance(stopped, KeyboardInterrupt) else (f"stopped by {stopped}", 143)
        print(f"{how}: run the same command to resume; finished parts are kept in {target}.partial", file=sys.stderr)
        return code
    n_bytes = open_store(target).n_bytes
    print(summary(target, manifest["n_frames"], manifest["n_atoms"], n_bytes, time.monotonic() - begin))
    return 0


def _frames(files: list[SourceFile], what: str, labels: LabelOptions, units: UnitOptions) -> Iterator[Frame]:
    """All frames, one after the other; a label that was named and never came is an error at the end."""
    from forgefield.data.labels.label_reader import LabelReader
    from forgefield.data.readers import frames_of
    from forgefield.data.store.store import is_store, open_store

    reader = LabelReader(labels, units)
    for file in files:
        if is_store(file.path):  # many frames are read together there
            yield from map(reader.stored, open_store(file.path).table(factor=file.weight))
        else:
            yield from frames_of(file, reader, units)
    reader.finish(what)


def summary(target: Path, n_frames: int, n_atoms: int, n_bytes: int, seconds: float) -> str:
    """What was written, and how to train on it."""
    counts = f"{counted(n_frames, 'frame')}, {counted(n_atoms, 'atom')}, {size_text(n_bytes)}"
    return f"wrote {target}: {counts}, in {seconds:.1f} s\nin a config:  data.train: {target}"
