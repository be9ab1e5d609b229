"""Export the model of a run as a package, one file that can be used in place of the run, or for another program."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.arguments import add_trust
from forgefield.errors import ForgefieldError
from forgefield.models.registry import export_formats, exporter

if TYPE_CHECKING:
    from forgefield.runs import Run

PACKAGE_SUFFIX = ".ff"
MLIAP = "mliap"
"""`pair_style mliap unified` of LAMMPS."""
EXAMPLES = """\
examples:
  forgefield export runs/water -o water.ff --licence CC-BY-4.0
  forgefield predict water.ff new.extxyz -o out.extxyz
  forgefield export runs/water --to aoti -o water.pt2 --device cuda
  forgefield export runs/water --to deepmd -o water.dp
  forgefield export runs/water --to mliap -o water.pt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="name of a run in the folder runs/, its path, or a packaged model (.ff)")
    formats = export_formats()
    files = "; ".join([*(f"{program}: {entry.help}" for program, entry in formats.items()), f"{MLIAP}: .pt"])
    parser.epilog = EXAMPLES
    parser.add_argument("--to", choices=[*formats, MLIAP], help="program that will read it (default: Forgefield)")
    parser.add_argument("-o", "--out", required=True, help=f"file to write; Forgefield: {PACKAGE_SUFFIX}; {files}")
    parser.add_argument("--licence", "--license", metavar="TEXT", help="licence of the model, stored in the package")
    parser.add_argument("--force", "--overwrite", action="store_true", help="overwrite the file OUT if it exists")
    parser.add_argument("--which", choices=["best", "last"], default="best", help="weights (default: best)")
    parser.add_argument("--head", metavar="NAME", help="branch of a model with several branches")
    parser.add_argument("--device", default="cpu", help="aoti, torchscript: device on which it will run (default: cpu)")
    parser.add_argument(
        "--sel",
        type=int,
        nargs="+",
        help="deepmd: maximum number of neighbours of each species, if trained without it",
    )
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from forgefield.inference.packages import write_package
    from forgefield.runs import Run

    if Path(args.out).exists() and not args.force:
        raise ForgefieldError(f"{args.out} exists already; --force overwrites it, -o FILE names another.")
    opened = Run.open(args.run, trust_code=args.trust_code)
    opened.require_head(args.head)
    if args.to is None:
        if args.sel is not None:
            raise ForgefieldError("--sel is an option of --to deepmd.")
        written = write_package(opened, args.out, which=args.which, head=args.head, licence=args.licence)
    else:
        if args.licence is not None:
            raise ForgefieldError(f"--licence is stored in packages only; files of {args.to} have no field for it.")
        if args.to == MLIAP:
            return _export_mliap(opened, args)
        written = exporter(args.to)(
            opened.load_potential(args.which, args.device, head=args.head), args.out, sel=args.sel
        )
    print(f"wrote {written}")
    return 0


def _export_mliap(opened: Run, args: argparse.Namespace) -> int:
    from forgefield.inference.lammps.mliap import write_mliap

    if args.sel is not None:
        raise ForgefieldError("--sel is an option of --to deepmd.")
    written = write_mliap(opened, args.out, which=args.which, head=args.head)
    print(f"wrote {written}; LAMMPS reads it with: pair_style mliap unified {written} 0")
    return 0
