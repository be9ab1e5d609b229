"""`SAM`: sharpness-aware minimisation (Foret et al., 2021), which steps along the gradient at the worst point nearby.

After the gradient g of a batch is complete and averaged over ranks, weights move by rho g / |g|; the batch is evaluated there
once more, by the same engine and strategy, so that its gradient is averaged too; weights move back exactly, and the optimiser
steps with the second gradient. What is logged and measured is the first evaluation. It costs a second evaluation of every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.training.probing import training_step_arguments, without_side_effects


class SAM(L.Callback):
    """rho: how far weights move. adaptive: in units of the size of each weight (Kwon et al., 2021). start_step: plain steps
    before it begins."""

    def __init__(self, rho: float = 0.05, adaptive: bool = False, start_step: int = 0) -> None:
        if rho <= 0 or start_step < 0:
            raise ForgefieldError("SAM: rho is positive, start_step not negative.")
        self.rho, self.adaptive, self.start_step = rho, adaptive, start_step
        self._batch: tuple[Any, int] = (None, 0)

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise ForgefieldError("SAM needs automatic optimisation.")
        if trainer.accumulate_grad_batches != 1:
            raise ForgefieldError(
                "SAM evaluates the batch of a step a second time; with several batches a step (accumulation) there is none. "
                "Use larger batches, and training.memory.parts where memory is short."
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ForgefieldError(
                "SAM cannot move weights along scaled gradients (trainer.precision=16-mixed); use bf16-mixed."
            )
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise ForgefieldError("SAM evaluates a step twice and LBFGS as often as it likes; use another optimiser.")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = (batch, batch_idx)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step < self.start_step:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:  # another callback took the gradients away: the step is not made
            return
        kept = [p.detach().clone() for p in parameters]
        self._move(parameters)
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            with without_side_effects(pl_module):
                self._differentiate(trainer, optimizer)
        finally:
            with torch.no_grad():
                torch._foreach_copy_([p.detach() for p in parameters], kept)

    @torch.no_grad()
    def _move(self, parameters: list[torch.nn.Parameter]) -> None:
        """w + rho g / |g|, or with each weight's own size, w + rho w^2 g / |w g|. Not at all where the gradient is zero."""
        weights = [p.detach() for p in parameters]
        gradients = [p.grad.detach() for p in parameters if p.grad is not None]
        scaled: Any
        directions: Any
        if self.adaptive:
            scaled = torch._foreach_mul(torch._foreach_abs(weights), gradients)
            directions = torch._foreach_mul(torch._foreach_abs(weights), scaled)
        else:
            scaled = directions = gradients
        norm = torch.stack([n.double() for n in torch._foreach_norm(scaled)]).norm()
        length = torch.where(norm > 0, self.rho / torch.where(norm > 0, norm, 1.0), 0.0)
        moves = [direction * length.to(direction.dtype) for direction in directions]
        torch._foreach_add_(weights, moves)

    def _differentiate(self, trainer: L.Trainer, optimizer: Any) -> None:
        """The gradient at the present weights, averaged over ranks as the strategy does it."""
        strategy: Any = trainer.strategy
        with torch.enable_grad():
            with trainer.precision_plugin.train_step_context():
                output = strategy.training_step(*training_step_arguments(trainer.lightning_module, *self._batch))
            loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
            strategy.backward(loss, optimizer)
