"""Choose structures of a pool to compute next: those about which a trained model knows least.

Near-duplicates of the training data, and of one another, are left out. The pool is read twice and is not held in memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forgefield.cli.arguments import READING, add_overrides, add_trust, device_name, refuse_files

EXAMPLES = """\
examples:
  forgefield select runs/water pool.extxyz -n 100 -o next.extxyz
  forgefield select runs/water 'md/*.extxyz' -n 100 -o next.extxyz --by distance --method d-optimal
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="name of a run in the folder runs/, or its path")
    parser.add_argument("pool", metavar="POOL", help="file, folder or pattern with structures; labels are not needed")
    parser.add_argument("-n", "--number", type=int, required=True, metavar="N", help="number of structures to choose")
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="file to write (.extxyz)")
    parser.add_argument(
        "--by",
        choices=("uncertainty", "distance", "both"),
        default="both",
        help="the most uncertain structures, those that cover feature space, or those that cover it among the 10 N most "
        "uncertain (default: both)",
    )
    parser.add_argument(
        "--method",
        choices=("farthest", "kmeans", "d-optimal"),
        default="farthest",
        help="how feature space is covered (default: farthest points)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="E",
        help="leave out structures closer than this to a training frame or a chosen one, eV per atom (default: a tenth of "
        "the typical distance between training frames)",
    )
    parser.add_argument("--figure", metavar="FILE", help="picture of the selection (default: OUT with .png)")
    parser.add_argument("--force", "--overwrite", action="store_true", help="overwrite the file OUT if it exists")
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: cuda if available)")
    add_trust(parser)
    add_overrides(parser, READING)


def run(args: argparse.Namespace) -> int:
    overrides = refuse_files(args.overrides)
    from forgefield import api
    from forgefield.config.loading import override_config
    from forgefield.runs import Run

    opened = Run.open(args.run, trust_code=args.trust_code)
    options = override_config(opened.config, overrides, allowed=READING, verb="select").data if overrides else None
    chosen = api.select(
        opened,
        args.pool,
        args.number,
        args.out,
        by=args.by,
        method=args.method,
        tolerance=args.tolerance,
        device=device_name(args.device),
        figure=args.figure or Path(args.out).with_suffix(".png"),
        overwrite=args.force,
        options=options,
        notify=print,
    )
    print(f"chose {len(chosen.indices)} of {chosen.n_pool} structures")
    if chosen.indices:
        lowest, highest = 1000 * chosen.uncertainties.min(), 1000 * chosen.uncertainties.max()
        what, unit = ("the force on an atom", "meV/A") if opened.members else ("an atom's energy", "meV")
        print(f"largest uncertainty of {what} in each of them: {lowest:.3g} to {highest:.3g} {unit}")
    print(f"wrote {args.out} and {chosen.figure}")
    return 0
