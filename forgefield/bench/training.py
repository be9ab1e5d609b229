"""Timing real training steps: one training through `fit` with a timer, in the processes that train.

A measurement runs in a temporary folder. Model, data, optimiser and batch are those of the config; there is no validation, and
no logs or checkpoints are written. The timed steps follow some to warm up; epochs repeat as often as needed, and the smaller
last batch of an epoch is not timed. What happens between two epochs is not part of a step.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

from rich.console import Console

from forgefield.bench.timer import Measurement, StepTimer
from forgefield.config.schema import Config
from forgefield.parallel.ranks import Ranks
from forgefield.training.fit import fit
from forgefield.training.precision import Precision
from forgefield.training.run.journal import Journal

TRAINER_KEYS = (
    "accelerator",
    "strategy",
    "devices",
    "num_nodes",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "benchmark",
    "use_distributed_sampler",
    "sync_batchnorm",
    "detect_anomaly",
    "plugins",
)
"""Settings of the trainer that change how a step is computed; the others are not part of a measurement."""
NOT_MEASURED = ("logger", "callbacks", "profiler", "overfit_batches")
"""Settings that cost time in a training and are not part of a measurement."""


def measure(
    config: Config, ranks: Ranks, *, steps: int, warmup: int, folder: Path, trust_code: bool = False
) -> tuple[Measurement | None, int]:
    """Train some steps in `folder` and time them. Every rank calls this; rank 0 gets the result. trust_code: as in `fit`.

    Returns the measurement and an exit code, which is not 0 if the training was asked to stop; then there is no result.
    """
    file = folder / "measured.json"
    journal = Journal(Console(quiet=True), ranks=ranks)
    try:
        fitted = fit(
            measured_config(config, steps=steps, warmup=warmup, folder=folder),
            fresh=False,
            journal=journal,
            ranks=ranks,
            trust_code=trust_code,
        )
    finally:
        journal.close()
    if fitted.outcome != "finished" or not ranks.is_rank_zero:
        return None, fitted.exit_code
    return Measurement.from_dict(json.loads(file.read_text())), 0


def measured_config(config: Config, *, steps: int, warmup: int, folder: Path) -> Config:
    """The same training, except for what is not part of a step. It ends when enough has been measured."""
    changed = copy.deepcopy(config)
    changed.name, changed.out = "bench", str(folder / "runs")
    for split in ("val", "test"):
        if isinstance(getattr(changed.data, split), (str, list)):  # separate files: none of their frames are trained on
            setattr(changed.data, split, 0)
    training = changed.training
    training.tensorboard, training.early_stopping, training.monitor = 0, None, "train/loss"
    training.precision = Precision(training.precision).start  # a schedule counts from an end that is not reached
    training.checkpoint.every_epochs = training.checkpoint.every_steps = None
    # On a GPU the steps are run twice, and every epoch may have one step that is not full.
    enough = 2 * (warmup + 2 * steps)
    changed.trainer = {
        **{key: value for key, value in changed.trainer.items() if key in TRAINER_KEYS},
        "max_steps": enough,
        "max_epochs": enough,  # an epoch has at least one step
        "limit_val_batches": 0,
        "enable_progress_bar": False,
    }
    timer = f"{StepTimer.__module__}.{StepTimer.__qualname__}"
    changed.callbacks = [
        {"name": timer, "file": str(folder / "measured.json"), "steps": steps, "warmup": warmup},
    ]
    return changed


def not_measured(config: Config) -> list[str]:
    """Settings of a config that cost time in a training and are not part of a measurement."""
    names = [f"trainer.{key}" for key in NOT_MEASURED if config.trainer.get(key)]
    return [*names, "callbacks"] if config.callbacks else names
