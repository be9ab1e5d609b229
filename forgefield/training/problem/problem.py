"""What a training is about: samples of one kind, the model and the task on them. `fit.py` tells the story of all kinds.

A subject brings what differs between kinds (frames with atoms, points of a grid): data, model, task, the Lightning module that
trains it, and what is to be said of them. `fit.py` brings the rest: the run folder, checkpoints, metrics, callbacks, ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from forgefield.config.schema import Config
from forgefield.config.trust import code_of_model
from forgefield.errors import ForgefieldError
from forgefield.kinds import FRAMES, POINTS
from forgefield.models.registry import MODULE_FOLDER, names_same_code, with_found_folder
from forgefield.parallel.exchange import StepExchange
from forgefield.parallel.ranks import Ranks
from forgefield.runs import Run
from forgefield.training.run.checkpoint import ResumePoint
from forgefield.training.run.folder import has_begun
from forgefield.training.run.journal import Journal
from forgefield.training.run.signals import StopControl
from forgefield.training.run_module import RunModule

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class TrainingSession:
    """Who trains, how they tell the user, and whether they are asked to stop. lr_factor: what their number does to learning
    rates. trust_code: whether code may be imported that a run names and not the config."""

    ranks: Ranks
    journal: Journal
    stop: StopControl
    lr_factor: float
    trust_code: bool = False


class Loader(Protocol):
    """Batches of one epoch for this rank, from any place of it on. A place is counted in samples, over all ranks."""

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...

    def start_at(self, sample: int) -> int: ...

    def position(self, batch: int) -> int: ...


class Problem(ABC):
    """One kind of samples with its model and task. `config` may differ from what was given: a model taken from a run settles
    options. After `prepare` there are `data` (with `val` and `test`, None where there are none), `task`, `model` and its
    options in full, `resolved`.

    options: the config's `trainer` section as a plain dict; a subject takes out what it does itself.
    """

    data: Any
    task: Any
    model: nn.Module
    resolved: dict[str, Any]
    fingerprint: str

    def __init__(self, run: Run, config: Config, options: dict[str, Any], session: TrainingSession) -> None:
        self.run, self.config, self.options, self.session = run, config, options, session

    @property
    def has_val(self) -> bool:
        return self.data.val is not None and self.options.get("limit_val_batches") != 0

    @abstractmethod
    def prepare(self) -> None:
        """Read the data, resolve and build the model."""

    @abstractmethod
    def metric_names(self, split: str) -> list[str]:
        """Every metric of `train` or `val` that a row may hold, without the name of the split."""

    @abstractmethod
    def module(
        self, monitor: str, exchange: StepExchange | None, restart: ResumePoint | None, quick: bool
    ) -> RunModule:
        """What Lightning trains. quick: a try that leaves nothing behind."""

    @abstractmethod
    def loader(self, device: torch.device) -> Any:
        """Training batches, for a training on `device`. Called once, before `val_loader`."""

    @abstractmethod
    def val_loader(self) -> Any:
        """Validation batches."""

    def describe_data(self) -> Rows:
        """The data as it is served, for the table at the start; called after `loader`."""
        return self.data.describe()

    @abstractmethod
    def refuse(self, device: torch.device) -> None:
        """Stop where the device does not have what is asked for, before anything is done."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What `run.json` says of this kind of run."""

    @abstractmethod
    def batch_row(self) -> str:
        """How much makes a step, for the table at the start."""

    @property
    def units(self) -> dict[str, str]:
        """Units of quantities that not every run of this kind has, for the progress display."""
        return {}

    def kept_model(self, resolved: dict[str, Any]) -> dict[str, Any]:
        """The options in full that all ranks take: those that the run has kept, once it has begun, else `resolved`, which only
        rank 0 needs to give."""
        if self.session.ranks.is_rank_zero and has_begun(self.run):
            if self.run.info["data_fingerprint"] != self.fingerprint:
                raise ForgefieldError(
                    f"The data of run {self.run.name} is not the data it was started with (a file or the split changed); "
                    "restore it, or start over with --fresh."
                )
            resolved = self._stored_model()
        return self.session.ranks.broadcast(resolved)

    def _stored_model(self) -> dict[str, Any]:
        """The options in `run.json`. Code that they name is that of the config, or the user has allowed it."""
        stored, section = self.run.info["model"], self.config.model
        if "from" in section or not any(code_of_model(stored)):
            return stored  # code of the first run was allowed, or refused, when that run was opened
        trust = Run(self.run.path, trust_code=self.session.trust_code).trust
        if not names_same_code(section, stored):
            for where, path in code_of_model(stored):
                trust.require(path, where, stored.get(MODULE_FOLDER))
            return stored
        return with_found_folder(stored)


def problem_for(run: Run, config: Config, options: dict[str, Any], session: TrainingSession) -> Problem:
    """The training problem that a config describes."""
    kind = FRAMES if config.data.points is None else POINTS
    return kind.problem.load()(run, config, options, session)
