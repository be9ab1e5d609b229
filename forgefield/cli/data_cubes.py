"""Convert cube or xsf files of Quantum ESPRESSO's pp.x, one for each level, to the targets of a snapshot.

Files are sorted by the numbers in their names, with or without padding (tmp.pp1.cube or tmp.pp001.cube). The array has
shape (nx, ny, nz, levels) and is in 1/(eV*A^3), or in the standard unit of another --target. With --info the output of pw.x is
also written, as an .info.json next to the array.

examples:
  forgefield data cubes 'tmp.pp*.cube' -o Be_snapshot0.out.npy --info Be_snapshot0.out
  forgefield data cubes rho.cube -o Be_snapshot0.dens.npy --target density
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from forgefield.cli.data_arguments import counted, progress_bar, size_text
from forgefield.errors import ForgefieldError

SUMMARY = "convert cube or xsf files, one for each level, to the LDOS of a snapshot"
UNITS = {"ldos": "1/(Ry*Bohr^3)", "density": "1/Bohr^3"}
"""In which pp.x writes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="CUBES", help="files or a glob, such as 'tmp.pp*.cube'")
    parser.add_argument(
        "-o", "--out", required=True, metavar="FILE", help="array to write, such as Be_snapshot0.out.npy"
    )
    parser.add_argument("--target", default="ldos", choices=sorted(UNITS), help="quantity in the files (default: ldos)")
    parser.add_argument("--units", metavar="UNIT", help="unit in the files (1/(Ry*Bohr^3), for a density 1/Bohr^3)")
    parser.add_argument("--info", metavar="FILE", help="output of pw.x, to store as .info.json next to the array")
    parser.add_argument("--double", action="store_true", help="write float64 (default: float32)")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from forgefield.ldos.data.cube import cubes_to_array, level_files

    begin, out = time.monotonic(), Path(args.out)
    if out.suffix != ".npy":
        raise ForgefieldError(f"{out}: the array is written as .npy; choose a name that ends so")
    if out.exists():
        raise ForgefieldError(f"{out} exists already; delete it or choose another name")
    files = level_files(args.paths)
    information = None if args.info is None else _information(Path(args.info), out)
    with progress_bar("reading") as report:
        shape = cubes_to_array(
            files,
            out,
            target=args.target,
            units=args.units or UNITS[args.target],
            dtype=np.float64 if args.double else np.float32,
            progress=report,
        )
    grid = " x ".join(map(str, shape[:3]))
    size = size_text(out.stat().st_size)
    print(f"wrote {out}: {counted(shape[3], 'level')} on {grid} points, {size}, in {time.monotonic() - begin:.1f} s")
    if information is not None:
        information[0].write_text(information[1])
        print(f"wrote {information[0]}")
    return 0


def _information(source: Path, out: Path) -> tuple[Path, str]:
    """Name and content of the .info.json that goes with an array."""
    from forgefield.ldos.data.info import read_info
    from forgefield.ldos.data.rows import require_file
    from forgefield.ldos.data.snapshot_files import base_name

    require_file(source)
    path = out.with_name(f"{base_name(out)}.info.json")
    if path.exists():
        raise ForgefieldError(f"{path} exists already; delete it or leave --info out")
    return path, json.dumps(read_info(source).to_json(), indent=1)
