"""The Lightning module of points: a batch of Lightning's is a block of optimiser steps, made by an engine without its help.

Optimisation is manual: Lightning's loop runs once a block, and global steps, schedules by step and clipping are kept here as it
would keep them. Losses are added up on the device and read when a row of metrics is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from forgefield.config.schema import TrainingOptions
from forgefield.errors import ForgefieldError
from forgefield.ldos.loss import PointErrors, PointTask, errors_known_in_training
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training.blocks import Block, BlockLoader
from forgefield.ldos.training.engines import EagerEngine, GraphsEngine, Sums
from forgefield.ldos.training.observing import SnapshotMeasure
from forgefield.parallel.exchange import StepExchange
from forgefield.parallel.ranks import Ranks
from forgefield.parallel.strategies import SimpleDDPStrategy
from forgefield.training.epoch_length import fit_epoch_length
from forgefield.training.run_module import RunModule

MakeEngine = Callable[["PointsModule"], EagerEngine | GraphsEngine]


class PointsModule(RunModule):
    """make_engine: builds the engine once the optimiser and the strategy are there. observables: measured on whole snapshots at
    every `every`-th validation. clip: gradient clipping as the trainer's settings say. told: called with the observables before
    the first step."""

    def __init__(
        self,
        model: LDOSNetwork,
        task: PointTask,
        options: TrainingOptions,
        *,
        monitor: str,
        make_engine: MakeEngine,
        observables: SnapshotMeasure | None = None,
        every: int = 1,
        clip: tuple[float | None, str] = (None, "norm"),
        told: Callable[[dict[str, float]], None] = lambda values: None,
        ranks: Ranks | None = None,
        exchange: StepExchange | None = None,
        lr_factor: float = 1.0,
    ) -> None:
        scale = model.output_scale
        super().__init__(
            model,
            task,
            options,
            monitor=monitor,
            samples=("points",),
            train_errors=PointErrors(task.target, scale, errors_known_in_training(task.loss.kind)),
            val_errors=PointErrors(task.target, scale),
            ranks=ranks,
            exchange=exchange,
            lr_factor=lr_factor,
        )
        self.automatic_optimization = False
        self.model, self.task = model, task
        self.observables, self.every, self.clip, self.told = observables, every, clip, told
        self._make_engine = make_engine
        self.engine: EagerEngine | GraphsEngine | None = None
        self.choices: dict[str, bool] = {}
        """What the engine of an earlier part of the training chose by measurements, see `GraphsEngine`."""
        self._schedule: dict[str, Any] | None = None
        self._validations = 0

    @property
    def trained(self) -> LDOSNetwork:
        return self.model

    @property
    def scheduler(self) -> Any:
        """Of learning rates, or None."""
        return None if self._schedule is None else self._schedule["scheduler"]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Blocks are brought to the device by the engine, as a whole."""
        return batch if isinstance(batch, Block) else super().transfer_batch_to_device(batch, device, dataloader_idx)

    # ---- training

    def on_train_start(self) -> None:
        self._steps_in_all = self.steps_of_fit() if self.precision.unit == "steps" else -1
        super().on_train_start()
        self._end_with_a_block()  # in a resumed epoch no other hook comes in time
        if self.observables is not None and self.trainer.global_step == 0:
            self.told(self._observe())

    def on_train_epoch_start(self) -> None:
        self._end_with_a_block()
        super().on_train_epoch_start()

    def _end_with_a_block(self) -> None:
        """Let the last block end where `trainer.max_steps` ends the training."""
        loader: Any = self.trainer.train_dataloader
        loader.set_epoch(self.trainer.current_epoch)
        if self.trainer.max_steps not in (None, -1):
            loader.cut_after(self.trainer.max_steps - self.trainer.global_step)
            fit_epoch_length(self.trainer, loader)

    def steps_of_fit(self) -> int:
        trainer, loader = self.trainer, self.trainer.train_dataloader
        if loader is None:  # Lightning has not set it up yet
            trainer.fit_loop.setup_data()
            loader = trainer.train_dataloader
        assert isinstance(loader, BlockLoader)
        by_epochs = None if trainer.max_epochs in (None, -1) else trainer.max_epochs * loader.steps_per_epoch
        limits = [n for n in (by_epochs, None if trainer.max_steps == -1 else trainer.max_steps) if n is not None]
        return min(limits) if limits else -1

    def on_train_batch_start(self, batch: Block, batch_idx: int) -> None:
        if self.engine is None:
            self.engine = self._make_engine(self)

    def training_step(self, batch: Block, batch_idx: int) -> Tensor:
        assert self.engine is not None
        if self.exchange is not None:  # how many points a step has is known to all; the wish to stop is not
            self.exchange.send(torch.zeros(0, dtype=torch.float64, device=self.device))
        sums = Sums(self.task, self.device)
        for part in batch.parts(self._steps_to_change()):
            sums.add(self._make_steps(part))
        if self.exchange is not None:
            self.exchange.counts()
        loss_sums = self.task.sums(sums.by_level, sums.points)
        loss = loss_sums[0, 0] / loss_sums[1, 0].clamp_min(1e-300)
        self.train_loss.add(loss_sums if sums.terms is None else loss_sums + sums.terms.to(loss_sums.device))
        assert isinstance(self.train_errors, PointErrors)
        self.train_errors.add(self.train_errors.of_loss(self.task.loss.kind, sums.by_level, sums.points))
        self.throughput.count(points=sums.points)
        return loss

    def _steps_to_change(self) -> int:
        """How many steps ahead a schedule by steps changes the precision; not above 0 where it does not, or has."""
        by_steps = self.precision.unit == "steps" and self._steps_in_all > 0
        return self._steps_in_all - self.precision.last - self.trainer.global_step if by_steps else 0

    def _make_steps(self, block: Block) -> Sums:
        """Steps of one precision; they count as steps of Lightning's."""
        assert self.engine is not None
        self._follow_precision()
        with self.precision.applied(self._precision_now):
            sums = self.engine.run(block, self.trainer.global_step, self._next_rates)
        self.precision.require_effect(self._precision_now)
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for scope in (progress.total, progress.current):
            scope.ready += len(block)
            scope.completed += len(block)
        return sums

    def _next_rates(self) -> list[float]:
        """Learning rates of the next step; schedules by step move on behind it."""
        rates = [float(group["lr"]) for group in self.trainer.optimizers[0].param_groups]
        if self._schedule is not None and self._schedule["interval"] == "step":
            self._schedule["scheduler"].step()
        return rates

    def precision_changed(self) -> None:
        if self.engine is not None:
            self.engine.forget()

    def on_train_epoch_end(self) -> None:
        schedule = self._schedule
        if schedule is None or schedule["interval"] == "step":
            return
        if not _is_plateau(schedule["scheduler"]):
            schedule["scheduler"].step()
        elif self.monitor.startswith("train/"):
            self._step_plateau(schedule["scheduler"])

    def _step_plateau(self, scheduler: Any) -> None:
        value = self.trainer.callback_metrics.get(self.monitor)
        if value is not None:
            scheduler.step(float(value))

    # ---- validation

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        inputs, targets = batch["inputs"], batch["targets"]
        with torch.no_grad(), self.precision.applied(self.precision.weights):
            if not self.val_is_scaled:
                inputs, targets = self.model.scaled_inputs(inputs), self.model.scaled_targets(targets)
            difference = self.model.network(inputs) - targets
        difference = difference * batch["weight"][:, None].to(difference.dtype)
        by_level = self.task.loss.errors(difference.to(torch.float64)).sum(0)
        measured = PointErrors.measure(difference, batch["weight"])
        self.val_loss.add(self.task.sums(by_level, 0.0) + self._counts(measured[2, 0]))
        self.val_errors.add(measured)

    val_is_scaled = True
    """Whether validation batches hold scaled values, as kept rows do."""

    def _counts(self, n_points: Tensor) -> Tensor:
        counts = torch.zeros(2, len(self.task.names), dtype=torch.float64, device=n_points.device)
        counts[1, 0] = n_points * self.task.loss.levels.sum()
        return counts

    def validated(self) -> dict[str, float]:
        values = super().validated()
        if self.observables is not None and self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self._validations += 1
            if self._validations % self.every == 0:
                values |= self._observe()
        return values

    def on_validation_end(self) -> None:
        schedule = self._schedule
        if schedule is not None and _is_plateau(schedule["scheduler"]) and not self.monitor.startswith("train/"):
            self._step_plateau(schedule["scheduler"])

    def _observe(self) -> dict[str, float]:
        assert self.observables is not None
        with self.precision.applied(self.precision.weights):
            return {f"val/{name}": value for name, value in self.observables.values().items()}

    # ---- optimiser and state

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        optimiser = made["optimizer"] if isinstance(made, dict) else made
        if isinstance(optimiser, torch.optim.LBFGS):
            raise ForgefieldError(
                "training.optimizer: LBFGS evaluates a step several times; choose another for grid points."
            )
        if not isinstance(made, dict):
            return made
        self._schedule = made["lr_scheduler"]
        return {"optimizer": optimiser, "lr_scheduler": made["lr_scheduler"]["scheduler"]}

    def reduction(self) -> Callable[[], None] | None:
        """What averages gradients over ranks."""
        if self.ranks.world_size == 1:
            return None
        strategy = self.trainer.strategy
        if isinstance(strategy, SimpleDDPStrategy):
            return strategy.average_gradients
        kind = type(strategy).__name__
        other = "wants to see the backward pass" if isinstance(strategy, DDPStrategy) else "does not average gradients"
        raise ForgefieldError(f"trainer.strategy: {kind} {other}; for grid points leave it out.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["forgefield"]["validations"] = self._validations
        chosen = self.engine.choices if isinstance(self.engine, GraphsEngine) else self.choices
        checkpoint["forgefield"]["fused_kernels"] = dict(chosen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._validations = int(checkpoint["forgefield"]["validations"])
        self.choices = dict(checkpoint["forgefield"].get("fused_kernels", {}))


def _is_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
