"""A hyperparameter search: one worker trains trials until there are enough; several workers may share a study.

Each trial is a separate run in the folder of the search, with the settings of the config except for the values it tries. A
search that was stopped or killed resumes: finished trials count, the training of an unfinished one continues.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from forgefield.config.components import environment_of_children
from forgefield.config.loading import load_config
from forgefield.config.template import commented_yaml
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.parallel.ranks import single_process
from forgefield.processes import die_with_parent, this_process
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.fit import fit
from forgefield.training.run.journal import Journal
from forgefield.training.trainer import requested_processes
from forgefield.tuning.options import Dimension, TuneOptions, override, read_space, short
from forgefield.tuning.page import write_page
from forgefield.tuning.study import (
    HEARTBEAT,
    ReportTrial,
    has_foreign_trials,
    n_combinations,
    open_study,
    queue_again,
    queue_dead_trials,
    require_optuna,
    sampler_of,
)

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

ConfigSource = str | Path | dict[str, Any] | Config

MAX_FAILURES = 3
"""Number of consecutive failed trials that ends a search, since the next ones would fail too."""


class Stopped(Exception):
    """A training was asked to stop. code: exit code to end with."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class TrialFailed(Exception):
    """A trial ended with an error or with a metric that is not finite."""


@dataclass(frozen=True)
class Search:
    """source, overrides: the arguments of `load_config`. base: the config it returns. options, space: the search."""

    source: ConfigSource
    overrides: tuple[str, ...]
    base: Config
    options: TuneOptions
    space: tuple[Dimension, ...]
    trust_code: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.base.out) / f"{self.base.name}-tune"

    @property
    def monitor(self) -> str:
        return self.options.monitor or str(self.base.training.monitor)

    @property
    def trials(self) -> int:
        if self.options.sampler == "grid":
            return min(self.options.trials, n_combinations(self.space))
        return self.options.trials

    def config(self, values: dict[str, object], folder: str, repeat: int) -> Config:
        """The config of one training of a trial."""
        trial = [override(key, value) for key, value in values.items()]
        config = load_config(self.source, [*self.overrides, *trial], trust_code=self.trust_code)
        config.out, config.name = str(self.folder / "trials"), folder if repeat == 0 else f"{folder}-{repeat}"
        config.seed += repeat
        config.training.monitor = self.monitor
        config.tune = None
        config.trainer["devices"] = 1
        return config

    def open(self) -> Study:
        """The study of the search, created, or checked to have the same config and space."""
        self.folder.mkdir(parents=True, exist_ok=True)
        study = open_study(self.folder, str(self.base.name), self.options)
        _require_same(study, self)
        return study


def run_search(
    source: ConfigSource,
    overrides: Sequence[str],
    *,
    space: Sequence[str] = (),
    trials: int | None = None,
    fresh: bool = False,
    workers: int = 1,
    worker: int | None = None,
    trust_code: bool = False,
) -> tuple[Path, int]:
    """Search, write `best.yaml`, `trials.csv` and `tune.html`, and return the folder of the search and an exit code.

    Parameters
    ----------
    source, overrides, space, trials, fresh, trust_code
        As in `forgefield.tune`.
    workers
        Number of processes on this machine that search together.
    worker
        Number of this process among those; None for the process that the user started.
    """
    search = prepare(source, overrides, space=space, trials=trials, trust_code=trust_code)
    if fresh:
        move_aside(search)
    code = 0
    if workers > 1:
        search.open()
        command = [str(source), *overrides, *(word for spec in space for word in ("--space", spec))]
        command += ["--trust-code"] if trust_code else []
        command += ["--trials", str(trials)] if trials is not None else []
        code = run_workers(command, workers)
        study = search.open()
    else:
        try:
            study = work(search, worker=worker or 0)
        except Stopped as stopped:
            print("Stopped; run the same command to resume.")
            return search.folder, stopped.code
    if worker is None:
        best, page = write_best(search, study), write_page(search, study)
        if best is not None:
            print(f"best: {search.monitor} {study.best_value:.6g}, trial {study.best_trial.number}; {best}")
            print(f"its run: {search.folder / 'trials' / study.best_trial.user_attrs['folder']}")
        print(f"figures: {page}")
    return search.folder, code


def prepare(
    source: ConfigSource,
    overrides: Sequence[str],
    *,
    space: Sequence[str] = (),
    trials: int | None = None,
    trust_code: bool = False,
) -> Search:
    """Load the config and check everything before a study is created. space, trials, trust_code: from the command line."""
    require_optuna()
    base = load_config(source, overrides, trust_code=trust_code)
    options = base.tune or TuneOptions()
    if trials is not None:
        if trials < 1:
            raise ForgefieldError(f"--trials {trials}: a search needs at least one trial.")
        options = replace(options, trials=trials)
    dimensions = read_space(options.space, space)
    if base.name is None:
        raise ForgefieldError("'name' is missing: a search needs a name for its folder.")
    search = Search(source, tuple(overrides), base, options, tuple(dimensions), trust_code)
    search.config({d.key: d.example() for d in dimensions}, "0000", 0)  # raises an error for a key that does not exist
    if requested_processes(base) > 1 and base.trainer.get("devices") not in (None, "auto", -1, "-1"):
        raise ForgefieldError(
            f"trainer.devices={base.trainer['devices']}: each trial is trained in one process on one device; start as many "
            "workers as there are devices (--workers)."
        )
    return search


def work(search: Search, *, worker: int = 0, notify: Callable[[str], None] = print) -> Study:
    """Train trials until there are enough and return the study. worker: its number among the workers of one command."""
    study = search.open()
    for number in queue_dead_trials(study):
        notify(f"Trial {number} was abandoned by a process that died; another trial resumes its training.")
    trainer = _Worker(search, study, notify)
    while trainer.is_needed():
        study.sampler = sampler_of(study, search.options, search.space, int(search.base.seed), worker)
        study.optimize(trainer.train, n_trials=1, catch=(TrialFailed,), callbacks=[trainer.finish])
        if trainer.failed >= MAX_FAILURES:
            raise ForgefieldError(
                f"{MAX_FAILURES} trials in a row failed, so the search ends here. The last error: {trainer.reason}"
            )
    return study


class _Worker:
    """Trains trials in this process. failed: number of consecutive failures. reason: of the last one."""

    def __init__(self, search: Search, study: Study, notify: Callable[[str], None]) -> None:
        self.search, self.study, self.notify = search, study, notify
        self.failed, self.reason, self._began = 0, "", 0.0

    def is_needed(self) -> bool:
        """Whether there are too few trials that are done or being trained. Waits for those of other machines, which may be
        lost."""
        optuna, is_waiting = require_optuna(), False
        states = optuna.trial.TrialState
        while True:
            optuna.storages.fail_stale_trials(self.study)
            trials = self.study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED, states.RUNNING))
            if len(trials) < self.search.trials:
                return True
            running = [trial for trial in trials if trial.state == states.RUNNING]
            if len(trials) - len(running) >= self.search.trials or not has_foreign_trials(running):
                return False
            if not is_waiting:
                self.notify(
                    "The remaining trials are being trained on other machines; waiting, in case one of them is lost."
                )
            is_waiting = True
            time.sleep(HEARTBEAT)

    def train(self, trial: Trial) -> float:
        """The objective that Optuna minimises."""
        self._began = time.monotonic()
        values = {dimension.key: dimension.suggest(trial) for dimension in self.search.space}
        folder = trial.user_attrs.get("folder") or f"{trial.number:04d}"
        trial.set_user_attr("folder", folder)
        trial.set_user_attr("worker", this_process())
        best = [self._repeat(trial, values, folder, repeat) for repeat in range(self.search.options.repeats)]
        return sum(best) / len(best)

    def _repeat(self, trial: Trial, values: dict[str, object], folder: str, repeat: int) -> float:
        optuna = require_optuna()
        progress = ReportTrial(trial, self.search.monitor, may_end=repeat == 0)
        with open(os.devnull, "w") as discarded:
            journal = Journal(Console(file=discarded, force_jupyter=False))
            try:
                config = self.search.config(values, folder, repeat)
                fitted = fit(
                    config,
                    fresh=False,
                    journal=journal,
                    ranks=single_process(),
                    callbacks=[progress],
                    trust_code=self.search.trust_code,
                )
            except optuna.TrialPruned:
                Run(self.search.folder / "trials" / folder).write_info(status="stopped", pruned=True)
                raise
            except (ForgefieldError, torch.OutOfMemoryError) as error:
                trial.set_user_attr("error", str(error).splitlines()[0])
                raise TrialFailed(str(error)) from error
            finally:
                journal.close()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        if fitted.outcome == "stopped":
            queue_again(self.study, self.study.trials[trial.number])  # Optuna marks this one as failed
            raise Stopped(fitted.exit_code)
        best = progress.best if progress.values else _best_of(fitted.run, self.search.monitor)
        if not math.isfinite(best):
            trial.set_user_attr("error", f"{self.search.monitor} is not a finite number")
            raise TrialFailed(f"{self.search.monitor} is not a finite number: the training diverged.")
        return best

    def finish(self, study: Study, trial: FrozenTrial) -> None:
        """After each trial: print a line, and count failures."""
        state = trial.state.name
        if state == "FAIL":
            self.failed, self.reason = self.failed + 1, trial.user_attrs.get("error", "it was abandoned")
        else:
            self.failed = 0
        self.notify(line_of(self.search, study, trial, time.monotonic() - self._began))


def line_of(search: Search, study: Study, trial: FrozenTrial, seconds: float) -> str:
    """One line about a trial that ended."""
    values = {d.key: d.decode(trial.params[d.key]) for d in search.space if d.key in trial.params}
    shown = "  ".join(f"{key}={short(value)}" for key, value in values.items())
    if trial.state.name == "COMPLETE":
        outcome = f"{trial.value:<10.4g}" + (" best so far" if study.best_trial.number == trial.number else "")
    elif trial.state.name == "PRUNED":
        outcome = f"ended early after {len(trial.intermediate_values)} validations"
    else:
        outcome = f"failed: {trial.user_attrs.get('error', 'it was abandoned')}"
    return f"trial {trial.number:>4}  {search.monitor} {outcome}  {seconds:.0f} s  {shown}"


def _best_of(run: Run, monitor: str) -> float:
    """The best value in the metrics of a training that was already complete."""
    values = [row[monitor] for row in run.metrics() if isinstance(row.get(monitor), (int, float))]
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _require_same(study: Study, search: Search) -> None:
    """Refuse a study that was created with another config or space, which are stored with it."""
    values = asdict(search.base)
    del values["tune"]
    description = {
        "space": {d.key: json.loads(json.dumps(d.describe())) for d in search.space},
        "monitor": search.monitor,
        "repeats": search.options.repeats,
        "config": json.loads(json.dumps(values)),
    }
    stored = study.user_attrs.get("forgefield")
    if stored is None:
        study.set_user_attr("forgefield", description)
        return
    for what in description:
        if stored[what] != description[what]:
            now, before = (
                _flat(each[what]) if isinstance(each[what], dict) else {what: each[what]}
                for each in (description, stored)
            )
            key = next(key for key in {**now, **before} if now.get(key) != before.get(key))
            raise ForgefieldError(
                f"The search {search.base.name} was started with another {what} ({key}: {before.get(key)}, now "
                f"{now.get(key)}); trials would not be comparable. Use the old one, another name, or start over with --fresh."
            )


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Nested dictionaries as one, with dotted keys."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def write_best(search: Search, study: Study) -> Path | None:
    """Write `best.yaml`, the config of the best trial under a new name. None where no trial is complete."""
    try:
        trial = study.best_trial
    except ValueError:
        return None
    values = {d.key: d.decode(trial.params[d.key]) for d in search.space}
    config = search.config(values, f"{search.base.name}-best", 0)
    config.out = search.base.out
    if "devices" not in search.base.trainer:
        del config.trainer["devices"]
    header = (
        f"# trial {trial.number}: {search.monitor} {trial.value:.6g}; its run: trials/{trial.user_attrs['folder']}\n"
    )
    return write_atomically(search.folder / "best.yaml", header + commented_yaml(config))


def move_aside(search: Search) -> None:
    """Rename the folder of an existing search, so that a new one can start."""
    if search.options.storage is not None:
        raise ForgefieldError(
            "--fresh does not clear tune.storage, which other searches may use; choose another name or database."
        )
    if search.folder.exists():
        names = (search.folder.with_name(f"{search.folder.name}.{n}") for n in itertools.count(1))
        search.folder.rename(next(path for path in names if not path.exists()))


# ---- several workers on this machine


def run_workers(arguments: Sequence[str], n: int) -> int:
    """Run `forgefield tune ARGUMENTS --worker i` for i below n and return the first exit code that is not 0. Stop signals are
    passed on to the workers."""
    gpus = _visible_gpus()
    children = []
    for number in range(n):
        environ = {**os.environ, **environment_of_children()}
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        command = [sys.executable, "-m", "forgefield", "tune", *arguments, "--worker", str(number)]
        children.append(subprocess.Popen(command, env=environ, preexec_fn=die_with_parent()))

    def forward_signal(number: int, frame: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        codes = [child.wait() for child in children]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return next((code for code in codes if code != 0), 0)


def _visible_gpus() -> list[str]:
    """The GPUs that this process can use, as named in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]
