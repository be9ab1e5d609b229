"""What the live page asks for, as JSON values: the table of runs, curves, one run in detail, a comparison; and its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from forgefield.diagnosis.records import thinned
from forgefield.errors import ForgefieldError
from forgefield.report.live.folder import RunsFolder
from forgefield.report.live.record import LiveRun
from forgefield.report.live.tables import errors_table, runs_table, settings_table
from forgefield.report.markup import shorten
from forgefield.report.sections.diagnosis import NAMES
from forgefield.tasks.units import unit_of
from forgefield.training.run.owner import REQUESTS, read_owner, send_request

POINTS = 800
"""Largest number of points of a curve."""
LARGEST_COMPARISON = 12
"""Number of runs that may be compared, or drawn, at the same time."""


class Answers:
    """Answers for one folder. A thread holds `lock` while it asks."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self._stopped: set[tuple[str, int, str | None]] = set()

    def runs(self, kind: str = "mae") -> dict[str, Any]:
        """The table of all runs, and for each: state, small curve, number of findings, possible requests."""
        runs = list(self.folder.update().values())
        details = [
            {
                "name": run.name,
                "state": run.state,
                "host": run.owner.host if run.owner is not None and not run.owner.is_local else None,
                "requests": self._requests(run),
                "findings": len(run.findings),
                "monitor": run.data.monitor,
                "course": run.course,
            }
            for run in runs
        ]
        return {"folder": str(self.folder.path), "runs": details, "table": runs_table(runs, kind).as_json()}

    def metrics(self, names: Sequence[str]) -> list[dict[str, str]]:
        """Metrics that any of the runs has, without those of single species."""
        runs = self._chosen(names)
        keys = dict.fromkeys(key for run in runs for row in run.data.metrics[-1:] for key in row)
        order = sorted(
            (key for key in keys if key not in ("epoch", "step") and key.count("/") < 2),
            key=lambda key: (key != "val/loss", key != "train/loss", key.startswith("train/"), key == "lr", key),
        )
        return [{"key": key, "unit": _unit_of(key, runs)} for key in order]

    def curves(self, names: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
        """Values of some metrics of some runs, thinned out, by run: `epoch`, `step` and the metrics."""
        answer: dict[str, Any] = {"metrics": self.metrics(names), "runs": {}}
        for run in self._chosen(names):
            rows = run.data.metrics
            columns = [[row.get(key) for row in rows] for key in ("step", *metrics)]
            epochs = [row.get("epoch", 0.0) for row in rows]
            x, *values = thinned(epochs, *columns, most=POINTS)  # type: ignore[arg-type]
            answer["runs"][run.name] = {"epoch": x, "step": values[0], "series": dict(zip(metrics, values[1:]))}
        return answer

    def compare(self, names: Sequence[str]) -> dict[str, Any]:
        """The errors of some runs, and the settings in which they differ."""
        runs = self._chosen(names)
        return {"errors": errors_table(runs).as_json(), "settings": settings_table(runs).as_json()}

    def detail(self, name: str) -> dict[str, Any]:
        """Findings, log and errors of one run."""
        run = self.folder.run(name)
        return {
            "name": run.name,
            "path": str(run.path),
            "state": run.state,
            "facts": _facts(run),
            "findings": [
                {"callback": NAMES.get(callback, callback), "step": f.step, "what": f.what, "advice": f.advice}
                for callback, f in run.findings
            ],
            "has_diagnosis": bool(run.data.diagnosis),
            "log": run.log(),
            "errors": errors_table([run]).as_json(),
            "has_report": (run.path / "report.html").is_file(),
        }

    def report(self, name: str) -> bytes | None:
        """The report of a run; None if it has none."""
        try:
            return (self.folder.run(name).path / "report.html").read_bytes()
        except (OSError, ForgefieldError):
            return None

    def request(self, name: str, request: str) -> dict[str, Any]:
        """Send `stop` or `checkpoint` to a run. A second stop is not sent: the run would exit at once."""
        if request not in REQUESTS:
            raise ForgefieldError(f"A request is {' or '.join(REQUESTS)}, not '{request}'.")
        path = self.folder.run(name).path
        owner = read_owner(path)
        key = (owner.process["host"], owner.process["pid"], owner.process["born"]) if owner is not None else None
        if key in self._stopped:
            raise ForgefieldError(f"Run {name} was asked to stop and is saving a checkpoint.")
        send_request(path, request)
        if request == "stop" and key is not None:
            self._stopped.add(key)
        done = "stops after the current step and saves a checkpoint" if request == "stop" else "saves a checkpoint"
        return {"message": f"Run {name} {done}."}

    def _requests(self, run: LiveRun) -> list[str]:
        """Requests that the process of a run accepts from here now."""
        if run.owner is None or not run.owner.is_local or not run.owner.hears_signals:
            return []
        process = run.owner.process
        return [] if (process["host"], process["pid"], process["born"]) in self._stopped else list(REQUESTS)

    def _chosen(self, names: Sequence[str]) -> list[LiveRun]:
        if len(names) > LARGEST_COMPARISON:
            raise ForgefieldError(
                f"At most {LARGEST_COMPARISON} runs can be shown together; {len(names)} were selected."
            )
        return [self.folder.run(name) for name in dict.fromkeys(names)]


def _unit_of(metric: str, runs: Sequence[LiveRun]) -> str:
    quantity, _, kind = metric.partition("/")[2].rpartition("_")
    if kind not in ("mae", "rmse"):
        return ""
    return unit_of(metric) or next((run.data.heads[quantity] for run in runs if quantity in run.data.heads), "")


def _facts(run: LiveRun) -> list[list[str]]:
    """What the run is: model, data, hardware, process."""
    info = run.data.info
    model, machine = info.get("model"), info.get("hardware")
    facts = [["folder", str(run.path)]]
    if isinstance(model, dict):
        facts.append(["model", shorten(model.get("name"), 60)])
    facts += [
        [str(row[0]), shorten(row[1], 300)] for row in info.get("data") or [] if isinstance(row, list) and len(row) == 2
    ]
    if isinstance(machine, dict):
        facts += [[str(key), shorten(value, 100)] for key, value in machine.items() if isinstance(value, (str, int))]
    if run.owner is not None:
        facts.append(["process", f"{run.owner.process['pid']} on {run.owner.host}"])
    if run.data.metrics:
        changed = (run.path / "metrics.jsonl").stat().st_mtime if (run.path / "metrics.jsonl").exists() else time.time()
        facts.append(["last validation", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed))])
    return facts
