"""Copy snapshots to openPMD files (HDF5), which MALA reads.

Each snapshot becomes NAME.in.h5 (descriptors, after three columns of coordinates) and NAME.out.h5 (LDOS), in 1/(eV*A^3) and
with the calculation inside. Trainings read .npy and .h5 alike.

examples:
  forgefield data openpmd 'Be_snapshot*.in.npy' -o openpmd
  forgefield data openpmd Al_snapshots/ -o openpmd --units '1/(eV*Bohr^3)'
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from forgefield.cli.arguments import add_option
from forgefield.cli.data_arguments import progress_bar, source_of
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.options import PointsOptions
from forgefield.text import counted, size_text

SUMMARY = "copy snapshots to openPMD files, which MALA reads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="SNAPSHOT", help="files such as Be_snapshot0.in.npy, folders or globs"
    )
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--target", default="ldos", metavar="KIND", help="ldos, dos or density (default: ldos)")
    add_option(parser, "--units", PointsOptions, "units")
    add_option(parser, "--type", DescriptorOptions, "type")


def run(args: argparse.Namespace) -> int:
    from forgefield.ldos.data.openpmd_copy import copy_to_openpmd
    from forgefield.ldos.data.snapshot_files import find_snapshots

    begin, folder = time.monotonic(), Path(args.out)
    snapshots = find_snapshots(source_of(args.paths), target=args.target, units=args.units, need=(), setting="SNAPSHOT")
    with progress_bar("copying", "files") as report:
        files = copy_to_openpmd(snapshots, folder, descriptors=args.type or DescriptorOptions.type, progress=report)
    size = size_text(sum(file.stat().st_size for file in files))
    print(f"wrote {counted(len(files), 'file')} to {folder}, {size}, in {time.monotonic() - begin:.1f} s")
    return 0
