"""Test the physics of a trained model: crystals, molecules or liquids, next to a reference if there is one.

Each evaluation gives numbers with units and figures, on a page and as JSON in the folder evaluation of the run. Run the same
command again to resume; finished evaluations are not repeated.
"""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import add_option_arguments, add_run_arguments, device_name, options_set
from forgefield.cli.importing import for_good
from forgefield.trust.suites.measurement import EvaluationOptions

EXAMPLES = """\
examples:
  forgefield evaluate runs/copper --suite crystal --reference ase.calculators.emt.EMT
  forgefield evaluate runs/ethanol --suite molecule --structures ethanol.xyz --ps 20
  forgefield evaluate runs/water --suite liquid --structures water.extxyz --temperature 330 --ps 50
  forgefield evaluate runs/water --suite liquid --structures water.extxyz --reference aimd.extxyz
  forgefield evaluate runs/copper --only eos phonons --reference runs/larger
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    parser.add_argument(
        "--suite",
        choices=("crystal", "molecule", "liquid"),
        help="default: crystal for periodic structures, else molecule",
    )
    parser.add_argument(
        "--structures",
        metavar="FILE",
        help="structures to evaluate (default: crystals of the elements, or the first frame of the training data)",
    )
    parser.add_argument(
        "--reference",
        metavar="REFERENCE",
        help="import path of an ASE calculator, a run, a file with labelled frames, or a JSON file: an evaluation.json or a "
        "mapping of names to numbers",
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="evaluations to do: eos, phonons, ...")
    parser.add_argument("-o", "--out", metavar="FOLDER", help="folder of the results (default: evaluation in the run)")
    add_option_arguments(parser, EvaluationOptions)


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield import api

    report = api.evaluate(
        args.run,
        suite=args.suite,
        structures=args.structures,
        reference=args.reference,
        only=args.only,
        out=args.out,
        which=args.which,
        head=args.head,
        device=device_name(args.device),
        notify=lambda text: print(text, flush=True),
        trust_code=args.trust_code,
        **options_set(args, EvaluationOptions),
    )
    print(f"page: {report.page}")
    if report.failed:
        print(f"{len(report.failed)} of {len(report.results)} evaluations failed")
    return 1 if report.failed else 0
