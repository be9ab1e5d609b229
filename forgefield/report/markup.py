"""Text of the page: numbers with units, HTML elements, tables, and the sections, cards and tabs built from them.

Text becomes HTML in one place only, `tag`, which escapes every child and attribute that is not already `Html`. A run name, a
species or a line of a config can therefore not inject markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from forgefield.report.folder import RunData

NOTHING = "–"
THIN = "\u2009"


def significant(value: float | None, digits: int = 3) -> str:
    """`3.21`, `41.0`, `12 300`, `1.2e-05`; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if size < -4 or size > 8:
        written = f"{value:.{digits - 1}e}"
    else:
        written = f"{round(value, digits - 1 - size):,.{max(digits - 1 - size, 0)}f}".replace(",", THIN)
    return written.replace("-", "−", 1) if value < 0 else written


def count(value: float | None) -> str:
    """An integer with thousands separated."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{round(value):,}".replace(",", THIN)


def short_count(value: float | None) -> str:
    """`812`, `61.3 k`, `1.25 M`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return significant(value / (1e3 if letter == "k" else limit)) + THIN + letter
    return count(value) if abs(value) >= 100 or float(value).is_integer() else significant(value)


def duration(seconds: float | None) -> str:
    """`48 s`, `3 min 05 s`, `2 h 14 min`, `3 d 04 h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 10:
        return f"{significant(seconds, 2)} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    if rounded < 86400:
        return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600:02d} h"


def with_unit(name: str, unit: str) -> str:
    """`MAE, meV`; the name alone for a quantity without a unit."""
    return f"{name}, {unit}" if unit else name


def shorten(value: object, limit: int = 200) -> str:
    """The value as text of bounded length."""
    written = str(value)
    return written if len(written) <= limit else written[: limit - 1] + "…"


_VOID = {"meta", "input", "hr", "br"}
Child = Union["Html", str, int, float, None]


class Html(str):
    """Markup that is already escaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """The value as escaped text; `Html` is returned unchanged."""
    if isinstance(value, Html):
        return value
    return Html(escape("" if value is None else str(value), quote=True))


def join(children: Iterable[Child], separator: str = "") -> Html:
    return Html(text(separator).join(text(child) for child in children))


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """One element. `class_` and `for_` stand for the Python keywords, `aria_label` for `aria-label`; an attribute that
    is None or False is left out and one that is True has no value."""
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written += f" {key}" if value is True else f' {key}="{text(value)}"'
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def table(
    header: Sequence[Child], rows: Sequence[Sequence[Child]], *, caption: str | None = None, text_columns: int = 1
) -> Html:
    """A table whose first `text_columns` columns are text and whose other columns are numbers, aligned to the right.

    Units in the header (`MAE, meV/A`) and short entries are not broken over two lines.
    """
    names = [
        tag("th", _with_unit(cell), class_="num" if column >= text_columns else None)
        for column, cell in enumerate(header)
    ]
    body = [
        tag(
            "tr",
            *[tag("td", cell, class_=_cell_class(column - text_columns + 1, cell)) for column, cell in enumerate(row)],
        )
        for row in rows
    ]
    title = tag("caption", caption) if caption else None
    return tag("div", tag("table", title, tag("thead", tag("tr", *names)), tag("tbody", *body)), class_="scroll")


def _with_unit(header: Child) -> Child:
    name, comma, unit = str(header).partition(", ")
    return join([name + comma, tag("span", unit, class_="unbroken")]) if comma else header


def _cell_class(column: int, cell: Child) -> str | None:
    if column > 0:
        return "num"
    return "unbroken" if cell is not None and len(str(cell)) <= 12 else None


def key_values(rows: list[tuple[str, Child]]) -> Html:
    """Names on the left, values on the right."""
    return tag("dl", *[tag("div", tag("dt", key), tag("dd", value)) for key, value in rows], class_="pairs")


# ---- building blocks of the page


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


def stored_rows(stored: object) -> list[tuple[str, Child]]:
    """Rows of an entry of `run.json`: a mapping, a list of (name, value), or text."""
    if isinstance(stored, dict):
        return flat_rows(stored)
    if isinstance(stored, list):
        rows = [row for row in stored if isinstance(row, list) and len(row) == 2]
        return flat_rows({str(name): value for name, value in rows})
    return [("Description", shorten(stored, 1000))] if stored else []


def flat_rows(values: Mapping[str, object], prefix: str = "", limit: int = 60) -> list[tuple[str, Child]]:
    """A nested mapping as rows named `outer.inner`; at most `limit` rows, each of bounded length."""
    rows: list[tuple[str, Child]] = []
    for key, value in values.items():
        name = f"{prefix}{shorten(key, 60)}"
        if isinstance(value, dict) and value and prefix.count(".") < 4:
            rows += flat_rows(value, f"{name}.", limit)
        else:
            rows.append((name, _readable(value)))
    return rows[:limit]


def _readable(value: object) -> str:
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
