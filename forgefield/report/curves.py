"""A run in a notebook: its learning curves as one figure, and a short HTML summary."""

from __future__ import annotations

from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from forgefield.errors import ForgefieldError
from forgefield.report.analysis import quantities
from forgefield.report.canvas import COLOURS, house_style, linear_ticks, new_figure
from forgefield.report.folder import RunData, read_run, split_title
from forgefield.report.markup import with_unit
from forgefield.report.sections.headline import errors_by_split
from forgefield.report.sections.learning import curve, x_axis
from forgefield.results import html_table

STYLES = {"train": COLOURS["orange"], "val": COLOURS["blue"]}


def plot_run(path: Path) -> Figure:
    """The loss and the mean absolute errors over the training, on logarithmic axes."""
    run = read_run(path)
    if run.members:
        raise ForgefieldError(f"{run.name} is an ensemble; its members, {run.path / 'members'}, have learning curves.")
    shown = {"loss": "loss"} | {
        f"{quantity.name}_mae": with_unit(f"{quantity.title}, MAE", quantity.error_unit)
        for quantity in quantities(run.heads).values()
    }
    x_key = x_axis(run.metrics)
    panels = {
        label: curves
        for name, label in shown.items()
        if (curves := {s: c for s in STYLES if (c := curve(run.metrics, x_key, f"{s}/{name}")) is not None})
    }
    if not panels:
        raise ForgefieldError(f"{run.name} has no metrics yet: they are written at the end of every epoch.")
    with house_style():
        figure = new_figure(3.6 * len(panels), 2.9)
        figure.set_facecolor("white")
        for axes, (label, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
            for split, (x, y) in curves.items():
                name = "validation" if split == "val" else "training"
                axes.semilogy(x, y, color=STYLES[split], marker="." if len(x) == 1 else "", label=name)
            axes.set(xlabel=x_key, ylabel=label)
            linear_ticks(axes, "x", 5, integers=True)
            axes.legend(frameon=False)
    return figure


def run_html(path: Path) -> str:
    """Name, status, errors and the place of the report."""
    run = read_run(path)
    status = str(run.info.get("status", "unknown"))
    lines = [f"<b>{escape(run.name)}</b> ({escape(status)}), {escape(str(path))}"]
    rows = _error_rows(run)
    if rows:
        lines.append(html_table(["error", *[split_title(split) for split in errors_by_split(run)], "unit"], rows))
    if (run.path / "report.html").is_file():
        lines.append(f"<p>Report: <code>{escape(str(Path(path) / 'report.html'))}</code></p>")
    return "".join(lines)


def _error_rows(run: RunData) -> list[list[str]]:
    by_split = errors_by_split(run)
    rows = []
    for quantity in quantities(run.heads).values():
        for kind in ("mae", "rmse"):
            values = [errors.get(f"{quantity.name}_{kind}") for errors in by_split.values()]
            if any(value is not None for value in values):
                cells = ["" if value is None else f"{value:.3g}" for value in values]
                rows.append([f"{quantity.title}, {kind.upper()}", *cells, quantity.error_unit])
    return rows
