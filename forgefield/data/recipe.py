"""The settings of `forgefield init --accurate`: small errors matter more than the time of the training.

Model, learning rate, weights, batch and number of steps follow from trainings on small molecules and two metals, judged by
validation frames (benchmarks/recipes.py, benchmarks/accuracy.py; docs/reference/settings-measurements.md). EMA, gradient
clipping, the form of the schedule and the weight of the stress were not varied. benchmarks/accuracy.py trains with these
settings on public data sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FEW_FRAMES = 100
"""Training frames up to which features of l = 2 made errors of other frames larger."""
IRREPS, MORE_IRREPS = "128x0e + 128x1o", "128x0e + 128x1o + 128x2e"
"""Features with few training frames, and with more."""
WEIGHTS = {"energy": 1.0, "forces": 10.0, "stress": 100.0}
"""Loss weights of the targets."""
SCHEDULES: dict[str, dict[str, Any]] = {"energy": {"kind": "lr", "to": 100}}
"""How loss weights change."""
TRAINING: dict[str, Any] = {
    "lr": 0.01,
    "ema": 0.99,
    "clip_norm": 10.0,
    "scheduler": {"name": "cosine_to", "stop_lr": 0.0},
}
"""Section `training`."""
STEPS_PER_FRAME, LEAST_STEPS, MOST_STEPS = 240, 12_000, 100_000
"""Optimiser steps: 50 training frames had smaller errors after 12,000 than after 50,000, 450 the smallest after 100,000."""
MOST_FRAMES, ATOMS_PER_BATCH = 5, 128
VALIDATIONS = 100


def batch_frames(mean_atoms: float) -> int:
    """Frames of a batch: five, and fewer of more than about 128 atoms in all."""
    return max(1, min(MOST_FRAMES, round(ATOMS_PER_BATCH / mean_atoms)))


def training_steps(n_train: int) -> int:
    """Number of optimiser steps for this number of training frames."""
    return min(max(STEPS_PER_FRAME * n_train, LEAST_STEPS), MOST_STEPS)


def model(n_train: int) -> dict[str, Any]:
    """Section `model` for this number of training frames."""
    irreps = IRREPS if n_train <= FEW_FRAMES else MORE_IRREPS
    return {"name": "mace", "hidden_irreps": irreps, "max_ell": 3, "correlation": 3}


def target(name: str) -> dict[str, Any]:
    """Section `task` of a target."""
    schedule = {"schedule": dict(SCHEDULES[name])} if name in SCHEDULES else {}
    return {"weight": WEIGHTS[name], **schedule}


def accurate_config(labels: Mapping[str, int], n_train: int, mean_atoms: float) -> dict[str, Any]:
    """Sections `model`, `task`, `training` and `trainer`, and `batch` of section `data`.

    labels: number of frames with energy, forces and stress. n_train, mean_atoms: number of training frames and of their atoms.
    """
    frames = batch_frames(mean_atoms)
    epochs = math.ceil(training_steps(n_train) / math.ceil(n_train / frames))
    return {
        "batch": {"frames": frames},
        "model": model(n_train),
        "task": {name: target(name) for name in WEIGHTS if labels.get(name)},
        "training": dict(TRAINING),
        "trainer": {"max_epochs": epochs, "check_val_every_n_epoch": max(1, epochs // VALIDATIONS)},
    }
