"""What the functions of `forgefield` return: lists and mappings that print, and display in a notebook, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.tasks.units import UNITS

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 8
"""Number of rows of a long table that are displayed."""


class Metrics(list[dict[str, Any]]):
    """Rows of `metrics.jsonl`, each a dictionary. `metrics["val/loss"]` is a column, `metrics.dataframe()` a pandas
    DataFrame."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.columns:
            raise KeyError(f"there is no metric '{key}'; there are {', '.join(self.columns) or 'none yet'}")
        return np.array([np.nan if (value := row.get(key)) is None else value for row in self], dtype=float)

    @property
    def columns(self) -> list[str]:
        """Names of all values, in the order in which they appear."""
        return list(dict.fromkeys(name for row in self for name in row))

    def dataframe(self) -> DataFrame:
        """The rows as a DataFrame; needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ForgefieldError("A DataFrame needs pandas: pip install pandas.") from error
        return pandas.DataFrame(list(self), columns=self.columns)

    def __repr__(self) -> str:
        return f"Metrics({len(self)} rows of {', '.join(self.columns) or 'nothing yet'})"

    def _repr_html_(self) -> str:
        rows = [[_cell(row.get(name)) for name in self.columns] for row in self[-SHOWN:]]
        note = f"<p>The last {len(rows)} of {len(self)} rows.</p>" if len(rows) < len(self) else ""
        return html_table(self.columns, rows) + note


class Errors(dict[str, float]):
    """Errors by name: `errors["forces_mae"]`, in meV/atom, meV/A, GPa, or the unit of the label."""

    def __init__(self, values: Mapping[str, float], units: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self.units = UNITS | dict(units or {})
        """Units by quantity."""

    def _rows(self) -> list[list[str]]:
        return [[name, _cell(value), self._unit(name)] for name, value in self.items()]

    def _unit(self, metric: str) -> str:
        quantity, _, kind = metric.partition("/")[0].rpartition("_")
        return self.units.get(quantity, "") if kind in ("mae", "rmse", "max") else ""

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit}".rstrip() for name, value, unit in rows)

    def _repr_html_(self) -> str:
        return html_table(["error", "", "unit"], self._rows())


class Predictions(dict[str, np.ndarray]):
    """Arrays of `predictions/SPLIT.npz` by name: `energy_pred` and `energy_ref` (n_frames,), eV, `forces_pred` and `forces_ref`
    (sum of n_atoms, 3), eV/A, `n_atoms`, ..."""

    def __init__(self, arrays: Mapping[str, np.ndarray], title: str) -> None:
        super().__init__(arrays)
        self.title = title

    def __repr__(self) -> str:
        lines = [f"  {name}: {array.dtype} {array.shape}" for name, array in self.items()]
        return "\n".join([f"Predictions({self.title})", *lines])


class Checks(list[Any]):
    """Results of `forgefield.check`, one for each law; `passed` says whether all of them are fulfilled."""

    def __init__(self, results: Iterable[Any], note: str | None = None) -> None:
        super().__init__(results)
        self.note = note
        """A sentence about the accuracy of radial tables, for models that have them."""

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self)

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [result.name for result in self if not result.passed]

    def _rows(self) -> list[list[str]]:
        return [
            [result.name, "ok" if result.passed else "FAILED", f"{result.value:.1e}", f"{result.tolerance:.1e}"]
            for result in self
        ]

    def __repr__(self) -> str:
        lines = [
            f"{name:<24} {verdict:<6} {value:>8} (allowed {limit})" for name, verdict, value, limit in self._rows()
        ]
        end = f"all {len(self)} checks passed" if self.passed else f"failed: {', '.join(self.failed)}"
        return "\n".join([*lines, end])

    def _repr_html_(self) -> str:
        return html_table(["check", "", "largest deviation", "allowed"], self._rows())


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as HTML; all text is escaped."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
