"""Records of the diagnosis callbacks, one JSON file each in the folder `diagnosis` of a run, and their figures.

A record contains findings as sentences and the numbers of its figure. It contains no times, unless time or energy is its
subject, so that a resumed run writes the same files. Files may be truncated or written by another program; reading them does
not fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forgefield.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "diagnosis"
Record = dict[str, Any]
"""Content of a record file: JSON values by name."""


@dataclass(frozen=True)
class Finding:
    """kind: a short name, each is reported once. step: of the optimiser. what: the observation. advice: what to do about it."""

    kind: str
    step: int
    what: str
    advice: str

    def sentence(self) -> str:
        return f"Step {self.step}: {self.what} {self.advice}".strip()


def write_record(folder: Path, name: str, record: Record) -> Path:
    """Write `NAME.json` atomically and return its path. Numbers that are not finite become null."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomically(folder / f"{name}.json", json.dumps(_finite(record), indent=1) + "\n")


def read_records(folder: Path) -> dict[str, Record]:
    """All records of a run by name; files that cannot be read are skipped."""
    records: dict[str, Record] = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records[path.stem] = record
    return records


def findings_of(record: Record) -> list[Finding]:
    """The well-formed findings of a record."""
    rows = record.get("findings")
    return [
        Finding(str(row["kind"]), row["step"], str(row["what"]), str(row["advice"]))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and {"kind", "step", "what", "advice"} <= row.keys() and isinstance(row["step"], int)
    ]


def as_rows(findings: list[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON values."""
    return [asdict(finding) for finding in findings]


def numbers(record: object, *keys: str) -> list[float]:
    """The list of numbers under nested keys, with NaN for entries that are not numbers; empty if there is no such list."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    if not isinstance(record, list):
        return []
    return [float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else math.nan for x in record]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# ---- figures


LINE, GRID = "#a3adba", "#e4e8ee"
BLUE, ORANGE, GREEN = "#0969ac", "#d2600a", "#0a8a68"


def autocorrelation_figure(record: Record) -> Figure | None:
    """Above: mean autocorrelation over the lag, with the middle half of the coordinates. Below: lag 1 over the training."""
    lags = numbers(record, "lags")
    shown = [(name, colour) for name, colour in (("gradients", ORANGE), ("parameters", BLUE)) if name in record]
    if not lags or not shown:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.7, 3.6), layout="constrained")
    main, below = figure.subplots(2, 1, height_ratios=(2, 1))
    for name, colour in shown:
        mean, low, high = (numbers(record, name, key) for key in ("mean", "low", "high"))
        if not len(mean) == len(low) == len(high) == len(lags):
            continue
        main.fill_between(lags, low, high, color=colour, alpha=0.18, linewidth=0)
        main.plot(lags, mean, color=colour, label=name)
        steps, first = numbers(record, "history", "step"), numbers(record, "history", name)
        if len(steps) == len(first):
            below.plot(steps, first, color=colour, marker="o" if len(steps) <= 12 else None, markersize=3)
    for axes in (main, below):
        axes.axhline(0, color=LINE, linewidth=0.8, zorder=0)
    limit = record.get("threshold")
    if isinstance(limit, (int, float)):
        below.axhline(limit, color=LINE, linewidth=0.9, linestyle=(0, (2, 2)))
    main.set(xlabel="lag, steps", ylabel="autocorrelation", ylim=(-0.6, 1.05))
    below.set(xlabel="step", ylabel="at lag 1", ylim=(-1.05, 1.05))
    _finish(main)
    _finish(below)
    return figure


def norms_figure(record: Record) -> Figure | None:
    """Norm of the whole gradient over steps; steps whose gradient was not finite are marked."""
    steps, norms = numbers(record, "norms", "step"), numbers(record, "norms", "norm")
    if not steps or len(steps) != len(norms) or not any(n > 0 for n in norms):
        return None
    figure, axes = _single()
    axes.plot(steps, [n if n > 0 else math.nan for n in norms], color=BLUE, label="gradient norm")
    events = record.get("events")
    bad = [event.get("step") for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    for number, step in enumerate(step for step in bad[:200] if isinstance(step, int)):
        axes.axvline(step, color=ORANGE, linewidth=0.9, label="not finite" if number == 0 else None)
    _logarithmic(axes, "step", "norm of the gradient")
    return figure


def updates_figure(record: Record) -> Figure | None:
    """Relative size of updates over steps: how far one step moves the weights."""
    steps, ratios = numbers(record, "history", "step"), numbers(record, "history", "update")
    if not steps or len(steps) != len(ratios) or not any(r > 0 for r in ratios):
        return None
    figure, axes = _single()
    axes.axhspan(1e-4, 1e-2, color=GREEN, alpha=0.12, linewidth=0, label="usual")
    axes.plot(steps, [r if r > 0 else math.nan for r in ratios], color=BLUE, label="update / weights")
    _logarithmic(axes, "step", "change of a step, relative")
    return figure


def spikes_figure(record: Record) -> Figure | None:
    """Loss of every kept step, with spikes marked."""
    steps, losses = numbers(record, "losses", "step"), numbers(record, "losses", "loss")
    if not steps or len(steps) != len(losses) or not any(x > 0 for x in losses):
        return None
    figure, axes = _single()
    axes.plot(steps, [x if x > 0 else math.nan for x in losses], color=BLUE, label="loss", linewidth=1.0)
    events = record.get("spikes")
    rows = [e for e in events if isinstance(e, dict)] if isinstance(events, list) else []
    for number, event in enumerate(rows[:200]):
        if isinstance(event.get("step"), int):
            axes.axvline(event["step"], color=ORANGE, linewidth=0.9, label="spike" if number == 0 else None)
    _logarithmic(axes, "step", "loss")
    return figure


def throughput_figure(record: Record) -> Figure | None:
    """Milliseconds of a step, median and slow ones, row by row."""
    steps = numbers(record, "rows", "step")
    middle, slow = numbers(record, "rows", "median_ms"), numbers(record, "rows", "slow_ms")
    if not steps or not len(steps) == len(middle) == len(slow) or not any(m > 0 for m in middle):
        return None
    figure, axes = _single()
    axes.plot(steps, middle, color=BLUE, label="median", marker="o" if len(steps) <= 12 else None, markersize=3)
    axes.plot(steps, slow, color=ORANGE, label="slowest 5 %", marker="o" if len(steps) <= 12 else None, markersize=3)
    axes.set_ylim(0, 1.15 * max(x for x in (*middle, *slow) if math.isfinite(x)))
    axes.set(xlabel="step", ylabel="step, ms")
    _finish(axes)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Record], Figure | None]]] = {
    "gradient_check": ("Gradient norm", norms_figure),
    "training_helper": ("Size of updates", updates_figure),
    "autocorrelation": ("Autocorrelation over steps", autocorrelation_figure),
    "loss_spike": ("Loss of each step", spikes_figure),
    "throughput": ("Time of a step", throughput_figure),
}
"""Title and figure of each kind of record that has one."""


def image_of(figure: Figure, dpi: int = 110) -> np.ndarray:
    """The figure as pixels (height, width, 3), on white."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_facecolor("white")
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _single() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.7, 2.9), layout="constrained")
    return figure, figure.subplots()


def _logarithmic(axes: Axes, x: str, y: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=x, ylabel=y)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=3, frameon=False, borderpad=0)


def thinned(steps: Sequence[float], *series: Sequence[float], most: int = 400) -> tuple[list[float], ...]:
    """The same curves with about `most` points, first and last kept."""
    if len(steps) <= most:
        return (list(steps), *(list(values) for values in series))
    keep = np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))
    return ([steps[i] for i in keep], *([values[i] for i in keep] for values in series))
