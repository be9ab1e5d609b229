"""Rewrite `report.html` of a run, a self-contained page."""

from __future__ import annotations

import argparse

from forgefield.cli.importing import for_good


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example:\n  forgefield report runs/water\n"
    parser.add_argument(
        "run", metavar="RUN", help="name of a run in the folder runs/, its path, or a packaged model (.ff)"
    )


def run(args: argparse.Namespace) -> int:
    with for_good():
        from forgefield import api

    print(f"wrote {api.report(args.run)}")
    return 0
