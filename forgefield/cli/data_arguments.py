"""Arguments shared by the verbs of `forgefield data`: how files are read, neighbour lists, and a progress bar."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.cli.arguments import add_option, selected
from forgefield.config.option import class_doc
from forgefield.data.options import DataOptions, LabelOptions, UnitOptions
from forgefield.errors import ForgefieldError
from forgefield.text import can_redraw

if TYPE_CHECKING:
    from rich.progress import Task

    from forgefield.data.neighbours.graph import GraphOptions

UNITS = ("energy", "length", "forces", "stress")
LABELS = ("energy", "forces", "stress", "virial", "weight")
GRAPH = ("cutoff", "adaptive_cutoff", "max_neighbours")
FLAGS = {
    **{f"data.units.{name}": f"{name}_unit" for name in UNITS},
    **{f"data.labels.{name}": f"{name}_key" for name in LABELS},
    **{f"data.{name}": name for name in GRAPH},
}
"""Settings of a config that flags correspond to, and the names of the flags."""
SETTING = re.compile(r"(\+\+?|~)?(data|model|task|training|trainer)\.[\w.]+(=.*)?")

Report = Callable[[int, "int | None"], None]


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Units and names of labels in the files."""
    units = parser.add_argument_group("units of the files", class_doc(UnitOptions))
    for name in UNITS:
        add_option(units, f"--{name}-unit", UnitOptions, name)
    labels = parser.add_argument_group("labels in the files", class_doc(LabelOptions))
    for name in LABELS:
        add_option(labels, f"--{name}-key", LabelOptions, name)
    labels.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME[=KEY][:PER[:SHAPE]]",
        help="an additional label, as in data.labels.fields: gap, gap=band_gap, charge:atom, dipole:frame:3, tensor:frame:3x3",
    )


def add_graph(parser: argparse.ArgumentParser) -> None:
    """Neighbour lists to be stored."""
    group = parser.add_argument_group(
        "neighbour lists in the store",
        "As in the section data of the training; without --cutoff, training computes them.",
    )
    for name in GRAPH:
        add_option(group, f"--{name.replace('_', '-')}", DataOptions, name, default="none")


def without_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and the settings (`data.units.energy=kcal/mol`) that were among them."""
    settings = [word for word in words if SETTING.fullmatch(word) and not Path(word).exists()]
    return [word for word in words if word not in settings], settings


def apply_settings(args: argparse.Namespace, settings: list[str]) -> None:
    """Set the flags that correspond to these settings."""
    if not settings:
        return
    from forgefield.config.loading import load_config, override_config, override_keys
    from forgefield.config.typed import select

    allowed = [key for key, flag in FLAGS.items() if flag in vars(args)]
    verb = f"data {args.data_verb}"
    if not allowed:
        raise ForgefieldError(f"'{settings[0]}': forgefield {verb} takes no settings (key=value).")
    config = override_config(load_config({"name": "data"}), settings, allowed=allowed, verb=verb)
    for key in override_keys(settings):
        vars(args)[FLAGS[key]] = select(config, key)


def source_of(paths: list[str]) -> str | list[str]:
    """One path, or a list of several."""
    return paths if len(paths) > 1 else paths[0]


def reading_options(args: argparse.Namespace) -> tuple[LabelOptions, UnitOptions]:
    """The options of `add_reading`."""
    units = selected(args, *(f"{name}_unit" for name in UNITS))
    labels = selected(args, *(f"{name}_key" for name in LABELS))
    return (
        LabelOptions(**{flag.removesuffix("_key"): key for flag, key in labels.items()}, fields=_fields(args.field)),
        UnitOptions(**{flag.removesuffix("_unit"): unit for flag, unit in units.items()}),
    )


def _fields(words: list[str]) -> dict[str, Any] | None:
    """`--field` as `data.labels.fields`; None without it."""
    from forgefield.data.field_options import field_options

    fields: dict[str, Any] = {}
    for word in words:
        field, *more = word.split(":")
        name, _, key = field.partition("=")
        options: dict[str, Any] = {"key": key} if key else {}
        try:
            options |= {"per": more[0]} if more else {}
            options |= {"shape": [int(size) for size in more[1].split("x")]} if len(more) > 1 else {}
        except ValueError:
            raise ForgefieldError(f"--field {word}: a shape is numbers with x between them, such as 3 or 3x3") from None
        if len(more) > 2:
            raise ForgefieldError(f"--field {word}: it is NAME=KEY:PER:SHAPE, such as dipole=mu:frame:3")
        fields[name] = options
    field_options(fields)  # raises for what cannot be a field
    return fields or None


def graph_options(args: argparse.Namespace) -> GraphOptions | None:
    """The options of `add_graph`; None without --cutoff."""
    from forgefield.data.neighbours.graph import GraphOptions

    options = selected(args, *GRAPH)
    if options and "cutoff" not in options:
        flag = next(iter(options)).replace("_", "-")
        raise ForgefieldError(f"--{flag} needs --cutoff, the radius of the neighbour lists")
    return GraphOptions(**options) if options else None


@contextmanager
def progress_bar(title: str, noun: str = "frames", *, speed: bool = True) -> Iterator[Report]:
    """A progress bar on stderr if that is a terminal. Yields the function that updates it: done, and total if known."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            pace = task.finished_speed or task.speed
            return Text("" if pace is None else f"{pace:,.0f} {noun}/s")

    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    if speed:
        columns += [TextColumn("{task.completed:.0f} " + noun), Speed()]
    columns += [TimeRemainingColumn(compact=True)]
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, speed_estimate_period=30, disable=not can_redraw(console)
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=None if total is None else max(done, total))
