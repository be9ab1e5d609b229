"""Convert data of any format to a store or to a structure file.

A store is a folder of columns with hashes: it may be larger than memory, and trainings start quickly. With
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

from forgefield.cli.data_arguments import (
    add_graph,
    add_reading,
    graph_options,
    progress_bar,
    reading_options,
    source_of,
)
from forgefield.errors import ForgefieldError
from forgefield.processes import Terminated

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
    from forgefield.data.conversion import convert_data
    from forgefield.ldos.data.show import is_snapshot_name

    snapshot = next((path for path in args.paths if path.endswith(".npy") and is_snapshot_name(path)), None)
    if snapshot is not None:
        raise ForgefieldError(
            f"{snapshot} is a file of a snapshot, and stores contain structures; "
            f"`forgefield data openpmd {snapshot} -o FOLDER` writes openPMD files"
        )
    begin, (labels, units), graph = time.monotonic(), reading_options(args), graph_options(args)
    try:
        with progress_bar("converting") as report:
            written = convert_data(
                source_of(args.paths),
                args.target,
                labels=labels,
                units=units,
                graph=graph,
                workers=args.workers,
                progress=report,
            )
    except (KeyboardInterrupt, Terminated) as stopped:
        how, code = ("interrupted", 130) if isinstance(stopped, KeyboardInterrupt) else (f"stopped by {stopped}", 143)
        print(
            f"{how}: run the same command to resume; finished parts are kept in {args.target}.partial", file=sys.stderr
        )
        return code
    print(f"wrote {written}, in {time.monotonic() - begin:.1f} s\nin a config:  data.train: {written.path}")
    return 0
