"""What one training step computes, as a pure function of weights and a batch: gradients, loss sums and error sums.

Engines differ only in how they execute this function. A loss of forces is differentiated by double backward, by the tangent
form, which needs no second derivatives, or by the tangent form with generated kernels, for models that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.kernels.convolution.dispatch import use_edge_operators
from forgefield.kernels.cpu.convolution import can_use_c
from forgefield.models.edges import StepMemory
from forgefield.models.potential import Potential
from forgefield.ops.execution import C_CONVOLUTIONS, C_LATEST, C_NONE, C_SPLINES, KNOTS, execution
from forgefield.ops.products import lowered_type
from forgefield.tasks.loss_kernels import kernels_support, loss_by_kernels
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.task import Task
from forgefield.training.precision import KERNEL_TOLERANCES, STORAGE_TOLERANCES

DERIVATIVES = ("double", "tangent", "kernels")
T = TypeVar("T")


class Measured(NamedTuple):
    """sums: (2, n_targets), sums and counts of the loss terms. errors: as from `ErrorMetrics.measure`."""

    sums: Tensor
    errors: Tensor


class Differentiated(NamedTuple):
    """gradients: of the loss, for each trained weight; None if the loss does not depend on it. loss: scalar."""

    gradients: list[Tensor | None]
    loss: Tensor
    measured: Measured


class StepFunction:
    """The loss of `task` on the outputs of `potential`, and its gradients.

    errors: the errors to measure. evaluation_errors: those of evaluations, which may include the largest; default: the same.
    knots: number of intervals of the tables from which kernels read radial weights; 0 for exact weights.
    storage: type in which kernels store rows during a training step.
    edge_kernels: whether kernels may be used for sums over edges.
    c_code: what compiled C code may compute on a CPU if there is a compiler (`ops/execution.py`).
    shapes: of the tensors of a batch.
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
        c_code: int = C_LATEST,
        shapes: Shapes = SHAPES,
        evaluation_errors: ErrorMetrics | None = None,
    ) -> None:
        if derivative not in DERIVATIVES:
            raise ValueError(f"there is no derivative form '{derivative}'")
        self.potential, self.task, self.errors, self.derivative = potential, task, errors, derivative
        self.shapes, self.knots, self.storage, self.edge_kernels = shapes, knots, storage, edge_kernels
        self.c_code = c_code
        self.evaluation_errors = errors if evaluation_errors is None else evaluation_errors
        parameters = dict(potential.named_parameters())
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        frozen = [name for name in parameters if name not in set(self.trained)]
        self.fixed = [*frozen, *(name for name, _ in potential.named_buffers())]
        self._holder = _Holder(potential)
        self._owners: dict[str, tuple[Mapping[str, Tensor | None], str]] = {}
        """For each weight the dictionary of its module that contains it, and its key there."""

    def trained_weights(self) -> list[Tensor]:
        """The parameters themselves (not copies), in the order of `trained`."""
        return self._tensors(self.trained)

    def fixed_weights(self) -> list[Tensor]:
        """Frozen parameters and buffers, in the order of `fixed`."""
        return self._tensors(self.fixed)

    def _tensors(self, names: Sequence[str]) -> list[Tensor]:
        """Tensors by name, from the dictionaries of their modules: iterating over all modules would take longer than a small
        step. Modules must not be replaced during a training."""
        if not self._owners:
            for prefix, module in self.potential.named_modules():
                for tensors in (module._parameters, module._buffers):
                    # TorchScript's modules have mappings that cannot be iterated over without keys().
                    self._owners |= {
                        f"{prefix}.{key}" if prefix else key: (tensors, key) for key in list(tensors.keys())
                    }
        tensors = [owner[key] for owner, key in (self._owners[name] for name in names)]
        return cast("list[Tensor]", tensors)

    def differentiate(
        self,
        trained: Sequence[Tensor],
        fixed: Sequence[Tensor],
        batch: Batch,
        target_weights: Tensor,
        denominators: Tensor | None,
    ) -> Differentiated:
        """The gradients of a step.

        trained, fixed: weights, in the order of the attributes of these names.
        target_weights: (n_targets,), weights of the loss terms.
        denominators: (n_targets,), of all ranks; None for those of the batch.
        """
        weights = [tensor.detach().requires_grad_(True) for tensor in trained]
        by_tangent = self.derivative != "double" and (self.task.needs_forces or self.task.needs_stress)
        form = self._by_tangent if by_tangent else self._by_double_backward
        with torch.enable_grad(), self._kernels(self.storage):
            return self._with_weights(weights, fixed, lambda: form(weights, batch, target_weights, denominators))

    def evaluate(self, trained: Sequence[Tensor], fixed: Sequence[Tensor], batch: Batch) -> Measured:
        """Loss sums and errors of a batch, without gradients."""
        with _evaluation_mode(self.potential), self._kernels("float32"):
            outputs = self._with_weights([tensor.detach() for tensor in trained], fixed, lambda: self._outputs(batch))
        with torch.no_grad():
            return _measured(*self.task.sums(outputs, batch), self.evaluation_errors.measure(outputs, batch))

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
        # Submodules stay in training mode: random choices (dropout) have to be the same in both passes.
        with _evaluation_mode(self.potential, recurse=False):
            outputs = self._outputs(batch, memory)
        loss, measured, adjoints = self._adjoints(outputs, batch, target_weights, denominators)
        values, cotangents = self.potential.response(batch, adjoints, memory)
        gradients = torch.autograd.grad(values, weights, cotangents, allow_unused=True)
        return Differentiated(list(gradients), loss.detach(), measured)

    def _adjoints(
        self, outputs: Batch, batch: Batch, target_weights: Tensor, denominators: Tensor | None
    ) -> tuple[Tensor, Measured, Batch]:
        """The loss, its sums and errors, and the derivative of the loss in each output."""
        if kernels_support(self.task, self.errors, batch):
            detached = {name: outputs[name].detach() for name in self.task.outputs}
            result = loss_by_kernels(self.task, self.errors, detached, batch, target_weights, denominators)
            return result.loss, Measured(result.sums, result.errors), result.slopes
        leaves = {name: outputs[name].detach().requires_grad_(True) for name in self.task.outputs}
        loss, measured = self._loss(leaves, batch, target_weights, denominators)
        return loss, measured, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))

    @property
    def rounding(self) -> float:
        """Relative difference that rounding in kernels may cause in gradients, in addition to the tolerance of the
        precision."""
        if self.derivative != "kernels":
            return 0.0
        return max(STORAGE_TOLERANCES[self.storage], KERNEL_TOLERANCES[lowered_type()])

    @contextmanager
    def _kernels(self, storage: str) -> Iterator[None]:
        enabled = self.derivative == "kernels"
        with execution(kernels=enabled, knots=self.knots, storage=storage), self.code_setting():
            yield

    @contextmanager
    def code_setting(self) -> Iterator[None]:
        """Context in which compiled C code and kernels for sums over edges are used as requested, or not."""
        with execution(c_code=self.c_code if self.may_use_c_code else C_NONE), self.edge_setting():
            yield

    def edge_setting(self) -> AbstractContextManager[object]:
        """Context in which sums over edges use kernels or not, as requested."""
        return nullcontext() if self.edge_kernels else execution(operators=False)

    @property
    def sums_by_kernels(self) -> bool:
        """Whether the model has sums over edges that are computed by kernels, with any engine."""
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
        model = self.potential.interface
        level = C_CONVOLUTIONS if model.convolves else C_SPLINES if model.sums_over_edges else C_LATEST + 1
        return self.c_code >= level and self.edge_kernels and on_cpu

    @property
    def convolves_by_c(self) -> bool:
        """Whether an eager step computes convolutions by compiled C code."""
        return self.may_use_c_code and can_use_c()

    @property
    def uses_edge_kernels(self) -> bool:
        """Whether an eager step uses kernels or C code for sums over edges or convolutions."""
        return self.sums_by_kernels or self.convolves_by_c

    def _with_weights(self, trained: Sequence[Tensor], fixed: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """The result of `compute` while the potential has these weights."""
        named = dict(zip(self.trained, trained)) | dict(zip(self.fixed, fixed))
        named = {f"potential.{name}": tensor for name, tensor in named.items()}
        result: T = functional_call(self._holder, named, (compute,))
        return result

    def _outputs(self, batch: Batch, memory: StepMemory | None = None) -> Batch:
        task = self.task
        outputs: Batch = self.potential(batch, forces=task.needs_forces, stress=task.needs_stress, memory=memory)
        return outputs

    def _loss(
        self, outputs: Batch, batch: Batch, target_weights: Tensor, denominators: Tensor | None
    ) -> tuple[Tensor, Measured]:
        sums, counts = self.task.sums(outputs, batch)
        loss = self.task.combine(sums, counts if denominators is None else denominators, target_weights)
        return loss, _measured(sums, counts, self.errors.measure(outputs, batch))


def _measured(sums: Tensor, counts: Tensor, errors: Tensor) -> Measured:
    return Measured(torch.stack([sums, counts]).detach(), errors)


class _Holder(nn.Module):
    """Calls a function during `functional_call`, which replaces weights only inside a call of a module."""

    def __init__(self, potential: Potential) -> None:
        super().__init__()
        self.potential = potential

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


class _evaluation_mode:  # noqa: N801
    """Inside the block the module is in evaluation mode. recurse: also its submodules."""

    def __init__(self, module: nn.Module, *, recurse: bool = True) -> None:
        self.module, self.recurse = module, recurse

    def __enter__(self) -> None:
        self.was_training = self.module.training
        self._set(False)

    def __exit__(self, *exception: object) -> None:
        self._set(self.was_training)

    def _set(self, training: bool) -> None:
        if self.recurse:
            self.module.train(training)
        else:
            self.module.training = training
