"""`forgefield check --overfit`: train on a single batch until errors are near zero or the maximum number of steps is reached.

A model can fit a few frames almost exactly if model, loss and data are consistent. If it cannot, longer training does not help:
labels may not belong to the frames, a target may have no weight, parameters may have no gradient, or the cutoff may be so short
that atoms have no neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forgefield.data.batch import batch_shapes, with_edges
from forgefield.errors import ForgefieldError
from forgefield.ops.functions import combine_keys
from forgefield.settings import Config
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.tasks.units import unit_of
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import StepFunction
from forgefield.training.optim.optimisers import build_optimiser
from forgefield.training.optim.schedules import replaced_learning_rates
from forgefield.training.problem.frames import build_frames_problem

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class TargetResult:
    """RMSE of one target, or fraction of wrong classes, in `unit`.

    before, error: at the start and at the end. spread: of the labels in all training data.
    """

    name: str
    before: float
    error: float
    spread: float
    unit: str

    @property
    def remaining(self) -> float:
        """The final error relative to the first one, or to a tenth of the spread if the first was small by chance."""
        scale = max(self.before, self.spread / 10)
        return self.error / scale if scale > 0 else 0.0


@dataclass
class OverfitResult:
    """losses: of all steps. goal: fraction of the error that may remain."""

    goal: float
    targets: list[TargetResult] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.targets) and all(target.remaining <= self.goal for target in self.targets)


def overfit(
    engine: Engine,
    optimiser: torch.optim.Optimizer,
    batch: Batch,
    *,
    steps: int,
    goal: float,
    measure: Callable[[], dict[str, tuple[float, str]]],
    spreads: dict[str, float],
) -> OverfitResult:
    """Train on one batch until the goal is reached, with a cosine decay of the learning rate in the second half of the steps.

    measure: returns the current error of each target and its unit. spreads: of the labels, by target.
    """
    result = OverfitResult(goal)
    before = measure()
    rates = [float(group["lr"]) for group in optimiser.param_groups]
    for step in range(steps):
        share = max(0.0, 2 * step / steps - 1)
        factor = 0.5 * (1 + math.cos(math.pi * share))
        optimiser.zero_grad()
        loss = engine.step(_with_fresh_keys(batch, step)).loss
        loss.backward()
        with replaced_learning_rates(optimiser, [factor * rate for rate in rates]):
            optimiser.step()
        result.losses.append(float(loss.detach()))
        if (step + 1) % max(steps // 20, 1) == 0 or step + 1 == steps or not math.isfinite(result.losses[-1]):
            now = measure()
            result.targets = [
                TargetResult(name, before[name][0], value, spreads.get(name, 0.0), unit)
                for name, (value, unit) in now.items()
            ]
            if result.passed or not math.isfinite(result.losses[-1]):
                break
    return result


def _with_fresh_keys(batch: Batch, step: int) -> Batch:
    """The batch with other dropout masks in every step, as in a training."""
    if "frame_key" not in batch:
        return batch
    keys = batch["frame_key"]
    return batch | {"frame_key": combine_keys(keys, torch.full_like(keys, step))}


def errors_of(
    engine: Engine, errors: ErrorMetrics, task: Task, batch: Batch, units: dict[str, str]
) -> dict[str, tuple[float, str]]:
    """RMSE of each target on the batch, or fraction of wrong classes, with its unit."""
    metrics = errors.compute(engine.evaluate(batch).errors)
    values: dict[str, tuple[float, str]] = {}
    for target in task.targets:
        if target.classes is not None:
            values[target.name] = (1.0 - metrics[f"{target.name}_accuracy"], "wrong")
        elif f"{target.name}_rmse" in metrics:
            values[target.name] = (metrics[f"{target.name}_rmse"], units.get(target.name, ""))
    return values


def curve(losses: list[float], width: int = 64, height: int = 10) -> list[str]:
    """The losses as a logarithmic plot of text, line by line."""
    shown = [math.log10(loss) for loss in losses if loss > 0 and math.isfinite(loss)]
    if len(shown) < 2:
        return []
    columns = min(width, len(shown))
    medians = [sorted(chunk)[len(chunk) // 2] for i in range(columns) if (chunk := _chunk(shown, i, columns))]
    low, high = min(medians), max(medians)
    step = (high - low) / (height - 1) or 1.0
    rows = [round((value - low) / step) for value in medians]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{10 ** (low + row * step):8.1e}" if row in (0, height // 2, height - 1) else " " * 8
        lines.append(f"{label} |" + "".join("*" if value == row else " " for value in rows).rstrip())
    return [*lines, " " * 9 + "+" + "-" * columns, f"{'step 1':>15}{len(losses):>{max(columns - 5, 6)}}"]


def _chunk(values: list[float], i: int, n: int) -> list[float]:
    """The i-th of n chunks."""
    return values[i * len(values) // n : (i + 1) * len(values) // n]


def overfit_config(config: Config, *, steps: int, goal: float) -> OverfitResult:
    """Train the newly initialised model of a config on the first batch of its data, with its loss, optimiser and learning
    rate."""
    problem = build_frames_problem(config)
    data, task, potential = problem.data, problem.task, problem.model
    batch = with_edges(next(iter(problem.serve(keep_order=True).train_dataloader())), potential.cutoff)
    errors = task.error_metrics(data.species.symbols)
    edges = config.training.kernels.edges
    engine = Engine(StepFunction(potential, task, errors, shapes=batch_shapes(data.train.fields), edge_kernels=edges))
    parameters = [p for p in potential.parameters() if p.requires_grad]
    optimiser = build_optimiser(config.training.optimizer, parameters, lr=config.training.lr, module=potential)
    if isinstance(optimiser, torch.optim.LBFGS):
        raise ForgefieldError(
            "check --overfit: LBFGS is not supported, which evaluates a step several times; use another training.optimizer."
        )
    units = {name: unit_of(f"train/{name}_rmse") for name in task.names} | task.units
    statistics = data.statistics
    scales = {
        target.name: max(target.scale) if isinstance(target.scale, tuple) else target.scale for target in task.targets
    }
    spreads = {name: scale for name, scale in scales.items() if scale != 1.0}
    spreads |= {
        name: 1000 * value
        for name, value in (("energy", statistics.energy_residual_std), ("forces", statistics.forces_rms))
        if value is not None
    }
    return overfit(
        engine,
        optimiser,
        batch,
        steps=steps,
        goal=goal,
        measure=lambda: errors_of(engine, errors, task, batch, units),
        spreads=spreads,
    )


def print_overfit(result: OverfitResult, title: str) -> None:
    """Print the curve of the loss, and the remaining error of each target."""
    goal = result.goal
    print(f"One batch of {title}, {len(result.losses)} steps; loss:")
    print("\n".join(curve(result.losses)))
    print(f"{'target':16s}{'':8s}{'at start':>12s}{'now':>12s}{'left':>9s}{'allowed':>9s}")
    for target in result.targets:
        verdict = "ok" if target.remaining <= goal else "FAILED"
        numbers = f"{target.before:12.4g}{target.error:12.4g}{target.remaining:8.1%}{goal:9.1%}"
        print(f"{target.name:16s}{verdict:8s}{numbers}  {target.unit}".rstrip())
    if result.passed:
        print("The model can learn this batch.")
        return
    failed = [target.name for target in result.targets if not target.remaining <= goal]
    print(
        f"The error of {', '.join(failed)} does not decrease to {goal:.0%}. Check that labels belong to their frames, that the "
        "target has a weight (task), that atoms have neighbours (data.cutoff), and training.lr; or allow more steps (--steps)."
    )
