"""Batches with spins, and training steps of models of spins."""

from __future__ import annotations

import torch
from torch import Tensor

from forgefield.data.batch import SHAPES
from forgefield.models import Potential
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import FieldTargetOptions, TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.step import StepFunction


def with_spins(batch: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The batch with spins, one of them zero, and with magnetic forces of every other atom."""
    generator = torch.Generator().manual_seed(seed)
    spins, forces = torch.randn(2, *batch["positions"].shape, generator=generator, dtype=torch.float64)
    spins *= 0.5  # virtual atoms within the room of the neighbour lists
    spins[0] = 0.0
    forces[::2] = torch.nan
    return {**batch, "spin": spins, "force_mag": forces}


def step_function(potential: Potential, derivative: str) -> StepFunction:
    names = ("O", "H")
    options = TaskOptions(energy=TargetOptions(), forces=TargetOptions(weight=2.0))
    options.fields = {"force_mag": FieldTargetOptions(weight=3.0)}
    task = Task(options, names, potential.extra_outputs)
    shapes = {**SHAPES, "spin": ("atoms", 3), "force_mag": ("atoms", 3)}
    return StepFunction(potential.train(), task, ErrorMetrics(task.names, names), derivative=derivative, shapes=shapes)
