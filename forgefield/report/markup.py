"""HTML that cannot be broken by what a run folder contains.

Text becomes markup in one place only, `tag`, which escapes every child and every attribute that is not already an
`Html`. A run name, a species or a config line can therefore never open a tag, whoever wrote the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Union

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
