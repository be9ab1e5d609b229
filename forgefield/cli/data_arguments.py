"""Arguments shared by the verbs of `forgefield data`: how files are read, where to write, and a progress bar."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from forgefield.data.neighbours.graph import GraphOptions
    from forgefield.data.options import LabelOptions, UnitOptions

UNITS = {"energy": "eV", "length": "A", "forces": None, "stress": None}
LABELS = ("energy", "forces", "stress", "virial", "weight")
MOST_WORKERS = 8

Report = Callable[[int, "int | None"], None]


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Units and names of labels in the files."""
    group = parser.add_argument_group("reading files")
    for name, default in UNITS.items():
        shown = default or ("energy/length" if name == "forces" else "energy/length^3")
        shown += "; may be eV/atom, ..." if name == "energy" else ""
        group.add_argument(
            f"--{name}-unit", default=default, metavar="UNIT", help=f"unit of {name} in the files (default: {shown})"
        )
    for name in LABELS:
        group.add_argument(f"--{name}-key", metavar="KEY", help=f"name of the {name} in the files; none to ignore it")
    group.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME[=KEY][:PER[:SHAPE]]",
        help="an additional label, as in data.labels.fields: gap, gap=band_gap, charge:atom, dipole:frame:3, tensor:frame:3x3",
    )


def add_graph(parser: argparse.ArgumentParser) -> None:
    """Neighbour lists that a store is to hold."""
    group = parser.add_argument_group("neighbour lists in the store (default: none; training computes them)")
    group.add_argument("--cutoff", type=float, metavar="R", help="data.cutoff of the training, A")
    group.add_argument("--adaptive-cutoff", type=float, metavar="R", help="data.adaptive_cutoff of the training, A")
    group.add_argument("--max-neighbours", type=int, metavar="N", help="data.max_neighbours of the training")


SETTING = re.compile(r"(\+\+?|~)?(data|model|task|training|trainer)\.[\w.]+(=.*)?")


def without_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and the settings (`data.units.energy=kcal/mol`) that were among them."""
    settings = [word for word in words if SETTING.fullmatch(word) and not Path(word).exists()]
    return [word for word in words if word not in settings], settings


def take_settings(args: argparse.Namespace, settings: list[str]) -> None:
    """Set the options that mean the same as these settings."""
    if not settings:
        return
    from forgefield.config.loading import load_config, override_config, override_keys
    from forgefield.config.typed import select

    options = {f"data.units.{name}": f"{name}_unit" for name in UNITS}
    options |= {f"data.labels.{name}": f"{name}_key" for name in LABELS}
    options |= {f"data.{name}": name for name in ("cutoff", "adaptive_cutoff", "max_neighbours")}
    options = {key: name for key, name in options.items() if hasattr(args, name)}
    verb = f"data {args.data_verb}"
    if not options:
        raise ForgefieldError(f"'{settings[0]}': forgefield {verb} takes no settings (key=value).")
    config = override_config(load_config({"name": "data"}), settings, allowed=list(options), verb=verb)
    for key in override_keys(settings):
        setattr(args, options[key], select(config, key))


def spec_of(paths: list[str]) -> Any:
    return paths if len(paths) > 1 else paths[0]


def reading_of(args: argparse.Namespace) -> tuple[LabelOptions, UnitOptions]:
    """What `add_reading` took in. Refused where it would change nothing: stores are in eV and A, their labels chosen."""
    from forgefield.data.options import LabelOptions, UnitOptions
    from forgefield.data.readers import source_files
    from forgefield.data.store.store import is_store

    given = [f"--{name}-unit" for name, default in UNITS.items() if getattr(args, f"{name}_unit") != default]
    given += [f"--{name}-key" for name in LABELS if getattr(args, f"{name}_key") is not None]
    given += ["--field"] if args.field else []
    if given and all(is_store(file.path) for file in source_files(spec_of(args.paths))):
        raise ForgefieldError(
            f"{given[0]} is for reading files, but {', '.join(args.paths)} is a store: it is in eV and A, and its labels "
            "were chosen when it was written"
        )
    return (
        LabelOptions(**{name: getattr(args, f"{name}_key") for name in LABELS}, fields=_fields(args.field)),
        UnitOptions(**{name: getattr(args, f"{name}_unit") for name in UNITS}),
    )


def _fields(words: list[str]) -> dict[str, Any] | None:
    """What `--field` says, as `data.labels.fields`; None where nothing is said."""
    from forgefield.data.field_options import field_options

    found: dict[str, Any] = {}
    for word in words:
        named, *more = word.split(":")
        name, _, key = named.partition("=")
        options: dict[str, Any] = {"key": key} if key else {}
        try:
            options |= {"per": more[0]} if more else {}
            options |= {"shape": [int(size) for size in more[1].split("x")]} if len(more) > 1 else {}
        except ValueError:
            raise ForgefieldError(f"--field {word}: a shape is numbers with x between them, such as 3 or 3x3") from None
        if len(more) > 2:
            raise ForgefieldError(f"--field {word}: it is NAME=KEY:PER:SHAPE, such as dipole=mu:frame:3")
        found[name] = options
    field_options(found)  # refuses what cannot be a field
    return found or None


def graph_of(args: argparse.Namespace) -> GraphOptions | None:
    """What `add_graph` took in."""
    from forgefield.data.neighbours.graph import GraphOptions

    if args.cutoff is None:
        for name in ("adaptive_cutoff", "max_neighbours"):
            if getattr(args, name) is not None:
                raise ForgefieldError(f"--{name.replace('_', '-')} needs --cutoff, the radius of the neighbour lists")
        return None
    return GraphOptions(args.cutoff, adaptive_cutoff=args.adaptive_cutoff, max_neighbours=args.max_neighbours)


def refuse_target(target: Path, graph: GraphOptions | None) -> bool:
    """Refuse a place that frames cannot be written to. Returns whether it is to be a store."""
    from forgefield.data.readers.registry import file_format
    from forgefield.data.store.export import is_writable, writable_suffixes

    if target.exists() or target.is_symlink():
        raise ForgefieldError(f"{target} exists already; delete it or choose another name")
    if is_writable(target):
        if graph is not None:
            raise ForgefieldError(f"--cutoff makes neighbour lists, and {target} cannot hold any; only a store can")
        if not target.absolute().parent.is_dir():
            raise ForgefieldError(f"{target}: the folder {target.parent} does not exist")
        return False
    if file_format(target) is not None:
        raise ForgefieldError(
            f"{target}: files ending in '{target.suffix}' are read but not written; use one of {writable_suffixes()}, or "
            "a name without ending for a store"
        )
    return True


def usable_cores() -> int:
    """Processor cores that this process may use, 8 at most."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, MOST_WORKERS)


def size_text(n_bytes: int) -> str:
    """`812 B`, `1.4 MB`, `3.2 GB`."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


@contextmanager
def progress_bar(what: str, noun: str = "frames", *, speed: bool = True) -> Iterator[Report]:
    """A bar on stderr where that is a terminal; else nothing. Gives the function that moves it: done, and total if known."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Any) -> Text:
            pace = task.finished_speed or task.speed
            return Text("" if pace is None else f"{pace:,.0f} {noun}/s")

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    if speed:
        columns += [TextColumn("{task.completed:.0f} " + noun), Speed()]
    columns += [TimeRemainingColumn(compact=True)]
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=30) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=None if total is None else max(done, total))
