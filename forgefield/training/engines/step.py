"""What one training step computes, as a pure function: weights and a batch in; gradients, loss sums and error sums out.

Engines differ in how they execute this function, never in what it is. `StepFunction` knows the ways of differentiating a loss
of forces: by double backward; by the tangent form, which takes no derivative of a derivative; or by that form through
generated kernels, for models that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.kernels.convolution.dispatch import use_edge_operators
from forgefield.kernels.cpu.convolution import can_use_c
from forgefield.models.edges import StepMemory
from forgefield.models.potential import Potential
from forgefield.ops.execution import KNOTS, execution
from forgefield.ops.products import lowered_type
from forgefield.tasks.loss_kernels import kernels_support, loss_by_kernels
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.training.precision import KERNEL_TOLERANCES, STORAGE_TOLERANCES

DERIVATIVES = ("double", "tangent", "kernels")
T = TypeVar("T")


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
    """The loss of `task` on the outputs of `potential`, and its gradients.

    errors: says which errors are measured. knots: intervals of the tables that kernels read radial weights from, zero for none;
    storage: what kernels store rows in while gradients are made. edge_kernels: whether sums over edges may go through kernels,
    for models that have such sums. c_code: whether convolutions on a CPU use compiled C code where there is a
    compiler. shapes: of the tensors of a batch.
    """

    def __init__(
        self,
        potential: Potential,
        task: Task,
        errors: ErrorMetrics,
        *,
        derivative: str = "double",
        knots: int = KNOTS,
        storage: str = "float32",
        edge_kernels: bool = True,
        c_code: bool = True,
        shapes: Shapes = SHAPES,
    ) -> None:
        if derivative not in DERIVATIVES:
            raise ValueError(f"there is no derivative form '{derivative}'")
        self.potential, self.task, self.errors, self.derivative = potential, task, errors, derivative
        self.shapes, self.knots, self.storage, self.edge_kernels = shapes, knots, storage, edge_kernels
        self.c_code = c_code
        parameters = dict(potential.named_parameters())
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        frozen = [name for name in parameters if name not in set(self.trained)]
        self.fixed = [*frozen, *(name for name, _ in potential.named_buffers())]
        self._holder = _Holder(potential)
        self._places: dict[str, tuple[dict[str, Any], str]] = {}

    def trained_weights(self) -> list[Tensor]:
        """The live tensors, in the order of `trained`; they follow optimiser, averages and checkpoints."""
        return self._found(self.trained)

    def fixed_weights(self) -> list[Tensor]:
        """Everything else the potential holds, in the order of `fixed`."""
        return self._found(self.fixed)

    def _found(self, names: Sequence[str]) -> list[Tensor]:
        """Looked up where modules keep them, since going through all modules would take longer than a small step. Modules may
        not be exchanged for others while they are trained."""
        if not self._places:
            for prefix, module in self.potential.named_modules():
                for held in (module._parameters, module._buffers):
                    self._places |= {f"{prefix}.{key}" if prefix else key: (held, key) for key in held.keys()}  # noqa: SIM118
        return [held[key] for held, key in (self._places[name] for name in names)]

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
        by_tangent = self.derivative != "double" and (self.task.needs_forces or self.task.needs_stress)
        form = self._by_tangent if by_tangent else self._by_double_backward
        with torch.enable_grad(), self._kernels(self.storage):
            return self._with_weights(weights, fixed, lambda: form(weights, batch, target_weights, denominators))

    def evaluate(self, trained: Sequence[Tensor], fixed: Sequence[Tensor], batch: Batch) -> Measured:
        """Loss sums and errors of a batch, without any gradient in the weights."""
        with _Evaluating(self.potential), self._kernels("float32"):
            outputs = self._with_weights([tensor.detach() for tensor in trained], fixed, lambda: self._outputs(batch))
        with torch.no_grad():
            return self._measured(*self.task.sums(outputs, batch), outputs, batch)

    def _by_double_backward(
        self, weights: list[Tensor], batch: Batch, target_weights: Tensor, denominators: Tensor | None
    ) -> Differentiated:
        loss, measured = self._loss(self._outputs(batch), batch, target_weights, denominators)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        return Differentiated(list(gradients), loss.detach(), measured)

    def _by_tangent(
        self, weights: list[Tensor], batch: Batch, target_weights: Tensor, denominators: Tensor | None
    ) -> Differentiated:
        memory = StepMemory()
        # Nothing below it is told to evaluate: what is left out by chance has to be so in both passes.
        with _Evaluating(self.potential, alone=True):
            outputs = self._outputs(batch, memory)
        loss, measured, adjoints = self._adjoints(outputs, batch, target_weights, denominators)
        values, cotangents = self.potential.response(batch, adjoints, memory)
        gradients = torch.autograd.grad(values, weights, cotangents, allow_unused=True)
        return Differentiated(list(gradients), loss.detach(), measured)

    def _adjoints(
        self, outputs: Batch, batch: Batch, target_weights: Tensor, denominators: Tensor | None
    ) -> tuple[Tensor, Measured, Batch]:
        """The loss, what is measured, and the derivative of the loss in each output."""
        if kernels_support(self.task, self.errors, batch):
            plain = {name: outputs[name].detach() for name in self.task.outputs}
            found = loss_by_kernels(self.task, self.errors, plain, batch, target_weights, denominators)
            return found.loss, Measured(found.sums, found.errors), found.slopes
        leaves = {name: outputs[name].detach().requires_grad_(True) for name in self.task.outputs}
        loss, measured = self._loss(leaves, batch, target_weights, denominators)
        return loss, measured, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))

    @property
    def rounding(self) -> float:
        """How far gradients may be, relative to their size, from those of plain operations in the precision in force, where it
        is more than the precision itself allows: kernels do not round all that these do, or more."""
        if self.derivative != "kernels":
            return 0.0
        return max(STORAGE_TOLERANCES[self.storage], KERNEL_TOLERANCES[lowered_type()])

    @contextmanager
    def _kernels(self, storage: str) -> Iterator[None]:
        enabled = self.derivative == "kernels"
        with execution(kernels=enabled, knots=self.knots, storage=storage, c_code=self.c_code), self.edge_setting():
            yield

    def edge_setting(self) -> AbstractContextManager[object]:
        """Inside, sums over edges are made as they are to be."""
        return nullcontext() if self.edge_kernels else execution(operators=False)

    @property
    def sums_by_kernels(self) -> bool:
        """Whether the model has sums over edges that go through kernels, whatever the engine."""
        weight = next(self.potential.parameters(), None)
        if weight is None or not self.potential.interface.sums_over_edges:
            return False
        with self.edge_setting():
            return use_edge_operators(weight)

    @property
    def may_use_c_code(self) -> bool:
        """Whether an eager step computes convolutions by compiled C code where there is a compiler."""
        weight = next(self.potential.parameters(), None)
        on_cpu = weight is not None and weight.device.type == "cpu"
        return self.c_code and self.edge_kernels and on_cpu and self.potential.interface.convolves

    @property
    def convolves_by_c(self) -> bool:
        """Whether an eager step computes convolutions by compiled C code."""
        return self.may_use_c_code and can_use_c()

    @property
    def uses_edge_kernels(self) -> bool:
        """Whether an eager step uses kernels or C code for sums over edges or convolutions."""
        return self.sums_by_kernels or self.convolves_by_c

    def _with_weights(self, trained: Sequence[Tensor], fixed: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """What `compute` gives while the potential holds these tensors."""
        named = dict(zip(self.trained, trained)) | dict(zip(self.fixed, fixed))
        named = {f"potential.{name}": tensor for name, tensor in named.items()}
        return functional_call(self._holder, named, (compute,))

    def _outputs(self, batch: Batch, memory: StepMemory | None = None) -> Batch:
        task = self.task
        return self.potential(batch, forces=task.needs_forces, stress=task.needs_stress, memory=memory)

    def _loss(
        self, outputs: Batch, batch: Batch, target_weights: Tensor, denominators: Tensor | None
    ) -> tuple[Tensor, Measured]:
        sums, counts = self.task.sums(outputs, batch)
        loss = self.task.combine(sums, counts if denominators is None else denominators, target_weights)
        return loss, self._measured(sums, counts, outputs, batch)

    def _measured(self, sums: Tensor, counts: Tensor, outputs: Batch, batch: Batch) -> Measured:
        return Measured(torch.stack([sums, counts]).detach(), self.errors.measure(outputs, batch))


class _Holder(nn.Module):
    """Holds the potential while something is computed with it; weights are put into a module from outside only so."""

    def __init__(self, potential: Potential) -> None:
        super().__init__()
        self.potential = potential

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class _Evaluating:
    """Inside, the module is in evaluation mode. alone: it is, and what it is made of is not."""

    def __init__(self, module: nn.Module, *, alone: bool = False) -> None:
        self.module, self.alone = module, alone

    def __enter__(self) -> None:
        self.was_training = self.module.training
        self._set(False)

    def __exit__(self, *exception: object) -> None:
        self._set(self.was_training)

    def _set(self, training: bool) -> None:
        if self.alone:
            self.module.training = training
        else:
            self.module.train(training)
