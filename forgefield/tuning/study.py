"""The Optuna study of a search: its database, sampler and pruner, the progress of a trial, and trials of dead processes.

A trial whose process died (killed, or its machine lost) is marked as failed and queued again; the new trial resumes the
training of the old one from its last checkpoint.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import os
import socket
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback

from forgefield.errors import ForgefieldError
from forgefield.processes import is_alive, machine
from forgefield.training.callbacks.monitor import epoch_is_complete
from forgefield.tuning.options import Dimension, TuneOptions, storable

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

HEARTBEAT = 60
"""Seconds between heartbeats of a trial; after three missing ones it counts as lost."""


def require_optuna() -> ModuleType:
    """The module `optuna`; an error that names the package where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ForgefieldError(
            "forgefield tune needs Optuna, which is not installed: pip install 'forgefield[tune]', or pip install optuna."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def open_study(folder: Path, name: str, options: TuneOptions) -> Study:
    """The study of that name, created if it does not exist."""
    optuna = require_optuna()
    url = options.storage or f"sqlite:///{(folder / 'study.db').resolve()}"
    callback_name = "heartbeat_stale_trial_callback"
    if callback_name not in inspect.signature(optuna.storages.RDBStorage.__init__).parameters:
        callback_name = "failed_trial_callback"
    settings: dict[str, Any] = {callback_name: queue_again}
    try:
        storage = optuna.storages.RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 120}} if url.startswith("sqlite") else None,
            heartbeat_interval=HEARTBEAT,
            grace_period=3 * HEARTBEAT,
            **settings,
        )
        return optuna.create_study(
            study_name=name,
            storage=storage,
            pruner=_pruner(optuna, options),
            direction="minimize",
            load_if_exists=True,
        )
    except ForgefieldError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ForgefieldError(f"tune.storage: the database {url} cannot be used: {reason}") from error


def sampler_of(study: Study, options: TuneOptions, space: Sequence[Dimension], seed: int, worker: int) -> BaseSampler:
    """The sampler of the next trial, seeded by seed, worker and the number of trials so far, so that an interrupted search
    resumes as it would have continued. Workers that share a database draw different values."""
    optuna = require_optuna()
    process = [zlib.crc32(f"{socket.gethostname()} {os.getpid()}".encode())] if options.storage is not None else []
    if options.sampler != "grid":
        entropy = [seed, worker, len(study.get_trials(deepcopy=False)), *process]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    if options.sampler == "grid":
        ranges = [dimension.key for dimension in space if dimension.choices is None]
        if ranges:
            raise ForgefieldError(f"tune.sampler=grid needs choices, and {ranges[0]} has a range.")
        return optuna.samplers.GridSampler({d.key: [storable(x) for x in d.choices or ()] for d in space}, seed=seed)
    if options.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(
        multivariate=True, constant_liar=True, n_startup_trials=max(options.startup, 1), seed=seed
    )


def _pruner(optuna: ModuleType, options: TuneOptions) -> BasePruner:
    if options.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=options.startup, n_warmup_steps=options.warmup)
    if options.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=max(options.warmup, 1))
    return optuna.pruners.NopPruner()


def n_combinations(space: Sequence[Dimension]) -> int:
    return len(list(itertools.product(*(dimension.choices or () for dimension in space))))


# ---- progress of a trial


class ReportTrial(Callback):
    """Reports `monitor` at every validation, counted from 0. The reported values are part of checkpoints, so that a training
    resumed by another trial reports all of them again. may_end: whether the training may be ended early."""

    state_key = "report_trial"

    def __init__(self, trial: Trial, monitor: str, *, may_end: bool) -> None:
        self.trial, self.monitor, self.may_end = trial, monitor, may_end
        self.values: list[float] = []

    @property
    def best(self) -> float:
        """The smallest finite value; NaN where there is none."""
        finite = [value for value in self.values if math.isfinite(value)]
        return min(finite, default=math.nan)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for number, value in enumerate(self.values):
            self._report(value, number)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.monitor.startswith("train/"):
            self._take(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.monitor.startswith("train/") and epoch_is_complete(trainer):
            self._take(trainer)

    def state_dict(self) -> dict[str, list[float]]:
        return {"values": list(self.values)}

    def load_state_dict(self, state_dict: dict[str, list[float]]) -> None:
        self.values = list(state_dict["values"])

    def _take(self, trainer: L.Trainer) -> None:
        """Store and report the present value, and end the training where Optuna advises it."""
        import optuna

        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        self.values.append(value)
        self._report(value, len(self.values) - 1)
        if self.may_end and self.trial.should_prune():
            raise optuna.TrialPruned

    def _report(self, value: float, number: int) -> None:
        if self.may_end and math.isfinite(value):
            self.trial.report(value, number)


# ---- abandoned trials


def queue_dead_trials(study: Study) -> list[int]:
    """Mark trials whose process on this machine is dead as failed and queue them again. Returns their numbers."""
    optuna, dead = require_optuna(), []
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        worker = trial.user_attrs.get("worker")
        if worker is None or worker["host"] != machine() or is_alive(worker):
            continue
        try:
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        except ValueError:  # another worker was faster
            continue
        queue_again(study, trial)
        dead.append(trial.number)
    return dead


def has_foreign_trials(running: Sequence[FrozenTrial]) -> bool:
    """Whether any of these trials is trained on another machine, whose processes are not visible from here."""
    workers = [trial.user_attrs.get("worker") for trial in running]
    return any(worker is not None and worker["host"] != machine() for worker in workers)


def queue_again(study: Study, trial: FrozenTrial) -> None:
    """Queue a new trial with the same values that resumes the training in the same folder."""
    folder = trial.user_attrs.get("folder")
    study.enqueue_trial(dict(trial.params), user_attrs={"folder": folder} if folder is not None else None)
