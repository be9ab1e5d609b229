"""Write the structures of a file with the energies, forces and stress that a trained model predicts for them."""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import READING, add_overrides, add_run_arguments, device_name, refuse_files

EXAMPLES = """\
examples:
  forgefield predict runs/water new.extxyz -o out.extxyz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    parser.add_argument("source", metavar="FILE", help="file, folder or pattern with structures; labels are not needed")
    parser.add_argument("-o", "--out", metavar="OUT", required=True, help="file to write (.extxyz, .traj, .db)")
    add_overrides(parser, READING)


def run(args: argparse.Namespace) -> int:
    overrides = refuse_files(args.overrides)
    from forgefield import api
    from forgefield.config.loading import override_config, override_keys
    from forgefield.runs import Run

    opened = Run.open(args.run)
    options = override_config(opened.config, overrides, allowed=READING, verb="predict").data if overrides else None
    device = device_name(args.device)
    written = api.predict(
        opened,
        args.source,
        args.out,
        options=options,
        which=args.which,
        head=args.head,
        device=device,
        labels_required=any(key.startswith("data.labels") for key in override_keys(overrides)),
    )
    print(f"wrote {written}")
    return 0
