"""How fast real training steps are, for the processes that run them: one training through `fit`, with a stopwatch.

A measurement has its own temporary folder and leaves nothing behind. Model, data, optimiser and batch are those of the config;
validation, logs and checkpoints are left out. Steps before the measured ones warm up; epochs repeat as often as needed, and the
smaller last batch of an epoch is not measured. What happens between two epochs is not part of a step.
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
"""Settings of the trainer that say how a step is done; the others have no part in a measurement."""
NOT_MEASURED = ("logger", "callbacks", "profiler", "overfit_batches")
"""Settings that would cost time in a training, which a measurement does not count."""


def measure(
    config: Config, ranks: Ranks, *, steps: int, warmup: int, folder: Path, trust_code: bool = False
) -> tuple[Measurement | None, int]:
    """Train some steps in `folder` and time them. Every rank calls this; rank 0 gets the result. trust_code: as in `fit`.

    Second: exit code, not 0 where the training was asked to stop; then there is no result.
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
    """The same training, but for what is not part of a step. It ends by itself when enough has been measured."""
    changed = copy.deepcopy(config)
    changed.name, changed.out = "bench", str(folder / "runs")
    for split in ("val", "test"):
        if isinstance(getattr(changed.data, split), (str, list)):  # files of their own: nothing of them is trained on
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
    """Settings of a config that cost time in a training and have no part in a measurement."""
    given = [f"trainer.{key}" for key in NOT_MEASURED if config.trainer.get(key)]
    return [*given, "callbacks"] if config.callbacks else given
