"""Trainings on grid points: networks for the LDOS or the density, with observables of complete snapshots."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.ldos.data import PointTable, Scaling
from forgefield.ldos.data.scaling import default_output_scaling
from forgefield.ldos.data.snapshot import calculation_facts, copy_pseudopotentials
from forgefield.ldos.descriptors import DescriptorOptions, require_fitting
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.loss import TERMS, UNITS, PointErrors, PointTask, metrics_from_loss
from forgefield.ldos.model import LDOSNetwork, LinearScale, PointFacts, build_network, load_network, resolve
from forgefield.ldos.observable_units import OBSERVABLE_UNITS
from forgefield.ldos.options import ObservablesOptions, PointTargetOptions
from forgefield.ldos.training.blocks import BlockLoader
from forgefield.ldos.training.data import PointData, PointSplit
from forgefield.ldos.training.engine_choice import EngineBuilder, block_size
from forgefield.ldos.training.executor import PointsExecutor
from forgefield.ldos.training.snapshots import NEEDED, SnapshotMeasure
from forgefield.models.resolving import check_model
from forgefield.parallel.ranks import Ranks
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
    """Data, network and task of a training on grid points. A network may start from another run: `model: {from: RUN}`."""

    data: PointData
    task: PointTask
    model: LDOSNetwork

    def __init__(
        self, run: Run, config: Config, options: dict[str, Any], session: TrainingSession, *, resumes: bool = True
    ) -> None:
        super().__init__(run, config, options, session, resumes=resumes)
        self.initial = initial_network(run, config, session.ranks, begun=self.has_begun)
        if self.initial is not None:
            self.config = self.initial.resolve_config(config)
        algorithm = str(options.pop("gradient_clip_algorithm", None) or "norm").split(".")[-1].lower()
        self.clip = (options.pop("gradient_clip_val", None), algorithm)
        self._limit = options.pop("limit_train_batches", None)
        if self._limit == 0:
            raise ForgefieldError("trainer.limit_train_batches=0 leaves nothing to train on.")

    # ---- data, model, task

    def prepare(self) -> None:
        config, ranks = self.config, self.session.ranks
        self.data = PointData(config.data, config.seed, ranks, output_scaling=self._output_scaling())
        self.data.prepare()
        table = self.data.train.table
        self.task = point_task(config, table.n_targets)
        self.data.measure()
        self.fingerprint = self.data.fingerprint
        require_same_data(self.fingerprint, ranks)
        if self.initial is None:
            _, _, model_options = check_model(config.model, trust=CONFIG)
            self.resolved = self.stored_or_resolved(resolve(model_options, self._facts()))
        else:
            self.data.inputs, self.data.outputs = self.initial.scaling("inputs"), self.initial.scaling("outputs")
            self.resolved = self.stored_or_resolved(self.initial.options(table, config.points.descriptors))
        if (descriptors := self.resolved["points"]["descriptors"]) is not None:
            options = DescriptorOptions.from_mapping(descriptors, "data.points.descriptors")
            in_config = config.points.descriptors is not None
            require_fitting(options, self.data.symbols, table.n_inputs if in_config else None)
        precision = Precision(config.training.precision).weights
        self.model = build_network(self.resolved, precision=precision, seed=config.seed)
        if self.initial is not None:
            self.initial.start(self.model)
        self._select_observables()
        self._require_complete_snapshots()
        self._block_size()

    def _output_scaling(self) -> str:
        """Kind of the scaling of targets. A run that has begun keeps its own when the default changes."""
        kind, ranks = self.config.points.scaling.outputs, self.session.ranks
        if kind is None and ranks.is_rank_zero and self.has_begun:
            kind = str(self.run.info["model"]["points"]["outputs"]["kind"])
        return ranks.broadcast(kind or default_output_scaling(self.config.model))

    def _facts(self) -> PointFacts:
        points = self.config.points
        return PointFacts(
            target=points.target,
            inputs=LinearScale(**self.data.inputs.to_dict()),
            outputs=LinearScale(**self.data.outputs.to_dict()),
            energies=energy_grid(points.energies),
            descriptors=points.descriptors,
        )

    def _select_observables(self) -> None:
        """Select the observables and the snapshots on which they are evaluated; by default the cheap ones that are possible."""
        self.observed: PointTable | None = None
        self.observables = ObservablesOptions(metrics=[])
        task, val = self.config.task, self.data.val
        complete = val.table if val is not None and val.is_complete else None
        if self.config.points.target != "ldos":
            return
        if task is None:
            self.observed = complete
            self.observables.metrics = [] if complete is None else _default_observables(complete)
        elif task.points is not None and task.points.observables is not None:
            self.observables = task.points.observables
            requested = self.observables.snapshots
            self.observed = (
                complete if requested is None else PointTable(self.data.find(requested, "task.observables.snapshots"))
            )
            if self.observed is None:
                raise ForgefieldError(
                    "task.observables needs complete snapshots: name them in data.val, or in task.observables.snapshots."
                )
        if not self.observables.metrics:
            self.observed = None
        if self.observables.training and not self.data.train.is_complete:
            raise ForgefieldError(
                "task.observables.training needs complete training snapshots, but a fraction of their points is held back for "
                "validation; name snapshots in data.val."
            )

    def _measure(
        self, table: PointTable, metrics: list[str], fermi: str, *, split: PointSplit | None = None
    ) -> SnapshotMeasure:
        folder = self.config.points.pseudopotentials
        resident = split.resident if split is not None and split.table is table else None
        return SnapshotMeasure(
            table,
            self.model,
            metrics,
            fermi,
            self.session.ranks,
            resident=resident,
            pseudopotentials=folder,
            remember=self.data.location != "disk",
        )

    def _block_size(self) -> None:
        """Set the number of steps per block, and convert Lightning's settings from batches to blocks."""
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

    # ---- interface of fit

    def metric_names(self, split: str) -> list[str]:
        metrics = metrics_from_loss(self.task.loss.kind) if split == "train" else ("mae", "rmse")
        names = ["loss", *PointErrors(self.task.target, torch.ones(1), metrics).names()]
        if self.observed is not None and (split == "val" or self.observables.training):
            names += [f"{name}_mae" for name in self.observables.metrics]
        return names

    def module(
        self, monitor: str, exchange: StepExchange | None, restart: ResumePoint | None, quick: bool
    ) -> TrainingModule:
        self._require_measured(monitor)
        builder = EngineBuilder(self.config, self.session, self.data, self.block, self._terms)
        self._executor = PointsExecutor(
            self.model,
            self.task,
            self.config.training,
            build_engine=builder,
            every=int(self.observables.every),
            clip=self.clip,
            report_initial=lambda values: self._report_initial(values, quick),
        )
        return self.module_of(self._executor, monitor, exchange)

    def _require_measured(self, monitor: str) -> None:
        """Refuse a monitored quantity that is constant or not computed at every validation."""
        early = self.config.training.early_stopping
        watched = {monitor, (early.monitor if early is not None else None) or monitor}
        if self.task.weight == 0 and "val/loss" in watched:
            setting = "training.monitor" if monitor == "val/loss" else "training.early_stopping.monitor"
            raise ForgefieldError(
                f"task.{self.task.target}.weight is 0, and val/loss has no terms for snapshots: it would always be 0; set "
                f"{setting}, for example val/band_energy_mae or val/{self.task.target}_rmse."
            )
        names = {f"val/{name}_mae" for name in self.observables.metrics}
        if watched & names and self.observables.every != 1:
            raise ForgefieldError(
                f"task.observables.every={self.observables.every}, but {min(watched & names)} is monitored and needed at "
                f"every validation; set it to 1, and validate less often with trainer.check_val_every_n_epoch="
                f"{self.observables.every}."
            )

    def _terms(self) -> SnapshotMeasure:
        """Observables of the training snapshots, for terms of the loss."""
        return self._measure(self.data.train.table, ["band_energy"], "self_consistent", split=self.data.train)

    def _require_complete_snapshots(self) -> None:
        if self.task.terms and not self.data.train.is_complete:
            raise ForgefieldError(
                f"task.{next(iter(self.task.terms))} is a term for complete snapshots, but a fraction of their points is held "
                "back for validation; name snapshots in data.val."
            )

    def _report_initial(self, values: dict[str, float], quick: bool) -> None:
        """Store and print the observables before the first step."""
        if self.session.ranks.is_rank_zero and not quick:
            self.run.write_info(before_training=values)
        shown = [
            f"{name} {value:.4g} {OBSERVABLE_UNITS[name]}"
            for name, value in (
                (key.removeprefix("val/").removesuffix("_mae"), v)
                for key, v in values.items()
                if key.startswith("val/")
            )
        ]
        self.session.journal.notify(f"Before the first step: {', '.join(shown)}.")

    def loader(self, device: torch.device) -> BlockLoader:
        self.model.to(device)
        self.data.load(self.model, device)
        self._device = device
        if self.observed is not None:
            self._executor.observables = self._measure(
                self.observed, list(self.observables.metrics), self.observables.fermi, split=self.data.val
            )
            if self.observables.training:
                self._executor.training_observables = self._measure(
                    self.data.train.table, list(self.observables.metrics), self.observables.fermi, split=self.data.train
                )
        # Errors in units and energies of the snapshots are raised now, not at the first validation.
        terms = self._terms() if self.task.terms else None
        for measure in (self._executor.observables, self._executor.training_observables, terms):
            if measure is not None:
                for number in range(len(measure.facts)):
                    measure.reference(number)
        return BlockLoader(self.data.train_loader(device), self.block, self._limit)

    def val_loader(self) -> Any:
        assert self.data.val is not None
        self._executor.val_is_scaled = self.data.val.resident is not None
        return self.data.val_loader(self._device)

    def refuse(self, device: torch.device) -> None:
        EngineBuilder.refuse(self.config, device, self.session.ranks.world_size)

    def facts(self) -> dict[str, Any]:
        descriptors = self.config.points.descriptors or {}
        snapshots = self.data.train.table.snapshots
        copy_pseudopotentials(snapshots, self.config.points.pseudopotentials, self.run.path)
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
        where = {"device": "on the device", "memory": "in memory", "disk": "on disk"}[self.data.location]
        return f"{text}; {self.block} steps per block; rows {where}"

    @property
    def units(self) -> dict[str, str]:
        """Units of the errors of the target and of all observables."""
        return {self.task.target: UNITS[self.task.target]} | {
            name: OBSERVABLE_UNITS[name] for name in self.observables.metrics
        }


def energy_grid(energies: dict[str, float] | list[dict[str, float]] | None) -> dict[str, Any] | None:
    """The energy levels of a config in the format stored in the model."""
    if energies is None:
        return None
    return EnergyGrid.from_segments(energies if isinstance(energies, list) else [energies]).to_dict()


def point_task(config: Config, n_targets: int) -> PointTask:
    """The task of a config; by default only the target at each point."""
    target = config.points.target
    if config.task is None or config.task.points is None:
        return PointTask(target, PointTargetOptions(), {}, n_targets)
    options = config.task.points
    terms = {name: getattr(options, name) for name in TERMS if getattr(options, name) is not None}
    return PointTask(target, getattr(options, target), terms, n_targets)


def _default_observables(table: PointTable) -> list[str]:
    """The cheap observables for which the snapshots have all metadata."""
    infos = [snapshot.info for snapshot in table.snapshots]
    return [
        name
        for name in ("band_energy", "density")
        if all(getattr(info, key) is not None for info in infos for key in NEEDED[name])
    ]


START_KEYS = ("from", "which", "shifts")
"""Keys of the section that are not options of the model."""


@dataclass(frozen=True)
class InitialNetwork:
    """The network of another run from which a training starts.

    origin: description of that run. resolved: its resolved options; scalings, energy levels and weights are kept. state:
    initial weights; None if the training is resumed and has its own.
    """

    origin: str
    resolved: dict[str, Any]
    state: dict[str, Tensor] | None

    def resolve_config(self, config: Config) -> Config:
        """The config completed with the settings of the network. Contradictions are errors."""
        config, model = copy.deepcopy(config), config.model
        if model.get("shifts") != "keep":
            raise ForgefieldError("model.shifts is for energies of potentials; for grid points leave it out.")
        for key, value in model.items():
            if key not in START_KEYS and value != self.resolved.get(key):
                raise ForgefieldError(
                    f"model.{key} is {value}, and the network of {self.origin} has {self.resolved.get(key)}; leave it out: it "
                    "is part of the network."
                )
        points, stored = config.points, self.resolved["points"]
        energies = points.energies
        grid = (
            None
            if energies is None
            else EnergyGrid.from_segments(energies if isinstance(energies, list) else [energies])
        )
        same = grid is None if stored["energies"] is None else grid == EnergyGrid.from_dict(stored["energies"])
        if points.target != stored["target"] or not same:
            raise ForgefieldError(
                f"data.points: target {points.target} and energies {energies} are not those of the network of {self.origin}, "
                "which "
                f"predicts {stored['target']} at {stored['energies']}."
            )
        config.model["name"] = self.resolved["name"]
        return config

    def options(self, table: PointTable, descriptors: Mapping[str, Any] | None) -> dict[str, Any]:
        """Resolved options for these data. descriptors: those of the config; None: those of the network."""
        stored = self.resolved["points"]
        for quantity, actual, expected in (
            ("descriptors", table.n_inputs, len(stored["inputs"]["shift"])),
            ("target values", table.n_targets, len(stored["outputs"]["shift"])),
        ):
            if actual != expected:
                raise ForgefieldError(
                    f"data.train has {actual} {quantity} per point, the network of {self.origin} {expected}."
                )
        return {**self.resolved, "points": {**stored, "descriptors": descriptors or stored["descriptors"]}}

    def scaling(self, side: str) -> Scaling:
        """Scaling of inputs or outputs: that of the network, not of the new data."""
        return Scaling.from_dict(self.resolved["points"][side])

    def start(self, model: LDOSNetwork) -> None:
        if self.state is not None:
            model.load_state_dict(self.state)


def initial_network(run: Run, config: Config, ranks: Ranks, *, begun: bool) -> InitialNetwork | None:
    """The network that `model.from` names, read by rank 0 and sent to all ranks; None if the config describes a new one.

    begun: whether `run` is resumed and has its own copy of the network.
    """
    if "from" not in config.model:
        return None
    return ranks.broadcast(_read(run, config, begun) if ranks.is_rank_zero else None)


def _read(run: Run, config: Config, begun: bool) -> InitialNetwork:
    model = config.model
    if begun:
        return InitialNetwork(f"run {model['from']}", run.info["model"], None)
    source = Run.open(model["from"], out=config.out)
    if not source.of_points:
        raise ForgefieldError(
            f"model.from: run {source.name} is a potential, but this training is on grid points (data.points)."
        )
    network = load_network(source, model["which"])
    return InitialNetwork(f"run {source.name}", source.info["model"], dict(network.state_dict()))
