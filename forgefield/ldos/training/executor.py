"""Training and validation steps on grid points: a Lightning batch is a block of optimiser steps, executed by an engine.

Optimisation is manual: Lightning's loop runs once per block; global steps, schedules by step and clipping are handled here in
the same way as in Lightning. Losses are summed on the device and read when a row of metrics is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.loss import PointErrors, PointTask, metrics_from_loss
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training.blocks import Block, BlockLoader
from forgefield.ldos.training.engines import EagerEngine, GraphsEngine, Sums
from forgefield.ldos.training.snapshots import SnapshotMeasure
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.training.executor import StepExecutor
from forgefield.training.optim.optimisers import ManualSchedule
from forgefield.training.options import TrainingOptions
from forgefield.training.trainer import set_epoch_length

BuildEngine = Callable[["PointsExecutor"], EagerEngine | GraphsEngine]


class PointsExecutor(StepExecutor[Block, dict[str, Tensor]]):
    """Trains a network on points of a grid.

    build_engine: builds the engine once the optimiser and the strategy exist. observables: evaluated on complete snapshots at
    every `every`-th validation. clip: gradient clipping as set for the trainer, value and algorithm. report_initial: called
    with the observables before the first step.
    """

    model_name = "model"
    samples = ("points",)
    automatic_optimization = False
    model: LDOSNetwork
    task: PointTask
    engine: EagerEngine | GraphsEngine | None

    def __init__(
        self,
        model: LDOSNetwork,
        task: PointTask,
        options: TrainingOptions,
        *,
        build_engine: BuildEngine,
        observables: SnapshotMeasure | None = None,
        every: int = 1,
        clip: tuple[float | None, str] = (None, "norm"),
        report_initial: Callable[[dict[str, float]], None] = lambda values: None,
    ) -> None:
        scale = model.output_scale
        super().__init__(
            model,
            task,
            options,
            train_errors=PointErrors(task.target, scale, metrics_from_loss(task.loss.kind)),
            val_errors=PointErrors(task.target, scale),
        )
        self.observables, self.every, self.clip, self.report_initial = observables, every, clip, report_initial
        self.training_observables: SnapshotMeasure | None = None
        """Observables of the training snapshots, if they are requested as well."""
        self._make_engine = build_engine
        self.choices: dict[str, bool] = {}
        """Choices that the engine made by measurement before the training was resumed, see `GraphsEngine`."""
        self._validations = 0

    @property
    def schedule(self) -> ManualSchedule:
        """Schedule of the learning rates."""
        return ManualSchedule(self.module.trainer.optimizers[0], self.module.schedule, self.module.monitor)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Blocks are copied to the device by the engine."""
        return batch if isinstance(batch, Block) else move_data_to_device(batch, device)

    # ---- training

    def before_training(self) -> None:
        self.module.total_steps = self.steps_of_fit() if self.module.precision.unit == "steps" else -1

    def on_train_start(self) -> None:
        self._align_last_block()  # in a resumed epoch no other hook is called in time
        if self.observables is not None and self.module.trainer.global_step == 0:
            self.report_initial(self._observe())

    def on_train_epoch_start(self) -> None:
        self._align_last_block()

    def _align_last_block(self) -> None:
        """Let the last block end at `trainer.max_steps`."""
        loader = self.module.trainer.train_dataloader
        assert isinstance(loader, BlockLoader)
        loader.set_epoch(self.module.trainer.current_epoch)
        if self.module.trainer.max_steps not in (None, -1):
            loader.cut_after(self.module.trainer.max_steps - self.module.trainer.global_step)
            set_epoch_length(self.module.trainer, loader)

    def steps_of_fit(self) -> int:
        trainer, loader = self.module.trainer, self.module.trainer.train_dataloader
        if loader is None:  # Lightning has not set it up yet
            trainer.fit_loop.setup_data()
            loader = trainer.train_dataloader
        assert isinstance(loader, BlockLoader)
        by_epochs = None if trainer.max_epochs in (None, -1) else trainer.max_epochs * loader.steps_per_epoch
        limits = [n for n in (by_epochs, None if trainer.max_steps == -1 else trainer.max_steps) if n is not None]
        return min(limits) if limits else -1

    def on_train_batch_start(self, batch: Block) -> None:
        if self.engine is None:
            self.engine = self._make_engine(self)

    def training_step(self, batch: Block, batch_idx: int) -> Tensor:
        assert self.engine is not None
        if self.module.exchange is not None:  # all ranks know the number of points, but not stop requests
            self.module.exchange.send(torch.zeros(0, dtype=torch.float64, device=self.module.device))
        sums = Sums(self.task, self.module.device)
        for block in batch.split_at(self._steps_to_change()):
            sums.add(self._run_steps(block))
        if self.module.exchange is not None:
            self.module.exchange.counts()
        loss_sums = self.task.sums(sums.by_level, sums.points)
        loss = loss_sums[0, 0] / loss_sums[1, 0].clamp_min(1e-300)
        self.module.train_loss.add(loss_sums if sums.terms is None else loss_sums + sums.terms.to(loss_sums.device))
        assert isinstance(self.train_errors, PointErrors)
        self.train_errors.add(self.train_errors.of_loss(self.task.loss.kind, sums.by_level, sums.points))
        self.module.throughput.count(points=sums.points)
        return loss

    def _steps_to_change(self) -> int:
        """Steps until a schedule by steps changes the precision; 0 or negative if it does not, or has already."""
        by_steps = self.module.precision.unit == "steps" and self.module.total_steps > 0
        return self.module.total_steps - self.module.precision.last - self.module.trainer.global_step if by_steps else 0

    def _run_steps(self, block: Block) -> Sums:
        """Execute steps of one precision, and count them as global steps of Lightning."""
        assert self.engine is not None
        self.module.follow_precision()
        with self.module.precision.applied(self.module.precision_now):
            sums = self.engine.run(block, self.module.trainer.global_step, self.schedule.next_rates)
        self.module.precision.require_effect(self.module.precision_now)
        progress = self.module.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for scope in (progress.total, progress.current):
            scope.ready += len(block)
            scope.completed += len(block)
        return sums

    def on_train_epoch_end(self) -> None:
        self.schedule.end_epoch(self.module.trainer.callback_metrics)

    # ---- validation

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        inputs, targets = batch["inputs"], batch["targets"]
        with torch.no_grad(), self.module.precision.applied(self.module.precision.weights):
            if not self.val_is_scaled:
                inputs, targets = self.model.scaled_inputs(inputs), self.model.scaled_targets(targets)
            difference = self.model.network(inputs) - targets
        difference = difference * batch["weight"][:, None].to(difference.dtype)
        by_level = self.task.loss.errors(difference.to(torch.float64)).sum(0)
        measured = PointErrors.measure(difference, batch["weight"])
        self.module.val_loss.add(self.task.sums(by_level, 0.0) + self._counts(measured[2, 0]))
        self.val_errors.add(measured)

    val_is_scaled = True
    """Whether validation batches contain scaled values, as resident rows do."""

    def _counts(self, n_points: Tensor) -> Tensor:
        counts = torch.zeros(2, len(self.task.names), dtype=torch.float64, device=n_points.device)
        counts[1, 0] = n_points * self.task.loss.levels.sum()
        return counts

    def measure_after_validation(self) -> dict[str, float]:
        if (
            self.observables is not None
            and self.module.trainer.state.fn == "fit"
            and not self.module.trainer.sanity_checking
        ):
            self._validations += 1
            if self._validations % self.every == 0:
                return self._observe()
        return {}

    def on_validation_end(self) -> None:
        self.schedule.end_validation(self.module.trainer.callback_metrics)

    def _observe(self) -> dict[str, float]:
        assert self.observables is not None
        with self.module.precision.applied(self.module.precision.weights):
            values = {f"val/{name}": value for name, value in self.observables.values().items()}
            if self.training_observables is not None:
                values |= {f"train/{name}": value for name, value in self.training_observables.values().items()}
            return values

    # ---- optimiser and state

    def check_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        if isinstance(optimiser, torch.optim.LBFGS):
            raise ForgefieldError(
                "training.optimizer: LBFGS evaluates a step several times; choose another for grid points."
            )

    def reduction(self) -> Callable[[], None] | None:
        """The function that averages gradients over ranks; None with one rank."""
        if self.module.ranks.world_size == 1:
            return None
        strategy = self.module.trainer.strategy
        if isinstance(strategy, SimpleDDPStrategy):
            return strategy.average_gradients
        kind = type(strategy).__name__
        reason = (
            "needs to observe the backward pass" if isinstance(strategy, DDPStrategy) else "does not average gradients"
        )
        raise ForgefieldError(f"trainer.strategy: {kind} {reason}; for grid points leave it out.")

    def state(self) -> dict[str, Any]:
        chosen = self.engine.choices if isinstance(self.engine, GraphsEngine) else self.choices
        return {"validations": self._validations, "fused_kernels": dict(chosen)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._validations = int(state["validations"])
        self.choices = dict(state.get("fused_kernels", {}))
