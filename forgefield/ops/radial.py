"""Functions of a distance: the polynomial envelope that ends every interaction, and the Bessel basis under it.

Both take the distance in units of the cutoff and are exactly zero from the cutoff on, with two continuous derivatives.
All of it is meant to be evaluated in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
