"""What one training step computes, as a pure function: weights and a batch in; gradients, loss sums and error sums out.

Engines differ in how they execute this function, never in what it is. `StepFunction` knows the two ways of differentiating a
loss of forces: by double backward, or by the tangent form, which takes no derivative of a derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forgefield.models.potential import Potential
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task

Batch = dict[str, Tensor]
DERIVATIVES = ("double", "tangent")


class Measured(NamedTuple):
    """`sums`: (2, n_targets), sums and counts of the loss terms. `errors`: what `ErrorMetrics.add` takes."""

    sums: Tensor
    errors: Tensor


class Differentiated(NamedTuple):
    """`gradients`: of the loss in each trained weight, None where it does not depend on it. `loss`: what was differentiated."""

    gradients: list[Tensor | None]
    loss: Tensor
    measured: Measured


class StepFunction:
    """The loss of `task` on the outputs of `potential`, and its gradients. errors: says which errors are measured."""

    def __init__(self, potential: Potential, task: Task, errors: ErrorMetrics, *, derivative: str = "double") -> None:
        if derivative not in DERIVATIVES:
            raise ValueError(f"there is no derivative form '{derivative}'")
        self.potential, self.task, self.errors, self.derivative = potential, task, errors, derivative
        parameters = dict(potential.named_parameters())
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        frozen = [name for name in parameters if name not in set(self.trained)]
        self.fixed = [*frozen, *(name for name, _ in potential.named_buffers())]
        self._response = _Response(potential)

    def trained_weights(self) -> list[Tensor]:
        """The live tensors, in the order of `trained`; they follow optimiser, averages and checkpoints."""
        parameters = dict(self.potential.named_parameters())
        return [parameters[name] for name in self.trained]

    def fixed_weights(self) -> list[Tensor]:
        """Everything else the potential holds, in the order of `fixed`."""
        tensors = dict(self.potential.named_parameters()) | dict(self.potential.named_buffers())
        return [tensors[name] for name in self.fixed]

    def differentiate(
        self,
        trained: Sequence[Tensor],
        fixed: Sequence[Tensor],
        batch: Batch,
        target_weights: Tensor,
        denominators: Tensor | None,
    ) -> Differentiated:
        """denominators: (n_targets,) of all ranks; the batch's own, if None. target_weights: (n_targets,) of the loss."""
        weights = [tensor.detach().requires_grad_(True) for tensor in trained]
        if self.derivative == "tangent" and (self.task.needs_forces or self.task.needs_stress):
            return self._by_tangent(weights, fixed, batch, target_weights, denominators)
        outputs = self._outputs(weights, fixed, batch)
        loss, measured = self._loss(outputs, batch, target_weights, denominators)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        return Differentiated(list(gradients), loss.detach(), measured)

    def _by_tangent(
        self,
        weights: list[Tensor],
        fixed: Sequence[Tensor],
        batch: Batch,
        target_weights: Tensor,
        denominators: Tensor | None,
    ) -> Differentiated:
        with _evaluating(self.potential):
            outputs = self._outputs([weight.detach() for weight in weights], fixed, batch)
        leaves = {name: outputs[name].detach().requires_grad_(True) for name in self.task.names}
        loss, measured = self._loss(leaves, batch, target_weights, denominators)
        adjoints = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
        named = {f"potential.{name}": tensor for name, tensor in self._named(weights, fixed).items()}
        response = functional_call(self._response, named, (batch, adjoints))
        gradients = torch.autograd.grad(response, weights, allow_unused=True)
        return Differentiated(list(gradients), loss.detach(), measured)

    def evaluate(self, trained: Sequence[Tensor], fixed: Sequence[Tensor], batch: Batch) -> Measured:
        """Loss sums and errors of a batch, without any gradient in the weights."""
        with _evaluating(self.potential):
            outputs = self._outputs([tensor.detach() for tensor in trained], fixed, batch)
        with torch.no_grad():
            return self._measured(*self.task.sums(outputs, batch), outputs, batch)

    def _named(self, trained: Sequence[Tensor], fixed: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.trained, trained)) | dict(zip(self.fixed, fixed))

    def _outputs(self, trained: Sequence[Tensor], fixed: Sequence[Tensor], batch: Batch) -> Batch:
        asked = {"forces": self.task.needs_forces, "stress": self.task.needs_stress}
        return functional_call(self.potential, self._named(trained, fixed), (batch,), asked)

    def _loss(
        self, outputs: Batch, batch: Batch, target_weights: Tensor, denominators: Tensor | None
    ) -> tuple[Tensor, Measured]:
        sums, counts = self.task.sums(outputs, batch)
        loss = self.task.combine(sums, counts if denominators is None else denominators, target_weights)
        return loss, self._measured(sums, counts, outputs, batch)

    def _measured(self, sums: Tensor, counts: Tensor, outputs: Batch, batch: Batch) -> Measured:
        return Measured(torch.stack([sums, counts]).detach(), self.errors.measure(outputs, batch))


class _Response(nn.Module):
    """`Potential.response` as a module's forward, which is what weights can be put into from outside."""

    def __init__(self, potential: Potential) -> None:
        super().__init__()
        self.potential = potential

    def forward(self, batch: Batch, adjoints: Batch) -> Tensor:
        return self.potential.response(batch, adjoints)


class _evaluating:
    """Inside, the module is in evaluation mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.was_training = self.module.training
        self.module.eval()

    def __exit__(self, *exception: object) -> None:
        self.module.train(self.was_training)
