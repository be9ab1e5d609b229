"""Several trainings at the same time, each in a process of its own.

A step of a small model leaves a GPU idle most of the time; trainings of several models then share it. Signals are passed on to
all of them, and none outlives this process.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forgefield.config.components import environment_of_children
from forgefield.config.template import commented_yaml
from forgefield.errors import ForgefieldError
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.spawn import run_processes
from forgefield.processes import usable_cores
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.fit import TrainingResult
from forgefield.training.options import EnsembleOptions
from forgefield.training.run.journal import Journal
from forgefield.training.trainer import requested_processes

REPORT_S = 15.0
"""Seconds between two lines of progress."""


def number_together(options: EnsembleOptions, config: Config, ranks: Ranks) -> int:
    """How many members of an ensemble are trained at the same time in this process's place."""
    several = ranks.launch.launcher != "none" or requested_processes(config) > 1
    if several and (options.together or 1) > 1:
        raise ForgefieldError(
            "training.ensemble.together: members that are trained in several processes each are trained one after another; "
            "leave it out, or set trainer.devices=1."
        )
    if several:
        return 1
    on_gpu = evaluation_device(config.trainer.get("accelerator")) != "cpu"
    return min(options.size, options.together or (options.size if on_gpu else 1))


def train_side_by_side(
    configs: Sequence[Config], together: int, journal: Journal, *, trust_code: bool = False
) -> TrainingResult:
    """Train the models of several configs, `together` at the same time; the result of the last, or of one that did not end."""
    runs = [Run(config.folder) for config in configs]
    with tempfile.TemporaryDirectory(prefix="forgefield-") as folder, _progress(runs, journal):
        for start in range(0, len(configs), together):
            part = configs[start : start + together]
            files = [Path(folder) / f"{config.name}.yaml" for config in part]
            for file, config in zip(files, part):
                file.write_text(commented_yaml(config))
            logs = [file.with_suffix(".log") for file in files]
            command = [sys.executable, "-m", "forgefield", "train", *(["--trust-code"] if trust_code else [])]
            threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(part)))}
            code = run_processes(
                [[*command, str(file)] for file in files],
                [threads | environment_of_children()] * len(part),
                what="Member",
                logs=logs,
            )
            if code:
                return _ended(code, configs, runs[start], logs, journal)
    return TrainingResult(runs[-1], None, "complete")


def _ended(code: int, configs: Sequence[Config], run: Run, logs: Sequence[Path], journal: Journal) -> TrainingResult:
    """The result of a member that did not end its training, whose last messages are shown."""
    if code in (configs[0].training.checkpoint.requeue_exit, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        journal.notify("Stopped. Run the same command to resume.")
        return TrainingResult(run, None, "stopped", exit_code=code)
    for log in logs:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        journal.notify(f"{log.stem}: {lines[-1].strip() if lines else 'no messages'}")
    return TrainingResult(run, None, "failed", exit_code=code)


@contextmanager
def _progress(runs: Sequence[Run], journal: Journal) -> Iterator[None]:
    """Inside the block, a line now and then says how far each training is."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(REPORT_S):
            journal.notify("; ".join(f"{run.name}: {_how_far(run)}" for run in runs))

    thread = threading.Thread(target=report, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _how_far(run: Run) -> str:
    """The last row of the metrics, in a few words."""
    path = run.path / "metrics.jsonl"
    try:
        row = json.loads(path.read_text().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return "starting"
    loss = row.get("val/loss", row.get("train/loss"))
    return f"epoch {int(row.get('epoch', 0)) + 1}" + ("" if loss is None else f", loss {loss:.4g}")
