"""One run as the live page and the tables see it, read again only where its files have changed.

A look at an unchanged run costs a few calls of `stat`; a row that was appended to the metrics costs the reading of that row.
Files may be missing, half written or damaged at any time: what cannot be read is left out until the next look.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from forgefield.diagnosis.records import FOLDER, Finding, findings_of, read_records, thinned
from forgefield.errors import ForgefieldError
from forgefield.report.folder import Row, RunData, errors_of, numbers_of
from forgefield.report.sections.headline import best_row, median_of
from forgefield.runs import RUN_JSON, Run
from forgefield.settings import as_dict
from forgefield.training.run.owner import Owner, read_owner
from forgefield.untrusted.documents import load_json, load_yaml
from forgefield.weights import stored_checksum

Value = TypeVar("Value")
Stamp = tuple[int, int, int]
"""Inode, size and time of the last change of a file."""
STARTING, RUNNING, INTERRUPTED = "starting", "running", "interrupted"
COURSE = 40
"""Number of points of the small curve in the table."""
_COMPARED = 64
"""How many bytes before the end of what was read must be the same for a file to count as appended to."""


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class Cached(Generic[Value]):
    """A value that is computed from a file, again when the file changes.

    read: gets the path; called only for a file that exists. missing: makes the value without the file.
    """

    def __init__(self, path: Path, read: Callable[[Path], Value], missing: Callable[[], Value]) -> None:
        self._path, self._read, self._missing = path, read, missing
        self._stamp: Stamp | None = None
        self._value = missing()

    def value(self) -> Value:
        now = stamp(self._path)
        if now != self._stamp:
            try:
                self._value = self._read(self._path) if now is not None else self._missing()
            except (OSError, ValueError, RecursionError, ForgefieldError, yaml.YAMLError):
                self._value = self._missing()
            self._stamp = now
        return self._value


class AppendedLines:
    """The complete lines of a file that grows, of which only the new ones are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp | None = None
        self._offset, self._end = 0, b""

    def read(self) -> tuple[list[str], bool]:
        """New lines, and whether they replace all earlier ones, because the file was written again."""
        now = stamp(self._path)
        if now == self._stamp:
            return [], False
        is_new = self._stamp is None or now is None or now[0] != self._stamp[0] or now[1] < self._offset
        self._stamp = now
        if now is None:
            self._offset, self._end = 0, b""
            return [], True
        with open(self._path, "rb") as file:
            if not is_new:
                file.seek(self._offset - len(self._end))
                is_new = file.read(len(self._end)) != self._end
            if is_new:
                self._offset, self._end = 0, b""
            file.seek(self._offset)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._end = (self._end + complete)[-_COMPARED:]
        return complete.decode(errors="replace").splitlines(), is_new


class LiveRun:
    """A run folder. `update` reads what has changed; everything else shows the state of the last update."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = path.name if name is None else name
        """Its name in tables: the path in the folder that is watched."""
        self.data = RunData(path)
        self.owner: Owner | None = None
        self._info = Cached[dict[str, Any]](path / "run.json", _read_info, dict)
        self._metrics, self._timing = AppendedLines(path / "metrics.jsonl"), AppendedLines(path / "timing.csv")
        self._timing_header: list[str] = []
        self._summary: dict[str, Any] = {}
        """What was computed from all rows, until there are other rows."""
        self._summarised: dict[str, Any] = {}
        self._tests: dict[str, Cached[dict[str, Any]]] = {}
        self._folder_stamp: Stamp | None = None
        self._findings_stamp: tuple[Stamp | None, ...] = ()
        self._checksum = Cached(path / "checkpoints" / "best.safetensors", stored_checksum, lambda: None)
        self._config = Cached(path / "config.yaml", lambda file: load_yaml(file.read_text()), dict)
        self._settings = Cached[dict[str, Any]](path / "config.yaml", lambda file: _settings(file.parent), dict)

    def update(self) -> None:
        """Read what has changed since the last update."""
        self.data.info = self._info.value()
        self.owner = read_owner(self.path)
        if "monitor" not in self.data.info:  # written by an earlier version
            config = self._config.value()
            self.data.config = config if isinstance(config, dict) else {}
        lines, is_new = self._metrics.read()
        if is_new:
            self.data.metrics = []
        if is_new or lines or self.data.info is not self._summarised:
            self._summary, self._summarised = {}, self.data.info
        self.data.metrics += [row for line in lines if (row := _metrics_row(line))]
        lines, is_new = self._timing.read()
        if is_new or lines:
            self._summary.clear()
        if is_new:
            self.data.timing, self._timing_header = [], next(csv.reader(lines[:1]), [])
            lines = lines[1:]
        table = csv.reader(line.replace("\0", "") for line in lines)
        self.data.timing += [_from_one(numbers_of(dict(zip(self._timing_header, cells)))) for cells in table]
        self._update_tests()
        self._update_findings()

    def _update_tests(self) -> None:
        now = stamp(self.path)  # changes when a file is added, removed or replaced
        if now != self._folder_stamp:
            self._folder_stamp = now
            names = sorted(entry.name for entry in os.scandir(self.path) if _is_test(entry.name)) if now else []
            self._tests = {
                name.removesuffix(".json"): self._tests.get(name.removesuffix(".json"))
                or Cached(self.path / name, _read_mapping, dict)
                for name in names
            }
        tests = {name: test.value() for name, test in self._tests.items()}
        self.data.tests = {name: test for name, test in tests.items() if not self._is_outdated(test)}

    def _is_outdated(self, test: dict[str, Any]) -> bool:
        """Whether errors were measured with earlier weights of the run."""
        stored, current = test.get("weights_sha256"), self._checksum.value()
        return test.get("weights") == "best" and isinstance(stored, str) and current is not None and stored != current

    def _update_findings(self) -> None:
        folder = self.path / FOLDER
        stamps: tuple[Stamp | None, ...] = ()
        if (now := stamp(folder)) is not None:
            stamps = (now, *(stamp(entry) for entry in os.scandir(folder)))
        if stamps != self._findings_stamp:
            self._findings_stamp = stamps
            self.data.diagnosis = read_records(self.path) if stamps else {}

    # ---- what it shows

    @property
    def state(self) -> str:
        """`starting`, `running`, `interrupted` (the process is gone), or the status in `run.json`."""
        status = str(self.data.info.get("status", "new"))
        if self.owner is not None:
            return RUNNING if status == RUNNING else STARTING
        return {RUNNING: INTERRUPTED, "new": "not started"}.get(status, status)

    @property
    def epoch(self) -> int | None:
        """Number of completed epochs, a part of one counted as one."""
        return int(self.data.metrics[-1]["epoch"]) if self.data.metrics and "epoch" in self.data.metrics[-1] else None

    @property
    def seconds(self) -> float | None:
        """Training time without validation."""
        seconds = [row["seconds"] for row in self.data.timing if "seconds" in row]
        return sum(seconds) if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Expected time until the last epoch or step of a run that is trained, at the speed so far."""
        if self.owner is None or not self.data.metrics or not self.seconds:
            return None
        last, info = self.data.metrics[-1], self.data.info
        shares = [
            last[key] / limit
            for key, limit in (("epoch", info.get("max_epochs")), ("step", info.get("max_steps")))
            if key in last and isinstance(limit, int) and limit > 0
        ]
        share = max(shares, default=0.0)
        return self.seconds * (1 / share - 1) if 0 < share <= 1 else None

    @property
    def speed(self) -> float | None:
        """Median of atoms, or points, per second."""
        value: float | None = self._once(
            "speed", lambda: median_of(self.data.timing, f"{self.data.kind.counted}_per_second")
        )
        return value

    @property
    def best(self) -> Row:
        """The row with the lowest monitored value; empty if there is none yet."""
        row: Row = self._once("best", lambda: best_row(self.data) or {})
        return row

    @property
    def course(self) -> list[float]:
        """The monitored value over the training, thinned out to at most 40 values."""
        monitor = self.data.monitor
        values: list[float] = self._once(
            "course", lambda: thinned([row[monitor] for row in self.data.metrics if monitor in row], most=COURSE)[0]
        )
        return values

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        if name not in self._summary:
            self._summary[name] = compute()
        return self._summary[name]

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        """Findings of the diagnosis callbacks, with the name of the callback, in the order of steps."""
        found = [(name, finding) for name, record in self.data.diagnosis.items() for finding in findings_of(record)]
        return sorted(found, key=lambda entry: entry[1].step)

    def errors(self) -> dict[str, dict[str, float]]:
        """Errors by split and name (`forces_mae`): of the best weights in validation, and of each test set."""
        named: dict[str, dict[str, float]] = {"val": {}}
        for key, value in self.best.items():
            split, _, name = key.partition("/")
            if split == "val" or split.startswith("val-"):
                named.setdefault(split, {})[name] = value
        tests = {name: errors_of(test) for name, test in self.data.tests.items()}
        return {name: errors for name, errors in (named | tests).items() if errors}

    def settings(self) -> dict[str, Any]:
        """All settings, with the defaults of this version where the run has none."""
        return self._settings.value()

    def log(self, lines: int = 200) -> list[str]:
        """The last lines of the log."""
        try:
            with open(self.path / "log.txt", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 400 * lines))
                content = file.read()
        except OSError:
            return []
        return content.decode(errors="replace").splitlines()[-lines:]


def _read_info(path: Path) -> dict[str, Any]:
    return RUN_JSON.upgrade(_read_mapping(path), path)


def _read_mapping(path: Path) -> dict[str, Any]:
    value = load_json(path.read_text(encoding="utf-8", errors="replace"))
    return value if isinstance(value, dict) else {}


def _settings(folder: Path) -> dict[str, Any]:
    """As the run's version resolved them, or, where this version cannot interpret them, as they are in the file."""
    run = Run(folder)
    try:
        return as_dict(run.config)
    except ForgefieldError:
        return run.settings


def _metrics_row(line: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return _from_one(numbers_of(value)) if isinstance(value, dict) else {}


def _from_one(row: Row) -> Row:
    """The row with epochs counted from one; files count from zero."""
    return row | {"epoch": row["epoch"] + 1} if "epoch" in row else row


def _is_test(name: str) -> bool:
    return name == "test.json" or (name.startswith("test-") and name.endswith(".json"))
