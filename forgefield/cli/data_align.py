"""Align the LDOS of snapshots in energy, by whole levels, with that of a reference.

Needed if the zero of energy differs between calculations. The folder contains NAME.out.npy, NAME.info.json with energies on
the common scale and the shift (ldos_shift_ev), and links to the descriptors, so that it can be trained on. Only levels that all
shifted snapshots have are kept.

examples:
  forgefield data align 'Be_snapshot*.out.npy' -o aligned --first -8 --spacing 0.5
  forgefield data align Be_snapshots/ -o aligned --first -8 --spacing 0.5 --reference Be_snapshot2 --trim --last 8
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from forgefield.cli.arguments import add_option
from forgefield.cli.data_arguments import progress_bar, source_of
from forgefield.ldos.options import PointsOptions
from forgefield.text import counted

SUMMARY = "align the LDOS of snapshots in energy with that of a reference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="SNAPSHOT", help="files such as Be_snapshot0.out.npy, folders or globs"
    )
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--first", type=float, required=True, metavar="eV", help="energy of the first level")
    parser.add_argument("--spacing", type=float, required=True, metavar="eV", help="spacing of the levels")
    parser.add_argument("--reference", metavar="NAME", help="snapshot to align with (default: the first)")
    parser.add_argument(
        "--zero",
        type=float,
        default=1e-5,
        metavar="X",
        help="a band begins where the mean LDOS exceeds this fraction of its norm (default: 1e-5)",
    )
    parser.add_argument("--trim", action="store_true", help="leave out the levels below the band of the reference")
    parser.add_argument("--last", type=float, metavar="eV", help="leave out the levels above this energy")
    add_option(parser, "--units", PointsOptions, "units")


def run(args: argparse.Namespace) -> int:
    from forgefield.ldos.data.align import align_snapshots
    from forgefield.ldos.data.snapshot_files import find_snapshots

    begin, folder = time.monotonic(), Path(args.out)
    snapshots = find_snapshots(source_of(args.paths), units=args.units, need=("targets",), setting="SNAPSHOT")
    with progress_bar("aligning", "snapshots") as report:
        alignment = align_snapshots(
            snapshots,
            folder,
            first=args.first,
            spacing=args.spacing,
            reference=args.reference,
            zero=args.zero,
            trim=args.trim,
            last=args.last,
            progress=report,
        )
    for name, shift in alignment.shifts.items():
        print(f"{name}: lowered by {shift * alignment.spacing + 0.0:g} eV ({counted(shift, 'level')})")
    print(
        f"wrote {folder}: {counted(len(snapshots), 'snapshot')} in {time.monotonic() - begin:.1f} s\n"
        f"in a config:  data.train: {folder}\n              data.points.energies: {alignment.energies()}"
    )
    return 0
