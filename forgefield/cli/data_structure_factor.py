"""Static structure factor of periodic structures, averaged over the frames of a file and over directions.

S(k) = |sum over atoms of exp(i k r)|^2 / n_atoms for the wave vectors of the cell. The file has one row per shell of wave
vectors: their mean length in 1/A, the mean of S, and their number.

examples:
  forgefield data structure-factor trajectory.extxyz -o s.csv
  forgefield data structure-factor al.xyz -o s.csv --k-max 8 --shells 80
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forgefield.cli.data_arguments import source_of
from forgefield.errors import ForgefieldError
from forgefield.text import counted

SUMMARY = "static structure factor of periodic structures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="FILE", help="structures or trajectories of any format")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="table to write (.csv)")
    parser.add_argument(
        "--k-max", type=float, default=10.0, metavar="1/A", help="longest wave vector (default: 10 1/A)"
    )
    parser.add_argument("--shells", type=int, default=100, metavar="N", help="shells of wave vectors (default: 100)")


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from forgefield.data.options import LabelOptions, UnitOptions
    from forgefield.data.reading import read_table
    from forgefield.files import written_atomically
    from forgefield.physics.structure_factor import static_structure_factor

    table = read_table(source_of(args.paths), LabelOptions(), UnitOptions(), required=False)
    frames = [table[index] for index in range(len(table))]
    for index, frame in enumerate(frames):
        if not np.all(frame.pbc):
            raise ForgefieldError(f"frame {index} is not periodic in all directions; its wave vectors are not discrete")
    found = static_structure_factor(
        ((frame.positions, frame.cell) for frame in frames), k_max=args.k_max, shells=args.shells
    )
    with written_atomically(Path(args.out)) as partial:
        rows = np.column_stack([found.k, found.values, found.vectors])
        np.savetxt(partial, rows, fmt=("%.6f", "%.8g", "%d"), delimiter=",", header="k (1/A),S,vectors", comments="")
    highest = int(np.argmax(found.values))
    print(
        f"wrote {args.out}: {counted(len(found.k), 'shell')} of {counted(len(frames), 'frame')}; largest S "
        f"{found.values[highest]:.3f} at {found.k[highest]:.3f} 1/A"
    )
    return 0
