"""`learning.html`: the learning history of a loop as a self-contained page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgefield.files import write_atomically
from forgefield.report.canvas import to_svg
from forgefield.report.markup import Html, card, count, section, significant, table, tag
from forgefield.report.page import page_html
from forgefield.report.sections.evaluation import panel_figure
from forgefield.text import counted

ERRORS = {"energy_mae": "energy MAE, meV/atom", "forces_mae": "force MAE, meV/A"}


def write_learning_page(folder: Path, content: dict[str, Any]) -> Path:
    """Write the page of a history, as in `history.json`; returns its path."""
    history = content["history"]
    labels = sum(record["labelled"] for record in history)
    header = tag(
        "header",
        tag("div", "Forgefield learning loop", class_="eyebrow"),
        tag("div", tag("h1", content["name"]), class_="title-row"),
        tag("p", f"{counted(len(history) - 1, 'iteration')} · {counted(labels, 'label')}", class_="subtitle"),
        class_="top wrap",
    )
    figures = [_figure(panel, f"learning-{number}") for number, panel in enumerate(_panels(history))]
    sections = [
        ("history", "History", section("history", "History", None, tag("div", *figures, class_="grid"))),
        ("iterations", "Iterations", section("iterations", "Iterations", None, _table(history))),
    ]
    if failed := _failed(history):
        lead = "Structures that could not be labelled; they are set aside."
        sections.append(("failed", "Failed labels", section("failed", "Failed labels", lead, failed)))
    page = page_html(f"{content['name']} · learning", header, sections, footer="Written by forgefield learn.")
    return write_atomically(folder / "learning.html", page.encode("utf-8", errors="replace"))


def _figure(panel: dict[str, Any], name: str) -> Html:
    return card(panel["title"], to_svg(panel_figure(panel), name, panel["title"]))


def _panels(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    explored = [record for record in history if "largest" in record]
    panels = []
    if explored:
        x = [float(record["iteration"]) for record in explored]
        unit = explored[0]["unit"]
        curves = [
            {"label": "largest", "x": x, "y": [record["largest"] for record in explored]},
            {"label": "median", "x": x, "y": [record["median"] for record in explored]},
            {"label": "threshold", "x": x, "y": [record["threshold"] for record in explored]},
        ]
        panels.append(_panel("Uncertainty of explored structures", "iteration", f"uncertainty, {unit}", curves))
        shares = [100 * record["candidates"] / max(record["examined"], 1) for record in explored]
        panels.append(
            _panel("Structures above the threshold", "iteration", "share, %", [{"label": "", "x": x, "y": shares}])
        )
    for name, title in ERRORS.items():
        curves = []
        for split, label in (("val", "validation"), ("test", "test")):
            points = [
                (total, record["errors"][split][name])
                for total, record in zip(_totals(history), history)
                if name in record.get("errors", {}).get(split, {})
            ]
            if points:
                curves.append({"label": label, "x": [p[0] for p in points], "y": [p[1] for p in points]})
        if curves:
            panels.append(_panel(f"Errors: {title.partition(',')[0]}", "labels", title, curves))
    return panels


def _panel(title: str, x_label: str, y_label: str, curves: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "x_label": x_label, "y_label": y_label, "curves": curves, "reference": [], "ticks": []}


def _totals(history: list[dict[str, Any]]) -> list[float]:
    """Numbers of labels up to each iteration."""
    totals, total = [], 0
    for record in history:
        total += record["labelled"]
        totals.append(float(total))
    return totals


def _table(history: list[dict[str, Any]]) -> Html:
    splits = [split for split in ("val", "test") if any(split in record.get("errors", {}) for record in history)]
    header = [
        "iteration",
        "simulations",
        "exploded",
        "examined",
        "candidates",
        "largest uncertainty",
        "labels",
        "failed",
    ]
    header += [f"{'validation' if split == 'val' else 'test'} {title}" for split in splits for title in ERRORS.values()]
    rows = []
    for record in history:
        row = [str(record["iteration"])]
        row += [count(record.get(name)) for name in ("simulations", "exploded", "examined", "candidates")]
        row += [significant(record.get("largest")), count(record["labelled"]), count(len(record["failed"]))]
        row += [significant(record.get("errors", {}).get(split, {}).get(name)) for split in splits for name in ERRORS]
        rows.append(row)
    return table(header, rows)


def _failed(history: list[dict[str, Any]]) -> Html | None:
    rows = [
        [f"iteration {record['iteration']}, structure {index}", reason]
        for record in history
        for index, reason in record["failed"].items()
    ]
    return table(["structure", "reason"], rows, text_columns=2) if rows else None
