"""Stacks (R, n, ...) of features, values alone (R = 1) or values and tangents (R = 2): linear maps, whose derivatives are
linear maps of stacks, and everything else by PyTorch's forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.core.runtime import Concurrent
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.products import is_lowered, product

T = TypeVar("T")


def moving(function: Callable[[list[Tensor]], list[Tensor]], stacks: Sequence[Tensor]) -> list[Tensor]:
    """Apply `function` of tensors (n, ...) to stacks (R, n, ...): values alone, or values and tangents."""
    if stacks[0].shape[0] == 1:
        return [value.unsqueeze(0) for value in function([stack.squeeze(0) for stack in stacks])]
    with forward_ad.dual_level():
        outputs = function([forward_ad.make_dual(*stack.unbind()) for stack in stacks])
        pairs = [forward_ad.unpack_dual(value) for value in outputs]
        return [
            torch.stack([pair.primal, torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent])
            for pair in pairs
        ]


def with_tangents(stack: Tensor, n_rows: int) -> Tensor:
    return stack if len(stack) == n_rows else torch.cat([stack, torch.zeros_like(stack)])


def cut_list(tensors: list[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    """Consecutive parts of these lengths, and the rest."""
    parts = []
    for length in lengths:
        parts.append(tensors[:length])
        tensors = tensors[length:]
    return [*parts, tensors]


ROWS = 2048
"""Rows that are summed by one product for the gradient of a matrix: libraries split long sums badly."""


class Started:
    """Gradients that are computed concurrently with the rest of a backward pass in a captured step."""

    def __init__(self) -> None:
        self._work: list[Concurrent[Any]] = []
        self.rows: Concurrent[None] | None = None
        """Sums of rows of edges, which are large: finished before the next ones are written."""

    def run(self, stream: str, function: Callable[[], T]) -> T:
        """The result, which must not be read before `wait`."""
        work = Concurrent(stream, function)
        self._work.append(work)
        return work.unfinished()

    def wait_for_rows(self) -> None:
        if self.rows is not None:
            self.rows.result()
        self.rows = None

    def wait(self) -> None:
        self.wait_for_rows()
        for work in self._work:
            work.result()
        self._work.clear()


def awaited(started: Started, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors; gradients that reach them through the result may be unfinished work of `started`."""
    if not any(tensor.requires_grad for tensor in tensors):
        return list(tensors)
    trained = iter(_Awaited.apply(started, *(tensor for tensor in tensors if tensor.requires_grad)))
    return [next(trained) if tensor.requires_grad else tensor for tensor in tensors]


class _Awaited(TypedFunction):
    @staticmethod
    def forward(ctx: AutogradContext, started: Started, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.started = started
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> Gradients:
        ctx.started.wait()
        return None, *gradients


def linear(x: Tensor, matrix: Tensor, start: Tensor | None = None, started: Started | None = None) -> Tensor:
    """x (R, n, k, c) times matrix (c, d), plus start (R or 1, n, k, d), whose tangents are zero if it has none.

    started: computes the gradient of the matrix; None: at once.
    """
    if is_lowered(x):
        result: Tensor = product(x, matrix)
        return result if start is None else result + with_tangents(start, len(x))
    made: Tensor = _Linear.apply(x, matrix, start, started)
    return made


class _Linear(TypedFunction):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, matrix: Tensor, start: Tensor | None, started: Started | None
    ) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.started = started
        ctx.n_added = 0 if start is None else len(start)
        if start is None:
            return x @ matrix
        result = x.new_empty((*x.shape[:-1], matrix.shape[1]))
        n = len(start)
        rows, added = x[:n].flatten(0, -2), start.flatten(0, -2)
        torch.addmm(added, rows, matrix, out=result[:n].flatten(0, -2))
        if n < len(x):
            torch.mm(x[n:].flatten(0, -2), matrix, out=result[n:].flatten(0, -2))
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, to_result: Tensor) -> Gradients:
        x, matrix = ctx.saved_tensors
        wants_x, wants_matrix, wants_start, _ = ctx.needs_input_grad
        to_matrix: Tensor | None = None
        if wants_matrix:
            gradient = partial(matrix_gradient, x.flatten(0, -2), to_result.flatten(0, -2))
            to_matrix = gradient() if ctx.started is None else ctx.started.run("matrices", gradient)
        to_x = to_result @ matrix.t() if wants_x else None
        return to_x, to_matrix, to_result[: ctx.n_added] if wants_start else None, None


def matrix_gradient(x: Tensor, to_result: Tensor) -> Tensor:
    """(c, d): transpose of x (n, c) times to_result (n, d)."""
    n_parts = x.shape[0] // ROWS
    if is_lowered(x) or n_parts < 2:
        return product(x.t(), to_result)
    n = n_parts * ROWS
    parts = torch.bmm(x[:n].view(n_parts, ROWS, -1).transpose(1, 2), to_result[:n].reshape(n_parts, ROWS, -1))
    return torch.addmm(parts.sum(0), x[n:].t(), to_result[n:])
