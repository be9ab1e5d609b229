"""Relax each structure of a file, and optionally its cell, with a trained model.

An interrupted relaxation is continued by the same command. The exit code is 1 if a structure did not converge.
"""

from __future__ import annotations

import argparse

from forgefield.cli.importing import for_good
from forgefield.cli.md import add_structure_arguments, structure_arguments
from forgefield.trust.options import RelaxOptions

EXAMPLES = """\
examples:
  forgefield relax runs/copper in.extxyz -o out.extxyz
  forgefield relax runs/copper in.extxyz --cell --pressure 10 --fmax 0.001 -o out.extxyz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_structure_arguments(parser, RelaxOptions, verb="relaxed", out="relaxed.extxyz")


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield import api

    result = api.relax(args.run, args.start, args.out, **structure_arguments(args, RelaxOptions))
    if not result.was_complete:
        print(f"wrote {result.file}")
    if result.unconverged:
        print(f"{len(result.unconverged)} of {len(result.structures)} structures did not converge")
    return 1 if result.unconverged else 0
