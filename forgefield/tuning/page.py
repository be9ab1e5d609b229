"""The results of a search: `trials.csv`, and `tune.html`, a self-contained page with figures.

Figures: the value of each trial and the best so far; the importance of each key for the better trials (PED-ANOVA); all trials
as lines through their values, the better the darker.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forgefield.files import write_atomically
from forgefield.tuning.options import Dimension, short
from forgefield.tuning.study import require_optuna

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.trial import FrozenTrial

    from forgefield.tuning.search import Search

_STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:60em;color:#222}td,th{padding:.15em .8em;text-align:left}"
)


def write_page(search: Search, study: Study) -> Path:
    """Write `tune.html` and `trials.csv` of a search and return the path of the page."""
    trials = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED", "FAIL")]
    write_atomically(search.folder / "trials.csv", _csv(search, trials))
    done = sorted((trial for trial in trials if trial.state.name == "COMPLETE"), key=lambda trial: trial.value or 0.0)
    figures = [_history(search, trials), _importance(study, done), _lines(search, done)]
    shown = "".join(f'<p><img src="data:image/png;base64,{figure}" alt=""></p>' for figure in figures if figure)
    head = "".join(
        f"<th>{html.escape(word)}</th>" for word in ("trial", search.monitor, *(d.key for d in search.space))
    )
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(search, trial))}</tr>" for trial in done[:20]
    )
    counts = {name: sum(trial.state.name == state for trial in trials) for name, state in _STATES.items()}
    summary = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
    title = html.escape(f"Search {search.base.name}")
    page = (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f"<p>{summary}.</p>{shown}<h2>Best trials</h2><table><tr>{head}</tr>{rows}</table>"
    )
    return write_atomically(search.folder / "tune.html", page)


_STATES = {"complete": "COMPLETE", "ended early": "PRUNED", "failed": "FAIL"}


def importances(study: Study) -> dict[str, float]:
    """Importance of each key, adding up to 1; empty where there are too few trials."""
    optuna = require_optuna()
    try:
        return optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), normalize=True
        )
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}


def _cells(search: Search, trial: FrozenTrial) -> list[str]:
    values = [short(d.decode(trial.params[d.key])) if d.key in trial.params else "" for d in search.space]
    return [str(trial.number), "" if trial.value is None else f"{trial.value:.6g}", *values]


def _csv(search: Search, trials: list[FrozenTrial]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", search.monitor, *(d.key for d in search.space), "state", "folder", "error"])
    for trial in trials:
        state = next(name for name, code in _STATES.items() if code == trial.state.name)
        attributes = trial.user_attrs
        writer.writerow([*_cells(search, trial), state, attributes.get("folder", ""), attributes.get("error", "")])
    return text.getvalue()


# ---- figures


def _canvas(width: float = 8.0, height: float = 3.2) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


def _history(search: Search, trials: list[FrozenTrial]) -> str | None:
    done = [(trial.number, trial.value) for trial in trials if trial.state.name == "COMPLETE"]
    ended = [
        (t.number, min(t.intermediate_values.values()))
        for t in trials
        if t.state.name == "PRUNED" and t.intermediate_values
    ]
    if not done:
        return None
    figure, axes = _canvas()
    numbers, values = map(np.array, zip(*done))
    axes.plot(numbers, values, "o", ms=4, label="complete")
    axes.step(numbers, np.minimum.accumulate(values), where="post", lw=1, label="best so far")
    if ended:
        axes.plot(*zip(*ended), "x", ms=4, color="0.6", label="ended early")
    if values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")
    axes.set(xlabel="trial", ylabel=search.monitor)
    axes.legend(frameon=False)
    return _png(figure)


def _importance(study: Study, done: list[FrozenTrial]) -> str | None:
    shares = importances(study) if len(done) > 2 else {}
    if not shares:
        return None
    figure, axes = _canvas(height=0.8 + 0.35 * len(shares))
    names = list(shares)[::-1]
    axes.barh(names, [shares[name] for name in names])
    axes.set(xlabel="importance", xlim=(0, 1))
    return _png(figure)


def _lines(search: Search, done: list[FrozenTrial]) -> str | None:
    if len(done) < 2:
        return None
    figure, axes = _canvas(width=max(6.0, 1.8 * len(search.space)), height=3.8)
    for rank, trial in reversed(list(enumerate(done))):
        heights = [_height(d, trial.params[d.key]) for d in search.space]
        share = 1 - rank / len(done)
        axes.plot(
            [*heights, *([heights[0]] if len(heights) == 1 else [])],
            color=(0.1, 0.3, 0.6),
            alpha=0.1 + 0.8 * share,
            lw=1.2,
        )
    axes.set_xticks(range(len(search.space)), [d.key for d in search.space], fontsize=8)
    axes.set_yticks([])
    axes.set_xlim(-0.15, max(len(search.space) - 1, 1) + 0.45)
    for x, dimension in enumerate(search.space):
        for height, label in _ticks(dimension):
            axes.annotate(label, (x, height), fontsize=7, xytext=(3, 2), textcoords="offset points")
        axes.axvline(x, color="0.8", lw=0.8, zorder=0)
    return _png(figure)


def _height(dimension: Dimension, stored: float) -> float:
    """Position of a value on its axis, 0 to 1."""
    if dimension.choices is not None:
        value = dimension.decode(stored)
        return dimension.choices.index(value) / max(len(dimension.choices) - 1, 1)
    low, high, x = dimension.low, dimension.high, stored
    if dimension.log:
        low, high, x = math.log(low), math.log(high), math.log(x)
    return (x - low) / (high - low)


def _ticks(dimension: Dimension) -> list[tuple[float, str]]:
    if dimension.choices is not None:
        n = max(len(dimension.choices) - 1, 1)
        return [(i / n, short(choice)) for i, choice in enumerate(dimension.choices)]
    return [(0.0, short(dimension.low)), (1.0, short(dimension.high))]
