"""The table that a training prints before its first step: data, model, task, training, processes and devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from forgefield.data.sampling.plan import Budget
from forgefield.parallel.ranks import Ranks
from forgefield.settings import Config
from forgefield.training.optim.schedules import describe_learning_rate
from forgefield.training.options import TrainingOptions, is_schedule_free
from forgefield.training.precision import Precision
from forgefield.training.problem.problem import Problem
from forgefield.training.run.journal import Journal
from forgefield.training.run.summary import Rows, device_name, model_rows, package_versions, print_summary


def summarise(journal: Journal, problem: Problem, trainer: L.Trainer, monitor: str) -> None:
    config, ranks = problem.config, problem.session.ranks
    sections: dict[str, Sequence[tuple[str, str]]] = {
        "Data": [*problem.describe_data(), *_no_descriptors(problem)],
        "Model": [("name", str(config.model["name"])), *_first_weights(config), *model_rows(problem.model)],
        "Task": list(problem.task.describe()),
        "Training": _training_rows(problem, trainer, monitor),
        "Summary of the training": process_rows(trainer, ranks),
    }
    journal.show(lambda console: print_summary(console, sections))


def _no_descriptors(problem: Problem) -> Rows:
    """A warning for points without descriptors, which cannot be added to a trained model."""
    if problem.config.data.points is None or problem.resolved["points"]["descriptors"] is not None:
        return []
    return [("descriptors", "no data.points.descriptors: this run cannot predict from structures")]


def _precision(config: Config) -> str:
    """The description of the precision, adapted for points, which have no geometry."""
    text = Precision(config.training.precision).describe()
    if config.data.points is None:
        return text
    return text.replace("geometry and energy sums float64", "scaling and sums over snapshots float64")


def _first_weights(config: Config) -> Rows:
    model = config.model
    return (
        [("first weights", f"{model['which']} of {model['from']}, shifts: {model['shifts']}")]
        if "from" in model
        else []
    )


def _training_rows(problem: Problem, trainer: L.Trainer, monitor: str) -> Rows:
    training, ranks = problem.config.training, problem.session.ranks
    epochs = f"{trainer.max_epochs} epochs" if trainer.max_epochs not in (None, -1) else ""
    steps = f"{trainer.max_steps} steps" if trainer.max_steps != -1 else ""
    optimiser = training.optimizer if isinstance(training.optimizer, str) else training.optimizer["name"]
    rate = describe_learning_rate(training.lr, training.scale_lr, ranks.world_size, problem.session.lr_factor)
    return [
        ("run folder", str(problem.run.path)),
        ("length", " or ".join(text for text in (epochs, steps) if text)),
        ("batch", problem.batch_row()),
        (
            "optimiser",
            f"{optimiser}, {rate}" + (f", clip {training.clip_norm:g}" if training.clip_norm else ""),
        ),
        *schedule_rows(training.scheduler, ranks.world_size),
        ("average", _average(training)),
        ("best by", monitor),
        ("engine", training.engine or "eager"),
        ("precision", _precision(problem.config)),
    ]


def effective_batch(budget: Budget, world_size: int, accumulate: int) -> str:
    """`8 frames`, or `8 frames x 4 ranks x 2 batches per step = 64 frames per step`; `up to 4096 atoms ...`, `at least ...`."""
    kind = budget.kind
    at_most = "" if kind == "frames" else "at least " if budget.bound == "lower" else "up to "
    return effective(budget.size, kind, world_size, accumulate, at_most)


def effective(size: int, kind: str, world_size: int, accumulate: int = 1, at_most: str = "") -> str:
    """Number of samples of a step, as a product. kind: of samples, in the plural."""
    factors = [f"{at_most}{size} {kind if size > 1 else kind[:-1]}"]
    if world_size > 1:
        factors.append(f"{world_size} ranks")
    if accumulate > 1:
        factors.append(f"{accumulate} batches per step")
    text = " x ".join(factors)
    return text if len(factors) == 1 else f"{text} = {at_most}{size * world_size * accumulate} {kind} per step"


def schedule_rows(scheduler: str | dict[str, Any] | None, world_size: int) -> Rows:
    if scheduler is None:
        return []
    name = scheduler if isinstance(scheduler, str) else scheduler["name"]
    by_steps = not isinstance(scheduler, str) and scheduler.get("interval", "epoch") == "step"
    note = ", counted in steps, of which an epoch has fewer with more ranks" if by_steps and world_size > 1 else ""
    return [("schedule", f"{name}{note}")]


def _average(training: TrainingOptions) -> str:
    if training.swa is not None:
        return f"SWA from {training.swa.start:g} on"
    if is_schedule_free(training.optimizer):
        return "of the schedule-free optimiser; validation and test use the averaged weights"
    return f"EMA {training.ema:g}; validation and test use the averaged weights" if training.ema else "none"


def process_rows(trainer: L.Trainer, ranks: Ranks) -> Rows:
    """Processes, devices and versions."""
    device, launch = trainer.strategy.root_device, ranks.launch
    together = ranks.world_size > 1
    started = launch.launcher + (f", {launch.job}" if launch.job else "")
    visible = {name: os.environ[name] for name in _VISIBLE if name in os.environ}
    rows = [
        ("distributed", f"yes, {type(trainer.strategy).__name__}" if together else "no, one process"),
        ("launcher", started + (f", restart {launch.restarts}" if launch.restarts else "")),
        ("world size", str(ranks.world_size)),
        ("my rank", str(ranks.rank)),
        ("node list", _nodes(ranks)),
        ("device", f"{device_name(device)} ({device})"),
        ("visible devices", ", ".join(f"{key}={item}" for key, item in visible.items()) or _counted()),
        ("threads", f"{torch.get_num_threads()} per process"),
        ("backend", _backend(ranks) if together else "none needed"),
        ("trainer precision", str(trainer.precision)),
    ]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        rows.append(("device memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"))
    rows.append(("versions", package_versions()))
    if launch.note:
        rows.append(("note", launch.note))
    return rows


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def _backend(ranks: Ranks) -> str:
    shared = (
        ranks.backend == "gloo" and torch.cuda.is_available() and torch.cuda.device_count() < ranks.launch.local_size
    )
    return ranks.backend + (" (several processes share a GPU, which nccl does not allow)" if shared else "")


def _counted() -> str:
    n = torch.cuda.device_count()
    return f"all ({n} GPU{'s' if n > 1 else ''})" if n else "no GPU"


def _nodes(ranks: Ranks) -> str:
    """`gpu001 (4), gpu002 (4)`, shortened in the middle where there are many."""
    counts = [f"{node} ({ranks.hosts.count(node)})" for node in ranks.nodes]
    if ranks.world_size == 1:
        return ranks.nodes[0]
    if len(counts) > 8:
        counts = [*counts[:4], "...", *counts[-2:]]
    return f"{len(ranks.nodes)}: {', '.join(counts)}" if len(ranks.nodes) > 1 else counts[0]
