"""Weighted sums of activated channels, as the last layer of a small network needs them, with their tangents and all
derivatives: one kernel forward and one backward."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction

ROWS = 32
"""Rows of one program."""


def activated_sum(channels: Tensor, weights: Tensor, *, inner: float, outer: float) -> Tensor:
    """(R, n): `outer` times the sum over channels of weights (width,) times silu(`inner` * channels).

    channels: (R, n, width), values alone (R = 1) or values and tangents (R = 2).
    """
    result: Tensor = _ActivatedSum.apply(channels, weights, inner, outer)
    return result


class _ActivatedSum(TypedFunction):
    @staticmethod
    def forward(ctx: AutogradContext, channels: Tensor, weights: Tensor, inner: float, outer: float) -> Tensor:
        channels, weights = channels.contiguous(), weights.contiguous()
        ctx.save_for_backward(channels, weights)
        ctx.factors = (inner, outer)
        n_rows, n, width = channels.shape
        result = channels.new_empty((n_rows, n))
        if n:
            _kernels().values[(-(-n // ROWS),)](
                channels=channels,
                weights=weights,
                out=result,
                n=n,
                inner=inner,
                outer=outer,
                **_sizes(n_rows, width),
            )
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, to_result: Tensor) -> Gradients:
        channels, weights = ctx.saved_tensors
        inner, outer = ctx.factors
        n_rows, n, width = channels.shape
        wants_weights = ctx.needs_input_grad[1]
        n_programs = -(-n // ROWS)
        to_channels = torch.empty_like(channels)
        parts = channels.new_empty((n_programs if wants_weights else 0, width))
        if n:
            _kernels().cotangents[(n_programs,)](
                channels=channels,
                weights=weights,
                to=to_result.contiguous(),
                out=to_channels,
                parts=parts,
                n=n,
                inner=inner,
                outer=outer,
                sums=wants_weights,
                **_sizes(n_rows, width),
            )
        return to_channels, parts.sum(0) if wants_weights else None, None, None


def _sizes(n_rows: int, width: int) -> dict[str, int | bool]:
    return {"moves": n_rows == 2, "width": width, "wide": max(16, 1 << (width - 1).bit_length()), "rows": ROWS}


@cache
def _kernels() -> SimpleNamespace:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n"])
    def values(
        channels,
        weights,
        out,
        n,
        inner: tl.constexpr,
        outer: tl.constexpr,
        moves: tl.constexpr,
        width: tl.constexpr,
        wide: tl.constexpr,
        rows: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
        column = tl.arange(0, wide)
        inside = (row < n)[:, None] & (column < width)[None, :]
        where = channels + row[:, None] * width + column[None, :]
        w = outer * tl.load(weights + column, mask=column < width, other=0.0)[None, :]
        v = inner * tl.load(where, mask=inside, other=0.0)
        s = 1.0 / (1.0 + tl.exp(-v))
        tl.store(out + row, tl.sum(w * v * s, 1), mask=row < n)
        if moves:
            dv = inner * tl.load(where + n.to(tl.int64) * width, mask=inside, other=0.0)
            tl.store(out + n + row, tl.sum(w * dv * s * (1.0 + v * (1.0 - s)), 1), mask=row < n)

    @triton.jit(do_not_specialize=["n"])
    def cotangents(
        channels,
        weights,
        to,
        out,
        parts,
        n,
        inner: tl.constexpr,
        outer: tl.constexpr,
        sums: tl.constexpr,
        moves: tl.constexpr,
        width: tl.constexpr,
        wide: tl.constexpr,
        rows: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
        column = tl.arange(0, wide)
        inside = (row < n)[:, None] & (column < width)[None, :]
        offset = row[:, None] * width + column[None, :]
        w = outer * inner * tl.load(weights + column, mask=column < width, other=0.0)[None, :]
        v = inner * tl.load(channels + offset, mask=inside, other=0.0)
        g = tl.load(to + row, mask=row < n, other=0.0)[:, None]
        s = 1.0 / (1.0 + tl.exp(-v))
        first = s * (1.0 + v * (1.0 - s))
        to_v = g * first
        to_w = g * v * s
        if moves:
            plane = n.to(tl.int64) * width
            dv = inner * tl.load(channels + plane + offset, mask=inside, other=0.0)
            h = tl.load(to + n + row, mask=row < n, other=0.0)[:, None]
            to_v += h * dv * s * (1.0 - s) * (2.0 + v * (1.0 - 2.0 * s))
            to_w += h * dv * first
            tl.store(out + plane + offset, w * h * first, mask=inside)
        tl.store(out + offset, w * to_v, mask=inside)
        if sums:
            total = outer * tl.sum(to_w, 0)
            tl.store(parts + tl.program_id(0).to(tl.int64) * width + column, total, mask=column < width)

    return SimpleNamespace(values=values, cotangents=cotangents)
