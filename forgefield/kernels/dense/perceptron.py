"""Triton kernels of a training step of a multilayer perceptron: forward and backward pass of a layer, Adam on a layer.

Imported only if Triton is installed. Every matrix that a kernel reads is padded to complete tiles with zeros, so that no load
is masked: rows of points to `ROWS`, columns to `COLUMNS`. Padding points have slope 0. The order of sums does not depend on
timing: a sum over points is computed by one program, or separately for each tile of points.

Tensor cores accept factors of tf32 only if the summed index is contiguous. With TRANSPOSED, matrices that are later summed
over their rows are therefore also stored transposed (arguments that end in `_t`). Tensor cores truncate factors; with ROUNDS,
factors are rounded to the nearest tf32 number when they are stored: half the error, and no bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 128
COLUMNS = 128


@triton.jit
def _activated(z, NAME: tl.constexpr):
    """Value of an activation. Written without minimum and maximum, which drop NaN on a GPU."""
    if NAME == "relu":
        y = tl.where(z <= 0, 0.0, z)
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
        y = tl.where(z > 20, z, tl.log(1 + tl.exp(tl.where(z > 20, 20.0, z))))
    elif NAME == "elu":
        y = tl.where(z > 0, z, tl.exp(tl.where(z > 0, 0.0, z)) - 1)
    else:
        y = z
    return y


@triton.jit
def _derivative(z, NAME: tl.constexpr):
    """Derivative of an activation at z; for relu and leakyrelu z may be its value."""
    if NAME == "relu":
        d = tl.where(z <= 0, 0.0, 1.0)
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
        d = tl.where(z > 0, 1.0, tl.exp(tl.where(z > 0, 0.0, z)))
    else:
        d = tl.full(z.shape, 1.0, tl.float32)
    return d


@triton.jit
def _factor(v, to, ROUNDS: tl.constexpr):
    """v as products take it: of the type that `to` points to, and where ROUNDS the nearest number of tf32."""
    if ROUNDS:
        bits = (v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        v = tl.where(
            v == v, bits.to(tl.float32, bitcast=True), v
        )  # adding to the bits of a NaN could make a number of it
    return v.to(to.dtype.element_ty)


@triton.jit
def _store(to, to_t, values, m, n, N, step, step_t, TRANSPOSED: tl.constexpr):
    """Store a tile of rows m and columns n < N, and where TRANSPOSED its transpose too."""
    tl.store(to + m[:, None] * step + n[None, :], values, mask=n[None, :] < N)
    if TRANSPOSED:
        tl.store(to_t + n[:, None] * step_t + m[None, :], tl.trans(values), mask=n[:, None] < N)


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
    rows, index, w, bias, x, x_t, y, y_t, d, M, N, K, row_step, w_step, x_step, y_step, t_step,
    NAME: tl.constexpr, KEEPS: tl.constexpr, TRANSPOSED: tl.constexpr, ROUNDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
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
        inputs = _factor(inputs, x, ROUNDS)
        if start % tl.num_programs(1) == at_n:
            _store(x, x_t, inputs, m, k, x_step, x_step, t_step, TRANSPOSED)
        weights = tl.load(w + n[None, :] * w_step + k[:, None])
        made = tl.dot(inputs, weights, made, input_precision="tf32")
    z = made + tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    _store(y, y_t, _factor(_activated(z, NAME), y, ROUNDS), m, n, N, y_step, t_step, TRANSPOSED)
    if KEEPS:
        tl.store(d + m[:, None] * y_step + n[None, :], _derivative(z, NAME), mask=n[None, :] < N)


@triton.jit
def inner_layer(
    x, w, bias, y, y_t, d, N, K, x_step, w_step, y_step, t_step,
    NAME: tl.constexpr, KEEPS: tl.constexpr, TRANSPOSED: tl.constexpr, ROUNDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = act(x w^T + bias); d, where KEEPS: the derivative of the activation."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    made = _layer(x, w, m, n, K, x_step, w_step, BM, BN, BK)
    z = made + tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    _store(y, y_t, _factor(_activated(z, NAME), y, ROUNDS), m, n, N, y_step, t_step, TRANSPOSED)
    if KEEPS:
        tl.store(d + m[:, None] * y_step + n[None, :], _derivative(z, NAME), mask=n[None, :] < N)


@triton.jit
def last_layer(
    x, w, bias, rows, index, weight, factor, slope, slope_t, columns, sums, M, N, K, targets_at, row_step, x_step, w_step,
    slope_step, t_step, sum_step, delta,
    NAME: tl.constexpr, LOSS: tl.constexpr, WEIGHTED: tl.constexpr, TRANSPOSED: tl.constexpr, ROUNDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The outputs, their errors and the slope of the loss. sums (tiles of points, outputs), float64: errors are added to them.
    slope: by what the last activation is applied to; 0 for points from M on. columns (tiles of points, outputs): its sums."""
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
        slopes = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, difference))
    else:
        errors = tl.where(size < delta, 0.5 * difference * difference, delta * (size - 0.5 * delta))
        slopes = tl.where(difference > delta, delta, tl.where(difference < -delta, -delta, difference))
    slopes *= tl.load(factor + n, mask=n < N, other=0.0)[None, :]
    slopes *= _derivative(z, NAME)
    _store(slope, slope_t, _factor(slopes, slope, ROUNDS), m, n, slope_step, slope_step, t_step, TRANSPOSED)
    tl.store(columns + at_m * slope_step + n, tl.sum(slopes, 0))
    mine = sums + at_m * sum_step + n
    tl.store(mine, tl.load(mine, mask=n < N, other=0.0) + tl.sum(errors, 0).to(tl.float64), mask=n < N)


@triton.jit
def _gradient(
    slope, x, dw, at_n, at_k, P, N, K, slope_step, x_step,
    TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A tile of dw = slope^T x. Where TRANSPOSED, slope and x are the transposes."""
    n, k, p = at_n * BN + tl.arange(0, BN), at_k * BK + tl.arange(0, BK), tl.arange(0, BP)
    made = tl.zeros((BN, BK), dtype=tl.float32)
    if TRANSPOSED:
        made = _layer(slope, x, n, k, P, slope_step, x_step, BN, BK, BP)
    else:
        a = slope + p[:, None] * slope_step + n[None, :]
        b = x + p[:, None] * x_step + k[None, :]
        for _ in range(tl.cdiv(P, BP)):
            made = tl.dot(tl.trans(tl.load(a)), tl.load(b), made, input_precision="tf32")
            a += BP * slope_step
            b += BP * x_step
    tl.store(dw + n[:, None] * K + k[None, :], made, mask=(n[:, None] < N) & (k[None, :] < K))


@triton.jit
def _slope_below(
    slope, w, kept, below, below_t, columns, at_m, at_k, N, K, slope_step, w_step, kept_step, t_step,
    NAME: tl.constexpr, KEEPS: tl.constexpr, TRANSPOSED: tl.constexpr, ROUNDS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of below, (slope w) times the derivative of the activation below, and the sums of its columns. Where TRANSPOSED, w
    is the transpose."""
    m, k, n = at_m * BM + tl.arange(0, BM), at_k * BK + tl.arange(0, BK), tl.arange(0, BN)
    if TRANSPOSED:
        made = _layer(slope, w, m, k, N, slope_step, w_step, BM, BK, BN)
    else:
        a = slope + m[:, None] * slope_step + n[None, :]
        b = w + n[:, None] * w_step + k[None, :]
        made = tl.zeros((BM, BK), dtype=tl.float32)
        for _ in range(tl.cdiv(N, BN)):
            made = tl.dot(tl.load(a), tl.load(b), made, input_precision="tf32")
            a += BN
            b += BN * w_step
    derivative = tl.load(kept + m[:, None] * kept_step + k[None, :], mask=k[None, :] < K, other=0.0).to(tl.float32)
    if not KEEPS:
        derivative = _derivative(derivative, NAME)
    made *= derivative
    _store(below, below_t, _factor(made, below, ROUNDS), m, k, K, kept_step, t_step, TRANSPOSED)
    tl.store(columns + at_m * kept_step + k, tl.sum(made, 0), mask=k < K)


@triton.jit
def layer_backwards(
    slope, slope_t, w, x, kept, below, below_t, columns, dw, P, N, K, slope_step, w_step, x_step, kept_step, t_step, of_weights,
    NAME: tl.constexpr, KEEPS: tl.constexpr, TRANSPOSED: tl.constexpr, ROUNDS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, XM: tl.constexpr, XK: tl.constexpr, XN: tl.constexpr,
):  # fmt: skip
    """Gradients of a layer and the slope below it, two products in one launch.

    Programs below `of_weights`: dw (N, K), sums over P points, tiles BN x BK in pieces of BP points. The others: below, tiles
    XM x XK in pieces of XN, and in columns (tiles of points, K) the sums of each tile. kept: the derivative of the activation
    below where KEEPS, else its value. w, x: their transposes where TRANSPOSED.
    """
    program = tl.program_id(0)
    if program < of_weights:
        across = tl.cdiv(K, BK)
        at_n, at_k = program // across, program % across
        if TRANSPOSED:
            _gradient(slope_t, x, dw, at_n, at_k, P, N, K, t_step, x_step, TRANSPOSED, BN, BK, BP)
        else:
            _gradient(slope, x, dw, at_n, at_k, P, N, K, slope_step, x_step, TRANSPOSED, BN, BK, BP)
    else:
        number, n_across = program - of_weights, tl.cdiv(K, XK)
        _slope_below(
            slope, w, kept, below, below_t, columns, number // n_across, number % n_across, N, K, slope_step, w_step, kept_step,
            t_step, NAME, KEEPS, TRANSPOSED, ROUNDS, XM, XK, XN,
        )  # fmt: skip


@triton.jit
def _adam(
    p, slope, first, second, mean, place, there, numbers, beta1, rest1, beta2, rest2, eps, decay,
    DECOUPLED: tl.constexpr, AVERAGED: tl.constexpr,
):  # fmt: skip
    """Adam on the entries `place` of one tensor, with their slopes; returns their new values. numbers: rate, rate over the
    first correction, one over the root of the second, share of the average."""
    rate, pace = tl.load(numbers), tl.load(numbers + 1)
    root, share = tl.load(numbers + 2), tl.load(numbers + 3)
    value = tl.load(p + place, mask=there, other=0.0)
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
    w, first_w, second_w, mean_w, b, first_b, second_b, mean_b, dw, columns, copy, copy_t, N, K, copy_step, t_step,
    column_step, n_columns, numbers_w, numbers_b, beta1, rest1, beta2, rest2, eps, decay, of_weights,
    DECOUPLED: tl.constexpr, AVERAGED: tl.constexpr, TRANSPOSED: tl.constexpr, ROUNDS: tl.constexpr,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adam on the weights (N, K) and biases (N,) of a layer; copy receives the new weights, padded and rounded as factors.

    dw (N, K): their slopes; columns (n_columns, N): parts of those of the biases, which are added up here. Programs below
    `of_weights` have weights: BLOCK of them in a row, or where TRANSPOSED a tile of SIDE rows and columns.
    """
    program = tl.program_id(0)
    if program < of_weights:
        if TRANSPOSED:
            across = tl.cdiv(K, SIDE)
            n, k = (program // across) * SIDE + tl.arange(0, SIDE), (program % across) * SIDE + tl.arange(0, SIDE)
            place, there = n[:, None] * K + k[None, :], (n[:, None] < N) & (k[None, :] < K)
        else:
            place = program * BLOCK + tl.arange(0, BLOCK)
            there = place < N * K
        value = _adam(
            w, tl.load(dw + place, mask=there, other=0.0), first_w, second_w, mean_w, place, there, numbers_w,
            beta1, rest1, beta2, rest2, eps, decay, DECOUPLED, AVERAGED,
        )  # fmt: skip
        value = _factor(value, copy, ROUNDS)
        if TRANSPOSED:
            tl.store(copy + n[:, None] * copy_step + k[None, :], value, mask=there)
            tl.store(copy_t + k[:, None] * t_step + n[None, :], tl.trans(value), mask=tl.trans(there))
        else:
            tl.store(copy + (place // K) * copy_step + place % K, value, mask=there)
    else:
        n_b = (program - of_weights) * BLOCK + tl.arange(0, BLOCK)
        slope = tl.zeros((BLOCK,), dtype=tl.float32)
        for tile in range(n_columns):
            slope += tl.load(columns + tile * column_step + n_b, mask=n_b < N, other=0.0)
        _adam(
            b, slope, first_b, second_b, mean_b, n_b, n_b < N, numbers_b, beta1, rest1, beta2, rest2, eps, decay,
            DECOUPLED, AVERAGED,
        )  # fmt: skip
