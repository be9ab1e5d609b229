"""List the runs in a folder with their state, errors, time and speed, as the live page does."""

from __future__ import annotations

import argparse

from forgefield.cli.importing import for_good

EXAMPLES = """\
examples:
  forgefield runs
  forgefield runs my-search/trials --sort forces_mae --first 10
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="runs", help="a folder of runs (default: runs)")
    parser.add_argument(
        "--errors", choices=("mae", "rmse"), default="mae", help="mean absolute or root mean square errors"
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        default="started",
        help="column: run, started, loss, seconds, ..., or an error: forces_mae",
    )
    parser.add_argument("--reverse", action="store_true", help="sort in descending order")
    parser.add_argument("--first", metavar="N", type=int, default=None, help="print the first N rows only")


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield import api

    print(api.list_runs(args.folder, errors=args.errors, sort=args.sort, descending=args.reverse, first=args.first))
    return 0
