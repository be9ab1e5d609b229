"""Types for custom autograd functions, and values with tangents in one tensor (n, 2, ...), whose second dimension holds a value
and its tangent.

Linear maps act on both rows in the same way, as one product. Everything else uses PyTorch's forward-mode differentiation here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:

    class AutogradContext(FunctionCtx):
        """What `forward` of an autograd function leaves for `backward` and `jvp`, under any names."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: object) -> None: ...
else:
    AutogradContext = FunctionCtx

Gradients = tuple[Any, ...]
"""Gradients of all inputs, None for those that have none."""

if TYPE_CHECKING:

    class TypedFunction(Function):
        """`torch.autograd.Function` whose `apply` has a signature."""

        @classmethod
        def apply(cls, *args: object) -> Any: ...
else:
    TypedFunction = Function


def carried(function: Callable[[list[Tensor]], list[Tensor]], rows: Sequence[Tensor]) -> list[Tensor]:
    """Apply `function` of tensors (n, ...) to rows (n, R, ...): R is 1 for values alone, 2 with tangents."""
    if rows[0].shape[1] == 1:
        return [value.unsqueeze(1) for value in function([row.squeeze(1) for row in rows])]
    with forward_ad.dual_level():
        outputs = function([forward_ad.make_dual(row[:, 0], row[:, 1]) for row in rows])
        pairs = [forward_ad.unpack_dual(value) for value in outputs]
        return [torch.stack([pair.primal, _tangent(pair)], 1) for pair in pairs]


def side_by_side(value: Tensor) -> Tensor:
    """(n, 2, ...) from a dual tensor, inside its level of forward-mode differentiation."""
    pair = forward_ad.unpack_dual(value)
    return torch.stack([pair.primal, _tangent(pair)], 1)


def tangent_of(value: Tensor) -> Tensor:
    """Tangent of a dual tensor, zero where there is none, inside its level of forward-mode differentiation."""
    return _tangent(forward_ad.unpack_dual(value))


def _tangent(pair: forward_ad.UnpackedDualTensor) -> Tensor:
    return torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent
