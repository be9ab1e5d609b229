"""Figures of a run (curves, parity, errors by species and force magnitude, distribution, timing) and of a data set.

Figures of a run take plain numbers and return a matplotlib `Figure`, to be saved in any format or put into the page with
`canvas.to_svg`. Many points are drawn as a density, so the size of a figure does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from forgefield.data.inspection.survey import Histogram, Survey, histograms, survey_table
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.report.analysis import GroupError, Pairs
from forgefield.report.canvas import COLOURS, DENSITY, house_style, linear_ticks, log_ticks, new_figure, plain
from forgefield.report.markup import count, shorten, significant, with_unit

SCATTER_LIMIT = 600
"""Largest number of points that are drawn one by one; more are drawn as a density."""
CURVE_POINTS = 400
"""A curve is thinned to about this many points; its first and last stay."""

Curve = tuple[Sequence[float], Sequence[float]]


def learning_figure(
    curves: Mapping[str, Curve],
    *,
    x_label: str = "epoch",
    y_label: str,
    learning_rate: Curve | None = None,
    best: float | None = None,
) -> Figure:
    """Curves over epochs on a logarithmic axis; the learning rate, if any, in a panel below.

    curves: name (`train`, `validation`) to (x, y). best: x of the best weights, marked by a line.
    """
    with house_style():
        figure = new_figure()
        if learning_rate is None:
            axes = main = figure.subplots()
        else:
            main, axes = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
            _curve(axes, learning_rate, COLOURS["green"], None)
            axes.set_ylabel("learning\nrate")
            _finish_log(axes, most=3)
        styles = {"train": COLOURS["orange"], "validation": COLOURS["blue"]}
        names = ("green", "purple") if styles.keys() & curves.keys() else ("blue", "orange", "green", "purple", "ink")
        spare = iter([COLOURS[name] for name in names] * len(curves))
        for name, curve in curves.items():
            _curve(main, curve, styles.get(name) or next(spare), name)
        if best is not None:
            main.axvline(best, color=COLOURS["line"], linewidth=0.9, linestyle=(0, (2, 2)), label="best weights")
        main.set_ylabel(y_label)
        _finish_log(main)
        _legend_above(main)
        axes.set_xlabel(x_label)
        linear_ticks(axes, "x", 6, integers=True)
        return figure


def parity_figure(pairs: Pairs) -> Figure:
    """Prediction against reference, with MAE and RMSE, and the error in a panel below."""
    with house_style():
        figure = new_figure(3.7, 4.1)
        _parity_panels(pairs, *figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1)))
        return figure


def parity_row(panels: Sequence[Pairs]) -> Figure:
    """The parity plots of several quantities side by side, on white, for a PNG file."""
    with house_style():
        figure = new_figure(3.7 * len(panels), 4.1)
        figure.set_facecolor("white")
        grid = figure.subplots(2, len(panels), sharex="col", height_ratios=(3.4, 1), squeeze=False)
        for column, panel in enumerate(panels):
            _parity_panels(panel, grid[0, column], grid[1, column])
            grid[0, column].set_title(panel.quantity.title, loc="left", color=COLOURS["strong"], fontweight="bold")
        return figure


def species_figure(groups: Sequence[GroupError]) -> Figure:
    """Force MAE and RMSE of each species as horizontal bars."""
    with house_style():
        groups = groups[:30]
        figure = new_figure(3.7, max(2.9, 0.32 * len(groups) + 0.9))
        axes = figure.subplots()
        at = np.arange(len(groups))
        axes.barh(at - 0.19, [g.mae for g in groups], 0.34, color=COLOURS["blue"], label="MAE")
        axes.barh(at + 0.19, [g.rmse for g in groups], 0.34, color=COLOURS["orange"], label="RMSE")
        axes.set_yticks(at, [shorten(group.label, 12) for group in groups])
        pad = max(0.0, (3 - len(groups)) / 2)
        axes.set_ylim(len(groups) - 0.5 + pad, -0.5 - pad)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.set_xlabel("force error, meV/Å")
        linear_ticks(axes, "x", 5)
        _legend_above(axes)
        return figure


def magnitude_figure(groups: Sequence[GroupError]) -> Figure:
    """Force MAE by magnitude of the reference force, and the error relative to that magnitude in a panel below."""
    with house_style():
        figure = new_figure()
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 1))
        at = np.arange(len(groups))
        top.bar(at, [group.mae for group in groups], 0.72, color=COLOURS["blue"])
        top.set_ylabel("MAE, meV/Å")
        percent = [100 * group.relative for group in groups]
        bottom.plot(at, percent, "o-", color=COLOURS["orange"], markersize=3.4)
        bottom.set_ylabel("relative, %")
        finite = [value for value in percent if np.isfinite(value) and value > 0]
        if finite and max(finite) > 20 * min(finite):
            bottom.set_yscale("log")
            log_ticks(bottom)
        else:
            bottom.set_ylim(bottom=0)
        for axes in (top, bottom):
            axes.grid(axis="y")
            axes.tick_params(axis="x", length=0)
        bottom.set_xticks(at, [group.label for group in groups], rotation=32, ha="right", rotation_mode="anchor")
        bottom.set_xlabel("magnitude of the reference force, eV/Å")
        return figure


def distribution_figure(pairs: Pairs) -> Figure:
    """Histogram of absolute errors on a logarithmic axis, with the median and the 95th percentile."""
    with house_style():
        figure = new_figure()
        axes = figure.subplots()
        error = np.abs(pairs.error)
        median, tail = (float(np.quantile(error, share)) for share in (0.5, 0.95))
        positive = error[error > 0]
        if len(positive) == 0:
            axes.text(0.5, 0.5, "all errors are exactly zero", ha="center", transform=axes.transAxes)
            axes.set_axis_off()
            return figure
        low = max(positive.min(), positive.max() * 1e-5)
        edges = np.geomspace(low, positive.max() * 1.0001, min(45, 6 + int(len(positive) ** 0.5)) + 1)
        share = np.histogram(np.maximum(positive, low), edges)[0] / len(error) * 100
        axes.stairs(share, edges, fill=True, color=COLOURS["blue"], alpha=0.28)
        axes.stairs(share, edges, color=COLOURS["blue"], linewidth=1.1)
        axes.set_xscale("log")
        axes.set_ylim(0, share.max() * 1.3)
        log_ticks(axes, "x")
        for value, name, colour in ((median, "median", COLOURS["strong"]), (tail, "95 % below", COLOURS["orange"])):
            if value > 0:
                label = f"{name} {significant(value)}"
                axes.axvline(value, color=colour, linewidth=1.1, linestyle=(0, (3, 2)), label=label)
        _legend_above(axes)
        axes.grid(axis="y")
        axes.set_ylabel("share, %")
        axes.set_xlabel(with_unit("absolute error", pairs.quantity.error_unit))
        return figure


def timing_figure(curve: Curve, *, y_label: str, x_label: str = "epoch") -> Figure:
    """A time or a speed over the epochs, with its median; the axis starts at zero."""
    with house_style():
        figure = new_figure(3.7, 2.75)
        axes = figure.subplots()
        _curve(axes, curve, COLOURS["blue"], None)
        median = float(np.median(curve[1]))
        label = f"median {plain(float(f'{median:.3g}'))}"
        axes.axhline(median, color=COLOURS["line"], linewidth=0.9, linestyle=(0, (2, 2)), label=label)
        axes.set_ylim(0, 1.15 * max(max(curve[1]), 1e-12))
        axes.yaxis.set_major_formatter(lambda value, _: plain(float(f"{value:.4g}")))
        linear_ticks(axes, "x", 6, integers=True)
        linear_ticks(axes, "y", 5)
        axes.grid(axis="y")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _legend_above(axes)
        return figure


def _curve(axes: Axes, curve: Curve, colour: str, label: str | None) -> None:
    x, y = (np.asarray(values, dtype=float) for values in curve)
    if len(x) > CURVE_POINTS:
        keep = np.unique(np.linspace(0, len(x) - 1, CURVE_POINTS).round().astype(int))
        x, y = x[keep], y[keep]
    axes.plot(x, y, color=colour, label=label, marker="o" if len(x) <= 12 else None, markersize=3)


def _finish_log(axes: Axes, most: int = 6) -> None:
    axes.set_yscale("log")
    log_ticks(axes, most=most)
    axes.grid(axis="y")


def _legend_above(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        corner = (-0.02, 1.0)
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=corner, ncols=3, columnspacing=1.2, borderpad=0)


def _parity_panels(pairs: Pairs, main: Axes, below: Axes) -> None:
    quantity = pairs.quantity
    centre, offset = _centre(pairs.reference)
    x, y = pairs.reference - centre, pairs.predicted - centre
    low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
    margin = 0.04 * (high - low) or max(abs(high), 1.0) * 1e-3
    low, high = low - margin, high + margin
    main.plot((low, high), (low, high), color=COLOURS["line"], linewidth=0.8, zorder=0)
    _points(main, x, y, (low, high, low, high), 58)
    error = pairs.error
    reach = 1.1 * float(np.abs(error).max()) or 1.0
    below.axhline(0, color=COLOURS["line"], linewidth=0.8, zorder=0)
    _points(below, x, error, (low, high, -reach, reach), (58, 9))
    main.set(xlim=(low, high), ylim=(low, high))
    below.set(xlim=(low, high), ylim=(-reach, reach))
    lines = (
        f"MAE {significant(pairs.mae)} {quantity.error_unit}".rstrip(),
        f"RMSE {significant(pairs.rmse)} {quantity.error_unit}".rstrip(),
        f"{count(len(x))} values",
    )
    main.text(
        0.04, 0.96, "\n".join(lines), transform=main.transAxes, va="top", color=COLOURS["strong"], linespacing=1.5
    )
    main.set_ylabel(with_unit(f"predicted {quantity.symbol}{offset}", quantity.unit))
    below.set_xlabel(with_unit(f"reference {quantity.symbol}{offset}", quantity.unit))
    below.set_ylabel(with_unit("error", quantity.error_unit))
    for axes in (main, below):
        linear_ticks(axes, "x", 5)
        linear_ticks(axes, "y", 5 if axes is main else 3)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: plain(float(f"{value:.6g}")))


def _centre(reference: np.ndarray) -> tuple[float, str]:
    """Offset to subtract from values far from zero, so that axis labels stay short, and the offset as a label."""
    mean = float(reference.mean())
    if abs(mean) <= 5 * float(np.ptp(reference)):
        return 0.0, ""
    rounded = float(f"{mean:.4g}")
    return rounded, f" {'−' if rounded > 0 else '+'} {plain(abs(rounded))}"


def _points(
    axes: Axes, x: np.ndarray, y: np.ndarray, extent: tuple[float, float, float, float], grid: int | tuple[int, int]
) -> None:
    if len(x) <= SCATTER_LIMIT:
        axes.plot(x, y, "o", color=COLOURS["blue"], markersize=3, alpha=0.55, markeredgewidth=0, linestyle="none")
        return
    colours = ListedColormap(DENSITY)
    axes.hexbin(x, y, gridsize=grid, extent=extent, bins="log", mincnt=1, cmap=colours, linewidths=0.2)


# ---- distributions of a data set


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
    with written_atomically(path) as partial, house_style():
        figure.savefig(partial, dpi=200, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def draw_histograms(panels: list[Histogram]) -> Figure:
    """All histograms, three in a row, on white."""
    with house_style():
        columns = 2 if len(panels) == 4 else min(COLUMNS, len(panels))
        rows = -(-len(panels) // columns)
        figure = new_figure(PANEL[0] * columns, PANEL[1] * rows)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)
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
    if panel.is_integer and panel.edges[-1] - panel.edges[0] < NARROW:
        middle = (panel.edges[0] + panel.edges[-1]) / 2
        axes.set_xlim(middle - NARROW / 2, middle + NARROW / 2)
    linear_ticks(axes, "x", 5, integers=panel.is_integer)
    axes.xaxis.set_major_formatter(lambda value, _: plain(float(f"{value:.6g}")))


def _summary(panel: Histogram) -> str:
    return panel.summary + (f", {count(panel.beyond)} beyond the axis" if panel.beyond else "")
