"""Search for good settings: train with many values of some keys of a config, end hopeless trainings early, keep the best.

What is varied is said in the section `tune` of the config, or with --space. The same command again goes on where the search
was; started on several machines with the same tune.storage, they search together. Needs Optuna.
"""

from __future__ import annotations

import argparse

from forgefield.cli.arguments import add_trust, split_config
from forgefield.cli.importing import for_good
from forgefield.errors import ForgefieldError

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
        "--space", metavar="KEY=SPEC", action="append", default=[], help="a key to vary (beside tune.space)"
    )
    parser.add_argument("--trials", type=int, metavar="N", help="trainings in all (default: tune.trials)")
    parser.add_argument("--workers", type=int, metavar="N", default=1, help="processes on this machine (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="start over; the old search of that name is moved aside")
    add_trust(parser)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    config, overrides = split_config(args.words)
    if config is None:
        raise ForgefieldError("forgefield tune needs a config file.")
    if args.workers < 1:
        raise ForgefieldError(f"--workers {args.workers}: one at least is needed.")
    with for_good():
        from forgefield import api

    _, code = api.tune_with_outcome(
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
