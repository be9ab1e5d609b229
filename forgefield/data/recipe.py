"""The settings of `forgefield init --accurate`: small errors matter more than the time of the training.

Model, learning rate, weight of the forces and batch follow from short trainings on five molecules (benchmarks/recipes.py); the
number of steps, the schedule, the EMA and the weight of the stress were not varied there
(docs/reference/settings-measurements.md). benchmarks/accuracy.py trains with these settings on public data sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MODEL: dict[str, Any] = {"name": "mace", "hidden_irreps": "128x0e + 128x1o", "max_ell": 3, "correlation": 3}
"""Section `model`."""
WEIGHTS = {"energy": 1.0, "forces": 10.0, "stress": 100.0}
"""Loss weights of the targets."""
TRAINING: dict[str, Any] = {
    "lr": 0.01,
    "ema": 0.99,
    "clip_norm": 10.0,
    "scheduler": {"name": "cosine_to", "stop_lr": 0.0},
}
"""Section `training`."""
FEW_FRAMES = 100
STEPS, MORE_STEPS = 50_000, 100_000
"""Optimiser steps with at most 100 training frames, and with more: a choice, not a result of the study."""
MOST_FRAMES, ATOMS_PER_BATCH = 5, 128
VALIDATIONS = 100


def batch_frames(mean_atoms: float) -> int:
    """Frames of a batch: five, and fewer of more than about 128 atoms in all."""
    return max(1, min(MOST_FRAMES, round(ATOMS_PER_BATCH / mean_atoms)))


def training_steps(n_train: int) -> int:
    """Number of optimiser steps for this number of training frames."""
    return STEPS if n_train <= FEW_FRAMES else MORE_STEPS


def accurate_config(labels: Mapping[str, int], n_train: int, mean_atoms: float) -> dict[str, Any]:
    """Sections `model`, `task`, `training` and `trainer`, and `batch` of section `data`.

    labels: number of frames with energy, forces and stress. n_train, mean_atoms: number of training frames and of their atoms.
    """
    frames = batch_frames(mean_atoms)
    epochs = math.ceil(training_steps(n_train) / math.ceil(n_train / frames))
    return {
        "batch": {"frames": frames},
        "model": dict(MODEL),
        "task": {name: {"weight": weight} for name, weight in WEIGHTS.items() if labels.get(name)},
        "training": dict(TRAINING),
        "trainer": {"max_epochs": epochs, "check_val_every_n_epoch": max(1, epochs // VALIDATIONS)},
    }
