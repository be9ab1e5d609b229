"""Tells Lightning how many batches an epoch has where that differs from epoch to epoch.

Batches counted in atoms or edges pack the frames of an epoch in their order, so one epoch may need a batch more than
another. Lightning asks for the length once.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L


def fit_epoch_length(trainer: L.Trainer, loader: Any) -> None:
    """Called at the start of an epoch, when the loader knows which it is."""
    fit_loop = trainer.fit_loop
    combined, limit = fit_loop._combined_loader, trainer.limit_train_batches
    n_batches = len(loader)
    if combined is None or fit_loop.max_batches == n_batches:
        return
    if isinstance(limit, int):
        n_batches = min(n_batches, limit)
    elif limit != 1.0:
        n_batches = int(n_batches * limit)
    if n_batches == fit_loop.max_batches:
        return
    combined.limits = [n_batches]
    fit_loop.max_batches = n_batches
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(n_batches * trainer.val_check_interval))


PLANNED = 5_000_000
"""Frames over all epochs up to which every epoch of a fit is planned to count its steps."""


def steps_of_fit(trainer: L.Trainer) -> int:
    """Optimiser steps of the whole training, for schedules that are as long; -1 where there is no end."""
    estimate = trainer.estimated_stepping_batches
    if not math.isfinite(estimate):
        return -1
    loader: Any = trainer.train_dataloader
    epochs = trainer.max_epochs
    same = getattr(loader, "epochs_are_alike", True) or trainer.limit_train_batches != 1.0 or trainer.max_steps != -1
    if same or epochs in (None, -1) or epochs * loader.draws > PLANNED:
        return int(estimate)
    return sum(math.ceil(loader.batches_in(epoch) / trainer.accumulate_grad_batches) for epoch in range(epochs))


def epochs_of_fit(trainer: L.Trainer) -> int:
    """Epochs of the whole training, the last one perhaps cut short by `max_steps`; -1 where there is no end."""
    epochs = -1 if trainer.max_epochs is None else int(trainer.max_epochs)
    if trainer.max_steps < 0:
        return epochs
    of_epoch = max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
    by_steps = math.ceil(trainer.max_steps / of_epoch)
    return by_steps if epochs < 0 else min(epochs, by_steps)
