"""The LightningModule of all trainings: rows of metrics, averages of weights, the optimiser, and the state that a resume needs.

What depends on the kind of samples is done by its `StepExecutor`. Nothing here reads a value back from the device during a
step: errors and loss sums are added up on the device, on each rank separately, and are summed over ranks and read when a row
of metrics is written.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import (
    STEP_OUTPUT,
    LRSchedulerConfigType,
    OptimizerLRScheduler,
    OptimizerLRSchedulerConfig,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from forgefield.errors import ForgefieldError
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.parallel.reductions import StepExchange
from forgefield.tasks.metrics import SUMS, ErrorMetrics
from forgefield.tasks.schedules import StepState
from forgefield.training.executor import EngineLike, StepExecutor, TaskLike
from forgefield.training.optim.averages import ScheduleFreeAverage, weight_average
from forgefield.training.optim.optimisers import (
    build_optimiser,
    build_scheduler,
    fit_length,
    rescale_learning_rates,
)
from forgefield.training.optim.schedule_free import ScheduleFree
from forgefield.training.optim.schedules import StepSchedule, relative_learning_rate
from forgefield.training.optim.update import portable_optimiser_states
from forgefield.training.options import TrainingOptions
from forgefield.training.precision import Precision
from forgefield.training.run.writer import Snapshot
from forgefield.training.trainer import epochs_of_fit, set_epoch_length, training_loader


class Throughput:
    """Counts samples, of each kind in `samples` (frames, atoms, points), and the time between `resume` and `pause`. Nothing is
    read from the device."""

    def __init__(self, samples: tuple[str, ...] = ("frames", "atoms")) -> None:
        self.samples = samples
        self._counts = dict.fromkeys(samples, 0)
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def columns(self) -> list[str]:
        """Keys of the result of `take`."""
        return ["seconds", *self.samples, *(f"{name}_per_second" for name in self.samples)]

    def resume(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def count(self, **counts: int) -> None:
        """Add numbers of samples of each kind."""
        self.resume()
        for name in self.samples:
            self._counts[name] += counts[name]

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def per_second(self, name: str) -> float | None:
        """Rate of one kind of sample; None if nothing was counted."""
        count = self._counts.get(name, 0)
        return count / self.seconds if count and self.seconds > 0 else None

    def take(self) -> dict[str, float | int | None]:
        """Counts and rates since the last call; resets the counts."""
        row: dict[str, float | int | None] = {"seconds": self.seconds, **self._counts}
        row |= {f"{name}_per_second": self.per_second(name) for name in self.samples}
        running = self._since is not None
        self._counts = dict.fromkeys(self.samples, 0)
        self._seconds, self._since = 0.0, None
        if running:
            self.resume()
        return row


class LossMeter:
    """Loss over many batches: sums and counts of each term, added on the device."""

    def __init__(self, task: TaskLike) -> None:
        self.task = task
        self.sums = torch.zeros(2, len(task.names), dtype=torch.float64)

    def add(self, sums: Tensor) -> None:
        """sums: (2, n_targets), sums and counts of one batch."""
        self.sums = self.sums.to(sums.device) + sums

    def value(self, sums: Tensor | None = None) -> float:
        """The loss of everything that was added, on this rank or, from the sums of all, on all ranks; NaN without labels."""
        sums = self.sums if sums is None else sums
        if not bool((sums[1] > 0).any()):
            return float("nan")
        return self.task.report(sums[0], sums[1])

    def reset(self) -> None:
        self.sums = torch.zeros_like(self.sums)


class TrainingModule(L.LightningModule):
    """Trains the model of an executor on its task with the settings of the config's `training` section.

    ranks: the processes that train together. exchange: their message of every batch. lr_factor: multiplies every learning
    rate.
    """

    def __init__(
        self,
        executor: StepExecutor[Any, Any],
        options: TrainingOptions,
        *,
        monitor: str,
        ranks: Ranks | None = None,
        exchange: StepExchange | None = None,
        lr_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.executor = executor
        self.add_module(executor.model_name, executor.model)
        self.automatic_optimization = executor.automatic_optimization
        self.options = options
        self.monitor = monitor
        self.ranks = ranks if ranks is not None else single_process()
        self.exchange = exchange
        self.lr_factor = lr_factor
        self.ema = weight_average(executor.model, options)
        self.train_loss, self.val_loss = LossMeter(executor.task), LossMeter(executor.task)
        self.train_errors, self.val_errors = executor.train_errors, executor.val_errors
        self.precision = Precision(options.precision)
        self.precision_now = self.precision.start
        self.total_steps = -1
        self.throughput = Throughput(executor.samples)
        self.latest: dict[str, float] = {}
        self._world_size_before: int | None = None
        self._schedule_length: int | None = None
        self._schedule_unit = "epoch"
        self.schedule: LRSchedulerConfigType | None = None
        """The scheduler of learning rates."""
        executor.attach(self)

    def __setattr__(self, name: str, value: object) -> None:
        """Set `_current_fx_name` without torch's test for weights: Lightning sets it forty times per step."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            nn.Module.__setattr__(self, name, cast("nn.Module", value))

    @property
    def trained(self) -> nn.Module:
        """The model, whose state is saved, averaged and deployed."""
        return self.executor.model

    @property
    def task(self) -> TaskLike:
        return self.executor.task

    @property
    def engine(self) -> EngineLike | None:
        """How steps are computed; None before the first batch."""
        return self.executor.engine

    def transfer_batch_to_device(self, batch: object, device: torch.device, dataloader_idx: int) -> object:
        """The batch on the device. Lightning's search for tensors in containers takes longer than the transfer."""
        on_device: object = self.executor.to_device(batch, device)
        return on_device

    def on_after_batch_transfer(self, batch: object, dataloader_idx: int) -> object:
        complete: object = self.executor.after_transfer(batch)
        return complete

    # ---- training

    def on_fit_start(self) -> None:
        if self.ema is not None:
            self.ema.to(self.device)
        if self.ranks.rank > 0:  # initial weights are the same on all ranks; from now on random numbers differ
            torch.manual_seed(torch.initial_seed() + 7919 * self.ranks.rank)

    def on_train_start(self) -> None:
        self.executor.before_training()
        if self._schedule_length is not None:
            other_ranks = self._world_size_before not in (None, self.ranks.world_size)
            in_proportion = other_ranks and self._schedule_unit == "step"
            scheduler = self.trainer.lr_scheduler_configs[0].scheduler
            fit_length(scheduler, self._schedule_length, in_proportion=in_proportion)
        self.executor.on_train_start()

    def on_train_epoch_start(self) -> None:
        self.executor.on_train_epoch_start()
        loader = training_loader(self.trainer)
        loader.set_epoch(self.trainer.current_epoch)
        set_epoch_length(self.trainer, loader)
        self.throughput.resume()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.executor.on_train_batch_start(batch)

    def training_step(self, batch: object, batch_idx: int) -> Tensor:
        return self.executor.training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: object, batch_idx: int) -> None:
        self.executor.on_train_batch_end(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.executor.on_train_epoch_end()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if not self.executor.keeps_gradients:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        self.executor.backward(loss)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not self.executor.clips_gradients(gradient_clip_val, gradient_clip_algorithm):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def step_state(self) -> StepState:
        """The position of the next step in the training, for schedules of loss weights."""
        return StepState(
            step=self.trainer.global_step,
            steps=self.total_steps,
            epoch=self.current_epoch,
            epochs=epochs_of_fit(self.trainer),
            lr_ratio=relative_learning_rate(self.trainer.optimizers[0], self.options.lr * self.lr_factor),
        )

    def follow_precision(self) -> None:
        """A schedule may change the precision; what was compiled or captured holds for one precision only."""
        name = self.precision.at(
            epoch=self.current_epoch,
            epochs=self.trainer.max_epochs,
            step=self.trainer.global_step,
            steps=self.total_steps,
        )
        if name != self.precision_now:
            self.precision_now = name
            self.executor.precision_changed()

    def finish_row(self) -> None:
        """Complete a row of metrics: publish training loss and errors since the last row, and reset their sums."""
        loss_sums, error_sums = self._over_ranks(self.train_loss.sums, self.train_errors.sums)
        values = {"train/loss": self.finite_train_loss(loss_sums)}
        values.update({f"train/{name}": value for name, value in self.train_errors.compute(error_sums).items()})
        self.train_loss.reset()
        self.train_errors.reset()
        self._publish(values)

    def take_throughput(self) -> dict[str, float | int | None]:
        """Samples of each kind and their rates since the last call, over all ranks."""
        row, names = self.throughput.take(), self.throughput.samples
        if self.ranks.world_size > 1:
            counts = torch.tensor([row[name] for name in names], dtype=torch.float64, device=self.device)
            seconds = row["seconds"] or 0.0
            for name, count in zip(names, self.ranks.all_reduce(counts).tolist()):
                row[name] = int(count)
                row[f"{name}_per_second"] = count / seconds if count and seconds > 0 else None
        return row

    def _publish(self, values: dict[str, float]) -> None:
        """Pass values to Lightning's callbacks and to the row of metrics. `log` would create an accumulator for each of them
        and move it to the device and back, which takes longer than many steps."""
        self.latest.update(values)
        metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        self.trainer.callback_metrics.update(metrics)

    def finite_train_loss(self, sums: Tensor | None = None) -> float:
        """The training loss of all ranks since the last row. Raises ForgefieldError, on all ranks, if it is not finite."""
        sums = self._over_ranks(self.train_loss.sums)[0] if sums is None else sums
        loss = self.train_loss.value(sums)
        if bool((sums[1] > 0).any()) and not abs(loss) < float("inf"):
            raise ForgefieldError(
                f"The training loss is {loss} at step {self.trainer.global_step}; earlier checkpoints are not affected. Lower "
                "training.lr or set training.clip_norm, then train again with --fresh."
            )
        return loss

    def _over_ranks(self, *sums: Tensor) -> list[Tensor]:
        """Accumulators added up over ranks, in one message."""
        if self.ranks.world_size == 1:
            return list(sums)
        total = self.ranks.all_reduce(torch.cat([one.reshape(-1).to(self.device) for one in sums]))
        totals = total.split([one.numel() for one in sums])
        return [one.reshape(like.shape) for one, like in zip(totals, sums)]

    # ---- validation

    def validation_step(self, batch: object, batch_idx: int) -> None:
        self.executor.validation_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.throughput.pause()
        self.val_loss.reset()
        for errors in (self.val_errors, *self.executor.set_errors.values()):
            errors.reset()
        if self.ema is not None:
            self.ema.to(self.device)
            self.ema.exchange()

    def on_validation_epoch_end(self) -> None:
        values = self.validated()
        if self.ema is not None:
            self.ema.exchange()
        if not self.trainer.sanity_checking and self.trainer.state.fn == "fit":
            self.finish_row()
        self._publish(values)
        self.throughput.resume()

    def validated(self) -> dict[str, float]:
        """Loss and errors of the validation that has just ended, of all ranks; the model still has the validated weights."""
        accumulated = {"val": self.val_errors, **self.executor.set_errors}
        loss_sums, *error_sums = self._over_ranks(self.val_loss.sums, *(errors.sums for errors in accumulated.values()))
        values = {"val/loss": self.val_loss.value(loss_sums)}
        for (split, errors), sums in zip(accumulated.items(), error_sums):
            if isinstance(errors, ErrorMetrics) and errors.maxima:
                largest = self.ranks.maximum(errors.sums[:, SUMS:].to(sums.device))
                sums = torch.cat([sums[:, :SUMS], largest], dim=1)
            values |= {f"{split}/{name}": value for name, value in errors.compute(sums).items()}
            weights = self.options.monitor_weights or {}
            if weights and all(f"{split}/{name}" in values for name in weights):
                values[f"{split}/weighted_sum"] = sum(w * values[f"{split}/{name}"] for name, w in weights.items())
        return values | self.executor.measure_after_validation()

    def on_validation_end(self) -> None:
        self.executor.on_validation_end()

    # ---- optimiser

    def configure_optimizers(self) -> OptimizerLRScheduler:
        lr = self.options.lr * self.lr_factor
        optimiser = build_optimiser(
            self.options.optimizer, self.executor.parameter_groups(lr), lr=lr, module=self.executor.model
        )
        self.executor.check_optimiser(optimiser)
        if isinstance(self.ema, ScheduleFreeAverage) and isinstance(optimiser, ScheduleFree):
            self.ema.bind(optimiser)
        if self.options.scheduler is None:
            return optimiser
        scheduler = build_scheduler(
            self.options.scheduler,
            optimiser,
            monitor=self.monitor,
            validate_every=self.trainer.check_val_every_n_epoch or 1,
            epochs=self.trainer.max_epochs if self.trainer.max_epochs is not None else -1,
            steps=self.executor.steps_of_fit,
            lr_factor=self.lr_factor,
        )
        curve = scheduler["scheduler"]
        if "T_max" not in self.options.scheduler and isinstance(curve, (StepSchedule, CosineAnnealingLR)):
            self._schedule_length = curve.T_max
            self._schedule_unit = scheduler["interval"]
        self.schedule = scheduler
        # With manual optimisation, schedulers are stepped by the executor; Lightning only stores their state.
        configured: OptimizerLRSchedulerConfig = {
            "optimizer": optimiser,
            "lr_scheduler": scheduler if self.automatic_optimization else curve,
        }
        return configured

    # ---- state beyond weights, optimiser and loops

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        sums = {"train_loss": self.train_loss.sums.cpu().clone(), "train_errors": self.train_errors.sums.cpu().clone()}
        portable_optimiser_states(checkpoint.get("optimizer_states", []), self.trainer.optimizers)
        checkpoint["forgefield"] = {
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "sums": self.ranks.gather(sums),
            "lr_factor": self.lr_factor,
            **self.executor.state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["forgefield"]
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self._world_size_before = len(state["sums"])
        sums = sums_of_rank(state["sums"], self.ranks)
        self.train_loss.sums, self.train_errors.sums = sums["train_loss"], sums["train_errors"]
        rescale_learning_rates(checkpoint, self.lr_factor / state["lr_factor"])
        self.executor.load_state(state)

    def averaged_snapshot(self) -> Snapshot:
        """A copy of the model's state with averaged weights: what is validated, and what is deployed."""
        with nullcontext() if self.ema is None else self.ema.applied():
            return Snapshot(dict(self.executor.deployed_state()))


def training_module(module: L.LightningModule) -> TrainingModule:
    """The module, which has to be Forgefield's."""
    if not isinstance(module, TrainingModule):
        raise TypeError(f"{type(module).__name__} is not a TrainingModule")
    return module


def sums_of_rank(stored: list[dict[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    """The sums of this rank. If the number of ranks has changed, rank 0 gets the sums of all."""
    if len(stored) == ranks.world_size:
        return stored[ranks.rank]
    total = {name: torch.stack([sums[name] for sums in stored]).sum(0) for name in stored[0]}
    return total if ranks.is_rank_zero else {name: torch.zeros_like(tensor) for name, tensor in total.items()}
