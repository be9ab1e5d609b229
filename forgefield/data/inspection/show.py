"""What `forgefield data info` prints about frames: an inspection of files and stores as a table, then what looks wrong."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forgefield.data.inspection.inspect import Inspection, inspect_table
from forgefield.data.inspection.survey import Progress
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.neighbours.graph import check_cutoff
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import source_files
from forgefield.data.reading import read_table
from forgefield.data.store.store import Store, is_store, open_store
from forgefield.data.store.table import FrameTable
from forgefield.text import counted, size_text

SHOWN = 10
"""Number of sources that are listed."""
NAMED = 20
"""Number of names of other values that are listed."""
WIDE = 200
"""Columns of the output if it is not a terminal."""


@dataclass(frozen=True)
class SourceInspection:
    """Contents of files and stores."""

    table: FrameTable
    inspection: Inspection
    stores: list[Store]
    """The stores among the sources."""
    verified: bool
    """Whether the stores were compared with their hashes."""
    other_names: list[str]
    """Names of values in the files that are not labels."""
    hints: Mapping[str, str]
    """By label: which of these values may be the label, as a sentence."""

    def __repr__(self) -> str:
        text = io.StringIO()
        print_inspection(self, Console(file=text, width=WIDE, highlight=False, no_color=True, force_jupyter=False))
        return text.getvalue().rstrip()


def inspect_data(
    source: object,
    *,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    cutoff: float = 5.0,
    verify: bool = True,
    progress_bar: Callable[[str], AbstractContextManager[Progress | None]] = lambda title: nullcontext(None),
) -> SourceInspection:
    """Inspect files, folders, globs or stores: contents, ranges of labels, and what looks wrong.

    Parameters
    ----------
    source
        A path, or a list of them.
    labels, units
        Names of the labels in the source, and its units; default: the usual names, eV and A.
    cutoff
        Radius for neighbours and the closest pair, A.
    verify
        Whether to compare stores with their hashes.
    progress_bar
        Opens a progress bar with this title.
    """
    check_cutoff(cutoff, "cutoff")
    stores = [open_store(file.path) for file in source_files(source) if is_store(file.path)]
    for store in stores if verify else ():
        with progress_bar(f"comparing {store.path} with its hashes") as progress:
            store.verify(progress)
    reader = LabelReader(labels or LabelOptions(), units or UnitOptions())
    table = read_table(source, labels, units, reader=reader)
    with progress_bar("inspecting") as progress:
        inspection = inspect_table(table, cutoff, progress)
    return SourceInspection(table, inspection, stores, verify, reader.other_names(), reader.hints())


def info_console() -> Console:
    """A console for tables; in a pipe or a file, lines are wide."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)


def info_table() -> Table:
    """A table of two columns: names and values."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def print_inspection(inspected: SourceInspection, console: Console) -> None:
    """Print an inspection as a table, then what looks wrong."""
    inspection, table = inspected.inspection, info_table()
    for store in inspected.stores:
        table.add_row("store", escape(_store_text(store, inspected.verified)))
    _add_contents(table, inspection)
    for name, hint in inspected.hints.items():
        if name not in [label.name for label in inspection.labels]:
            table.add_row(name, escape(f"not found; {hint} (--{name}-key)"))
    if others := inspected.other_names:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        table.add_row("other values", escape(", ".join(others[:NAMED])) + more)
    _add_distances(table, inspection)
    _add_sources(table, inspection)
    console.print(table)
    for limit in inspection.limits:
        console.print(f"  {escape(limit)}")
    if inspection.remarks:
        console.print("\n[bold yellow]worth a look[/]")
        for remark in inspection.remarks:
            console.print(f"  {escape(remark)}")
    else:
        console.print("\nnothing suspicious")


def _add_contents(table: Table, inspection: Inspection) -> None:
    """Frames, atoms, species, periodicity and labels."""
    low, high, total = inspection.atoms
    table.add_row("frames", f"{inspection.n_frames} in {counted(inspection.n_files, 'file')}")
    table.add_row("atoms per frame", f"{low} to {high}, {total} in all" if low != high else f"{low}, {total} in all")
    for symbol, (atoms, frames) in inspection.species.items():
        table.add_row("species", f"{symbol}: {counted(atoms, 'atom')} in {counted(frames, 'frame')}")
    for axes, count in inspection.periodicity.items():
        table.add_row("periodic", f"{axes}: {counted(count, 'frame')}")
    for label in inspection.labels:
        span = f"{label.low:.6g} to {label.high:.6g} {label.unit}".rstrip()
        table.add_row(label.name, f"{span}, {label.frames} of {inspection.n_frames} frames")
    if not inspection.labels:
        table.add_row("labels", "none found")


def _store_text(store: Store, verified: bool) -> str:
    graph, lists = store.graph, "no neighbour lists"
    if graph is not None:
        lists = f"neighbour lists of {graph.cutoff:g} A"
        lists += "" if graph.adaptive_cutoff is None else f", growing to {graph.adaptive_cutoff:g} A"
        lists += "" if graph.max_neighbours is None else f", {graph.max_neighbours} nearest only"
    compared = "matches its hashes" if verified else "not compared with its hashes"
    about = f"{size_text(store.n_bytes)} in {counted(len(store.manifest['parts']), 'part')}, {lists}, {compared}"
    return f"{store.path}: {about}; content {store.manifest['hash']}"


def _add_distances(table: Table, inspection: Inspection) -> None:
    fewest, mean, most = inspection.survey.neighbours
    table.add_row("neighbours", f"{fewest} to {most}, {mean:.1f} on average within {inspection.survey.cutoff:g} A")
    largest = ", ".join(f"{number} {symbol}" for symbol, number in inspection.survey.most_by_element.items())
    table.add_row("most neighbours", f"{largest} around one atom")
    if inspection.survey.closest is not None:
        distance, frame = inspection.survey.closest
        table.add_row("closest pair", f"{distance:.3f} A ({escape(frame)})")


def _add_sources(table: Table, inspection: Inspection) -> None:
    """The sources of the frames, if there are several."""
    systems = inspection.systems
    for name, count in systems[:SHOWN] if len(systems) > 1 else ():
        table.add_row("source", f"{escape(name)}: {counted(count, 'frame')}")
    if len(systems) > SHOWN:
        others = systems[SHOWN:]
        frames = counted(sum(count for _, count in others), "frame")
        table.add_row("source", f"and {len(others)} more with {frames}")
