"""Scalar functions with derivatives written out: activations, the envelope that ends every interaction, and the Bessel basis;
and random numbers that are a function of keys.

Activations are scaled to unit second moment; the scale is e3nn's `normalize2mom`: <f(z)^2> = 1 for normal z, from its fixed
sample, so that weights can be exchanged with it. Radial functions take the distance in units of the cutoff and are exactly zero
from the cutoff on, with two continuous derivatives; they are meant to be evaluated in float64.
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
    "sigmoid": torch.sigmoid,
    "abs": torch.abs,
}


@cache
def second_moment_scale(name: str) -> float:
    """Factor that gives the named activation unit second moment over a normal input."""
    with torch.random.fork_rng(devices=[]):
        normalised = normalize2mom(_PLAIN[name], device="cpu")
    return 1.0 if normalised._is_id else float(normalised.cst)


def activate(name: str, x: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` times the named activation of x; names: silu, tanh, ssp, mish, gelu, sigmoid, abs."""
    if name == "silu":
        return _Silu.apply(x, scale)
    value = _PLAIN[name](x)
    return value if scale == 1.0 else value * scale


def polynomial_cutoff(x: Tensor, p: float) -> Tensor:
    """DimeNet's envelope: 1 at x = 0, 0 for x >= 1, smooth to the second derivative there. `p` >= 2 sets the decay."""
    a, b, c = (p + 1) * (p + 2) / 2, p * (p + 2), p * (p + 1) / 2
    inside = 1 - x**p * (a - x * (b - c * x))
    return torch.where(x < 1, inside, torch.zeros_like(inside))


def bessel_basis(x: Tensor, frequencies: Tensor, p: float) -> Tensor:
    """sin(n pi x) / (pi x) under the envelope, n of `frequencies`: (n_edges,), (n_basis,) -> (n_edges, n_basis)."""
    if frequencies.requires_grad:
        column = x.unsqueeze(1)
        return torch.sin(column * (math.pi * frequencies)) * (polynomial_cutoff(column, p) / (math.pi * column))
    return _FixedBessel.apply(x, frequencies, float(p))


def _bessel_derivatives(x: Tensor, frequencies: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Value, first and second derivative in x of every basis function, each (n_edges, n_basis)."""
    column = x.unsqueeze(1)
    inside = (column < 1).to(x.dtype)
    rest = (1 - column) * inside
    k = p * (p + 1) * (p + 2) / 2
    power = column ** (p - 2)
    u = polynomial_cutoff(column, p)
    du = -k * power * column * rest * rest
    ddu = -k * power * rest * ((p - 1) * rest - 2 * column)
    phase = column * (math.pi * frequencies)
    s = torch.sin(phase) / (math.pi * column)
    ds = (torch.cos(phase) * frequencies - s) / column
    dds = -((math.pi * frequencies) ** 2) * s - 2 * ds / column
    return s * u, ds * u + s * du, dds * u + 2 * ds * du + s * ddu


class _FixedBessel(torch.autograd.Function):
    """The basis as a function of one variable: its two derivatives are written out instead of traced."""

    @staticmethod
    def forward(ctx, x: Tensor, frequencies: Tensor, p: float) -> Tensor:
        value, first, second = _bessel_derivatives(x, frequencies, p)
        ctx.save_for_backward(x, first, second)
        ctx.save_for_forward(first)
        return value

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, first, second = ctx.saved_tensors
        return _FixedBesselGradient.apply(grad, x, first, second), None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, frequencies: None, p: None) -> Tensor:
        (first,) = ctx.saved_tensors
        return first * tangent.unsqueeze(1)


class _FixedBesselGradient(torch.autograd.Function):
    """sum_n grad_n f_n'(x)."""

    @staticmethod
    def forward(ctx, grad: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(grad, first, second)
        return (grad * first).sum(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor):
        grad, first, second = ctx.saved_tensors
        return outer.unsqueeze(1) * first, outer * (grad * second).sum(1), None, None


# Random numbers that are a function of keys: the same keys give the same numbers on any device, on any number of ranks,
# compiled or not, and in any order. Keys are integers from 0 to 2^32 - 1, in int64 tensors. Products stay below 2^63, so
# nothing depends on the handling of integer overflow.

KEY_RANGE = 1 << 32
_LOW = KEY_RANGE - 1
_STEP = 0x1E3779B9


def mix_keys(keys: Tensor) -> Tensor:
    """Keys, each mapped one-to-one to another that looks unrelated."""
    keys = torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 16))
    keys = torch.bitwise_and(keys * 0x21F0AAAD, _LOW)
    keys = torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 15))
    keys = torch.bitwise_and(keys * 0x735A2D97, _LOW)
    return torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 15))


def combine_keys(keys: Tensor, numbers: Tensor) -> Tensor:
    """A key for each pair; both are broadcast. numbers: from 0 to 2^32."""
    return mix_keys(torch.bitwise_and(keys + mix_keys(torch.bitwise_and(numbers + _STEP, _LOW)), _LOW))


def keys_in_subset(keys: Tensor, share: float) -> Tensor:
    """Whether each key belongs to a random subset with this share of all keys."""
    return keys < round(share * KEY_RANGE)
