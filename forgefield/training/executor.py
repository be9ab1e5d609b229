"""The part of a training that depends on the kind of samples: how batches are stepped on and validated.

`module.TrainingModule` is the one LightningModule of all trainings. It asks its `StepExecutor` for whatever differs between
frames (`frames_executor.py`) and points of a grid (`ldos/training/executor.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from forgefield.training.optim.optimisers import Parameters
from forgefield.training.options import TrainingOptions
from forgefield.training.trainer import steps_of_fit

if TYPE_CHECKING:
    from forgefield.training.module import TrainingModule


TrainBatch = TypeVar("TrainBatch")
ValBatch = TypeVar("ValBatch")


class TaskLike(Protocol):
    """The terms of a loss: their names, and the loss that is reported for sums and counts of each term."""

    names: tuple[str, ...]

    def report(self, sums: Tensor, counts: Tensor) -> float: ...

    def describe(self) -> list[tuple[str, str]]:
        """Name and description of each term, for summaries."""
        ...


class EngineLike(Protocol):
    """How steps are executed."""

    name: str

    def reset(self) -> None:
        """Discard what was compiled or captured."""
        ...


class ErrorsLike(Protocol):
    """Errors in physical units, as sums on the device."""

    sums: Tensor

    def add(self, measured: Tensor) -> None: ...

    def compute(self, sums: Tensor | None = None) -> dict[str, float]: ...

    def reset(self) -> None: ...


class StepExecutor(Generic[TrainBatch, ValBatch]):
    """Trains and validates `model` on batches of one kind of samples, on behalf of a `TrainingModule`.

    Methods are named after the hooks of Lightning in which they are called. Sums of losses and errors, the average of the
    weights and the precision are the module's.
    """

    model_name: ClassVar[str]
    """Attribute of the module that holds the model, and so the prefix of its weights in checkpoints."""
    samples: ClassVar[tuple[str, ...]]
    """What throughput counts."""
    automatic_optimization: ClassVar[bool] = True
    """Whether Lightning calls the optimiser; without it the executor does."""

    module: TrainingModule
    """There from `attach` on."""

    def __init__(
        self,
        model: nn.Module,
        task: TaskLike,
        options: TrainingOptions,
        train_errors: ErrorsLike,
        val_errors: ErrorsLike,
    ) -> None:
        """options: the config's `training` section. train_errors, val_errors: accumulators of errors."""
        self.model, self.task, self.options = model, task, options
        self.train_errors, self.val_errors = train_errors, val_errors
        self.set_errors: Mapping[str, ErrorsLike] = {}
        """Errors of named validation sets, `val-NAME`."""
        self.engine: EngineLike | None = None

    def attach(self, module: TrainingModule) -> None:
        """Become the executor of a module; called once, at the end of its construction."""
        self.module = module

    # ---- batches

    def to_device(self, batch: TrainBatch | ValBatch, device: torch.device) -> TrainBatch | ValBatch:
        """A batch of the training or validation loader, on the device."""
        return batch

    def after_transfer(self, batch: TrainBatch | ValBatch) -> TrainBatch | ValBatch:
        """The batch with what is computed on the device."""
        return batch

    # ---- training

    def before_training(self) -> None:
        """Called when training starts, before the schedule of learning rates is adjusted."""

    def on_train_start(self) -> None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_train_batch_start(self, batch: TrainBatch) -> None: ...

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        """The loss of a batch, whose sums and errors are added to the module's."""
        raise NotImplementedError

    def whole_step(self, batch: TrainBatch) -> Tensor | None:
        """Take a step with its update in one piece, so that nothing can be done between gradient and update; returns the loss,
        which the next step may overwrite. None: it has to be taken in parts."""
        return None

    def on_train_batch_end(self, batch: TrainBatch, batch_idx: int) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def steps_of_fit(self) -> int:
        """Number of optimiser steps of the training; -1 without limit."""
        return steps_of_fit(self.module.trainer)

    def precision_changed(self) -> None:
        """Discard what was compiled or captured: it holds for one precision only."""
        if self.engine is not None:
            self.engine.reset()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are written to fixed tensors by the engine, so that they are neither zeroed nor accumulated."""
        return False

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clips_gradients(self, value: float | None, algorithm: str | None) -> bool:
        """Whether the executor clips gradients, as part of its update; if not, Lightning does."""
        return False

    # ---- validation

    def validation_step(self, batch: ValBatch, batch_idx: int) -> None:
        """Add the sums and errors of a batch to the module's."""
        raise NotImplementedError

    def measure_after_validation(self) -> dict[str, float]:
        """Additional metrics of a validation that has just ended; the model still has the weights that were validated."""
        return {}

    def on_validation_end(self) -> None: ...

    # ---- optimiser and state

    def parameter_groups(self, lr: float) -> Parameters:
        """Trained parameters, or groups of them where learning rates differ."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def check_optimiser(self, optimiser: torch.optim.Optimizer) -> None:
        """Raise an error for an optimiser that cannot be used."""

    def state(self) -> dict[str, Any]:
        """Entries of a checkpoint beyond weights, optimiser and sums; called on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """state: what a checkpoint holds under `forgefield`."""

    def deployed_state(self) -> dict[str, Tensor]:
        """The state of the model as files of weights have it."""
        return self.model.state_dict()
