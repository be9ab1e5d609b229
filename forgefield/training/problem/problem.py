"""Data, model and task of a config: the only place where they are built, for trainings, checks and benchmarks.

A problem holds what differs between kinds of samples (frames of atoms, points of a grid): data, model, task and the Lightning
module that trains it. `fit.py` does the rest for all kinds: the run folder, checkpoints, metrics, callbacks, ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn

from forgefield.config.trust import code_of_model
from forgefield.errors import ForgefieldError
from forgefield.kinds import FRAMES, POINTS
from forgefield.models.resolved import MODULE_FOLDER
from forgefield.models.resolving import names_same_code, with_current_folder
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.parallel.reductions import StepExchange
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.executor import StepExecutor
from forgefield.training.module import TrainingModule
from forgefield.training.run.checkpoint import ResumePoint
from forgefield.training.run.folder import has_begun
from forgefield.training.run.journal import Journal
from forgefield.training.run.signals import StopControl
from forgefield.training.trainer import Loader


@dataclass(frozen=True)
class TrainingSession:
    """What all parts of a training share.

    ranks: the processes that train together. journal: messages for the user and the log. stop: requests to stop. lr_factor:
    multiplies all learning rates, see `training.scale_lr`. trust_code: whether code that a run names, and not the config, may
    be imported.
    """

    ranks: Ranks
    journal: Journal
    stop: StopControl
    lr_factor: float
    trust_code: bool = False

    @classmethod
    def silent(cls) -> TrainingSession:
        """One process that reports nothing and takes no requests to stop, for checks and measurements."""
        return cls(single_process(), Journal(Console(quiet=True)), StopControl(None), 1.0)


class Problem(ABC):
    """Data, task and model of one kind of samples; all of them are there after `prepare`.

    run: the run folder. config: may differ from the argument, because a model from another run fixes some settings. options:
    the config's `trainer` section as a plain dict; a problem removes settings that it implements itself. resumes: whether a
    run that has begun keeps its model options; without it, everything is built as for a new run.

    data: has `val` and `test`, None where there are none. resolved: options of the model in full.
    """

    data: Any
    task: Any
    model: nn.Module
    resolved: dict[str, Any]
    fingerprint: str

    def __init__(
        self, run: Run, config: Config, options: dict[str, Any], session: TrainingSession, *, resumes: bool = True
    ) -> None:
        self.run, self.config, self.options, self.session = run, config, options, session
        self.has_begun = resumes and has_begun(run)

    @property
    def has_val(self) -> bool:
        return self.data.val is not None and self.options.get("limit_val_batches") != 0

    @property
    def validated(self) -> list[str]:
        """Names of the splits that have metrics of the validation: `val`, and `val-NAME` of named sets."""
        return ["val"]

    @abstractmethod
    def prepare(self) -> None:
        """Read the data, resolve the options of the model, build task and model, in this order."""

    @abstractmethod
    def metric_names(self, split: str) -> list[str]:
        """Every metric of `train`, `val` or a named validation set that a row may hold, without the name of the split."""

    @abstractmethod
    def module(
        self, monitor: str, exchange: StepExchange | None, restart: ResumePoint | None, quick: bool
    ) -> TrainingModule:
        """What Lightning trains. quick: a trial run that stores nothing (`trainer.fast_dev_run`)."""

    def module_of(
        self, executor: StepExecutor[Any, Any], monitor: str, exchange: StepExchange | None
    ) -> TrainingModule:
        """The module around an executor."""
        return TrainingModule(
            executor,
            self.config.training,
            monitor=monitor,
            ranks=self.session.ranks,
            exchange=exchange,
            lr_factor=self.session.lr_factor,
        )

    @abstractmethod
    def loader(self, device: torch.device) -> Loader:
        """Training batches, for a training on `device`. Called once, before `val_loader`."""

    @abstractmethod
    def val_loader(self) -> Any:
        """Validation batches."""

    def describe_data(self) -> list[tuple[str, str]]:
        """Rows about the data for the table at the start; called after `loader`."""
        rows: list[tuple[str, str]] = self.data.describe()
        return rows

    @abstractmethod
    def refuse(self, device: torch.device) -> None:
        """Raise ForgefieldError if the device does not support the settings of the config."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Entries of `run.json` that only this kind of run has."""

    @abstractmethod
    def batch_row(self) -> str:
        """The size of a batch, for the table at the start."""

    @property
    def units(self) -> dict[str, str]:
        """Units of additional quantities, for the progress display."""
        return {}

    def stored_or_resolved(self, resolved: dict[str, Any]) -> dict[str, Any]:
        """The options of the model on all ranks: those in `run.json` once the run has begun, else `resolved` of rank 0."""
        if self.session.ranks.is_rank_zero and self.has_begun:
            if self.run.info["data_fingerprint"] != self.fingerprint:
                raise ForgefieldError(
                    f"The data of run {self.run.name} has changed since it was started (a file or the split); restore it, or "
                    "start over with --fresh."
                )
            resolved = self._stored_model()
        return self.session.ranks.broadcast(resolved)

    def _stored_model(self) -> dict[str, Any]:
        """The options in `run.json`. Code that they name must be that of the config, or allowed by the user."""
        stored: dict[str, Any] = self.run.info["model"]
        section = self.config.model
        if "from" in section or not any(code_of_model(stored)):
            return stored  # code of the first run was allowed, or refused, when that run was opened
        trust = Run(self.run.path, trust_code=self.session.trust_code).trust
        if not names_same_code(section, stored):
            for where, path in code_of_model(stored):
                trust.require(path, where, stored.get(MODULE_FOLDER))
            return stored
        return with_current_folder(stored)


def problem_for(run: Run, config: Config, options: dict[str, Any], session: TrainingSession) -> Problem:
    """The training problem that a config describes."""
    kind = FRAMES if config.data.points is None else POINTS
    problem: Problem = kind.problem.load()(run, config, options, session)
    return problem
