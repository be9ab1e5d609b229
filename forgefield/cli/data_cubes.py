"""Convert cube or xsf files of Quantum ESPRESSO's pp.x, one for each level, to the targets of a snapshot.

Files are sorted by the numbers in their names, with or without padding (tmp.pp1.cube or tmp.pp001.cube). The array has
shape (nx, ny, nz, levels) and is in 1/(eV*A^3), or in the standard unit of another --target. With --info the output of pw.x is
also written, as an .info.json next to the array. A name that ends in .h5 is written as openPMD.

Levels computed in several windows of energies are joined: each --join window begins at the last energy of the one before, and
that level is taken from the upper window (--disjoint: they share no energy).

examples:
  forgefield data cubes 'tmp.pp*.cube' -o Be_snapshot0.out.npy --info Be_snapshot0.out
  forgefield data cubes 'core/tmp.pp*.cube' --join 'valence/tmp.pp*.cube' -o Al_snapshot0.out.npy
  forgefield data cubes rho.cube -o Be_snapshot0.dens.npy --target density
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from forgefield.cli.arguments import add_option
from forgefield.cli.data_arguments import progress_bar
from forgefield.ldos.options import PointsOptions
from forgefield.text import counted, size_text

SUMMARY = "convert cube or xsf files, one for each level, to the LDOS of a snapshot"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="CUBES", help="files or a glob, such as 'tmp.pp*.cube'")
    parser.add_argument(
        "-o", "--out", required=True, metavar="FILE", help="array to write, such as Be_snapshot0.out.npy"
    )
    parser.add_argument(
        "--join",
        action="append",
        nargs="+",
        default=[],
        metavar="CUBES",
        help="files or a glob of the next window of energies, which begins at the last energy of the one before",
    )
    parser.add_argument("--disjoint", action="store_true", help="joined windows share no energy: use all files")
    add_option(parser, "--target", PointsOptions, "target")
    add_option(parser, "--units", PointsOptions, "units", default="as pp.x writes, 1/(Ry*Bohr^3) or 1/Bohr^3")
    parser.add_argument(
        "--info", metavar="FILE", type=Path, help="output of pw.x, to store as .info.json next to the array"
    )
    parser.add_argument("--double", action="store_true", help="write float64 (default: float32)")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from forgefield.ldos.data.cube import convert_cubes

    begin, out = time.monotonic(), Path(args.out)
    with progress_bar("reading", "levels") as report:
        shape, info = convert_cubes(
            args.paths,
            out,
            join=args.join,
            disjoint=args.disjoint,
            target=args.target or PointsOptions.target,
            units=args.units,
            info=args.info,
            dtype=np.float64 if args.double else np.float32,
            progress=report,
        )
    grid, size = " x ".join(map(str, shape[:3])), size_text(out.stat().st_size)
    print(f"wrote {out}: {counted(shape[3], 'level')} on {grid} points, {size}, in {time.monotonic() - begin:.1f} s")
    if info is not None:
        print(f"wrote {info}")
    return 0
