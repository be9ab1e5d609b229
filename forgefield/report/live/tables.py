"""Tables of runs: their progress and errors, and what differs between some of them.

The live page, `forgefield runs`, `forgefield compare` and the functions of the same names show these tables. A cell has a text,
which is the same everywhere, and a value to sort by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any

from forgefield.errors import ForgefieldError
from forgefield.report.folder import as_number, split_title
from forgefield.report.live.record import LiveRun
from forgefield.report.markup import NOTHING, duration, short_count, shorten, significant, with_unit
from forgefield.report.sections.headline import parameter_count
from forgefield.results import html_table
from forgefield.tasks.units import CLASS_METRICS, UNITS

if TYPE_CHECKING:
    from pandas import DataFrame

KINDS = ("mae", "rmse")
ORDER = ("energy", "forces", "stress", "virial")
"""Quantities that come first; others follow in alphabetical order."""
_SCORES = (*CLASS_METRICS, "auroc")
_NOT_COMPARED = ("name", "out")


@dataclass(frozen=True)
class Column:
    """title: its heading, followed by `detail` (the data of an error) and `unit`. numeric: whether values are numbers."""

    key: str
    title: str
    detail: str = ""
    unit: str = ""
    numeric: bool = False

    @property
    def heading(self) -> str:
        return ", ".join(part for part in (self.title, self.detail, self.unit) if part)


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Table:
    """Displayed as text in a terminal, and as HTML in a notebook."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""

    def column(self, key: str) -> list[float | str | None]:
        """The values of a column."""
        index = [column.key for column in self.columns].index(key)
        return [row[index].value for row in self.rows]

    def sorted_by(self, key: str, *, descending: bool = False) -> Table:
        """The rows in the order of a column, those without a value last. key: as in `Column.key`, or a heading."""
        names = {name: i for i, c in enumerate(self.columns) for name in (c.heading, c.title, c.key)}
        if key not in names:
            raise ForgefieldError(f"There is no column '{key}'; there are {', '.join(c.key for c in self.columns)}.")
        index = names[key]
        known = [row for row in self.rows if row[index].value is not None]
        missing = tuple(row for row in self.rows if row[index].value is None)
        known.sort(key=lambda row: (isinstance(row[index].value, str), row[index].value), reverse=descending)
        return Table(self.columns, (*known, *missing), self.title)

    def without_empty_columns(self, kept: Sequence[str] = ()) -> Table:
        """The columns that have a value in any row, and those that are `kept`."""
        shown = [
            i
            for i, column in enumerate(self.columns)
            if column.key in kept or any(row[i].value is not None for row in self.rows)
        ]
        rows = tuple(tuple(row[i] for i in shown) for row in self.rows)
        return Table(tuple(self.columns[i] for i in shown), rows, self.title)

    def fitting(self, width: int, kept: Sequence[str] = ()) -> tuple[Table, list[str]]:
        """The table without the last columns that are not `kept`, as many as do not fit into `width` characters; and their
        headings."""
        table, dropped = self, []
        while max(map(len, table.lines()), default=0) > width:
            free = [i for i, column in enumerate(table.columns) if column.key not in kept]
            if not free:
                break
            dropped.append(table.columns[free[-1]].heading)
            rows = tuple(row[: free[-1]] + row[free[-1] + 1 :] for row in table.rows)
            table = Table(table.columns[: free[-1]] + table.columns[free[-1] + 1 :], rows, table.title)
        return table, dropped[::-1]

    def dataframe(self) -> DataFrame:
        """The values as a DataFrame; needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ForgefieldError("A DataFrame needs pandas: pip install pandas.") from error
        return pandas.DataFrame(
            [[cell.value for cell in row] for row in self.rows], columns=[column.key for column in self.columns]
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "columns": [asdict(column) for column in self.columns],
            "rows": [[[cell.text, cell.value] for cell in row] for row in self.rows],
        }

    def lines(self) -> list[str]:
        """The table as text: lines of headings, a rule, then the rows."""
        headings = [list(line) for line in zip(*((c.title, c.detail, c.unit) for c in self.columns)) if any(line)]
        rows = [*headings, *([cell.text for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                f"{text:>{width}}" if column.numeric else f"{text:<{width}}"
                for text, width, column in zip(row, widths, self.columns)
            ).rstrip()
            for row in rows
        ]
        return [*lines[: len(headings)], "─" * max(map(len, lines), default=0), *lines[len(headings) :]]

    def __str__(self) -> str:
        return "\n".join([*([self.title] if self.title else []), *self.lines()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title = f"<p><b>{escape(self.title)}</b></p>" if self.title else ""
        return title + html_table([c.heading for c in self.columns], [[cell.text for cell in row] for row in self.rows])


def runs_table(runs: Sequence[LiveRun], kind: str = "mae") -> Table:
    """One row for each run: state, progress, errors, time, speed and size.

    kind: the errors that are shown, `mae` or `rmse`; accuracies of classes are always shown.
    """
    if kind not in KINDS:
        raise ForgefieldError(f"Errors are 'mae' or 'rmse', not '{kind}'.")
    errors = [run.errors() for run in runs]
    wanted = error_columns(errors, lambda name: _measure(name) in (kind, "accuracy") and not _is_detail(name))
    units = _units(runs)
    columns = (
        Column("run", "run"),
        Column("state", "state"),
        Column("epoch", "epoch", numeric=True),
        Column("loss", "best loss", numeric=True),
        *(
            Column(f"{split}/{name}", _name_of_error(name), split_title(split), _unit(name, units), numeric=True)
            for split, name in wanted
        ),
        Column("seconds", "time", numeric=True),
        Column("seconds_left", "time left", numeric=True),
        Column("speed", "speed", numeric=True),
        Column("parameters", "parameters", numeric=True),
        Column("started", "started"),
    )
    table = Table(columns, tuple(_run_row(run, found, wanted) for run, found in zip(runs, errors)))
    return table.without_empty_columns(("run", "state", "epoch"))


def _run_row(
    run: LiveRun, errors: Mapping[str, Mapping[str, float]], wanted: Sequence[tuple[str, str]]
) -> tuple[Cell, ...]:
    best = run.best.get(run.data.monitor)
    parameters = parameter_count(run.data)
    return (
        Cell(run.name, run.name),
        Cell(run.state, run.state),
        _progress(run),
        _number(best),
        *(_number(errors.get(split, {}).get(name)) for split, name in wanted),
        Cell(duration(run.seconds), run.seconds),
        Cell(duration(run.seconds_left), run.seconds_left),
        Cell(_speed(run), run.speed),
        Cell(short_count(parameters), parameters),
        _date(run.data.info.get("started")),
    )


def errors_table(runs: Sequence[LiveRun]) -> Table:
    """All errors of some runs: one row for each, one column for each run."""
    errors = [run.errors() for run in runs]
    units = _units(runs)
    columns = (Column("error", "error"), Column("data", "data"), *(Column(r.name, r.name, numeric=True) for r in runs))
    rows = [
        (
            Cell(with_unit(_name_of_error(name), _unit(name, units)), name),
            Cell(split_title(split), split),
            *(_number(found.get(split, {}).get(name)) for found in errors),
        )
        for split, name in error_columns(errors, lambda name: _measure(name) in (*KINDS, *_SCORES))
    ]
    return Table(columns, tuple(rows), "Errors")


def settings_table(runs: Sequence[LiveRun]) -> Table:
    """The settings in which some runs differ: one row for each setting, one column for each run."""
    values = [dict(_flat(run.settings())) for run in runs]
    keys = dict.fromkeys(key for settings in values for key in settings)
    rows = [
        (Cell(key, key), *(_setting(settings.get(key)) for settings in values))
        for key in keys
        if key not in _NOT_COMPARED and any(settings.get(key) != values[0].get(key) for settings in values)
    ]
    columns = (Column("setting", "setting"), *(Column(run.name, run.name) for run in runs))
    return Table(columns, tuple(rows), "Settings that differ")


def error_columns(
    errors: Sequence[Mapping[str, Mapping[str, float]]], is_shown: Callable[[str], bool]
) -> list[tuple[str, str]]:
    """Split and name of all errors that any run has, ordered by quantity, then validation and tests.

    errors: of each run, as from `LiveRun.errors`. is_shown: whether an error of this name is wanted.
    """
    every = {(split, name) for found in errors for split, named in found.items() for name in named if is_shown(name)}

    def position(column: tuple[str, str]) -> tuple[Any, ...]:
        split, name = column
        quantity = _quantity(name)
        rank = ORDER.index(quantity) if quantity in ORDER else len(ORDER)
        return rank, quantity, name.partition("/")[2], _measure(name), split != "val", split != "test", split

    return sorted(every, key=position)


def _measure(name: str) -> str:
    """`mae` of `forces_mae/Cu`."""
    return name.partition("/")[0].rpartition("_")[2] if not name.endswith("cross_entropy") else "cross_entropy"


def _quantity(name: str) -> str:
    """`forces` of `forces_mae/Cu`."""
    return name.partition("/")[0].removesuffix(f"_{_measure(name)}")


def _name_of_error(name: str) -> str:
    measure, species = _measure(name), name.partition("/")[2]
    shown = measure.upper() if measure in (*KINDS, "auroc", "f1") else measure.replace("_", " ")
    return f"{shorten(_quantity(name), 40).replace('_', ' ')}{f' of {species}' if species else ''} {shown}"


def _is_detail(name: str) -> bool:
    """Whether it is the error of one species or class, or one that another column has in another unit."""
    return "/" in name or _quantity(name).endswith("energy_total")


def _units(runs: Sequence[LiveRun]) -> dict[str, str]:
    units = dict(UNITS)
    for run in runs:
        units |= run.data.heads
    return units


def _unit(name: str, units: Mapping[str, str]) -> str:
    return units.get(_quantity(name), "") if _measure(name) in KINDS else ""


def _progress(run: LiveRun) -> Cell:
    limit, epoch = run.data.info.get("max_epochs"), run.epoch
    of = f"/{limit}" if isinstance(limit, int) and limit > 0 else ""
    return Cell(f"{epoch}{of}" if epoch is not None else NOTHING, epoch)


def _speed(run: LiveRun) -> str:
    return NOTHING if run.speed is None else f"{short_count(run.speed)} {run.data.kind.counted}/s"


def _number(value: float | None) -> Cell:
    return Cell(significant(value), value)


def _date(text: object) -> Cell:
    """A time as in `run.json`, in the local time zone."""
    try:
        time = datetime.fromisoformat(str(text)).astimezone()
    except ValueError:
        return Cell(NOTHING, None)
    return Cell(f"{time:%Y-%m-%d %H:%M}", time.timestamp())


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _setting(value: object) -> Cell:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else shorten(value, 80)
    return Cell(text, number if (number := as_number(value)) is not None else text)
