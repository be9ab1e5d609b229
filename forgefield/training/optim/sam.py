"""`SAM`: sharpness-aware minimisation (Foret et al., 2021), which uses the gradient at the worst point nearby.

The weights are moved by rho g / |g|, where g is the gradient of a batch averaged over ranks; the batch is evaluated there again
with the same engine and strategy; the weights are restored exactly, and the optimiser steps with the second gradient. Metrics
are those of the first evaluation. Every step takes two evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.training.probing import training_step_arguments, without_side_effects


class SAM(L.Callback):
    """rho: distance by which the weights are moved. adaptive: in units of the size of each weight (Kwon et al., 2021).
    start_step: number of ordinary steps at the beginning."""

    def __init__(self, rho: float = 0.05, adaptive: bool = False, start_step: int = 0) -> None:
        if rho <= 0 or start_step < 0:
            raise ForgefieldError("SAM: rho must be positive, and start_step must not be negative.")
        self.rho, self.adaptive, self.start_step = rho, adaptive, start_step
        self._batch: tuple[object, int] = (None, 0)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ForgefieldError("SAM needs automatic optimisation.")
        if trainer.accumulate_grad_batches != 1:
            raise ForgefieldError(
                "SAM does not support several batches per step (accumulation), because it evaluates the batch of a step twice. "
                "Use larger batches, with training.memory.parts if memory is limited."
            )
        if isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
            raise ForgefieldError("SAM does not support scaled gradients (trainer.precision=16-mixed); use bf16-mixed.")
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise ForgefieldError(
                "SAM does not support LBFGS, which evaluates a step several times; use another optimiser."
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._batch = (batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step < self.start_step:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:  # another callback removed the gradients, so that nothing is updated
            return
        original = [p.detach().clone() for p in parameters]
        self._move(parameters)
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            with without_side_effects(pl_module):
                self._differentiate(trainer, optimizer)
        finally:
            with torch.no_grad():
                torch._foreach_copy_([p.detach() for p in parameters], original)

    @torch.no_grad()
    def _move(self, parameters: list[torch.nn.Parameter]) -> None:
        """w + rho g / |g| or, if adaptive, w + rho w^2 g / |w g|; w if the gradient is zero."""
        weights = [p.detach() for p in parameters]
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        scaled: Sequence[Tensor] = gradients
        directions: Sequence[Tensor] = gradients
        if self.adaptive:
            scaled = torch._foreach_mul(torch._foreach_abs(weights), gradients)
            directions = torch._foreach_mul(torch._foreach_abs(weights), list(scaled))
        norm = torch.stack([n.double() for n in torch._foreach_norm(list(scaled))]).norm()
        length = torch.where(norm > 0, self.rho / torch.where(norm > 0, norm, 1.0), 0.0)
        moves = [direction * length.to(direction.dtype) for direction in directions]
        torch._foreach_add_(weights, moves)

    def _differentiate(self, trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradients at the present weights; the strategy averages them over ranks."""
        with torch.enable_grad():
            with trainer.precision_plugin.train_step_context():
                output = trainer.strategy.training_step(
                    *training_step_arguments(trainer.lightning_module, *self._batch)
                )
            loss = output["loss"] if isinstance(output, Mapping) else output
            assert isinstance(loss, Tensor)
            trainer.strategy.backward(loss, optimizer)
