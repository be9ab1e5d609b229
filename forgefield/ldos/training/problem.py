"""Trainings on grid points: networks of the LDOS or the density, with observables of whole snapshots."""

from __future__ import annotations

from typing import Any

import torch

from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.ldos.data import PointTable
from forgefield.ldos.data.conditions import calculation_facts, keep_pseudopotentials
from forgefield.ldos.descriptors import DescriptorOptions, require_fitting
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.loss import TERMS, UNITS, PointErrors, PointTask, errors_known_in_training
from forgefield.ldos.model import LDOSNetwork, LinearScale, PointFacts, build_network, resolve
from forgefield.ldos.observables import OBSERVABLE_UNITS
from forgefield.ldos.options import ObservablesOptions, PointTargetOptions
from forgefield.ldos.training.blocks import BlockLoader
from forgefield.ldos.training.data import PointData
from forgefield.ldos.training.executor import PointsExecutor
from forgefield.ldos.training.initial import initial_network
from forgefield.ldos.training.observing import NEEDED, SnapshotMeasure
from forgefield.ldos.training.start import EngineMaker, block_size
from forgefield.models.resolving import check_model
from forgefield.parallel.reductions import StepExchange
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.module import TrainingModule
from forgefield.training.precision import Precision
from forgefield.training.problem.preflight import require_same_data
from forgefield.training.problem.problem import Problem, TrainingSession
from forgefield.training.run.checkpoint import ResumePoint
from forgefield.training.run.start_summary import effective


class PointsProblem(Problem):
    data: PointData
    task: PointTask
    model: LDOSNetwork

    def __init__(
        self, run: Run, config: Config, options: dict[str, Any], session: TrainingSession, *, resumes: bool = True
    ) -> None:
        super().__init__(run, config, options, session, resumes=resumes)
        self.initial = initial_network(run, config, session.ranks, begun=self.has_begun)
        if self.initial is not None:
            self.config = self.initial.settle(config)
        algorithm = str(options.pop("gradient_clip_algorithm", None) or "norm").split(".")[-1].lower()
        self.clip = (options.pop("gradient_clip_val", None), algorithm)
        self._limit = options.pop("limit_train_batches", None)
        if self._limit == 0:
            raise ForgefieldError("trainer.limit_train_batches=0 leaves nothing to train on.")

    # ---- data, model, task

    def prepare(self) -> None:
        config, ranks = self.config, self.session.ranks
        self.data = PointData(config.data, config.seed, ranks)
        self.data.prepare()
        table = self.data.train.table
        self.task = point_task(config, table.n_targets)
        self.data.measure()
        self.fingerprint = self.data.fingerprint
        require_same_data(self.fingerprint, ranks)
        if self.initial is None:
            _, _, given = check_model(config.model, trust=CONFIG)
            self.resolved = self.stored_or_resolved(resolve(given, self._facts()))
        else:
            self.data.inputs, self.data.outputs = self.initial.scaling("inputs"), self.initial.scaling("outputs")
            self.resolved = self.stored_or_resolved(self.initial.options(table, config.points.descriptors))
        if (made_by := self.resolved["points"]["descriptors"]) is not None:
            options = DescriptorOptions.from_mapping(made_by, "data.points.descriptors")
            said_here = config.points.descriptors is not None
            require_fitting(options, self.data.symbols, table.n_inputs if said_here else None)
        precision = Precision(config.training.precision).weights
        self.model = build_network(self.resolved, precision=precision, seed=config.seed)
        if self.initial is not None:
            self.initial.start(self.model)
        self._find_observed()
        self._require_whole_snapshots()
        self._block_size()

    def _facts(self) -> PointFacts:
        points = self.config.points
        return PointFacts(
            target=points.target,
            inputs=LinearScale(**self.data.inputs.to_dict()),
            outputs=LinearScale(**self.data.outputs.to_dict()),
            energies=energy_grid(points.energies),
            descriptors=points.descriptors,
        )

    def _find_observed(self) -> None:
        """Which snapshots observables are measured on, and which observables; where nothing is said, those that can be."""
        self.observed: PointTable | None = None
        self.observables = ObservablesOptions(metrics=[])
        task, val = self.config.task, self.data.val
        whole = val.table if val is not None and val.is_whole else None
        if self.config.points.target != "ldos":
            return
        if task is None:
            self.observed = whole
            self.observables.metrics = [] if whole is None else _possible(whole)
        elif task.points is not None and task.points.observables is not None:
            self.observables = task.points.observables
            named = self.observables.snapshots
            self.observed = whole if named is None else PointTable(self.data.find(named, "task.observables.snapshots"))
            if self.observed is None:
                raise ForgefieldError(
                    "task.observables needs whole snapshots: name them in data.val, or in task.observables.snapshots."
                )
        if not self.observables.metrics:
            self.observed = None

    def _measure(self, table: PointTable, metrics: list[str], fermi: str, *, part: Any = None) -> SnapshotMeasure:
        folder = self.config.points.pseudopotentials
        kept = part.kept if part is not None and part.table is table else None
        return SnapshotMeasure(
            table,
            self.model,
            metrics,
            fermi,
            self.session.ranks,
            kept=kept,
            pseudopotentials=folder,
            remember=self.data.place != "disk",
        )

    def _block_size(self) -> None:
        """Steps of a block; settings of Lightning that count batches are made to count blocks of so many steps."""
        steps = -(-len(self.data.train) // (self.data.batch * self.session.ranks.world_size))
        limit = self._limit
        if isinstance(limit, float):
            limit = max(1, int(limit * steps)) if limit != 1.0 else None
        self._limit = limit
        flops = 6 * self.data.batch * sum(p.numel() for p in self.model.parameters())
        self.block = block_size(self.config.training, self.options, min(steps, limit or steps), flops)
        interval = self.options.get("val_check_interval")
        if isinstance(interval, int) and not isinstance(interval, bool):
            self.options["val_check_interval"] = interval // self.block

    # ---- what fit asks for

    def metric_names(self, split: str) -> list[str]:
        known = errors_known_in_training(self.task.loss.kind) if split == "train" else ("mae", "rmse")
        names = ["loss", *PointErrors(self.task.target, torch.ones(1), known).names()]
        if split == "val" and self.observed is not None:
            names += [f"{name}_mae" for name in self.observables.metrics]
        return names

    def module(
        self, monitor: str, exchange: StepExchange | None, restart: ResumePoint | None, quick: bool
    ) -> TrainingModule:
        self._require_measured(monitor)
        maker = EngineMaker(self.config, self.session, self.data, self.block, self._terms)
        self._executor = PointsExecutor(
            self.model,
            self.task,
            self.config.training,
            make_engine=maker,
            every=int(self.observables.every),
            clip=self.clip,
            report_initial=lambda values: self._report_initial(values, quick),
        )
        return self.module_of(self._executor, monitor, exchange)

    def _require_measured(self, monitor: str) -> None:
        """What decides something has to say something, and an observable has to be known at every validation."""
        early = self.config.training.early_stopping
        watched = {monitor, (early.monitor if early is not None else None) or monitor}
        if self.task.weight == 0 and "val/loss" in watched:
            setting = "training.monitor" if monitor == "val/loss" else "training.early_stopping.monitor"
            raise ForgefieldError(
                f"task.{self.task.target}.weight is 0, and val/loss holds no term on snapshots: it would always be 0; set "
                f"{setting}, for example val/band_energy_mae or val/{self.task.target}_rmse."
            )
        names = {f"val/{name}_mae" for name in self.observables.metrics}
        if watched & names and self.observables.every != 1:
            raise ForgefieldError(
                f"task.observables.every={self.observables.every}, but {min(watched & names)} is watched and so needed at "
                f"every validation; set it to 1, and validate less often with trainer.check_val_every_n_epoch="
                f"{self.observables.every}."
            )

    def _terms(self) -> SnapshotMeasure:
        """Training snapshots, for terms of the loss."""
        return self._measure(self.data.train.table, ["band_energy"], "self_consistent", part=self.data.train)

    def _require_whole_snapshots(self) -> None:
        if self.task.terms and not self.data.train.is_whole:
            raise ForgefieldError(
                f"task.{next(iter(self.task.terms))} is a term on whole snapshots, and a share of their points is held back "
                "for validation; name snapshots in data.val."
            )

    def _report_initial(self, values: dict[str, float], quick: bool) -> None:
        """Observables before the first step."""
        if self.session.ranks.is_rank_zero and not quick:
            self.run.write_info(before_training=values)
        shown = [
            f"{name} {value:.4g} {OBSERVABLE_UNITS[name]}"
            for name, value in ((key.removeprefix("val/").removesuffix("_mae"), v) for key, v in values.items())
        ]
        self.session.journal.notify(f"Before the first step: {', '.join(shown)}.")

    def loader(self, device: torch.device) -> BlockLoader:
        self.model.to(device)
        self.data.keep(self.model, device)
        self._device = device
        if self.observed is not None:
            self._executor.observables = self._measure(
                self.observed, list(self.observables.metrics), self.observables.fermi, part=self.data.val
            )
        # What is wrong with units and energies of snapshots is told now.
        measures = [self._executor.observables, self._terms() if self.task.terms else None]
        for measure in measures:
            for number in range(0 if measure is None else len(measure.facts)):
                measure.reference(number)  # type: ignore[union-attr]
        return BlockLoader(self.data.train_loader(device), self.block, self._limit)

    def val_loader(self) -> Any:
        assert self.data.val is not None
        self._executor.val_is_scaled = self.data.val.kept is not None
        return self.data.val_loader(self._device)

    def refuse(self, device: torch.device) -> None:
        EngineMaker.refuse(self.config, device, self.session.ranks.world_size)

    def facts(self) -> dict[str, Any]:
        descriptors = self.config.points.descriptors or {}
        snapshots = self.data.train.table.snapshots
        keep_pseudopotentials(snapshots, self.config.points.pseudopotentials, self.run.path)
        return {
            "samples": "points",
            "species": self.data.symbols,
            "cutoff": descriptors.get("cutoff"),
            "statistics": {"n_points": len(self.data.train)},
            "units": self.units,
            "calculation": calculation_facts(snapshot.info for snapshot in snapshots),
        }

    def batch_row(self) -> str:
        text = effective(self.data.batch, "points", self.session.ranks.world_size)
        return f"{text}; {self.block} steps a block; rows on {self.data.place}"

    @property
    def units(self) -> dict[str, str]:
        """Of everything that is measured."""
        return {self.task.target: UNITS[self.task.target]} | {
            name: OBSERVABLE_UNITS[name] for name in self.observables.metrics
        }


def energy_grid(energies: Any) -> dict[str, Any] | None:
    """The config's levels as the model keeps them."""
    if energies is None:
        return None
    return EnergyGrid.from_segments(energies if isinstance(energies, list) else [energies]).to_dict()


def point_task(config: Config, n_targets: int) -> PointTask:
    """The task of a config; without one, the target alone."""
    target = config.points.target
    if config.task is None or config.task.points is None:
        return PointTask(target, PointTargetOptions(), {}, n_targets)
    options = config.task.points
    terms = {name: getattr(options, name) for name in TERMS if getattr(options, name) is not None}
    return PointTask(target, getattr(options, target), terms, n_targets)


def _possible(table: PointTable) -> list[str]:
    """Observables that the snapshots tell enough for, of those that are cheap."""
    infos = [snapshot.info for snapshot in table.snapshots]
    return [
        name
        for name in ("band_energy", "density")
        if all(getattr(info, key) is not None for info in infos for key in NEEDED[name])
    ]
