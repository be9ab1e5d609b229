"""Radial networks with one hidden layer, as tables need them: values and slopes of the hidden channels at the knots, the
polynomials between these, and the way back to the first weights.

With v = x W and v' = x' W for the basis x and its slope x', the hidden layer is h = f(v), h' = f'(v) v', f = silu. The
polynomials of its channels are made in float64 and rounded; the last matrix is applied to them, as they are linear in h and h'.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from forgefield.ops.kernels.build import module_from
from forgefield.ops.kernels.setting import interpreted

KNOTS, CHANNELS = 16, 32
"""That one program takes."""


def _tile() -> tuple[int, int]:
    """The interpreter takes its time for every program and not for every number."""
    return (1024, 128) if interpreted() else (KNOTS, CHANNELS)


@dataclass(frozen=True)
class HiddenCurves:
    """Hidden channels of one layer's network. basis: (n_intervals + 1, 2, n_basis) float64, with its slope. first: (n_basis,
    width); scale multiplies it, and gain what comes out."""

    basis: Tensor
    first: Tensor
    scale: float
    gain: float

    @torch.no_grad()
    def curves(self) -> Tensor:
        """Polynomials of the channels, (n_intervals, 4, width), in the precision of the weights."""
        curves = self.first.new_empty((self.basis.shape[0] - 1, 4, self.first.shape[1]))
        _kernels().curves[self._grid(curves.shape[0])](self.basis, self._first(), curves, *self._numbers(), num_warps=8)
        return curves

    @torch.no_grad()
    def gradient(self, to_curves: Tensor) -> Tensor:
        """Cotangent of the first matrix, from that of the curves."""
        first, grid = self._first(), self._grid(self.basis.shape[0])
        parts, found = self.basis.new_empty((grid[0], first.numel())), torch.empty_like(first)
        given = (self.basis, first, to_curves.contiguous(), parts, first.numel())
        _kernels().to_first[grid](*given, *self._numbers(), num_warps=8)
        _kernels().add_parts[(-(-first.numel() // 128),)](parts, found, grid[0], first.numel(), 128, num_warps=4)
        return found

    def _first(self) -> Tensor:
        return self.first.detach().contiguous()

    def _grid(self, n_knots: int) -> tuple[int, int]:
        knots, channels = _tile()
        return -(-n_knots // knots), -(-self.first.shape[1] // channels)

    def _numbers(self) -> tuple[float, ...]:
        return (self.basis.shape[0] - 1, *self.first.shape, self.scale, self.gain, *_tile())


_SOURCE = """
import triton
import triton.language as tl


@triton.jit
def hidden(basis, first, knot, known, column, inside, n_basis: tl.constexpr, width: tl.constexpr, scale: tl.constexpr):
    # Values and slopes before the activation, at some knots of some channels.
    like = knot[:, None] + column[None, :]
    v = tl.zeros_like(like).to(tl.float64)
    dv = tl.zeros_like(like).to(tl.float64)
    for b in tl.static_range(n_basis):
        w = scale * tl.load(first + b * width + column, mask=inside, other=0.0).to(tl.float64)
        x = tl.load(basis + knot * 2 * n_basis + b, mask=known, other=0.0)
        dx = tl.load(basis + (knot * 2 + 1) * n_basis + b, mask=known, other=0.0)
        v += x[:, None] * w[None, :]
        dv += dx[:, None] * w[None, :]
    return v, dv


@triton.jit
def curves(
    basis,
    first,
    out,
    n_intervals,
    n_basis: tl.constexpr,
    width: tl.constexpr,
    scale: tl.constexpr,
    gain: tl.constexpr,
    knots: tl.constexpr,
    channels: tl.constexpr,
):
    column = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = column < width
    knot = tl.program_id(0) * knots + tl.arange(0, knots)
    known = knot < n_intervals
    v, dv = hidden(basis, first, knot, known, column, inside, n_basis, width, scale)
    q = tl.sigmoid(v)
    h0 = gain * v * q
    s0 = gain * q * (1.0 + v * (1.0 - q)) * dv
    v, dv = hidden(basis, first, knot + 1, known, column, inside, n_basis, width, scale)
    q = tl.sigmoid(v)
    h1 = gain * v * q
    s1 = gain * q * (1.0 + v * (1.0 - q)) * dv
    where = out + (knot * 4 * width)[:, None] + column[None, :]
    both = known[:, None] & inside[None, :]
    tl.store(where, 0.5 * (h0 + h1) + 0.125 * (s0 - s1), mask=both)
    tl.store(where + width, 1.5 * (h1 - h0) - 0.25 * (s0 + s1), mask=both)
    tl.store(where + 2 * width, 0.5 * (s1 - s0), mask=both)
    tl.store(where + 3 * width, 2.0 * (h0 - h1) + s0 + s1, mask=both)


@triton.jit
def to_first(
    basis,
    first,
    given,
    parts,
    n_weights,
    n_intervals,
    n_basis: tl.constexpr,
    width: tl.constexpr,
    scale: tl.constexpr,
    gain: tl.constexpr,
    knots: tl.constexpr,
    channels: tl.constexpr,
):
    column = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = column < width
    knot = tl.program_id(0) * knots + tl.arange(0, knots)
    known = knot <= n_intervals
    # Of the polynomial that begins at a knot, and of the one that ends there.
    where = given + (knot * 4 * width)[:, None] + column[None, :]
    begins = (knot < n_intervals)[:, None] & inside[None, :]
    ends = ((knot > 0) & known)[:, None] & inside[None, :]
    g0 = tl.load(where, mask=begins, other=0.0).to(tl.float64)
    g1 = tl.load(where + width, mask=begins, other=0.0).to(tl.float64)
    g2 = tl.load(where + 2 * width, mask=begins, other=0.0).to(tl.float64)
    g3 = tl.load(where + 3 * width, mask=begins, other=0.0).to(tl.float64)
    to_h = 0.5 * g0 - 1.5 * g1 + 2.0 * g3
    to_s = 0.125 * g0 - 0.25 * g1 - 0.5 * g2 + g3
    g0 = tl.load(where - 4 * width, mask=ends, other=0.0).to(tl.float64)
    g1 = tl.load(where - 3 * width, mask=ends, other=0.0).to(tl.float64)
    g2 = tl.load(where - 2 * width, mask=ends, other=0.0).to(tl.float64)
    g3 = tl.load(where - width, mask=ends, other=0.0).to(tl.float64)
    to_h = gain * (to_h + 0.5 * g0 + 1.5 * g1 - 2.0 * g3)
    to_s = gain * (to_s - 0.125 * g0 - 0.25 * g1 + 0.5 * g2 + g3)
    v, dv = hidden(basis, first, knot, known, column, inside, n_basis, width, scale)
    q = tl.sigmoid(v)
    slope = q * (1.0 + v * (1.0 - q))
    to_v = scale * (to_h * slope + to_s * dv * q * (1.0 - q) * (2.0 + v * (1.0 - 2.0 * q)))
    to_dv = scale * to_s * slope
    out = parts + tl.program_id(0).to(tl.int64) * n_weights
    for b in tl.static_range(n_basis):
        x = tl.load(basis + knot * 2 * n_basis + b, mask=known, other=0.0)
        dx = tl.load(basis + (knot * 2 + 1) * n_basis + b, mask=known, other=0.0)
        total = tl.sum(x[:, None] * to_v + dx[:, None] * to_dv, 0)
        tl.store(out + b * width + column, total, mask=inside)


@triton.jit
def add_parts(parts, out, n_parts, n_columns, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < n_columns
    total = tl.zeros([block], tl.float64)
    for part in range(n_parts):
        total += tl.load(parts + part * n_columns + column, mask=inside, other=0.0)
    tl.store(out + column, total, mask=inside)
"""
"""Functions that call each other have to be those of a module."""


@cache
def _kernels() -> types.ModuleType:
    return module_from(_SOURCE)
