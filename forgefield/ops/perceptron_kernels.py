"""Triton kernels of a training step of a multilayer perceptron: a layer forwards, a layer backwards, Adam on a layer.

Imported only where Triton is there. Every matrix that a kernel reads is padded to whole tiles with zeros, so that no load is
masked: rows of points to `ROWS`, columns to `COLUMNS`. Points that only fill up have slope 0, and nothing is added in an order
that depends on timing: a sum over points is made by one program, or kept apart for each tile of points.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 128
COLUMNS = 128


@triton.jit
def _activated(z, NAME: tl.constexpr):
    """Value of an activation."""
    if NAME == "relu":
        y = tl.maximum(z, 0.0)
    elif NAME == "leakyrelu":
        y = tl.where(z > 0, z, 0.01 * z)
    elif NAME == "silu":
        y = z * tl.sigmoid(z)
    elif NAME == "gelu":
        y = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    elif NAME == "tanh":
        y = 2 * tl.sigmoid(2 * z) - 1
    elif NAME == "sigmoid":
        y = tl.sigmoid(z)
    elif NAME == "softplus":
        y = tl.where(z > 20, z, tl.log(1 + tl.exp(tl.minimum(z, 20.0))))
    elif NAME == "elu":
        y = tl.where(z > 0, z, tl.exp(tl.minimum(z, 0.0)) - 1)
    else:
        y = z
    return y


@triton.jit
def _derivative(z, NAME: tl.constexpr):
    """Derivative of an activation at z; for relu and leakyrelu z may be its value."""
    if NAME == "relu":
        d = tl.where(z > 0, 1.0, 0.0)
    elif NAME == "leakyrelu":
        d = tl.where(z > 0, 1.0, 0.01)
    elif NAME == "silu":
        s = tl.sigmoid(z)
        d = s * (1 + z * (1 - s))
    elif NAME == "gelu":
        d = 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * tl.exp(-0.5 * z * z) * 0.3989422804014327
    elif NAME == "tanh":
        s = tl.sigmoid(2 * z)
        d = 4 * s * (1 - s)
    elif NAME == "sigmoid":
        s = tl.sigmoid(z)
        d = s * (1 - s)
    elif NAME == "softplus":
        d = tl.where(z > 20, 1.0, tl.sigmoid(z))
    elif NAME == "elu":
        d = tl.where(z > 0, 1.0, tl.exp(tl.minimum(z, 0.0)))
    else:
        d = tl.full(z.shape, 1.0, tl.float32)
    return d


@triton.jit
def _layer(x, w, m, n, K, x_step, w_step, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Tile of x w^T: points m, outputs n; x (points, K), w (outputs, K)."""
    k = tl.arange(0, BK)
    a = x + m[:, None] * x_step + k[None, :]
    b = w + n[None, :] * w_step + k[:, None]
    made = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        made = tl.dot(tl.load(a), tl.load(b), made, input_precision="tf32")
        a += BK
        b += BK
    return made


@triton.jit
def first_layer(
    rows, index, w, bias, x, y, d, M, N, K, row_step, w_step, x_step, y_step,
    NAME: tl.constexpr, KEEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gathers its inputs: y = act(rows[index] w^T + bias). x receives the inputs, rounded as factors are; d, where KEEPS, the
    derivative of the activation. rows: wide enough for whole tiles of K, what lies behind K is not used."""
    at_m, at_n = tl.program_id(0), tl.program_id(1)
    m, n = at_m * BM + tl.arange(0, BM), at_n * BN + tl.arange(0, BN)
    chosen = tl.load(index + m, mask=m < M, other=0)
    made = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(tl.cdiv(K, BK)):
        k = start * BK + tl.arange(0, BK)
        inputs = tl.load(rows + chosen[:, None] * row_step + k[None, :], mask=k[None, :] < K, other=0.0)
        inputs = inputs.to(x.dtype.element_ty)
        if at_n == 0:
            tl.store(x + m[:, None] * x_step + k[None, :], inputs)
        weights = tl.load(w + n[None, :] * w_step + k[:, None])
        made = tl.dot(inputs, weights, made, input_precision="tf32")
    z = made + tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    place, there = m[:, None] * y_step + n[None, :], n[None, :] < N
    tl.store(y + place, _activated(z, NAME).to(y.dtype.element_ty), mask=there)
    if KEEPS:
        tl.store(d + place, _derivative(z, NAME), mask=there)


@triton.jit
def inner_layer(
    x, w, bias, y, d, N, K, x_step, w_step, y_step,
    NAME: tl.constexpr, KEEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = act(x w^T + bias); d, where KEEPS: the derivative of the activation."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    made = _layer(x, w, m, n, K, x_step, w_step, BM, BN, BK)
    z = made + tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    place, there = m[:, None] * y_step + n[None, :], n[None, :] < N
    tl.store(y + place, _activated(z, NAME).to(y.dtype.element_ty), mask=there)
    if KEEPS:
        tl.store(d + place, _derivative(z, NAME), mask=there)


@triton.jit
def last_layer(
    x, w, bias, rows, index, weight, factor, slope, sums, M, N, K, targets_at, row_step, x_step, w_step, slope_step, sum_step,
    delta,
    NAME: tl.constexpr, LOSS: tl.constexpr, WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The outputs, their errors and the slope of the loss. sums (tiles of points, outputs), float64: errors are added to them.
    slope: by what the last activation is applied to; 0 for points from M on."""
    at_m = tl.program_id(0)
    m, n = at_m * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    made = _layer(x, w, m, n, K, x_step, w_step, BM, BN, BK)
    z = made + tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    chosen = tl.load(index + m, mask=m < M, other=0)
    there = (m[:, None] < M) & (n[None, :] < N)
    targets = tl.load(rows + chosen[:, None] * row_step + targets_at + n[None, :], mask=there, other=0.0)
    difference = tl.where(there, _activated(z, NAME) - targets, 0.0)
    if WEIGHTED:
        difference *= tl.load(weight + m, mask=m < M, other=0.0)[:, None]
    size = tl.abs(difference)
    if LOSS == "mse":
        errors, slopes = difference * difference, 2.0 * difference
    elif LOSS == "mae":
        errors = size
        slopes = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
    else:
        errors = tl.where(size < delta, 0.5 * difference * difference, delta * (size - 0.5 * delta))
        slopes = tl.minimum(tl.maximum(difference, -delta), delta)
    slopes *= tl.load(factor + n, mask=n < N, other=0.0)[None, :]
    slopes *= _derivative(z, NAME)
    tl.store(slope + m[:, None] * slope_step + n[None, :], slopes.to(slope.dtype.element_ty))
    mine = sums + at_m * sum_step + n
    tl.store(mine, tl.load(mine, mask=n < N, other=0.0) + tl.sum(errors, 0).to(tl.float64), mask=n < N)


@triton.jit
def _gradient(
    slope, x, dw, db, at_n, at_k, P, N, K, slope_step, x_step, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr
):
    """A tile of dw = slope^T x, and of db where it is the first of its rows."""
    n, k, p = at_n * BN + tl.arange(0, BN), at_k * BK + tl.arange(0, BK), tl.arange(0, BP)
    a = slope + p[:, None] * slope_step + n[None, :]
    b = x + p[:, None] * x_step + k[None, :]
    made = tl.zeros((BN, BK), dtype=tl.float32)
    total = tl.zeros((BN,), dtype=tl.float32)
    for _ in range(tl.cdiv(P, BP)):
        slopes = tl.load(a)
        made = tl.dot(tl.trans(slopes), tl.load(b), made, input_precision="tf32")
        if at_k == 0:
            total += tl.sum(slopes.to(tl.float32), 0)
        a += BP * slope_step
        b += BP * x_step
    tl.store(dw + n[:, None] * K + k[None, :], made, mask=(n[:, None] < N) & (k[None, :] < K))
    if at_k == 0:
        tl.store(db + n, total, mask=n < N)


@triton.jit
def _slope_below(
    slope, w, kept, below, at_m, at_k, N, K, slope_step, w_step, kept_step,
    NAME: tl.constexpr, KEEPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of (slope w) times the derivative of the activation below."""
    m, k, n = at_m * BM + tl.arange(0, BM), at_k * BK + tl.arange(0, BK), tl.arange(0, BN)
    a = slope + m[:, None] * slope_step + n[None, :]
    b = w + n[:, None] * w_step + k[None, :]
    made = tl.zeros((BM, BK), dtype=tl.float32)
    for _ in range(tl.cdiv(N, BN)):
        made = tl.dot(tl.load(a), tl.load(b), made, input_precision="tf32")
        a += BN
        b += BN * w_step
    place, there = m[:, None] * kept_step + k[None, :], k[None, :] < K
    known = tl.load(kept + place, mask=there, other=0.0).to(tl.float32)
    if not KEEPS:
        known = _derivative(known, NAME)
    tl.store(below + place, (made * known).to(below.dtype.element_ty), mask=there)


@triton.jit
def layer_backwards(
    slope, w, x, kept, below, dw, db, P, N, K, slope_step, w_step, x_step, kept_step, of_weights,
    NAME: tl.constexpr, KEEPS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, XM: tl.constexpr, XK: tl.constexpr, XN: tl.constexpr,
):  # fmt: skip
    """Gradients of a layer and the slope below it, two products in one launch.

    Programs below `of_weights`: dw (N, K) and db (N,), sums over P points, tiles BN x BK in pieces of BP points. The others:
    below, tiles XM x XK in pieces of XN. kept: the derivative of the activation below where KEEPS, else its value.
    """
    program = tl.program_id(0)
    if program < of_weights:
        across = tl.cdiv(K, BK)
        _gradient(slope, x, dw, db, program // across, program % across, P, N, K, slope_step, x_step, BN, BK, BP)
    else:
        number, beside = program - of_weights, tl.cdiv(K, XK)
        _slope_below(
            slope, w, kept, below, number // beside, number % beside, N, K, slope_step, w_step, kept_step,
            NAME, KEEPS, XM, XK, XN,
        )  # fmt: skip


@triton.jit
def _adam(
    p, g, first, second, mean, place, there, numbers, beta1, rest1, beta2, rest2, eps, decay,
    DECOUPLED: tl.constexpr, AVERAGED: tl.constexpr,
):  # fmt: skip
    """Adam on the entries `place` of one tensor; returns their new values. numbers: rate, rate over the first correction, one
    over the root of the second, share of the average."""
    rate, pace = tl.load(numbers), tl.load(numbers + 1)
    root, share = tl.load(numbers + 2), tl.load(numbers + 3)
    value = tl.load(p + place, mask=there, other=0.0)
    slope = tl.load(g + place, mask=there, other=0.0)
    m = tl.load(first + place, mask=there, other=0.0)
    v = tl.load(second + place, mask=there, other=0.0)
    if DECOUPLED:
        value -= rate * decay * value
    else:
        slope += decay * value
    m = beta1 * m + rest1 * slope
    v = beta2 * v + rest2 * slope * slope
    value -= pace * m / (tl.sqrt(v) * root + eps)
    tl.store(first + place, m, mask=there)
    tl.store(second + place, v, mask=there)
    tl.store(p + place, value, mask=there)
    if AVERAGED:
        a = tl.load(mean + place, mask=there, other=0.0)
        tl.store(mean + place, a + (value - a) * share, mask=there)
    return value


@triton.jit
def adam_on_layer(
    w, dw, first_w, second_w, mean_w, b, db, first_b, second_b, mean_b, copy, N, K, copy_step, numbers_w, numbers_b,
    beta1, rest1, beta2, rest2, eps, decay,
    DECOUPLED: tl.constexpr, AVERAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adam on the weights (N, K) and biases (N,) of a layer; copy receives the new weights, padded and rounded as factors."""
    program = tl.program_id(0)
    of_weights = tl.cdiv(N * K, BLOCK)
    if program < of_weights:
        place = program * BLOCK + tl.arange(0, BLOCK)
        there = place < N * K
        value = _adam(
            w, dw, first_w, second_w, mean_w, place, there, numbers_w, beta1, rest1, beta2, rest2, eps, decay,
            DECOUPLED, AVERAGED,
        )  # fmt: skip
        tl.store(copy + (place // K) * copy_step + place % K, value.to(copy.dtype.element_ty), mask=there)
    else:
        place = (program - of_weights) * BLOCK + tl.arange(0, BLOCK)
        _adam(
            b, db, first_b, second_b, mean_b, place, place < N, numbers_b, beta1, rest1, beta2, rest2, eps, decay,
            DECOUPLED, AVERAGED,
        )  # fmt: skip
