"""List the runs in a folder with their state, errors, time and speed, as the live page does."""

from __future__ import annotations

import argparse
import shutil
import sys

from forgefield.cli.importing import for_good

EXAMPLES = """\
examples:
  forgefield runs
  forgefield runs my-search/trials --sort forces_mae --first 10
"""
ALWAYS = ("run", "state", "epoch", "loss", "seconds", "seconds_left")
"""Columns that are shown in a terminal of any width."""


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
        from forgefield.report.live.verbs import list_runs

    table = list_runs(args.folder, errors=args.errors, sort=args.sort, descending=args.reverse, first=args.first)
    dropped: list[str] = []
    if sys.stdout.isatty():
        table, dropped = table.fitting(shutil.get_terminal_size().columns, ALWAYS)
    print(table)
    if dropped:
        print(f"\nToo wide for this terminal: {'; '.join(dropped)}. `forgefield runs | less -S` shows all columns.")
    return 0
