"""SiLU on a CPU with derivatives of one operation each, also below the threshold of a SiLU that a tanh continues.

The arguments of `silut:T` rarely reach T. Where the host can see that none does, the tanh is not computed. On other devices and
in traces, where compilers fuse operations, the functions of `networks` are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from forgefield.models.deeppot.networks import activation_function
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.graph import is_traced

Activation = Callable[[Tensor], Tensor]


class _Silu(TypedFunction):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return functional.silu(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return (_Slope.apply(grad, *ctx.saved_tensors),)

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor) -> Tensor:
        result: Tensor = _Slope.apply(tangent, *ctx.saved_tensors)
        return result


class _Slope(TypedFunction):
    """grad times the slope at x."""

    @staticmethod
    def forward(ctx: AutogradContext, grad: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(grad, x)
        ctx.save_for_forward(grad, x)
        result: Tensor = torch.ops.aten.silu_backward(grad, x)
        return result

    @staticmethod
    def backward(ctx: AutogradContext, outer: Tensor) -> Gradients:
        grad, x = ctx.saved_tensors
        wants_grad, wants_x = ctx.needs_input_grad
        of_grad = _Slope.apply(outer, x) if wants_grad else None
        return of_grad, _curvature(x) * (grad * outer) if wants_x else None

    @staticmethod
    def jvp(ctx: AutogradContext, d_grad: Tensor | None, d_x: Tensor | None) -> Tensor | None:
        grad, x = ctx.saved_tensors
        by_grad = None if d_grad is None else _Slope.apply(d_grad, x)
        if d_x is None:
            return by_grad
        by_x: Tensor = _curvature(x) * (grad * d_x)
        return by_x if by_grad is None else by_grad + by_x


def _curvature(x: Tensor) -> Tensor:
    """Second derivative at x."""
    sigmoid = torch.sigmoid(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return sigmoid * (1 - sigmoid) * (2 + x * (1 - 2 * sigmoid))
    bent = (0.5 - sigmoid).mul_(x).add_(1).mul_(2)
    return bent.mul_(sigmoid).mul_(sigmoid.neg_().add_(1))


def _plain(x: Tensor) -> bool:
    return x.is_cuda or is_traced(x) or x.numel() == 0


def fast_activation(name: str) -> Activation:
    """`networks.activation_function`, with less work on a CPU where it is a SiLU."""
    activate = activation_function(name)
    word, _, threshold = name.lower().partition(":")
    if word == "silu":
        return partial(_below, activate=activate, threshold=math.inf)
    if word in ("silut", "custom_silu"):
        return partial(_below, activate=activate, threshold=float(threshold or 3.0))
    return activate


def _below(x: Tensor, *, activate: Activation, threshold: float) -> Tensor:
    if _plain(x) or not (threshold == math.inf or float(x.detach().max()) < threshold):
        return activate(x)
    result: Tensor = _Silu.apply(x)
    return result
