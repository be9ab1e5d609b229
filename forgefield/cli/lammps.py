"""Run a LAMMPS input file with `pair_style forgefield`, in one process or, after mpirun, in several.

In the input file:

  units metal
  pair_style forgefield RUN               # keywords: which, device, dtype, head, uncertainty, trust_code
  pair_coeff * * Cu Au                    # chemical symbol of each atom type, or its name in the model

All arguments with one dash are those of lmp; -in is required. The plugin for LAMMPS is compiled on first use, which takes some
seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

EXAMPLES = """\
examples:
  forgefield lammps -in in.water
  mpirun -n 4 forgefield lammps -in in.water -log water.log
  forgefield lammps --mpirun              path of the mpirun that belongs to this LAMMPS
  forgefield lammps --plugin              path of the plugin, for `plugin load` in an input file of lmp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("-in", "-i", metavar="FILE", help="input file")
    parser.add_argument("-log", metavar="FILE", help="log file (default: log.lammps)")
    parser.add_argument("-screen", metavar="FILE", help="none, or a file for what would be printed")
    parser.add_argument("-var", metavar="WORD", nargs="+", help="name and values of a variable of the input file")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--plugin", action="store_true", help="compile the plugin if necessary and print its path")
    group.add_argument("--mpirun", action="store_true", help="print the path of the mpirun that belongs to this LAMMPS")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Words other than this verb's options, which have two dashes, are passed to LAMMPS, which has more than those above."""
    mine = [word for word in words if word in ("--plugin", "--mpirun", "--help", "-h")]
    args = parser.parse_args(mine)
    args.arguments = [word for word in words if word not in mine]
    return args


def run(args: argparse.Namespace) -> int:
    from forgefield.inference.lammps.build import find_lammps, plugin_path

    if args.plugin:
        print(plugin_path(find_lammps()))
        return 0
    if args.mpirun:
        print(find_lammps().mpirun)
        return 0
    from forgefield.inference.lammps.session import run_input

    return run_input(args.arguments)
