"""What `forgefield data info` prints about snapshots: grid, columns, and facts about the calculation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ase.symbols import Symbols
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forgefield.data.inspection.show import info_table
from forgefield.ldos.data.info import SnapshotInfo, read_info
from forgefield.ldos.data.rows import require_file
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.snapshot_files import INFO_SUFFIX, INPUT, SUFFIXES, TARGETS, base_name, find_snapshots
from forgefield.text import counted


def is_snapshot_name(path: str) -> bool:
    """Whether a path or a pattern is named as files of snapshots are, such as Be_snapshot0.in.npy."""
    if path.endswith(INFO_SUFFIX):
        return True
    return Path(path).suffix in SUFFIXES and base_name(Path(path)) != Path(path).stem


def print_snapshots(paths: Sequence[str], console: Console) -> None:
    """Print the contents of snapshots. paths: of any of their files."""
    table = info_table()
    names = {Path(path).with_name(base_name(Path(path))): path for path in reversed(paths)}
    for path in names.values():
        if path.endswith(INFO_SUFFIX):
            path = _with_values(Path(path)) or path
        if path.endswith(INFO_SUFFIX):  # nothing else of this snapshot is there
            require_file(Path(path))
            _add_facts(table, read_info(Path(path)))
            continue
        targets = (target for target, endings in TARGETS.items() if Path(path).stem.endswith(endings[0]))
        for snapshot in find_snapshots(path, target=next(targets, "ldos"), need=(), setting="data info"):
            _add_snapshot(table, snapshot)
    console.print(table)
    console.print("\nforgefield train learns from snapshots with a section data.points")


def _with_values(info: Path) -> str | None:
    """A file of values that belongs to an .info.json, its descriptors first."""
    endings = (INPUT, *(ending for target in TARGETS.values() for ending in target))
    files = (info.with_name(f"{base_name(info)}{ending}{suffix}") for ending in endings for suffix in SUFFIXES)
    return next((str(file) for file in files if file.is_file()), None)


def _add_snapshot(table: Table, snapshot: Snapshot) -> None:
    shape = snapshot.grid_shape
    grid = "no grid" if shape is None else " x ".join(map(str, shape))
    table.add_row("snapshot", escape(f"{snapshot.name}: {grid}, {snapshot.n_points} points"))
    if snapshot.inputs is not None:
        cut = f", after {snapshot.cut} of coordinates" if snapshot.cut else ""
        table.add_row("inputs", escape(f"{counted(snapshot.n_inputs, 'column')}{cut}, in {snapshot.inputs.path}"))
    if snapshot.targets is not None:
        columns = counted(snapshot.n_targets, "column")
        table.add_row("targets", escape(f"{columns}, {snapshot.target}, in {snapshot.targets.path}"))
    _add_facts(table, snapshot.info)


def _add_facts(table: Table, info: SnapshotInfo) -> None:
    facts = {
        "grid": None if info.grid_shape is None else " x ".join(map(str, info.grid_shape)),
        "atoms": None if info.numbers is None else Symbols(info.numbers).get_chemical_formula(),
        "electrons": None if info.electrons is None else f"{info.electrons:g}",
        "temperature": None if info.temperature is None else f"{info.temperature:g} K",
        "Fermi energy": None if info.fermi_energy is None else f"{info.fermi_energy:.4f} eV",
        **{f"{name} energy": f"{value:.4f} eV" for name, value in info.energies.items() if name in ("total", "band")},
    }
    for name, fact in facts.items():
        if fact is not None:
            table.add_row(name, escape(fact))
