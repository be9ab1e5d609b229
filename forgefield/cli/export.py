"""Export the model of a run as a package, one file that can be used in place of the run, or for another program."""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import PACKAGE_SUFFIX, add_trust
from forgefield.models.registry import export_formats

MLIAP = "mliap"
"""`pair_style mliap unified` of LAMMPS."""
MALA = "mala"
"""Of LDOS networks."""
EXAMPLES = """\
examples:
  forgefield export runs/water -o water.ff --licence CC-BY-4.0
  forgefield predict water.ff new.extxyz -o out.extxyz
  forgefield export runs/water --to aoti -o water.pt2 --device cuda
  forgefield export runs/water --to deepmd -o water.dp
  forgefield export runs/water --to nequip -o water.ckpt
  forgefield export runs/water --to mliap -o water.pt
  forgefield export runs/be --to mala -o be.zip
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="name of a run in the folder runs/, its path, or a packaged model (.ff)"
    )
    formats = export_formats()
    files = "; ".join(
        [*(f"{program}: {entry.help}" for program, entry in formats.items()), f"{MLIAP}: .pt", f"{MALA}: .zip"]
    )
    parser.epilog = EXAMPLES
    parser.add_argument("--to", choices=[*formats, MLIAP, MALA], help="program that will read it (default: Forgefield)")
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
    from forgefield import api

    written = api.export(
        args.run,
        args.out,
        to=args.to,
        which=args.which,
        head=args.head,
        device=args.device,
        licence=args.licence,
        sel=args.sel,
        overwrite=args.force,
        trust_code=args.trust_code,
    )
    print(
        f"wrote {written}"
        + (f"; LAMMPS reads it with: pair_style mliap unified {written} 0" if args.to == MLIAP else "")
    )
    return 0
