"""Compute the uncertainties of a trained model: one pass over its training data, calibrated on its validation frames.

The result is stored in the run. `forgefield predict --uncertainty`, calculators and `forgefield test` use it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from forgefield.cli.arguments import add_trust, device_name

EXAMPLES = """\
examples:
  forgefield uncertainty runs/water
  forgefield predict runs/water new.extxyz -o out.extxyz --uncertainty energy
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="name of a run in the folder runs/, or its path")
    parser.add_argument(
        "--directions",
        type=int,
        metavar="N",
        help="directions along which features of each training frame are differentiated; 0: all coordinates, exactly "
        "(default: 1 to 10 random ones)",
    )
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ... (default: cuda if available)")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    from forgefield import api
    from forgefield.inference.uncertainty import load_uncertainty
    from forgefield.runs import SCALES, Run
    from forgefield.trust.uncertainty import heads_of

    opened = Run.open(args.run, trust_code=args.trust_code)
    path = api.uncertainty(opened, device=device_name(args.device), directions=args.directions)
    if opened.members:
        scales = opened.info[SCALES]
        factors = ", ".join(f"{factor:.4g} ({name})" for name, factor in scales.items())
        print(f"deviations of {len(opened.members)} members are multiplied by {factors}")
        print(f"wrote {path}")
        return 0
    for head in heads_of(opened):
        about = load_uncertainty(opened, head=head).about
        _print(about, "" if head is None else f"branch {head}: ")
        print(f"wrote {opened.uncertainty_path(head)}")
    return 0


def _print(about: Mapping[str, Any], prefix: str) -> None:
    print(
        f"{prefix}trained on {about['training_energies']} energies and {about['training_forces']} force components, "
        f"calibrated on {about['validation_energies']} energies and {about['validation_forces']} force components"
    )
