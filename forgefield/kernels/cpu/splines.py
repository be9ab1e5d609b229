"""Radial weights on a CPU as splines: the network is evaluated at the knots of a table, not for every pair of atoms.

A table holds the coefficients of quintic B-splines, with four continuous derivatives, that interpolate the network. It is
computed in float64, also where weights are float32, so that slopes are as accurate as values; with 256 intervals it agrees
with the network to float32 rounding. Pairs read it by compiled C code (`splines_source.py`): twice differentiable in the
lengths in reverse mode and once in forward mode, and once in the table.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.function import once_differentiable

from forgefield.kernels.cpu.compiler import load_c
from forgefield.kernels.cpu.convolution import REAL, call, can_use_c, runs_on_cpu
from forgefield.kernels.cpu.splines_source import DEGREE, PIECES, SCALE, splines_source
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.execution import C_SPLINES, current
from forgefield.ops.graph import GradientSwitch

KNOTS_PER_INTERVAL = 4
"""A quintic spline needs an interval where the cubic polynomials of GPU kernels need four."""
WORTHWHILE = 2
"""Splines are used from this number of pairs on for each row of a table."""


def spline_intervals(weight: Tensor, lengths: Tensor, n_kinds: int = 1) -> int:
    """Number of intervals of the splines from which radial weights of pairs are read; 0 where the network is evaluated for
    every pair: where that is faster, in float64, without C code, and where tables are excluded.

    weight: any weight of the network. lengths: (n_pairs,). n_kinds: number of tables that are needed.
    """
    context = current()
    n_intervals = context.knots // KNOTS_PER_INTERVAL
    if n_intervals == 0 or context.c_code < C_SPLINES or context.lowering is not None or weight.dtype != torch.float32:
        return 0
    if not runs_on_cpu(lengths) or lengths.shape[0] < WORTHWHILE * n_kinds * (n_intervals + DEGREE) or not can_use_c():
        return 0
    has_tangent = forward_ad._current_level >= 0 and forward_ad.unpack_dual(weight).tangent is not None
    return 0 if has_tangent else n_intervals


def collocation_points(n_intervals: int) -> Tensor:
    """(n_intervals + DEGREE,) float64, from 0 to 1: where splines equal the function that they interpolate. These are the ends
    of intervals, and the middles of the first and last two."""
    return torch.from_numpy(_positions(n_intervals) / n_intervals)


@cache
def _positions(n_intervals: int) -> np.ndarray:
    ends = np.arange(n_intervals + 1.0)
    return np.sort(np.concatenate([ends, [0.5, 1.5, n_intervals - 1.5, n_intervals - 0.5]]))


def coefficients(values: Tensor) -> Tensor:
    """(n_intervals + DEGREE, n) float64: the table of splines with these values at the collocation points; it can be
    differentiated once."""
    result: Tensor = _Coefficients.apply(values)
    return result


def read_splines(
    lengths: Tensor,
    table: Tensor,
    dtype: torch.dtype,
    switch: GradientSwitch | None,
    *,
    kinds: Tensor | None = None,
    n_kinds: int = 1,
) -> Tensor:
    """(n_pairs, n) of this type: values of splines.

    lengths: (n_pairs,) float64, in units of the cutoff; they get no gradient once the switch is off.
    table: (n_kinds * (n_intervals + DEGREE), n) float64. kinds: (n_pairs,), which of the tables a pair reads.
    """
    form = _Form(table.shape[0] // n_kinds - DEGREE, kinds, dtype, switch or GradientSwitch())
    result: Tensor = _Splines.apply(lengths, table, form)
    return result


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    return load_c(splines_source(REAL[dtype]))


class _Factors:
    """A banded matrix without pivoting, which collocation with B-splines does not need: it is totally positive."""

    BAND = DEGREE

    def __init__(self, matrix: np.ndarray) -> None:
        n, band = len(matrix), self.BAND
        work = matrix.copy()
        for i in range(n):
            for j in range(i + 1, min(i + band + 1, n)):
                work[j, i] /= work[i, i]
                work[j, i + 1 : i + band + 1] -= work[j, i] * work[i, i + 1 : i + band + 1]
        lower, upper = np.zeros((n, band)), np.zeros((n, band + 1))
        for i in range(n):
            first, last = max(0, i - band), min(i + band + 1, n)
            lower[i, first - i + band :] = work[i, first:i]
            upper[i, : last - i] = work[i, i:last]
        self.lower, self.upper = torch.from_numpy(lower), torch.from_numpy(upper)

    def solve(self, values: Tensor) -> Tensor:
        """The solution for every column of values (n, columns) float64."""
        x = values.clone(memory_format=torch.contiguous_format)
        call(_library(torch.float32).solve, self.lower, self.upper, len(self.lower), self.BAND, x.shape[1], x)
        return x


@cache
def _factors(n_intervals: int) -> tuple[_Factors, _Factors]:
    """Of the matrix from coefficients to values at the collocation points, and of its transpose."""
    matrix = np.zeros((n_intervals + DEGREE, n_intervals + DEGREE))
    for row, position in enumerate(_positions(n_intervals)):
        at = min(int(position), n_intervals - 1)
        matrix[row, at : at + DEGREE + 1] = np.array(PIECES) @ (position - at) ** np.arange(DEGREE + 1) / SCALE
    return _Factors(matrix), _Factors(matrix.T)


class _Coefficients(TypedFunction):
    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor) -> Tensor:
        return _factors(len(values) - DEGREE)[0].solve(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> Tensor:
        return _factors(len(grad) - DEGREE)[1].solve(grad)


@dataclass(frozen=True)
class _Form:
    """n_intervals: of each table. kinds: (n_pairs,), number of the table that a pair reads; None if there is one. dtype: of
    values. switch: once it is off, lengths get no gradient."""

    n_intervals: int
    kinds: Tensor | None
    dtype: torch.dtype
    switch: GradientSwitch

    def values(self, x: Tensor, table: Tensor) -> Tensor:
        return self._results("values", x, None, table)

    def slopes(self, x: Tensor, along: Tensor, table: Tensor) -> Tensor:
        """(n_pairs, columns): derivatives of the splines times `along` (n_pairs,)."""
        return self._results("slopes", x, along, table)

    def dots(self, order: int, x: Tensor, g: Tensor, table: Tensor) -> Tensor:
        """(n_pairs,): dot products of rows of g and derivatives of the splines."""
        return self._run(
            ("first_dots", "second_dots")[order - 1], x, g, table, shape=table.shape, out=torch.empty_like(x)
        )

    def sums(self, x: Tensor, along: Tensor | None, g: Tensor, table: Tensor) -> Tensor:
        """Gradient of the table from that of values, or, with `along`, of slopes."""
        name = "value_sums" if along is None else "slope_sums"
        return self._run(name, x, along, g, shape=table.shape, out=torch.empty_like(table))

    def _results(self, name: str, x: Tensor, along: Tensor | None, table: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], table.shape[1]), dtype=self.dtype)
        return self._run(name, x, along, table, shape=table.shape, out=out)

    def _run(self, name: str, *inputs: Tensor | None, shape: torch.Size, out: Tensor) -> Tensor:
        """Run a pass. inputs: lengths and the other inputs of the pass. shape: of the table."""
        x = inputs[0]
        assert x is not None
        function = getattr(_library(self.dtype), name)
        call(function, *inputs, self.kinds, x.shape[0], self.n_intervals, shape[0], shape[1], out)
        return out


class _Splines(TypedFunction):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, table: Tensor, form: _Form) -> Tensor:
        ctx.save_for_backward(x, table)
        ctx.save_for_forward(x, table)
        ctx.form = form
        return form.values(x, table)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        (x, table), form = ctx.saved_tensors, ctx.form
        needs_x = ctx.needs_input_grad[0] and not form.switch.off
        to_x = _SplineGradient.apply(grad, x, table, form) if needs_x else None
        to_table = _TableGradient.apply(grad, x, table, form) if _is_requested(ctx, 1) else None
        return to_x, to_table, None

    @staticmethod
    def jvp(ctx: AutogradContext, d_x: Tensor, d_table: Tensor | None, form: None) -> Tensor:
        x, table = ctx.saved_tensors
        tangent: Tensor = _SplineTangent.apply(x, d_x, table, ctx.form)
        return tangent


def _is_requested(ctx: AutogradContext, number: int) -> bool:
    """Whether the gradient of an input is used by the backward pass that is running: that of forces does not use tables'."""
    node = ctx.next_functions[number][0]
    return bool(ctx.needs_input_grad[number] and node is not None and torch._C._will_engine_execute_node(node))


class _TableGradient(TypedFunction):
    @staticmethod
    def forward(ctx: AutogradContext, grad: Tensor, x: Tensor, table: Tensor, form: _Form) -> Tensor:
        return form.sums(x, None, grad, table)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        raise NotImplementedError("gradients of radial splines in their tables cannot be differentiated")


class _SplineGradient(TypedFunction):
    """Gradient of `_Splines` in the lengths, itself differentiable once."""

    @staticmethod
    def forward(ctx: AutogradContext, grad: Tensor, x: Tensor, table: Tensor, form: _Form) -> Tensor:
        ctx.save_for_backward(grad, x, table)
        ctx.form = form
        return form.dots(1, x, grad, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, along: Tensor) -> Gradients:
        (grad, x, table), form = ctx.saved_tensors, ctx.form
        to_grad = form.slopes(x, along, table) if ctx.needs_input_grad[0] else None
        needs_x = ctx.needs_input_grad[1] and not form.switch.off
        to_x = form.dots(2, x, grad, table).mul_(along) if needs_x else None
        to_table = form.sums(x, along, grad, table) if _is_requested(ctx, 2) else None
        return to_grad, to_x, to_table, None


class _SplineTangent(TypedFunction):
    """Tangent of `_Splines` along d_x, differentiable once."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, d_x: Tensor, table: Tensor, form: _Form) -> Tensor:
        ctx.save_for_backward(x, d_x, table)
        ctx.form = form
        return form.slopes(x, d_x, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        (x, d_x, table), form = ctx.saved_tensors, ctx.form
        to_x = form.dots(2, x, grad, table).mul_(d_x) if ctx.needs_input_grad[0] else None
        to_dx = form.dots(1, x, grad, table) if ctx.needs_input_grad[1] else None
        to_table = form.sums(x, d_x, grad, table) if ctx.needs_input_grad[2] else None
        return to_x, to_dx, to_table, None
