"""Compare runs: their errors side by side, and the settings in which they differ."""

from __future__ import annotations

import argparse

from forgefield.cli.importing import for_good


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example:\n  forgefield compare water-small water-large\n"
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="name of a run in the folder runs/, its path, or a packaged model (.ff)"
    )


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield.report.live.verbs import compare

    print(compare(*args.runs))
    return 0
