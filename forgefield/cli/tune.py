"""Search for good settings: train with different values of some settings, and end unpromising trainings early.

The settings to vary are in the section `tune` of the config, or given with --space. Run the same command again to resume the
search; commands on several machines with the same tune.storage search together. Needs Optuna.
"""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import add_option, add_trust, split_config
from forgefield.cli.importing import for_good
from forgefield.errors import ForgefieldError
from forgefield.tuning.options import TuneOptions

EXAMPLES = """\
examples:
  forgefield tune my.yaml --trials 40 --space 'training.lr={log: [1e-5, 1e-2]}' --space 'model.hidden=[[100],[200,200]]'
  forgefield tune my.yaml --workers 4
  forgefield tune my.yaml tune.storage=postgresql://host/search
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument(
        "words", metavar="CONFIG | key=value", nargs="+", help="config file, and settings that override it"
    )
    parser.add_argument(
        "--space",
        metavar="KEY=SPEC",
        action="append",
        default=[],
        help="setting to vary, in addition to tune.space",
    )
    add_option(parser, "--trials", TuneOptions, "trials", metavar="N", default="tune.trials")
    parser.add_argument(
        "--workers", type=int, metavar="N", default=1, help="number of processes on this machine (default: 1)"
    )
    parser.add_argument("--fresh", action="store_true", help="start over; an existing search of that name is renamed")
    add_trust(parser)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    config, overrides = split_config(args.words)
    if config is None:
        raise ForgefieldError("forgefield tune needs a config file.")
    if args.workers < 1:
        raise ForgefieldError(f"--workers {args.workers}: at least one is needed.")
    with for_good():
        from forgefield.tuning.search import run_search

    _, code = run_search(
        config,
        overrides,
        space=args.space,
        trials=args.trials,
        workers=args.workers,
        fresh=args.fresh,
        worker=args.worker,
        trust_code=args.trust_code,
    )
    return code
