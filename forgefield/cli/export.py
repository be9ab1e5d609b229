"""Export the model of a run in the format of another program."""

from __future__ import annotations

import argparse
from pathlib import Path

from forgefield.cli.arguments import add_trust
from forgefield.errors import ForgefieldError
from forgefield.models.registry import export_formats, exporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="name of a run in the folder runs/, or its path")
    formats = export_formats()
    files = "; ".join(f"{program}: {entry.help}" for program, entry in formats.items())
    parser.add_argument("--to", required=True, choices=list(formats), help="program that will read it")
    parser.add_argument("-o", "--out", required=True, help=f"file to write; {files}")
    parser.add_argument("--force", "--overwrite", action="store_true", help="overwrite the file OUT if it exists")
    parser.add_argument("--which", choices=["best", "last"], default="best", help="weights (default: best)")
    parser.add_argument("--head", metavar="NAME", help="branch of a model with several branches")
    parser.add_argument(
        "--sel",
        type=int,
        nargs="+",
        help="deepmd: maximum number of neighbours of each species, if trained without it",
    )
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from forgefield.runs import Run

    if Path(args.out).exists() and not args.force:
        raise ForgefieldError(f"{args.out} exists already; --force overwrites it, -o FILE names another.")
    opened = Run.open(args.run, trust_code=args.trust_code)
    opened.require_head(args.head)
    written = exporter(args.to)(opened.load_potential(args.which, head=args.head), args.out, sel=args.sel)
    print(f"wrote {written}")
    return 0
