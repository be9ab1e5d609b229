"""Activation functions scaled to unit second moment, with second derivatives that cost two passes instead of ten.

The scale is e3nn's `normalize2mom`: <f(z)^2> = 1 for normal z, from its fixed sample, so that weights can be
exchanged with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from e3nn.math import normalize2mom
from torch import Tensor


def shifted_softplus(x: Tensor) -> Tensor:
    """ln((1 + e^x) / 2): zero at zero."""
    return torch.nn.functional.softplus(x) - math.log(2.0)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:
        sigmoid = torch.sigmoid(x)
        ctx.save_for_backward(x, sigmoid)
        ctx.save_for_forward(x, sigmoid)
        ctx.scale = scale
        value = x * sigmoid
        return value if scale == 1.0 else value.mul_(scale)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, sigmoid = ctx.saved_tensors
        return _SiluGradient.apply(grad, x, sigmoid, ctx.scale), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, scale: None) -> Tensor:
        x, sigmoid = ctx.saved_tensors
        return _SiluGradient.apply(tangent, x, sigmoid, ctx.scale)


class _SiluGradient(torch.autograd.Function):
    """grad f'(x) with f' = s (1 + x (1 - s)), f'' = s (1 - s) (2 + x (1 - 2 s)), s the sigmoid."""

    @staticmethod
    def forward(ctx, grad: Tensor, x: Tensor, sigmoid: Tensor, scale: float) -> Tensor:
        slope = torch.addcmul(sigmoid, x, sigmoid - sigmoid * sigmoid)
        if scale != 1.0:
            slope.mul_(scale)
        ctx.save_for_backward(grad, x, sigmoid, slope)
        ctx.scale = scale
        return grad * slope

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor):
        grad, x, sigmoid, slope = ctx.saved_tensors
        curvature = torch.addcmul(x, x, sigmoid, value=-2).add_(2).mul_(sigmoid)
        curvature.addcmul_(curvature, sigmoid, value=-1).mul_(grad).mul_(outer)
        if ctx.scale != 1.0:
            curvature.mul_(ctx.scale)
        return outer * slope, curvature, None, None


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "ssp": shifted_softplus,
    "mish": torch.nn.functional.mish,
    "gelu": torch.nn.functional.gelu,
}


@cache
def second_moment_scale(name: str) -> float:
    """Factor that gives the named activation unit second moment over a normal input."""
    with torch.random.fork_rng(devices=[]):
        normalised = normalize2mom(_PLAIN[name], device="cpu")
    return 1.0 if normalised._is_id else float(normalised.cst)


def activate(name: str, x: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` times the named activation of x; names: silu, tanh, ssp, mish, gelu."""
    if name == "silu":
        return _Silu.apply(x, scale)
    value = _PLAIN[name](x)
    return value if scale == 1.0 else value * scale
