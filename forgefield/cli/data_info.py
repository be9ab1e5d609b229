"""Show the contents of files or stores, the ranges of values, and what looks wrong.

A store is verified with its hashes first. For snapshots (values on a grid), show the grid, the columns and what is known about
the calculation.

examples:
  forgefield data info train.xyz --figure train.png
  forgefield data info 'rmd17/*.npz' --energy-unit kcal/mol --cutoff 6
  forgefield data info water --no-verify
  forgefield data info Be_snapshot0.in.npy
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forgefield.cli.data_arguments import add_reading, counted, progress_bar, reading_of, size_text, spec_of
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from forgefield.data.inspection.inspect import Inspection
    from forgefield.data.store.store import Store
    from forgefield.ldos.data.snapshot import Snapshot

SUMMARY = "show the contents of files or stores, the ranges of values, and what looks wrong"
SHOWN = 10
"""How many sources are listed."""
NAMED = 20
"""How many names of other values are shown."""
WIDE = 200
"""Columns where nobody says how many there are: in a pipe or a file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="file, folder, glob or store")
    parser.add_argument(
        "--cutoff", type=float, default=5.0, help="radius for neighbours and the closest pair, A (default: 5)"
    )
    parser.add_argument("--figure", metavar="FILE", help="also write histograms (.png, .svg or .pdf)")
    parser.add_argument("--no-verify", action="store_true", help="do not verify large stores with their hashes")
    add_reading(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from forgefield.data.inspection.inspect import inspect_table
    from forgefield.data.labels.label_reader import LabelReader
    from forgefield.data.neighbours.graph import check_cutoff
    from forgefield.data.reading import read_table

    if all(map(_is_snapshot, args.paths)):
        return _show_snapshots(args)
    check_cutoff(args.cutoff, "--cutoff")
    if args.figure is not None:
        _check_figure(Path(args.figure))
    labels, units = reading_of(args)
    stores = _stores(args)
    reader = LabelReader(labels, units)
    table = read_table(spec_of(args.paths), labels, units, reader=reader)
    with progress_bar("looking", speed=False) as report:
        found = inspect_table(table, args.cutoff, report)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
    print_inspection(
        found, console, stores, verified=not args.no_verify, others=reader.other_names(), hints=reader.hints()
    )
    if args.figure is not None:
        from forgefield.report.figures import histogram_figure

        print(f"\nwrote {histogram_figure(table, Path(args.figure), survey=found.survey)}")
    return 0


# ---- snapshots


def _is_snapshot(path: str) -> bool:
    """By its name, such as Be_snapshot0.in.npy; also of a pattern."""
    from forgefield.ldos.data.snapshot_files import SUFFIXES, base_name

    return Path(path).suffix in SUFFIXES and base_name(Path(path)) != Path(path).stem


def _show_snapshots(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from forgefield.ldos.data.snapshot_files import TARGETS, base_name, find_snapshots

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, default in vars(parser.parse_args(args.paths)).items():
        if getattr(args, name) != default:
            raise ForgefieldError(f"--{name.replace('_', '-')} is about frames; {args.paths[0]} is of a snapshot")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for path in {Path(path).with_name(base_name(Path(path))): path for path in reversed(args.paths)}.values():
        own = (target for target, middles in TARGETS.items() if Path(path).stem.endswith(middles[0]))
        for snapshot in find_snapshots(path, target=next(own, "ldos"), need=(), setting="data info"):
            _add_snapshot(table, snapshot)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
    console.print(table)
    console.print("\nforgefield train learns from snapshots with a section data.points")
    return 0


def _add_snapshot(table: Table, snapshot: Snapshot) -> None:
    from ase.symbols import Symbols
    from rich.markup import escape

    info, shape = snapshot.info, snapshot.grid_shape
    grid = "no grid" if shape is None else " x ".join(map(str, shape))
    table.add_row("snapshot", escape(f"{snapshot.name}: {grid}, {snapshot.n_points} points"))
    if snapshot.inputs is not None:
        cut = f", after {snapshot.cut} of coordinates" if snapshot.cut else ""
        table.add_row("inputs", escape(f"{counted(snapshot.n_inputs, 'column')}{cut}, in {snapshot.inputs.path}"))
    if snapshot.targets is not None:
        columns = counted(snapshot.n_targets, "column")
        table.add_row("targets", escape(f"{columns}, {snapshot.target}, in {snapshot.targets.path}"))
    facts = {
        "atoms": None if info.numbers is None else Symbols(info.numbers).get_chemical_formula(),
        "electrons": None if info.electrons is None else f"{info.electrons:g}",
        "temperature": None if info.temperature is None else f"{info.temperature:g} K",
        "Fermi energy": None if info.fermi_energy is None else f"{info.fermi_energy:.4f} eV",
        **{f"{name} energy": f"{value:.4f} eV" for name, value in info.energies.items() if name in ("total", "band")},
    }
    for name, fact in facts.items():
        if fact is not None:
            table.add_row(name, escape(fact))


def _check_figure(path: Path) -> None:
    from forgefield.report.figures import check_figure_name

    check_figure_name(path)
    if path.exists():
        raise ForgefieldError(f"{path} exists already; delete it or choose another name")
    if not path.absolute().parent.is_dir():
        raise ForgefieldError(f"{path}: the folder {path.parent} does not exist")


def _stores(args: argparse.Namespace) -> list[Store]:
    """The stores among the sources, compared with their hashes."""
    from forgefield.data.readers import source_files
    from forgefield.data.store.store import is_store, open_store

    stores = [open_store(file.path) for file in source_files(spec_of(args.paths)) if is_store(file.path)]
    for store in stores:
        if not args.no_verify:
            with progress_bar(f"comparing {store.path} with its hashes", "parts", speed=False) as report:
                store.verify(report)
    return stores


def print_inspection(
    found: Inspection,
    console: Console,
    stores: list[Store],
    *,
    verified: bool,
    others: list[str],
    hints: Mapping[str, str],
) -> None:
    """The inspection as a table, then what looks wrong.

    others: names of values in the files that are no label. hints: for labels, a sentence on which of these may be them.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for store in stores:
        table.add_row("store", escape(_store_text(store, verified)))
    low, high, total = found.atoms
    table.add_row("frames", f"{found.n_frames} in {counted(found.n_files, 'file')}")
    table.add_row("atoms per frame", f"{low} to {high}, {total} in all" if low != high else f"{low}, {total} in all")
    for symbol, (atoms, holders) in found.species.items():
        table.add_row("species", f"{symbol}: {counted(atoms, 'atom')} in {counted(holders, 'frame')}")
    for axes, count in found.periodicity.items():
        table.add_row("periodic", f"{axes}: {counted(count, 'frame')}")
    for label in found.labels:
        span = f"{label.low:.6g} to {label.high:.6g} {label.unit}".rstrip()
        table.add_row(label.name, f"{span}, {label.frames} of {found.n_frames} frames")
    if not found.labels:
        table.add_row("labels", "none found")
    for name, hint in hints.items():
        if name not in [label.name for label in found.labels]:
            table.add_row(name, escape(f"not found; {hint} (--{name}-key)"))
    if others:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        table.add_row("other values", escape(", ".join(others[:NAMED])) + more)
    _add_surroundings(table, found)
    _add_sources(table, found)
    console.print(table)
    for limit in found.limits:
        console.print(f"  {escape(limit)}")
    if found.remarks:
        console.print("\n[bold yellow]worth a look[/]")
        for remark in found.remarks:
            console.print(f"  {escape(remark)}")
    else:
        console.print("\nnothing suspicious")


def _store_text(store: Store, verified: bool) -> str:
    graph = store.graph
    lists = "no neighbour lists"
    if graph is not None:
        lists = f"neighbour lists of {graph.cutoff:g} A"
        lists += "" if graph.adaptive_cutoff is None else f", growing to {graph.adaptive_cutoff:g} A"
        lists += "" if graph.max_neighbours is None else f", {graph.max_neighbours} nearest only"
    compared = "matches its hashes" if verified else "not compared with its hashes"
    about = f"{size_text(store.n_bytes)} in {counted(len(store.manifest['parts']), 'part')}, {lists}, {compared}"
    return f"{store.path}: {about}; content {store.manifest['hash']}"


def _add_surroundings(table: Table, found: Inspection) -> None:
    from rich.markup import escape

    fewest, mean, most = found.survey.neighbours
    table.add_row("neighbours", f"{fewest} to {most}, {mean:.1f} on average within {found.survey.cutoff:g} A")
    if found.survey.closest is not None:
        distance, place = found.survey.closest
        table.add_row("closest pair", f"{distance:.3f} A ({escape(place)})")


def _add_sources(table: Table, found: Inspection) -> None:
    """Where the frames are from, if not all from one file."""
    from rich.markup import escape

    if len(found.systems) < 2:
        return
    for name, count in found.systems[:SHOWN]:
        table.add_row("source", f"{escape(name)}: {counted(count, 'frame')}")
    if len(found.systems) > SHOWN:
        rest = found.systems[SHOWN:]
        frames = counted(sum(count for _, count in rest), "frame")
        table.add_row("source", f"and {len(rest)} more with {frames}")
