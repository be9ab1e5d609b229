"""One figure of a data set: how its sizes, energies, forces, stresses and distances are distributed."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forgefield.data.inspection.histograms import Histogram, histograms
from forgefield.data.inspection.survey import Survey, survey_table
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.files import written_whole
from forgefield.report.canvas import COLOURS, house_style, linear_ticks, log_ticks, new_figure, plain
from forgefield.report.numbers import count

SUFFIXES = (".png", ".svg", ".pdf")
COLUMNS = 3
PANEL = (3.1, 2.5)
"""Width and height of one histogram, inches."""
NARROW = 7
"""Smallest width of an axis of integers."""


def check_figure_name(path: Path) -> None:
    """Raise an error for a suffix that is not a supported format."""
    if path.suffix.lower() not in SUFFIXES:
        raise ForgefieldError(f"{path}: the name of a figure must end in {', '.join(SUFFIXES)}")


def histogram_figure(table: FrameTable, path: Path, *, cutoff: float = 5.0, survey: Survey | None = None) -> Path:
    """Write the histograms of a data set as a picture. survey: distances; default: computed up to `cutoff`, A."""
    path = Path(path)
    check_figure_name(path)
    figure = draw_histograms(histograms(table, survey or survey_table(table, cutoff)))
    with written_whole(path) as partial, house_style():
        figure.savefig(partial, dpi=200, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def draw_histograms(panels: list[Histogram]) -> Figure:
    """All histograms, three in a row, on white."""
    with house_style():
        columns = 2 if len(panels) == 4 else min(COLUMNS, len(panels))
        rows = -(-len(panels) // columns)
        figure = new_figure(PANEL[0] * columns, PANEL[1] * rows)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)  # type: ignore[union-attr, call-arg]
        figure.set_facecolor("white")
        grid = figure.subplots(rows, columns, squeeze=False)
        for number, axes in enumerate(grid.flat):
            if number < len(panels):
                _draw(axes, panels[number])
            else:
                axes.set_axis_off()
        return figure


def _draw(axes: Axes, panel: Histogram) -> None:
    share = 100 * panel.counts / panel.n_values
    lowest = 0.5 * 100 / panel.n_values if panel.tails else 0.0
    axes.stairs(share, panel.edges, fill=True, color=COLOURS["blue"], alpha=0.28, baseline=lowest)
    axes.stairs(share, panel.edges, color=COLOURS["blue"], linewidth=1.1, baseline=lowest)
    if panel.median is not None:
        axes.axvline(panel.median, color=COLOURS["orange"], linewidth=1.0, linestyle=(0, (3, 2)))
    if panel.tails:
        axes.set_yscale("log")
        axes.set_ylim(lowest, 2 * share.max())
        log_ticks(axes, most=5)
    else:
        axes.set_ylim(0, 1.12 * share.max())
        linear_ticks(axes, "y", 4)
    axes.set_title(f"{panel.title}\n", loc="left", color=COLOURS["strong"], fontweight="bold", linespacing=1.6)
    axes.text(0, 1.03, _summary(panel), transform=axes.transAxes, fontsize=7.2)
    axes.set_xlabel(panel.axis)
    axes.set_ylabel("share, %")
    axes.grid()
    if panel.whole and panel.edges[-1] - panel.edges[0] < NARROW:
        middle = (panel.edges[0] + panel.edges[-1]) / 2
        axes.set_xlim(middle - NARROW / 2, middle + NARROW / 2)
    linear_ticks(axes, "x", 5, whole=panel.whole)
    axes.xaxis.set_major_formatter(lambda value, _: plain(float(f"{value:.6g}")))


def _summary(panel: Histogram) -> str:
    return panel.summary + (f", {count(panel.beyond)} beyond the axis" if panel.beyond else "")
