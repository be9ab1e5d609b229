"""One training step of a config without Lightning, to measure its work and memory.

Model, task, optimiser, average and engine are those of a training with the same config; so are the parameters that are trained
(`training.freeze`, `lora`, `lr_groups`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgefield.config.schema import Config
from forgefield.data.batch import Batch, batch_shapes, to_device, with_edges
from forgefield.data.module import DataModule, FrameData
from forgefield.models.potential import Potential
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.training.engines.choose import knots_wanted
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import StepFunction
from forgefield.training.optim.averages import StochasticAverage, WeightAverage, weight_average
from forgefield.training.optim.optimisers import build_optimiser
from forgefield.training.optim.trainable import parameter_groups
from forgefield.training.precision import Precision
from forgefield.training.problem.frames import build_frames_problem


@dataclass
class BareStep:
    """Everything that a training step needs.

    batches: of `data`, as the task and the model need them. average: of the weights, if the config has one. resolved: all
    options of the model. knots: of the tables that kernels read, zero for none. storage: precision in which kernels store
    rows. edge_kernels: whether sums over edges may use kernels.
    """

    data: FrameData
    batches: DataModule
    potential: Potential
    task: Task
    optimiser: torch.optim.Optimizer
    average: WeightAverage | None
    device: torch.device
    resolved: dict[str, Any]
    precision: Precision
    knots: int
    storage: str
    edge_kernels: bool
    errors: ErrorMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.errors = self.task.error_metrics(self.data.species.symbols)

    def function(self, derivative: str) -> StepFunction:
        shapes = batch_shapes(self.data.train.fields)
        return StepFunction(
            self.potential,
            self.task,
            self.errors,
            derivative=derivative,
            knots=self.knots,
            storage=self.storage,
            edge_kernels=self.edge_kernels,
            shapes=shapes,
        )

    def batch(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """These frames of the training data, on the device."""
        return self.on_device(self.data.train.batch(np.asarray(rows)))

    def first_batch(self) -> Batch:
        """The first batch of a training, on the device."""
        return self.on_device(next(iter(self.batches.train_dataloader())))

    def on_device(self, batch: Batch) -> Batch:
        return with_edges(to_device(batch, self.device), self.potential.cutoff)

    def run(self, engine: Engine, batch: Batch) -> None:
        """One complete step, in the order in which Lightning does it."""

        def evaluate() -> Tensor:
            with self.precision.applied(self.precision.start):
                loss = engine.step(batch).loss
                self.optimiser.zero_grad()
                loss.backward()
            return loss

        self.optimiser.step(evaluate)  # type: ignore[arg-type]  # some optimisers evaluate a batch several times
        if self.average is not None:
            self.average.update()

    def persistent_tensors(self) -> list[Tensor]:
        """Tensors that persist from step to step: weights, gradients, optimiser state and average."""
        parameters = list(self.potential.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        average = [] if self.average is None else list(self.average.average.values())
        return [*parameters, *self.potential.buffers(), *gradients, *_tensors(self.optimiser.state), *average]


def bare_step(config: Config, *, precision: str | None = None, data: FrameData | None = None) -> BareStep:
    """One training step of a config. precision: replaces that of the config. data: read before, for the same data section."""
    config = copy.deepcopy(config)
    config.training.precision = precision if precision is not None else first_precision(config)
    arithmetic, device = Precision(config.training.precision), training_device(config)
    arithmetic.require_device(device)
    problem = build_frames_problem(config, data)
    task, potential, training = problem.task, problem.model, config.training
    potential.train().to(device)
    groups = parameter_groups(potential, training.lr_groups or {}, training.lr)
    optimiser = build_optimiser(training.optimizer, groups, lr=training.lr)
    average = weight_average(potential, training)
    if average is not None:
        average.to(device)
    if isinstance(average, StochasticAverage):
        average.plan(steps=1, steps_of_epoch=1, quick=True)
    kernels = config.training.kernels
    return BareStep(
        problem.data,
        problem.serve(),
        potential,
        task,
        optimiser,
        average,
        device,
        problem.resolved,
        arithmetic,
        knots_wanted(training),
        kernels.storage,
        kernels.edges,
    )


def first_precision(config: Config) -> str:
    """The precision that a training starts with."""
    return Precision(config.training.precision).start


def training_device(config: Config) -> torch.device:
    """The device on which a single process trains."""
    if (config.trainer.get("accelerator") or "auto") == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    devices = config.trainer.get("devices")
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(kind.type, devices[0] if isinstance(devices, list) and devices else 0)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has completed all work."""
    return (lambda: None) if device.type == "cpu" else (lambda: torch.accelerator.synchronize(device))


def _tensors(state: Mapping[Tensor, object]) -> list[Tensor]:
    return [item for item in torch.utils._pytree.tree_leaves(dict(state)) if isinstance(item, Tensor)]
