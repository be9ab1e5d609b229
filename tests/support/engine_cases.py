"""Models, batches and engines that the tests of engines share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forgefield.config.schema import TargetOptions, TaskOptions
from forgefield.models import Potential
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import largest_difference
from tests.support.structures import SPECIES, make_batch, make_frame

Batch = dict[str, Tensor]
ALL = ("energy", "forces", "stress")


def labelled(*atoms: int, seed: int = 0, periodic: bool = True, box: float = 4.0) -> Batch:
    """A batch of frames of so many atoms with random labels; every third energy and force is missing."""
    batch = make_batch(*(make_frame(n, seed=seed + i, periodic=periodic, box=box) for i, n in enumerate(atoms)))
    generator = torch.Generator().manual_seed(seed)
    for name in ALL:
        batch[name] = torch.randn(batch[name].shape, generator=generator, dtype=torch.float64)
    batch["energy"][2::3] = float("nan")
    batch["forces"][2::3] = float("nan")
    return batch


def learnt(potential: Potential, batch: Batch) -> Batch:
    """The batch with labels that the model has learnt, but for a hundred thousandth."""
    generator = torch.Generator().manual_seed(3)
    outputs = potential(batch, stress=True)
    labels = {}
    for name in ALL:
        off = 1e-5 * torch.randn(batch[name].shape, generator=generator, dtype=torch.float64).to(batch[name])
        labels[name] = outputs[name].detach().double() + off
    return {**batch, **labels}


def step_function(potential: Potential, targets: tuple[str, ...] = ALL, **options: Any) -> StepFunction:
    task = Task(TaskOptions(**{name: TargetOptions(weight=1.0 + i) for i, name in enumerate(targets)}), SPECIES)
    return StepFunction(potential.train(), task, ErrorMetrics(task.names, SPECIES), **options)


def difference(engine: Any, reference: Any, batch: Batch) -> float:
    """Largest relative difference of loss, errors and gradients; also of what an evaluation gives."""
    training, _ = largest_difference(
        engine.differentiate(batch), reference.differentiate(batch), engine.function.trained
    )
    found, expected = engine.evaluate(batch), reference.evaluate(batch)
    scale = 1e-12 + max(float(expected.sums.abs().max()), float(expected.errors.abs().max()))
    evaluation = max(float((a - b).abs().max()) / scale for a, b in zip(found, expected))
    return max(training, evaluation)
