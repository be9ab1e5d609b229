"""Active learning: explore with molecular dynamics, select uncertain structures, label them, train, and repeat.

The loop ends when no explored structure is more uncertain than the threshold. Run the same command again to resume it, also
after kill -9; no label is computed twice.

A loop.yaml:

  config: train.yaml     # what forgefield train takes
  explore: {structures: starts.extxyz, temperatures: [300, 900], ps: 2, threshold: 0.1}
  select: {frames: 20}
  label: {calculator: ase.calculators.emt.EMT}
"""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import device_name, refuse_files
from forgefield.cli.importing import for_good
from forgefield.text import counted

EXAMPLES = """\
examples:
  forgefield learn loop.yaml
  forgefield learn loop.yaml iterations=20 explore.temperatures=[300,600]
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("loop", metavar="LOOP", help="YAML file with the options of the loop")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="options that override the file")
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: cuda if available)")


def run(args: argparse.Namespace) -> int:
    overrides = refuse_files(args.overrides)
    with for_good():
        from forgefield import api

    result = api.learn(
        args.loop, *overrides, device=device_name(args.device), notify=lambda text: print(text, flush=True)
    )
    print(f"model: {result.run.path} ({counted(result.labels, 'label')} computed)")
    print(f"page: {result.folder / 'learning.html'}")
    return 0
