"""The section on physics: results of `forgefield evaluate`, from the files `evaluation/SUITE/evaluation.json` of a run.

Each evaluation is a card with its figures and a table of numbers next to those of the reference. The same cards are
`evaluation.html`, the page next to each of these files (`forgefield/report/evaluation_page.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forgefield.report.canvas import COLOURS, house_style, linear_ticks, new_figure, to_svg
from forgefield.report.folder import RunData, as_number
from forgefield.report.markup import Html, card, count, section, shorten, significant, table, tag, with_unit

MANY = 8
"""More curves than this are drawn in one colour, without a legend."""
SUITES = {"crystal": "Crystals", "molecule": "Molecules", "liquid": "Liquids"}


def has_evaluations(run: RunData) -> bool:
    """Whether the folder of a run has results of `forgefield evaluate`."""
    return bool(evaluation_files(run.path / "evaluation"))


def evaluation_files(folder: Path) -> list[Path]:
    """All results in a folder, one per suite."""
    return sorted(folder.glob("*/evaluation.json"))


def evaluation_section(run: RunData) -> Html:
    """Results of all suites of a run."""
    stored = [read_evaluation(path) for path in evaluation_files(run.path / "evaluation")]
    parts = [part for content in stored for part in (tag("h3", suite_title(content)), evaluation_cards(content))]
    lead = "Physical properties computed with the model (forgefield evaluate)."
    return section("evaluation", "Physics", lead, *parts)


def read_evaluation(path: Path) -> dict[str, Any]:
    """The content of an `evaluation.json`; one that is damaged is empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    return content if isinstance(content, dict) else {}


def suite_title(content: dict[str, Any]) -> str:
    """`Crystals: Cu, Au. Reference: EMT`."""
    structures = ", ".join(shorten(name, 40) for name in _list(content.get("structures")))
    reference = f"; reference: {shorten(content['reference'], 80)}" if content.get("reference") else ""
    return f"{SUITES.get(str(content.get('suite')), 'Evaluation')}: {structures}{reference}"


def evaluation_cards(content: dict[str, Any]) -> Html:
    """A card for each evaluation."""
    suite = str(content.get("suite"))
    results = [result for result in _list(content.get("results")) if isinstance(result, dict)]
    cards = [_card(result, f"evaluation-{suite}-{number}") for number, result in enumerate(results)]
    return tag("div", *cards, class_="grid two")


def _card(result: dict[str, Any], name: str) -> Html:
    structure = f" of {result['structure']}" if result.get("structure") else ""
    title = f"{result.get('title', '')}{structure}"
    figures = [
        to_svg(panel_figure(panel), f"{name}-{number}", f"{panel.get('title', '')}{structure}")
        for number, panel in enumerate(_list(result.get("panels")))
        if isinstance(panel, dict) and panel.get("curves")
    ]
    values = [value for value in _list(result.get("values")) if isinstance(value, dict)]
    compared = any(value.get("reference") is not None for value in values)
    rows = [_row(value, compared=compared) for value in values]
    header = ["quantity", "model", *(["reference", "difference"] if compared else [])]
    notes = [tag("p", shorten(note, 400)) for note in _list(result.get("notes"))]
    return card(shorten(title, 120), *figures, table(header, rows) if rows else None, *notes)


def _row(value: dict[str, Any], *, compared: bool) -> list[str]:
    model, reference = as_number(value.get("model")), as_number(value.get("reference"))
    is_count = not value.get("unit") and all(x is None or x.is_integer() for x in (model, reference))
    row = [with_unit(shorten(value.get("name"), 60), shorten(value.get("unit", ""), 20)), _number(model, 4, is_count)]
    if compared:
        difference = None if model is None or reference is None else model - reference
        row += [_number(reference, 4, is_count), _number(difference, 2, is_count)]
    return row


def _number(value: float | None, digits: int, is_count: bool) -> str:
    """A number with some significant digits, or as a count; rounding errors are zero."""
    if is_count:
        return count(value)
    return significant(0.0 if value is not None and abs(value) < 1e-9 else value, digits)


def panel_figure(panel: dict[str, Any]) -> Figure:
    """Curves of the model, and dashed ones of the reference."""
    with house_style():
        figure = new_figure()
        axes = figure.subplots()
        model = [each for each in _list(panel.get("curves")) if isinstance(each, dict)]
        reference = [each for each in _list(panel.get("reference")) if isinstance(each, dict)]
        labelled = any(each.get("label") for each in model) and len(model) <= MANY
        for number, curve in enumerate(model):
            _draw(axes, curve, colour=_colour(number, labelled), label=_label(curve, number, labelled, bool(reference)))
        for number, curve in enumerate(reference):
            label = "reference" if number == 0 else None
            colour = COLOURS["strong"] if labelled else COLOURS["orange"]
            _draw(axes, curve, colour=colour, label=label, dashed=True)
        axes.set_xlabel(str(panel.get("x_label", "")))
        axes.set_ylabel(str(panel.get("y_label", "")))
        ticks = [tick for tick in _list(panel.get("ticks")) if isinstance(tick, list) and len(tick) == 2]
        if ticks:
            axes.set_xticks([float(x) for x, _ in ticks], [str(name) for _, name in ticks])
        else:
            linear_ticks(axes, "x", 6)
        linear_ticks(axes, "y", 6)
        axes.grid(axis="y")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
        return figure


def _colour(number: int, labelled: bool) -> str:
    names = ("blue", "orange", "green", "purple", "ink", "line")
    return COLOURS[names[number % len(names)] if labelled else "blue"]


def _label(curve: dict[str, Any], number: int, labelled: bool, compared: bool) -> str | None:
    if labelled:
        return shorten(curve.get("label"), 40)
    return "model" if compared and number == 0 else None


def _draw(axes: Axes, curve: dict[str, Any], *, colour: str, label: str | None, dashed: bool = False) -> None:
    x, y = (list(map(as_number, _list(curve.get(axis)))) for axis in "xy")
    points = [(a, b) for a, b in zip(x, y) if a is not None and b is not None]
    style: dict[str, Any] = {"linestyle": (0, (3, 2))} if dashed else {}
    if curve.get("marker"):
        style = {"marker": "x" if dashed else "o", "linestyle": "none"}
    axes.plot(
        [a for a, _ in points], [b for _, b in points], color=colour, label=label, linewidth=1.1, markersize=5, **style
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
