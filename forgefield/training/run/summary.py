"""Panels and tables that a training prints before its first and after its last step.

Rows are pairs of a name and a value, both text. Text from files of the user is never interpreted as markup of rich.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import nn

from forgefield._version import __version__
from forgefield.data.paths import title as set_title
from forgefield.tasks.calibration import METRICS as CALIBRATION
from forgefield.tasks.plausibility import ADVICE, implausible_errors
from forgefield.tasks.units import UNITS

Rows = list[tuple[str, str]]
SIDE_BY_SIDE = 3
"""Maximum number of splits with columns of their own in a table."""
_FRAME = 4
"""Width of the border and padding of a panel, in characters."""
SPLIT_TITLES = {"train": "training", "val": "validation", "test": "test"}


def print_summary(console: Console, sections: dict[str, Sequence[tuple[str, str]]]) -> None:
    """Print a panel with the rows of each section; sections without rows are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    shown = [(title, rows) for title, rows in sections.items() if rows]
    width = max((len(str(name)) for _, rows in shown for name, _ in rows), default=0)
    for number, (title, rows) in enumerate(shown):
        if number:
            grid.add_row()
        grid.add_row(Text(title, style="bold cyan"))
        for name, value in rows:
            grid.add_row(Text(f"  {name}".ljust(width + 2), style="dim"), Text(str(value)))
    console.print(_panel(grid, "Forgefield"))


def model_rows(potential: nn.Module) -> Rows:
    """Number of parameters, in total and of submodules, number of trained ones, and their type."""
    parameters = list(potential.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    rows = [("parameters", f"{total:,}" if trainable == total else f"{total:,}, {trainable:,} of them trained")]
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in _children(potential)}
    sizes["others"] = total - sum(sizes.values())
    rows += [(f"  {name}", f"{size:,}") for name, size in sizes.items() if size]
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    rows.append(("type of weights", ", ".join(kinds) or "no weights"))
    return rows


def package_versions() -> str:
    return ", ".join(f"{name} {_version(name)}" for name in ("forgefield", "torch", "lightning"))


def device_name(device: torch.device) -> str:
    """The name of a GPU or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), "") or platform.processor() or platform.machine()


def hardware(device: torch.device, world_size: int) -> dict[str, Any]:
    """The hardware of a training: processor, GPU, numbers of processes and threads, and the CUDA version."""
    values: dict[str, Any] = {"cpu": device_name(torch.device("cpu"))}
    if device.type != "cpu":
        values[device.type] = device_name(device)
    if device.type == "cuda":
        values["cuda_version"] = torch.version.cuda
    return values | {"processes": world_size, "threads": torch.get_num_threads()}


def now() -> str:
    """Date and time with the time zone, in ISO format."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def end_summary(
    console: Console,
    run_path: Path,
    results: dict[str, Any],
    hints: Iterable[str],
    *,
    units: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    statistics: Mapping[str, Any] | None = None,
    note: str | None = None,
) -> None:
    """Print errors in physical units and how to use the model.

    results: errors by split, {"test": {"forces_mae": 41.0, ...}, "val": {...}}; or those of the test only.
    hints: lines to copy, commands or Python.
    units: of additional quantities.
    names: of species, by symbol, if they are not the symbols.
    statistics: of the training data, for warnings about errors far above the spread of its labels.
    note: how the training ended.
    """
    by_split = results if any(isinstance(value, dict) for value in results.values()) else {"test": results}
    by_split = {split: _bare(split, errors) for split, errors in by_split.items() if errors}
    content: list[RenderableType] = []
    if by_split:
        if any(key.removesuffix("_mae") != key for errors in by_split.values() for key in errors):
            table = errors_table(by_split, units, names)
            if len(by_split) > 1 and console.measure(table).maximum > console.width - _FRAME:
                table = _long_errors_table(by_split, UNITS | dict(units or {}))
            content.append(table)
        if any(key.endswith("_accuracy") for errors in by_split.values() for key in errors):
            content.append(classes_table(by_split))
        if any(key.endswith("_nll") for errors in by_split.values() for key in errors):
            content.append(calibration_table(by_split))
    else:
        content.append(
            Text("No errors were measured: the model predicts no labels, or no validation and test frames have them.")
        )
    problems = {sentence for errors in by_split.values() for sentence in implausible_errors(errors, statistics or {})}
    if problems:
        content += [Text(f"WARNING: {sentence}", style="bold red") for sentence in sorted(problems)]
        content.append(Text(ADVICE, style="red"))
    if note:
        content.append(Text(note))
    content.append(Text.assemble(("run folder  ", "dim"), str(run_path)))
    console.print(_panel(Group(*content), "Result"))
    # Outside the panel and without wrapping, so that lines can be copied; at once, as one output of a notebook.
    if lines := "\n".join(f"  {hint}" for hint in hints):
        console.print(Text(lines), soft_wrap=True)


def errors_table(
    by_split: dict[str, dict[str, float]],
    units: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Table:
    """One row per quantity (and species), with MAE and RMSE of each split.

    units: of additional quantities. names: of species.
    """
    units = UNITS | dict(units or {})
    if len(by_split) > SIDE_BY_SIDE:
        return _long_errors_table(by_split, units)
    kinds = _error_kinds(by_split)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("error", no_wrap=True)
    for split in by_split:
        for kind in kinds:
            table.add_column(
                f"{SPLIT_TITLES.get(split, set_title(split))}\n{_KIND_TITLES[kind]}", justify="right", no_wrap=True
            )
    table.add_column("unit", style="dim", no_wrap=True)
    for quantity, species in _rows_of(by_split, units):
        suffix = f"/{species}" if species else ""
        values = [errors.get(f"{quantity}_{kind}{suffix}") for errors in by_split.values() for kind in kinds]
        name = (
            f"  {(names or {}).get(species, species)}"
            if species
            else quantity.replace("_", ", ")
            if quantity in UNITS
            else quantity
        )
        style = "dim" if species else "bold"
        cells = [Text(digits(value), style=style) for value in values]
        table.add_row(Text(name, style="dim" if species else ""), *cells, Text(units.get(quantity, "")))
    return table


def _long_errors_table(by_split: dict[str, dict[str, float]], units: Mapping[str, str]) -> Table:
    """One row per quantity and split, without species, for many splits."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for heading in ("error", "data"):
        table.add_column(heading, no_wrap=True)
    kinds = _error_kinds(by_split)
    for kind in kinds:
        table.add_column(_KIND_TITLES[kind], justify="right", no_wrap=True)
    table.add_column("unit", style="dim", no_wrap=True)
    for quantity in dict.fromkeys(quantity for quantity, species in _rows_of(by_split, units) if not species):
        name = quantity.replace("_", ", ") if quantity in UNITS else quantity
        for split, errors in by_split.items():
            values = [errors.get(f"{quantity}_{kind}") for kind in kinds]
            if any(value is not None for value in values):
                cells = [Text(digits(value), style="bold") for value in values]
                table.add_row(name, SPLIT_TITLES.get(split, set_title(split)), *cells, Text(units.get(quantity, "")))
                name = ""
    return table


_KIND_TITLES = {"mae": "MAE", "rmse": "RMSE", "max": "largest"}


def _error_kinds(by_split: dict[str, dict[str, float]]) -> list[str]:
    """Kinds of errors that a table has: the largest only where they were measured (`training.max_errors`)."""
    measured = {key.partition("/")[0].rpartition("_")[2] for errors in by_split.values() for key in errors}
    return [kind for kind in _KIND_TITLES if kind != "max" or kind in measured]


def classes_table(by_split: dict[str, dict[str, float]]) -> Table:
    """One row per classified target, with the metrics of each split."""
    kinds = [kind for kind in _CLASS_TITLES if any(key.endswith(f"_{kind}") for e in by_split.values() for key in e)]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    table.add_column("class", no_wrap=True)
    for split in by_split:
        for kind in kinds:
            table.add_column(
                f"{SPLIT_TITLES.get(split, set_title(split))}\n{_CLASS_TITLES[kind]}",
                justify="right",
                no_wrap=True,
            )
    names = [key.removesuffix("_accuracy") for e in by_split.values() for key in e if key.endswith("_accuracy")]
    for name in dict.fromkeys(names):
        cells = [
            Text(digits(errors.get(f"{name}_{kind}")), style="bold") for errors in by_split.values() for kind in kinds
        ]
        table.add_row(Text(name), *cells)
    return table


_CLASS_TITLES = {"accuracy": "accuracy", "f1": "F1", "auroc": "AUROC", "cross_entropy": "cross-entropy"}


def calibration_table(by_split: dict[str, dict[str, float]]) -> Table:
    """One row per quantity with uncertainties and split: how well they agree with the errors."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for heading in ("uncertainty", "data"):
        table.add_column(heading, no_wrap=True)
    for heading in ("neg. log-\nlikelihood", "miscalibr.\narea", "within one\ndeviation"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = [key.removesuffix("_nll") for errors in by_split.values() for key in errors if key.endswith("_nll")]
    for name in dict.fromkeys(names):
        for split, errors in by_split.items():
            if f"{name}_nll" in errors:
                nll, area, share = (errors[f"{name}_{metric}"] for metric in CALIBRATION)
                cells = (digits(nll) if nll >= 0 else f"-{digits(-nll)}", digits(area), f"{100 * share:.0f} %")
                table.add_row(name, SPLIT_TITLES.get(split, set_title(split)), *cells)
    return table


def digits(value: float | None) -> str:
    """Three significant digits, no exponent in the usual range: `3.21`, `41.0`, `0.0071`, `12300`."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    if size < -4 or size > 6:
        return f"{value:.2e}"
    return f"{round(value, 2 - size):.{max(2 - size, 0)}f}"


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, box=ROUNDED, border_style="dim", title=title, title_align="left", expand=False)


def _rows_of(by_split: dict[str, dict[str, float]], units: Mapping[str, str]) -> list[tuple[str, str]]:
    """(quantity, species) in the order of `units`, each quantity before its species."""
    rows: dict[tuple[str, str], None] = {}
    for errors in by_split.values():
        for key in errors:
            name, _, species = key.partition("/")
            quantity = name.removesuffix("_mae").removesuffix("_rmse")
            if quantity != name and quantity in units:
                rows[quantity, species] = None
    order = list(units)
    return sorted(rows, key=lambda row: (order.index(row[0]), row[1] != ""))


def _bare(split: str, errors: dict[str, Any]) -> dict[str, float]:
    return {key.removeprefix(f"{split}/"): float(value) for key, value in errors.items()}


def _children(potential: nn.Module) -> list[tuple[str, nn.Module]]:
    """The submodules of the model inside wrappers with a single child."""
    children = list(potential.named_children())
    while len(children) == 1 and list(children[0][1].named_children()):
        children = list(children[0][1].named_children())
    return children


def _version(package: str) -> str:
    if package == "forgefield":
        return __version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
