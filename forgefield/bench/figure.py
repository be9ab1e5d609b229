"""The figure of `forgefield bench`: bars of the time of a step and of the first step, engine by engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from forgefield.bench.rows import Row

SUFFIXES = (".png", ".svg", ".pdf")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Two panels that share their labels; peers in another colour. path: `.png`, `.svg` or `.pdf`."""
    from forgefield.report.canvas import house_style, new_figure

    shown = [row for row in rows if row.refusal is None]
    precisions = {row.precision for row in shown}
    labels = [f"{row.label}, {row.precision}" if len(precisions) > 1 else row.label for row in shown]
    forms = {row.derivative for row in shown if row.derivative}
    if len(forms) > 1:
        labels = [f"{label}, {row.derivative}" if row.derivative else label for label, row in zip(labels, shown)]
    with house_style():
        figure = new_figure(7.4, 1.1 + 0.32 * max(len(shown), 1))
        figure.set_facecolor("white")
        left, right = figure.subplots(1, 2, sharey=True)
        _bars(left, [row.step_ms or 0.0 for row in shown], shown, "ms per step")
        _bars(right, [row.first_step_seconds or 0.0 for row in shown], shown, "first step, s")
        left.set_yticks(range(len(shown)), labels)
        left.invert_yaxis()
        figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        figure.savefig(path, dpi=200)


def _bars(axes: Axes, values: list[float], rows: Sequence[Row], label: str) -> None:
    from forgefield.report.canvas import COLOURS
    from forgefield.training.run.summary import digits

    colours = [COLOURS["line"] if row.is_peer else COLOURS["blue"] for row in rows]
    axes.barh(range(len(values)), values, height=0.62, color=colours)
    for place, value in enumerate(values):
        axes.annotate(
            digits(value), (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize="small"
        )
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.18 * max(values, default=1.0))
    axes.tick_params(axis="y", length=0)
