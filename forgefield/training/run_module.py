"""What every Lightning module of a run does, whatever its samples are: rows of metrics, averages, the state behind a resume.

Nothing here reads a value back from the device during a step. Errors and loss sums are added up on the device, each rank its
own, and added over ranks and read when a row of metrics is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor, nn

from forgefield.config.schema import TrainingOptions
from forgefield.errors import ForgefieldError
from forgefield.parallel.exchange import StepExchange
from forgefield.parallel.ranks import Ranks, single_process
from forgefield.tasks.schedules import StepState
from forgefield.training.epoch_length import epochs_of_fit, fit_epoch_length, steps_of_fit
from forgefield.training.optim.averages import weight_average
from forgefield.training.optim.captured_update import portable_optimiser_states
from forgefield.training.optim.optimisers import build_optimiser, build_scheduler, fit_length, rescale_learning_rates
from forgefield.training.precision import Precision
from forgefield.training.throughput import Throughput


class TaskLike(Protocol):
    """What a task says of its terms: their names, and the loss that is reported of added-up sums and counts."""

    names: tuple[str, ...]

    def report(self, sums: Tensor, counts: Tensor) -> float: ...


class ErrorsLike(Protocol):
    """Errors in physical units, as sums on the device."""

    sums: Tensor

    def add(self, measured: Tensor) -> None: ...

    def compute(self, sums: Tensor | None = None) -> dict[str, float]: ...

    def reset(self) -> None: ...


class LossMeter:
    """Loss over many batches: sums and counts of each term, added on the device."""

    def __init__(self, task: TaskLike) -> None:
        self.task = task
        self.sums = torch.zeros(2, len(task.names), dtype=torch.float64)

    def add(self, sums: Tensor) -> None:
        """sums: (2, n_targets), sums and counts of one batch."""
        self.sums = self.sums.to(sums.device) + sums

    def value(self, sums: Tensor | None = None) -> float:
        """The loss of all that was added, here or, given its sums, on all ranks; NaN where nothing was."""
        sums = self.sums if sums is None else sums
        if not bool((sums[1] > 0).any()):
            return float("nan")
        return self.task.report(sums[0], sums[1])

    def reset(self) -> None:
        self.sums = torch.zeros_like(self.sums)


class RunModule(L.LightningModule, ABC):
    """Trains a model on a task with the settings of the config's `training` section.

    trained: the model. samples: what throughput counts. train_errors, val_errors: accumulators of errors. ranks: who trains
    together. exchange: their message of every batch. lr_factor: multiplies every learning rate.
    """

    def __init__(
        self,
        trained: nn.Module,
        task: TaskLike,
        options: TrainingOptions,
        *,
        monitor: str,
        samples: tuple[str, ...],
        train_errors: ErrorsLike,
        val_errors: ErrorsLike,
        ranks: Ranks | None = None,
        exchange: StepExchange | None = None,
        lr_factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.options = options
        self.monitor = monitor
        self.ranks = ranks if ranks is not None else single_process()
        self.exchange = exchange
        self.lr_factor = lr_factor
        self.ema = weight_average(trained, options)
        self.train_loss, self.val_loss = LossMeter(task), LossMeter(task)
        self.train_errors, self.val_errors = train_errors, val_errors
        self.precision = Precision(options.precision)
        self._precision_now = self.precision.start
        self._steps_in_all = -1
        self.throughput = Throughput(samples)
        self.latest: dict[str, float] = {}
        self._world_size_before: int | None = None
        self._schedule_length: int | None = None
        self._schedule_unit = "epoch"

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning writes down which hook it is in forty times a step, and torch looks each time whether that is a weight."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    @abstractmethod
    def trained(self) -> nn.Module:
        """The model, whose state is saved, averaged and deployed."""

    # ---- training

    def on_fit_start(self) -> None:
        if self.ema is not None:
            self.ema.to(self.device)
        if self.ranks.rank > 0:  # weights were drawn alike everywhere; what is drawn from now on differs by rank
            torch.manual_seed(torch.initial_seed() + 7919 * self.ranks.rank)

    def on_train_start(self) -> None:
        if self._schedule_length is not None:
            other_ranks = self._world_size_before not in (None, self.ranks.world_size)
            in_proportion = other_ranks and self._schedule_unit == "step"
            scheduler = self.trainer.lr_scheduler_configs[0].scheduler
            fit_length(scheduler, self._schedule_length, in_proportion=in_proportion)

    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.set_epoch(self.trainer.current_epoch)
        fit_epoch_length(self.trainer, loader)
        self.throughput.resume()

    def steps_of_fit(self) -> int:
        """Optimiser steps of the whole training, -1 where there is no end."""
        return steps_of_fit(self.trainer)

    def _moment(self) -> StepState:
        group = self.trainer.optimizers[0].param_groups[0]
        return StepState(
            step=self.trainer.global_step,
            steps=self._steps_in_all,
            epoch=self.current_epoch,
            epochs=epochs_of_fit(self.trainer),
            lr_ratio=float(group["lr"]) / (self.options.lr * self.lr_factor * group.get("factor", 1.0)),
        )

    def _follow_precision(self) -> None:
        """A schedule may change the precision; what was compiled or captured holds for one precision only."""
        name = self.precision.at(
            epoch=self.current_epoch,
            epochs=self.trainer.max_epochs,
            step=self.trainer.global_step,
            steps=self._steps_in_all,
        )
        if name != self._precision_now:
            self._precision_now = name
            self.precision_changed()

    def precision_changed(self) -> None:
        """Forget what holds for one precision only."""

    def finish_row(self) -> None:
        """Close a row of metrics: training loss and errors since the last row, and a fresh start for the next."""
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
            row.update(zip(names, (int(n) for n in self.ranks.all_reduce(counts).tolist())))
            seconds = row["seconds"] or 0.0
            for name in names:
                row[f"{name}_per_second"] = row[name] / seconds if row[name] and seconds > 0 else None  # type: ignore[operator]
        return row

    def _publish(self, values: dict[str, float]) -> None:
        """Make values known to Lightning's callbacks and to whoever writes the row. They are whole already: `log` would make an
        accumulator of each and move it to the device and back, which takes longer than many steps."""
        self.latest.update(values)
        known = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        self.trainer.callback_metrics.update(known)

    def finite_train_loss(self, sums: Tensor | None = None) -> float:
        """The training loss of all ranks since the last row; stops the run, on all ranks, when it is not a number."""
        sums = self._over_ranks(self.train_loss.sums)[0] if sums is None else sums
        loss = self.train_loss.value(sums)
        if bool((sums[1] > 0).any()) and not abs(loss) < float("inf"):
            raise ForgefieldError(
                f"The training loss became {loss} by step {self.trainer.global_step}; the checkpoints before it are good. "
                "Lower training.lr or set training.clip_norm, then train again with --fresh."
            )
        return loss

    def _over_ranks(self, *sums: Tensor) -> list[Tensor]:
        """Accumulators added up over ranks, in one message."""
        if self.ranks.world_size == 1:
            return list(sums)
        total = self.ranks.all_reduce(torch.cat([part.reshape(-1).to(self.device) for part in sums]))
        parts = total.split([part.numel() for part in sums])
        return [part.reshape(like.shape) for part, like in zip(parts, sums)]

    # ---- validation

    def on_validation_epoch_start(self) -> None:
        self.throughput.pause()
        self.val_loss.reset()
        self.val_errors.reset()
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
        """Loss and errors of the validation that is complete now, of all ranks; the model still is what was validated."""
        loss_sums, error_sums = self._over_ranks(self.val_loss.sums, self.val_errors.sums)
        values = {"val/loss": self.val_loss.value(loss_sums)}
        return values | {f"val/{name}": value for name, value in self.val_errors.compute(error_sums).items()}

    # ---- optimiser

    def configure_optimizers(self) -> Any:
        optimiser = build_optimiser(self.options.optimizer, self.groups(), lr=self.options.lr * self.lr_factor)
        if self.options.scheduler is None:
            return optimiser
        scheduler = build_scheduler(
            self.options.scheduler,
            optimiser,
            monitor=self.monitor,
            validate_every=self.trainer.check_val_every_n_epoch or 1,
            epochs=self.trainer.max_epochs if self.trainer.max_epochs is not None else -1,
            steps=self.steps_of_fit,
            lr_factor=self.lr_factor,
        )
        if "T_max" not in self.options.scheduler:
            self._schedule_length = getattr(scheduler["scheduler"], "T_max", None)
            self._schedule_unit = scheduler["interval"]
        return {"optimizer": optimiser, "lr_scheduler": scheduler}

    def groups(self) -> list[Any]:
        """What is trained: parameters, or groups of them where rates differ."""
        return [p for p in self.trained.parameters() if p.requires_grad]

    # ---- state beyond weights, optimiser and loops

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        sums = {"train_loss": self.train_loss.sums.cpu().clone(), "train_errors": self.train_errors.sums.cpu().clone()}
        portable_optimiser_states(checkpoint.get("optimizer_states", []), self.trainer.optimizers)
        checkpoint["forgefield"] = {
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "sums": self.ranks.gather(sums),
            "lr_factor": self.lr_factor,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["forgefield"]
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self._world_size_before = len(state["sums"])
        own = own_sums(state["sums"], self.ranks)
        self.train_loss.sums, self.train_errors.sums = own["train_loss"], own["train_errors"]
        rescale_learning_rates(checkpoint, self.lr_factor / state["lr_factor"])

    def averaged_state(self) -> dict[str, Tensor]:
        """The model's state with averaged weights: what is validated, and what is deployed."""
        if self.ema is None:
            state = self.plain_state()
        else:
            with self.ema.applied():
                state = {name: tensor.detach().clone() for name, tensor in self.plain_state().items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def plain_state(self) -> dict[str, Tensor]:
        """The model's state as others read it."""
        return self.trained.state_dict()


def own_sums(stored: list[dict[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    """What this rank had added up. Where the number of ranks has changed, rank 0 takes over the sums of all."""
    if len(stored) == ranks.world_size:
        return stored[ranks.rank]
    total = {name: torch.stack([part[name] for part in stored]).sum(0) for name in stored[0]}
    return total if ranks.is_rank_zero else {name: torch.zeros_like(tensor) for name, tensor in total.items()}
