"""Building blocks of the page: sections, cards, tabs and columns, and mappings shown as rows of names and values."""

from __future__ import annotations

from typing import Any

from forgefield.report.folder import RunData
from forgefield.report.markup import Child, Html, join, key_values, tag
from forgefield.report.numbers import shorten


def section(anchor: str, title: str, lead: Child, *content: Child) -> Html:
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, *content, id=anchor)


def card(title: str | None, *content: Child) -> Html:
    return tag("div", tag("h3", title) if title else None, *content, class_="card")


def empty_card(run: RunData, file: str, title: str) -> Html:
    """A card in place of a figure whose file is missing: the problem, and the command that writes the file."""
    note = run.note(file)
    problem = f" {note.problem}. " if note else " has no data to show. "
    if note is None:
        hint: Child = None
    elif note.is_command:
        hint = join(["To create it: ", tag("code", note.remedy)])
    else:
        hint = note.remedy.replace("`", "") + "."
    return tag("div", tag("h3", title), tag("p", tag("code", file), problem, hint), class_="card empty")


def pairs_card(title: str, rows: list[tuple[str, Child]]) -> Html | None:
    return card(title, key_values(rows)) if rows else None


TABS = 8
"""Largest number of panels on a page; the style sheet has rules for this many."""


def tabbed(panels: list[tuple[str, Html]]) -> Html:
    """Panels, (title, content), of which one is shown at a time; the first `TABS` of them."""
    buttons: list[Child] = []
    for number, (title, _) in enumerate(panels[:TABS]):
        buttons.append(tag("input", type="radio", name="split", id=f"tab-{number}", checked=number == 0))
        buttons.append(tag("label", title, for_=f"tab-{number}"))
    shown = [tag("div", content, class_=f"panel panel-{number}") for number, (_, content) in enumerate(panels[:TABS])]
    return tag("div", *buttons, *shown, class_="tabs")


def stacks(*columns: list[Html | None]) -> Html:
    """Columns of cards, each filled from the top, so that cards of different heights leave no gaps."""
    return tag("div", *[tag("div", *column, class_="stack") for column in columns if any(column)], class_="grid two")


def stored_rows(stored: Any) -> list[tuple[str, Child]]:
    """Rows of an entry of `run.json`: a mapping, a list of (name, value), or text."""
    if isinstance(stored, dict):
        return flat_rows(stored)
    if isinstance(stored, list):
        rows = [row for row in stored if isinstance(row, list) and len(row) == 2]
        return flat_rows({str(name): value for name, value in rows})
    return [("Description", shorten(stored, 1000))] if stored else []


def flat_rows(values: dict[Any, Any], prefix: str = "", limit: int = 60) -> list[tuple[str, Child]]:
    """A nested mapping as rows named `outer.inner`; at most `limit` rows, each of bounded length."""
    rows: list[tuple[str, Child]] = []
    for key, value in values.items():
        name = f"{prefix}{shorten(key, 60)}"
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            rows += flat_rows(value, f"{name}.", limit)
        else:
            rows.append((name, _readable(value)))
    return rows[:limit]


def _readable(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}".replace("-", "−", 1) if value < 0 else f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return shorten(", ".join(_readable(entry) for entry in value[:50]), 160)
    return shorten(value, 160)


def dim_comments(source: str) -> Html:
    """The text with its comments in a muted colour."""
    lines: list[Child] = []
    for line in source.splitlines():
        start = 0 if line.lstrip().startswith("#") else line.find("  # ")
        if start < 0:
            start = line.find(" # ")
        if start < 0:
            lines.append(line)
        else:
            lines.append(join([line[:start], tag("span", line[start:], class_="comment")]))
    return join(lines, "\n")
