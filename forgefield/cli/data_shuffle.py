"""Write the grid points of snapshots to new files in random order.

Every point is written exactly once, and the sizes of the files differ by at most one point; the same seed gives the same files,
whatever the memory. Training shuffles in every epoch anyway, also from disk; use this only if you need such files.

examples:
  forgefield data shuffle 'Be_snapshot*.in.npy' -o shuffled --files 4
  forgefield data shuffle Al_snapshots/ -o shuffled --files 10 --seed 7 --memory 32 --units '1/(eV*Bohr^3)'
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from forgefield.cli.arguments import add_option
from forgefield.cli.data_arguments import progress_bar, source_of
from forgefield.errors import ForgefieldError
from forgefield.ldos.options import PointsOptions
from forgefield.text import counted, size_text

SUMMARY = "write the grid points of snapshots to new files in random order"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="SNAPSHOT", help="files such as Be_snapshot0.in.npy, folders or globs"
    )
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--files", type=int, required=True, metavar="N", help="number of files")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the random order (default: 0)")
    parser.add_argument(
        "--name", default="shuffled", metavar="NAME", help="files are NAME0.in.npy, ... (default: shuffled)"
    )
    parser.add_argument("--target", default="ldos", metavar="KIND", help="ldos, dos or density (default: ldos)")
    add_option(parser, "--units", PointsOptions, "units")
    parser.add_argument(
        "--memory", type=float, default=4.0, metavar="GB", help="approximate memory to use (default: 4)"
    )


def run(args: argparse.Namespace) -> int:
    from forgefield.ldos.data.shuffle import shuffle_snapshots
    from forgefield.ldos.data.snapshot_files import find_snapshots
    from forgefield.ldos.data.table import PointTable

    if not args.memory > 0:
        raise ForgefieldError(f"--memory must be more than 0, not {args.memory:g}")
    begin, folder = time.monotonic(), Path(args.out)
    snapshots = find_snapshots(source_of(args.paths), target=args.target, units=args.units, setting="SNAPSHOT")
    table = PointTable(snapshots)
    with progress_bar("shuffling") as report:
        shuffle_snapshots(
            table,
            folder,
            files=args.files,
            seed=args.seed,
            name=args.name,
            memory=int(args.memory * 2**30),
            progress=report,
        )
    n_bytes = sum(file.stat().st_size for file in folder.iterdir())
    print(
        f"wrote {folder}: {counted(table.n_points, 'point')} of {counted(len(snapshots), 'snapshot')} in "
        f"{counted(args.files, 'file')}, {size_text(n_bytes)}, in {time.monotonic() - begin:.1f} s\n"
        f"in a config:  data.train: {folder}"
    )
    return 0
