"""Relax each structure of a file, and optionally its cell, with a trained model.

An interrupted relaxation is continued by the same command. The exit code is 1 if a structure did not converge.
"""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import add_option_arguments, add_run_arguments, device_name, given_options
from forgefield.cli.importing import for_good
from forgefield.trust.options import RelaxOptions

EXAMPLES = """\
examples:
  forgefield relax runs/copper in.extxyz -o out.extxyz
  forgefield relax runs/copper in.extxyz --cell --pressure 10 --fmax 0.001 -o out.extxyz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    parser.add_argument(
        "start", metavar="FILE", help="file, folder or pattern with structures, each of which is relaxed"
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="OUT",
        default="relaxed.extxyz",
        help="file to write: .extxyz, .xyz or .traj (default: relaxed.extxyz)",
    )
    parser.add_argument("--force", "--overwrite", action="store_true", help="start over if OUT exists")
    add_option_arguments(parser, RelaxOptions)


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield import api

    result = api.relax(
        args.run,
        args.start,
        args.out,
        which=args.which,
        head=args.head,
        device=device_name(args.device),
        overwrite=args.force,
        notify=lambda text: print(text, flush=True),
        trust_code=args.trust_code,
        **given_options(args, RelaxOptions),
    )
    print(f"wrote {result.file}")
    if result.unconverged:
        print(f"{len(result.unconverged)} of {len(result.structures)} structures did not converge")
    return 1 if result.unconverged else 0
