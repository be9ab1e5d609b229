"""Molecular dynamics with a trained model, from each structure of a file.

The trajectory has energies, forces and momenta. An interrupted simulation is continued by the same command and ends bit for bit
as an uninterrupted one. The exit code is 1 if a structure exploded.
"""

from __future__ import annotations

import argparse
from typing import Any

from forgefield.cli.arguments import add_option_arguments, add_run_arguments, device_name, options_set
from forgefield.cli.importing import for_good
from forgefield.trust.options import DynamicsOptions

EXAMPLES = """\
examples:
  forgefield md runs/water start.extxyz --temperature 300 --ps 10 -o water.extxyz
  forgefield md runs/copper start.extxyz --ensemble npt --temperature 800 --pressure 5 --ps 20 -o npt.traj
  forgefield md runs/copper start.extxyz --ensemble nve --temperature 600 --timestep 2 -o nve.extxyz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_structure_arguments(parser, DynamicsOptions, verb="simulated", out="md.extxyz")


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield import api

    result = api.md(args.run, args.start, args.out, **structure_arguments(args, DynamicsOptions))
    print(*result.trajectories, *([] if result.was_complete else [f"wrote {result.file}"]), sep="\n")
    return 1 if result.exploded else 0


def add_structure_arguments(parser: argparse.ArgumentParser, options: type, *, verb: str, out: str) -> None:
    """Arguments of a verb that computes something for each structure of a file: `md` and `relax`."""
    add_run_arguments(parser)
    parser.add_argument(
        "start", metavar="FILE", help=f"file, folder or pattern with structures, each of which is {verb}"
    )
    parser.add_argument(
        "-o", "--out", metavar="OUT", default=out, help=f"file to write: .extxyz, .xyz or .traj (default: {out})"
    )
    parser.add_argument("--force", "--overwrite", action="store_true", help="start over if OUT exists")
    add_option_arguments(parser, options)


def structure_arguments(args: argparse.Namespace, options: type) -> dict[str, Any]:
    """Keyword arguments of `api.md` and `api.relax`."""
    return {
        "which": args.which,
        "head": args.head,
        "device": device_name(args.device),
        "overwrite": args.force,
        "notify": lambda text: print(text, flush=True),
        "trust_code": args.trust_code,
        **options_set(args, options),
    }
