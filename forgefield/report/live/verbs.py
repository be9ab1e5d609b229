"""`forgefield.list_runs`, `forgefield.compare` and `forgefield.watch`."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Union

from forgefield.errors import ForgefieldError
from forgefield.report.live.folder import RunsFolder, folder_of, opened
from forgefield.report.live.tables import Table, errors_table, runs_table, settings_table
from forgefield.runs import Run

if TYPE_CHECKING:
    from forgefield.report.live.server import LivePage

RunSource = Union[str, "os.PathLike[str]", Run]


@dataclass(frozen=True)
class RunComparison:
    """Displayed as two tables, in a terminal and in a notebook. Each has a method `dataframe`."""

    errors: Table
    """One row for each error, one column for each run."""
    settings: Table
    """One row for each setting that differs, one column for each run."""

    def __str__(self) -> str:
        settings = str(self.settings) if self.settings.rows else "All settings are the same."
        return f"{self.errors}\n\n{settings}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.errors._repr_html_() + self.settings._repr_html_()


def list_runs(
    folder: str | os.PathLike[str] = "runs",
    *,
    errors: str = "mae",
    sort: str = "started",
    descending: bool = False,
    first: int | None = None,
) -> Table:
    """All runs in a folder as a table: state, progress, errors, time, speed and size.

    Parameters
    ----------
    folder
        The folder, or a run in it.
    errors
        `mae` or `rmse`.
    sort
        A column, by its key or heading; `forces_mae` is the error in validation, `test/forces_mae` that of the test set.
    descending
        Whether the largest value comes first. Runs without a value are always last.
    first
        Number of rows; None for all.
    """
    path, _ = folder_of(folder)
    runs = list(RunsFolder(path).update().values())
    if not runs:
        raise ForgefieldError(f"There are no runs in {path}.")
    table = runs_table(runs, errors)
    keys = [column.key for column in table.columns]
    sort = f"val/{sort}" if sort not in keys and f"val/{sort}" in keys else sort
    if sort in keys or sort != "started":  # runs of other programs may have no date at all
        table = table.sorted_by(sort, descending=descending)
    return replace(table, rows=table.rows[:first])


def compare(*runs: RunSource) -> RunComparison:
    """The errors of some runs side by side, and the settings in which they differ.

    Parameters
    ----------
    *runs
        Names or paths of runs, packaged models (`.ff`), or `Run` objects; at least two.
    """
    if len(runs) < 2:
        raise ForgefieldError("A comparison needs at least two runs; `forgefield runs` lists them.")
    with tempfile.TemporaryDirectory(prefix="forgefield-") as folder:
        live = opened(runs, Path(folder))
        return RunComparison(errors_table(live), settings_table(live))


def watch(folder: str | os.PathLike[str] = "runs", *, port: int | None = None) -> LivePage:
    """Serve a live page of all runs in a folder on this machine, in the background. `close()` ends it.

    Parameters
    ----------
    folder
        A folder of runs, or a run, which the page then shows first.
    port
        Of the page; None for the first free one from 8642 on.
    """
    from forgefield.report.live.server import LivePage

    return LivePage(folder, port=port)
