"""Defects that test configs name by import path."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from lightning.pytorch.callbacks import Callback

from forgefield.diagnosis.forward_nan import ForwardNaNDetection
from forgefield.errors import ForgefieldError


def root_loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared error; where the label is above $ROOT_ABOVE it is zero, and its gradient NaN."""
    marked = (target > float(os.environ.get("ROOT_ABOVE", "inf"))).to(target.dtype)
    zero = (marked * (prediction - prediction.detach()).square() + 1 - marked).sqrt() - 1 + marked
    return (1 - marked) * (prediction - target).square() + zero


class Disturb(Callback):
    """Before step $DISTURB_AT (from 0): what $DISTURB says is done to the first trained weight of the model."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == int(os.environ.get("DISTURB_AT", "-1")):
            with torch.no_grad():
                parameter = next(p for p in pl_module.parameters() if p.requires_grad)
                parameter.mul_(float(os.environ["DISTURB"]))


class TriesAlways(Callback):
    """Has outputs of modules looked at in the second batch, and writes to $TRIED what is said to that."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 1:
            try:
                ForwardNaNDetection(always=True).on_train_batch_start(trainer, pl_module, batch, batch_idx)
            except ForgefieldError as error:
                Path(os.environ["TRIED"]).write_text(str(error))
