"""`forgefield data`: look at structure files before training on them.

forgefield data info train.xyz
forgefield data info 'rmd17/*.npz' --energy-unit kcal/mol --cutoff 6
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from forgefield.data.inspect import Inspection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="VERB")
    info = verbs.add_parser("info", help="what is in structure files, in which ranges, and what looks wrong")
    info.add_argument("paths", nargs="+", metavar="PATH", help="file, folder or glob")
    info.add_argument("--cutoff", type=float, default=5.0, help="radius for neighbours and the closest pair, A (5)")
    for name, default in (("energy", "eV"), ("length", "A"), ("forces", None), ("stress", None)):
        shown = default or ("energy/length" if name == "forces" else "energy/length^3")
        info.add_argument(
            f"--{name}-unit", default=default, metavar="UNIT", help=f"unit of {name} in the files ({shown})"
        )
    for name in ("energy", "forces", "stress", "virial"):
        info.add_argument(f"--{name}-key", metavar="KEY", help=f"name of the {name} in the files, or none")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from forgefield.config.schema import LabelOptions, UnitOptions
    from forgefield.data.inspect import inspect_frames
    from forgefield.data.readers import read_frames

    labels = LabelOptions(
        energy=args.energy_key, forces=args.forces_key, stress=args.stress_key, virial=args.virial_key
    )
    units = UnitOptions(
        energy=args.energy_unit, length=args.length_unit, forces=args.forces_unit, stress=args.stress_unit
    )
    frames = read_frames(args.paths if len(args.paths) > 1 else args.paths[0], labels, units)
    print_inspection(inspect_frames(frames, args.cutoff), Console())
    return 0


def print_inspection(found: Inspection, console: Console) -> None:
    """The inspection as a table, then what looks wrong."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    files = "1 file" if found.n_files == 1 else f"{found.n_files} files"
    low, high, total = found.atoms
    table.add_row("frames", f"{found.n_frames} in {files}")
    table.add_row("atoms per frame", f"{low} to {high}, {total} in all" if low != high else f"{low}, {total} in all")
    for symbol, (atoms, holders) in found.species.items():
        table.add_row("species", f"{symbol}: {atoms} atoms in {holders} frames")
    for axes, count in found.periodicity.items():
        table.add_row("periodic", f"{axes}: {count} frames")
    for label in found.labels:
        span = f"{label.low:.6g} to {label.high:.6g} {label.unit}"
        table.add_row(label.name, f"{span}, {label.frames} of {found.n_frames} frames")
    if not found.labels:
        table.add_row("labels", "none found")
    fewest, mean, most = found.neighbours
    table.add_row("neighbours", f"{fewest} to {most}, {mean:.1f} on average within {found.cutoff:g} A")
    if found.closest is not None:
        distance, place = found.closest
        table.add_row("closest pair", f"{distance:.3f} A ({escape(place)})")
    console.print(table)
    if found.remarks:
        console.print("\n[bold yellow]worth a look[/]")
        for remark in found.remarks:
            console.print(f"  {escape(remark)}", highlight=False)
    else:
        console.print("\nnothing suspicious")
