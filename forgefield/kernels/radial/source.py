"""The Triton functions of `hidden.py`, which imports this file when it first launches one: it needs Triton.

curves, to_first, add_parts: of networks with one hidden layer. activate, to_inner, curves_of, to_last: of deeper ones, whose
values and slopes at knots lie in rows (networks, knots, 2, width) of float64. f = silu.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(v, dv):
    """f(v) and how it changes with v."""
    q = tl.sigmoid(v)
    return v * q, q * (1.0 + v * (1.0 - q)) * dv


@triton.jit
def through_silu(v, dv, to_h, to_s):
    """From cotangents of f(v) and of its change those of v and of its change."""
    q = tl.sigmoid(v)
    slope = q * (1.0 + v * (1.0 - q))
    return to_h * slope + to_s * dv * q * (1.0 - q) * (2.0 + v * (1.0 - 2.0 * q)), to_s * slope


@triton.jit
def store_polynomial(where, width, mask, h0, s0, h1, s1):
    """Coefficients from values and slopes at both ends of an interval, by a place from -1/2 to 1/2 in it."""
    tl.store(where, 0.5 * (h0 + h1) + 0.125 * (s0 - s1), mask=mask)
    tl.store(where + width, 1.5 * (h1 - h0) - 0.25 * (s0 + s1), mask=mask)
    tl.store(where + 2 * width, 0.5 * (s1 - s0), mask=mask)
    tl.store(where + 3 * width, 2.0 * (h0 - h1) + s0 + s1, mask=mask)


@triton.jit
def to_knot(where, width, begins, ends):
    """Cotangents of value and slope at a knot, from those of the polynomial that begins there and of the one that ends."""
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
    return to_h + 0.5 * g0 + 1.5 * g1 - 2.0 * g3, to_s - 0.125 * g0 - 0.25 * g1 + 0.5 * g2 + g3


@triton.jit
def hidden(basis, first, knot, valid, column, inside, n_basis: tl.constexpr, width: tl.constexpr, scale: tl.constexpr):
    """Values and slopes before the activation, at some knots of some channels."""
    like = knot[:, None] + column[None, :]
    v = tl.zeros_like(like).to(tl.float64)
    dv = tl.zeros_like(like).to(tl.float64)
    for b in tl.static_range(n_basis):
        w = scale * tl.load(first + b * width + column, mask=inside, other=0.0).to(tl.float64)
        x = tl.load(basis + knot * 2 * n_basis + b, mask=valid, other=0.0)
        dx = tl.load(basis + (knot * 2 + 1) * n_basis + b, mask=valid, other=0.0)
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
    valid = knot < n_intervals
    v, dv = hidden(basis, first, knot, valid, column, inside, n_basis, width, scale)
    h0, s0 = silu(v, dv)
    v, dv = hidden(basis, first, knot + 1, valid, column, inside, n_basis, width, scale)
    h1, s1 = silu(v, dv)
    where = out + (knot * 4 * width)[:, None] + column[None, :]
    both = valid[:, None] & inside[None, :]
    store_polynomial(where, width, both, gain * h0, gain * s0, gain * h1, gain * s1)


@triton.jit
def to_first(
    basis,
    first,
    inputs,
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
    valid = knot <= n_intervals
    # Of the polynomial that begins at a knot, and of the one that ends there.
    where = inputs + (knot * 4 * width)[:, None] + column[None, :]
    begins = (knot < n_intervals)[:, None] & inside[None, :]
    ends = ((knot > 0) & valid)[:, None] & inside[None, :]
    to_h, to_s = to_knot(where, width, begins, ends)
    v, dv = hidden(basis, first, knot, valid, column, inside, n_basis, width, scale)
    to_v, to_dv = through_silu(v, dv, scale * gain * to_h, scale * gain * to_s)
    out = parts + tl.program_id(0).to(tl.int64) * n_weights
    for b in tl.static_range(n_basis):
        x = tl.load(basis + knot * 2 * n_basis + b, mask=valid, other=0.0)
        dx = tl.load(basis + (knot * 2 + 1) * n_basis + b, mask=valid, other=0.0)
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


@triton.jit
def activate(inputs, out, n, width: tl.constexpr, scale: tl.constexpr, block: tl.constexpr):
    """f of `scale` times what is given, and its slope."""
    e = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = e < n
    where = e // width * 2 * width + e % width
    v = scale * tl.load(inputs + where, mask=inside, other=0.0)
    dv = scale * tl.load(inputs + where + width, mask=inside, other=0.0)
    h, s = silu(v, dv)
    tl.store(out + where, h, mask=inside)
    tl.store(out + where + width, s, mask=inside)


@triton.jit
def to_inner(inputs, to, out, n, width: tl.constexpr, scale: tl.constexpr, block: tl.constexpr):
    """From cotangents of what `activate` makes of `given` those of `given`."""
    e = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = e < n
    where = e // width * 2 * width + e % width
    v = scale * tl.load(inputs + where, mask=inside, other=0.0)
    dv = scale * tl.load(inputs + where + width, mask=inside, other=0.0)
    to_h = scale * tl.load(to + where, mask=inside, other=0.0)
    to_s = scale * tl.load(to + where + width, mask=inside, other=0.0)
    to_v, to_dv = through_silu(v, dv, to_h, to_s)
    tl.store(out + where, to_v, mask=inside)
    tl.store(out + where + width, to_dv, mask=inside)


@triton.jit
def curves_of(
    inputs, out, n, n_intervals, width: tl.constexpr, scale: tl.constexpr, gain: tl.constexpr, block: tl.constexpr
):
    """`gain` times the polynomials of what `activate` would make: (networks, n_intervals, 4, width)."""
    e = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = e < n
    row = e // width
    knot = row + row // n_intervals  # one more in every network
    here = inputs + knot * 2 * width + e % width
    v = scale * tl.load(here, mask=inside, other=0.0)
    dv = scale * tl.load(here + width, mask=inside, other=0.0)
    h0, s0 = silu(v, dv)
    v = scale * tl.load(here + 2 * width, mask=inside, other=0.0)
    dv = scale * tl.load(here + 3 * width, mask=inside, other=0.0)
    h1, s1 = silu(v, dv)
    where = out + row * 4 * width + e % width
    store_polynomial(where, width, inside, gain * h0, gain * s0, gain * h1, gain * s1)


@triton.jit
def to_last(
    inputs, to, out, n, n_intervals, width: tl.constexpr, scale: tl.constexpr, gain: tl.constexpr, block: tl.constexpr
):
    """From cotangents of what `curves_of` makes of `given` those of `given`."""
    e = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = e < n
    row = e // width
    network, knot = row // (n_intervals + 1), row % (n_intervals + 1)
    where = to + (row - network) * 4 * width + e % width
    to_h, to_s = to_knot(where, width, inside & (knot < n_intervals), inside & (knot > 0))
    here = inputs + row * 2 * width + e % width
    v = scale * tl.load(here, mask=inside, other=0.0)
    dv = scale * tl.load(here + width, mask=inside, other=0.0)
    to_v, to_dv = through_silu(v, dv, scale * gain * to_h, scale * gain * to_s)
    there = out + row * 2 * width + e % width
    tl.store(there, to_v, mask=inside)
    tl.store(there + width, to_dv, mask=inside)
