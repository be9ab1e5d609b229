"""Select a small representative sample of a data set.

The number of frames of each composition is proportional to its share, every species is included if the sample is large enough,
and the frames of a composition are spread evenly over the range of their energies. The same data gives the same sample. Labels
and weights are kept.

examples:
  forgefield data sample water 100                           writes water-100.extxyz
  forgefield data sample 'runs/*.extxyz' 500 -o devset       writes the store devset/
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.data_arguments import add_graph, add_reading, graph_of, reading_of, refuse_target, spec_of
from forgefield.cli.data_convert import summary

if TYPE_CHECKING:
    from forgefield.data.store.table import FrameTable

SUMMARY = "select a small representative sample"
SHOWN = 10
"""How many sources are listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="SRC", help="files, folders, globs or stores")
    parser.add_argument("number", type=_number, metavar="N", help="number of frames")
    parser.add_argument("-o", "--out", metavar="DST", help="file or store to write (default: SRC-N.extxyz)")
    add_graph(parser)
    add_reading(parser)


def _number(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"the last word says how many frames, a number of at least 1, not '{word}'")
    return number


def run(args: argparse.Namespace) -> int:
    from forgefield.data.reading import read_table
    from forgefield.data.splits import representative_rows
    from forgefield.data.store.convert import store_frames
    from forgefield.data.store.export import write_frames
    from forgefield.data.store.store import open_store

    begin, graph = time.monotonic(), graph_of(args)
    target = Path(args.out) if args.out is not None else _default_name(args.paths[0], args.number)
    to_store = refuse_target(target, graph)
    table = read_table(spec_of(args.paths), *reading_of(args))
    rows = representative_rows(table, args.number)
    chosen = table.select(rows)
    if to_store:
        store_frames(chosen, target, graph)
    else:
        write_frames(chosen, target)
    n_bytes = open_store(target).n_bytes if to_store else target.stat().st_size
    print(taken(chosen, len(table)))
    print(summary(target, len(chosen), int(chosen.n_atoms.sum()), n_bytes, time.monotonic() - begin))
    return 0


def _default_name(source: str, number: int) -> Path:
    path = Path(source.partition("#")[0])
    stem = path.name if path.is_dir() else path.stem
    return Path(f"{stem.strip('*?[]') or 'sample'}-{number}.extxyz")


def taken(chosen: FrameTable, of: int) -> str:
    """Which frames were taken, by source: `water.extxyz: frames 0, 4, 8`."""
    by_source: dict[str, list[int]] = {}
    for frame in chosen:
        by_source.setdefault(frame.source, []).append(frame.index)
    lines = [f"{len(chosen)} of {of} frames" + ("" if len(chosen) < of else ": all there are")]
    for source, indices in list(by_source.items())[:SHOWN]:
        lines.append(f"  {source}: {'frame' if len(indices) == 1 else 'frames'} {_numbers(indices)}")
    if len(by_source) > SHOWN:
        rest = list(by_source.values())[SHOWN:]
        lines.append(f"  and {sum(map(len, rest))} frames of {len(rest)} more")
    return "\n".join(lines)


def _numbers(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:SHOWN]))
    return shown if len(indices) <= SHOWN else f"{shown}, ... ({len(indices)} in all)"
