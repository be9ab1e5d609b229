"""Show the contents of files or stores, the ranges of values, and what looks wrong.

A store is verified with its hashes first. For snapshots (values on a grid), show the grid, the columns and facts about the
calculation.

examples:
  forgefield data info train.xyz --figure train.png
  forgefield data info 'rmd17/*.npz' --energy-unit kcal/mol --cutoff 6
  forgefield data info water --no-verify
  forgefield data info Be_snapshot0.in.npy
"""

from __future__ import annotations

import argparse
from pathlib import Path

from forgefield.cli.arguments import add_option, selected
from forgefield.cli.data_arguments import add_reading, progress_bar, reading_options, source_of
from forgefield.data.options import DataOptions
from forgefield.errors import ForgefieldError

SUMMARY = "show the contents of files or stores, the ranges of values, and what looks wrong"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="file, folder, glob or store")
    add_option(parser, "--cutoff", DataOptions, "cutoff")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="also write histograms (.png, .svg or .pdf)")
    parser.add_argument("--no-verify", action="store_true", help="do not verify large stores with their hashes")
    add_reading(parser)


def run(args: argparse.Namespace) -> int:
    from forgefield.data.inspection.show import info_console, inspect_data, print_inspection
    from forgefield.ldos.data.show import is_snapshot_name, print_snapshots

    if all(map(is_snapshot_name, args.paths)):
        _refuse_options(args)
        print_snapshots(args.paths, info_console())
        return 0
    if args.figure is not None:
        _check_figure(args.figure)
    labels, units = reading_options(args)
    inspected = inspect_data(
        source_of(args.paths),
        labels=labels,
        units=units,
        verify=not args.no_verify,
        progress_bar=lambda title: progress_bar(title, speed=False),
        **selected(args, "cutoff"),
    )
    print_inspection(inspected, info_console())
    if args.figure is not None:
        from forgefield.report.figures import histogram_figure

        print(f"\nwrote {histogram_figure(inspected.table, args.figure, survey=inspected.inspection.survey)}")
    return 0


def _refuse_options(args: argparse.Namespace) -> None:
    """Refuse options for frames."""
    for name, value in vars(args).items():
        if value and name not in ("paths", "data_verb", "settings"):
            raise ForgefieldError(f"--{name.replace('_', '-')} applies to frames; {args.paths[0]} is a snapshot")


def _check_figure(path: Path) -> None:
    from forgefield.report.figures import check_figure_name

    check_figure_name(path)
    if path.exists():
        raise ForgefieldError(f"{path} exists already; delete it or choose another name")
    if not path.absolute().parent.is_dir():
        raise ForgefieldError(f"{path}: the folder {path.parent} does not exist")
