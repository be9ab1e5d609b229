"""Trainings on frames: potentials and predictors of properties."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from forgefield.config.trust import CONFIG
from forgefield.data.batch import batch_shapes
from forgefield.data.module import DataModule, FrameData, read_data
from forgefield.data.padding import plan_sizes
from forgefield.data.sampling.batching import sized, training_budget
from forgefield.data.sampling.loader import FrameLoader
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import branch_names
from forgefield.parallel.accelerators import evaluation_device
from forgefield.parallel.reductions import StepExchange
from forgefield.runs import OmittedOptions, Run
from forgefield.settings import Config
from forgefield.tasks.options import TaskOptions, quantity
from forgefield.tasks.task import Task
from forgefield.tasks.units import UNITS
from forgefield.training.engines.choose import EngineStarter, refuse_engine
from forgefield.training.frames_executor import FramesExecutor
from forgefield.training.module import TrainingModule
from forgefield.training.optim.trainable import choose_trained
from forgefield.training.options import measures_maxima
from forgefield.training.precision import Precision
from forgefield.training.problem.initial_model import initial_model
from forgefield.training.problem.model_options import (
    batch_spec,
    build_task,
    requested_task,
    resolved_model,
    with_fitted_shifts,
)
from forgefield.training.problem.preflight import (
    require_any_label,
    require_inputs,
    require_labels_of_branches,
    require_same_data,
)
from forgefield.training.problem.problem import Problem, TrainingSession
from forgefield.training.problem.transfer import Transfer, transfer
from forgefield.training.run.checkpoint import ResumePoint
from forgefield.training.run.start_summary import effective_batch
from forgefield.training.validation_batches import ValidationBatches


def build_frames_problem(config: Config, data: FrameData | None = None) -> FramesProblem:
    """Data, task and model of a config, built as for a new run but without a run folder, silently and in one process.

    data: read before, for the same `data` section.
    """
    problem = FramesProblem(
        Run(config.folder), config, copy.deepcopy(config.trainer), TrainingSession.silent(), resumes=False
    )
    problem.prepare(data)
    return problem


class FramesProblem(Problem):
    data: FrameData
    defaults: OmittedOptions
    """What options that the config leaves out mean in this run."""
    batches: DataModule
    """Batches of the loaders; set by `loader`."""
    task: Task
    task_options: TaskOptions
    model: Potential
    change: Transfer | None
    """Changes of the model of another run."""

    def __init__(
        self, run: Run, config: Config, options: dict[str, Any], session: TrainingSession, *, resumes: bool = True
    ) -> None:
        super().__init__(run, config, options, session, resumes=resumes)
        self._validation: FrameLoader | None = None
        begun, trust_code = self.has_begun, session.trust_code
        self.initial = initial_model(run, config, session.ranks, begun=begun, trust_code=trust_code)
        if self.initial is not None:
            self.config = self.initial.settle(config, session.journal.notify)

    def prepare(self, data: FrameData | None = None) -> None:
        """data: read before, for the same `data` section."""
        config, journal = self.config, self.session.journal
        ranks = self.session.ranks
        stored = self.run.info if ranks.is_rank_zero and self.has_begun else None
        self.defaults = ranks.broadcast(OmittedOptions() if stored is None else OmittedOptions.of_run(stored))
        self.data = data if data is not None else self._read()
        self._resolve()
        self.model = build_model(
            self.resolved,
            precision=Precision(config.training.precision).weights,
            seed=config.seed,
            trust=CONFIG if self.initial is None else self.initial.source.trust,
        )
        self._start_from_initial()
        choose_trained(self.model, config.training, journal.notify)
        require_inputs(self.model, self.data)

    def _read(self) -> FrameData:
        config, ranks = self.config, self.session.ranks
        return read_data(
            config.data,
            config.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            branches=branch_names(config.model if self.initial is None else self.initial.source.resolved),
            species_of=None if self.initial is None else self.initial.source.name,
            keep_species=self.defaults.keep_species,
            frames_by_default=self.defaults.frames,
            converting=_conversion_report(self.session.journal.notify),
            trust=CONFIG,
        )

    def _resolve(self) -> None:
        """Determine the task, the resolved options of the model and the fingerprint of the data. A resumed run keeps its
        options."""
        ranks = self.session.ranks
        self.data = data = replace(self.data, statistics=ranks.broadcast(self.data.statistics))
        self.task_options = options = requested_task(self.config, data, stress_by_default=self.defaults.stress)
        for name, dataset in data.splits():
            if name != "train":
                require_any_label(options, name, dataset)
        self.fingerprint = " ".join(d.frames.fingerprint for d in (data.train, data.val) if d is not None)
        require_labels_of_branches(options, data.train)
        require_same_data(self.fingerprint, ranks)
        for dataset in data.tests.values():
            require_same_data(dataset.frames.fingerprint, ranks)
        resolved: dict[str, Any] = {}
        change: Transfer | None = None
        if ranks.is_rank_zero:
            begun = self.has_begun
            if self.initial is not None:
                source = self.initial.source
                resolved_source = source.resolved if begun else self.initial.options(self.config, data)
                change = transfer(resolved_source, source.section, self.config, options, data, trust=source.trust)
            if not begun:
                resolved = resolved_model(self.config, data) if change is None else change.resolved
        self.change = ranks.broadcast(change)
        self.resolved = self.stored_or_resolved(resolved)
        if self.initial is None:
            self.data = with_fitted_shifts(self.config, data, self.resolved)
        self.task = build_task(options, self.resolved)

    def _start_from_initial(self) -> None:
        """Load the weights of another run, and report changes of its model."""
        initial, notify = self.initial, self.session.journal.notify
        if initial is None or self.change is None:
            return
        device = evaluation_device(self.options.get("accelerator"))
        changed = initial.start(self.model, self.resolved, self.data.train, device, self.session.ranks, self.change)
        if initial.state is not None:
            notify(f"Starting from the {initial.record['which']} weights of {initial.source.name}.")
            if self.change.changes_anything():
                notify(self.change.describe())
        if changed is not None:
            notify(changed)

    @property
    def validated(self) -> list[str]:
        return ["val", *self.data.val_sets]

    def metric_names(self, split: str) -> list[str]:
        maxima = split != "train" and measures_maxima(self.config.training)
        losses = ["loss"] if split in ("train", "val") else []
        return [*losses, *self.task.error_metrics(self.data.species.symbols, maxima=maxima).names()]

    def module(
        self, monitor: str, exchange: StepExchange | None, restart: ResumePoint | None, quick: bool
    ) -> TrainingModule:
        executor = FramesExecutor(
            self.model,
            self.task,
            self.config.training,
            self.data.species.symbols,
            starter=self._engine_starter(restart, quick),
            validation=self._validation_batches(restart, quick),
            shapes=batch_shapes(self.data.train.fields),
            val_sets=list(self.data.val_sets),
        )
        return self.module_of(executor, monitor, exchange)

    def _engine_starter(self, restart: ResumePoint | None, quick: bool) -> EngineStarter:
        """Starts the engine; a resumed run keeps its engine, unless the config names another one."""
        training = self.config.training
        stored, store = self._stored("engine", restart, quick)
        return EngineStarter(
            training,
            self.session.ranks,
            plan=lambda: plan_sizes(self.batches.train_dataloader().batch_sizes(), at_most=training.graphs.sizes),
            tolerance=Precision(training.precision).tolerance,
            notify=self.session.journal.notify,
            stored_choice=stored,
            store=store,
            compiling=self.session.stop.at_once,
            evaluation_plan=lambda: plan_sizes(self._validation_sizes(), at_most=training.graphs.sizes),
        )

    def _validation_sizes(self) -> np.ndarray:
        """(n, 3): frames, atoms and edges of the batches of a validation; empty if edges are not counted."""
        loader = self._validation
        return np.empty((0, 3), dtype=np.int64) if loader is None else loader.batch_sizes(epochs=1)

    def _validation_batches(self, restart: ResumePoint | None, quick: bool) -> ValidationBatches | None:
        """Chooses the size of batches of the validation; None if the config sets it."""
        if self.config.data.eval_batch is not None:
            return None
        stored, store = self._stored("validation_batch", restart, quick)
        notify = self.session.journal.notify
        return ValidationBatches(
            lambda: self._validation, self.session.ranks, notify=notify, stored=stored, store=store
        )

    def _stored(
        self, key: str, restart: ResumePoint | None, quick: bool
    ) -> tuple[dict[str, Any] | None, Callable[[dict[str, Any]], None]]:
        """A choice in `run.json` that a resumed run keeps, on all ranks, and a function that stores it."""
        ranks = self.session.ranks

        def store(choice: dict[str, Any]) -> None:
            if ranks.is_rank_zero and not quick:
                self.run.write_info(**{key: choice})

        stored: dict[str, Any] | None = self.run.info.get(key) if ranks.is_rank_zero and restart is not None else None
        return ranks.broadcast(stored), store

    def refuse(self, device: torch.device) -> None:
        refuse_engine(self.config.training, device)

    def loader(self, device: torch.device) -> FrameLoader:
        keep_order = bool(self.options.get("overfit_batches"))
        if keep_order:
            self.session.journal.notify(
                "trainer.overfit_batches is set: the same frames are used every epoch, without shuffling."
            )
        batches = self.serve(on_gpu=device.type == "cuda", keep_order=keep_order)
        batches.keep_on(device)
        return batches.train_dataloader()

    def serve(self, *, on_gpu: bool = False, keep_order: bool = False) -> DataModule:
        """Batches as the task and the model need them. keep_order: frames are not shuffled."""
        spec = batch_spec(self.task_options, self.model, seed=self.config.seed, on_gpu=on_gpu, keep_order=keep_order)
        self.batches = self.data.serve(spec)
        return self.batches

    def val_loader(self) -> FrameLoader | list[Any]:
        loader = self.batches.val_dataloader()
        self._validation = loader if isinstance(loader, FrameLoader) else None
        return loader

    def describe_data(self) -> list[tuple[str, str]]:
        return self.batches.describe()

    def facts(self) -> dict[str, Any]:
        return {
            "species": list(self.data.species.symbols),
            "cutoff": self.config.cutoff,
            "statistics": asdict(self.data.statistics),
            "initial_model": self.initial.record if self.initial is not None else None,
            **OmittedOptions(self.data.keep_species, self.data.frames_by_default, self.defaults.stress).record(),
        }

    def batch_row(self) -> str:
        accumulate = self.options.get("accumulate_grad_batches") or 1
        row = effective_batch(training_budget(self.data.options), self.session.ranks.world_size, accumulate)
        if sized(self.config.data, 1) is self.config.data:
            return row
        atoms = self.data.frames_by_default * float(self.data.train.n_atoms.mean())
        return f"{row} (data.batch is not set; about {atoms:.0f} atoms in a batch)"

    @property
    def units(self) -> dict[str, str]:
        of_branches = [name for name in self.task.names if "." in name]
        known = {name: UNITS[quantity(name)] for name in of_branches if quantity(name) in UNITS}
        return known | self.task.units


def _conversion_report(notify: Callable[[str], None]) -> Callable[[int, int | None], None]:
    """Reports the progress of the conversion for `data.lazy`, about ten times."""
    reported = -1

    def report(done: int, total: int | None) -> None:
        nonlocal reported
        step = 10 * done // total if total else done // 50_000
        if step > reported:
            reported = step
            progress = f"{done} of {total}" if total else f"{done}"
            notify(f"data.lazy: converting the data ({progress} frames); later runs use the result.")

    return report
