"""`evaluation.html`: the results of one suite of `forgefield evaluate` as a self-contained page."""

from __future__ import annotations

from pathlib import Path

from forgefield.files import write_atomically
from forgefield.report.markup import section, shorten, tag
from forgefield.report.page import page_html
from forgefield.report.sections.evaluation import evaluation_cards, read_evaluation, suite_title


def write_evaluation_page(folder: Path) -> Path:
    """Write `evaluation.html` from `evaluation.json` in a folder and return its path."""
    content = read_evaluation(folder / "evaluation.json")
    name = shorten(content.get("run", ""), 80)
    header = tag(
        "header",
        tag("div", "Forgefield evaluation", class_="eyebrow"),
        tag("div", tag("h1", name), class_="title-row"),
        tag("p", suite_title(content), class_="subtitle"),
        class_="top wrap",
    )
    cards = section("evaluation", "Physics", None, evaluation_cards(content))
    footer = "Written by forgefield evaluate; the numbers are in evaluation.json."
    page = page_html(f"{name} · evaluation", header, [("evaluation", "Physics", cards)], footer=footer)
    return write_atomically(folder / "evaluation.html", page.encode("utf-8", errors="replace"))
