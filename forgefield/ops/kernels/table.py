"""Radial weights as a table: cubic B-splines through the network's values at equally spaced lengths.

A kernel then reads four short rows for an edge where it would otherwise need hundreds of numbers of its own. The table is made
in float64, so that it is no further from the network than float32 is from float64. Its gradient is a sum over the edges of
each interval, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forgefield.ops.graph import Segments
from forgefield.ops.kernels.build import has_triton
from forgefield.ops.kernels.setting import interpreted

SHARES = 4
"""Programs among which the edges of an interval are divided."""


@lru_cache(maxsize=8)
def _prefilter(n_intervals: int, device: torch.device) -> Tensor:
    """(n_intervals + 3, n_intervals + 1) float64: from values at the knots to coefficients of the splines.

    The curvature is zero at the first knot, where no edge is so short, and the slope at the last, where interactions end.
    """
    with _disable_current_modes():  # it outlives a trace during which it may be asked for first
        size = n_intervals + 3
        system = torch.zeros(size, size, dtype=torch.float64)
        rows = torch.arange(n_intervals + 1)
        for offset, value in enumerate((1 / 6, 2 / 3, 1 / 6)):
            system[rows, rows + offset] = value
        system[-2, :3] = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)
        system[-1, -3:] = torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)
        given = torch.eye(size, n_intervals + 1, dtype=torch.float64)
        return torch.linalg.solve(system, given).to(device)


def spline_coefficients(values: Tensor) -> Tensor:
    """(n_intervals + 3, n): B-spline coefficients of the curves through values (n_intervals + 1, n), float64."""
    return _prefilter(values.shape[0] - 1, values.device) @ values


@dataclass(frozen=True)
class Places:
    """Where edges lie among the knots. at: (n_edges,) interval. place: (n_edges, R) from 0 to 1 within it, with its tangent
    where R is 2. by_interval: edges sorted by interval."""

    at: Tensor
    place: Tensor
    n_intervals: int

    @property
    def by_interval(self) -> Segments:
        return Segments(self.at, self.n_intervals)


def interval_of(scaled: Tensor, n_intervals: int) -> Tensor:
    """(n_edges,) int64: interval of each length, in units of the largest (n_edges,); what is longer is in the last."""
    return (scaled.detach() * n_intervals).to(torch.int64).clamp_(0, n_intervals - 1)


def place_in(scaled: Tensor, at: Tensor, n_intervals: int) -> Tensor:
    """(n_edges,) from 0 to 1; constant beyond the last knot."""
    return torch.clamp(scaled * n_intervals, max=float(n_intervals)) - at.to(scaled.dtype)


def splines(place: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The four B-splines that reach into an interval, at `place`, and their slopes."""
    u, v = place, 1 - place
    b0, b1, b3 = v * v * v / 6, 2 / 3 - u * u * (1 - 0.5 * u), u * u * u / 6
    d0, d1, d3 = -0.5 * v * v, (1.5 * u - 2) * u, 0.5 * u * u
    return [b0, b1, 1 - b0 - b1 - b3, b3], [d0, d1, -d0 - d1 - d3, d3]


def read_table(table: Tensor, at: Tensor, place: Tensor) -> Tensor:
    """(n_edges, n): the curves at the places (n_edges,), by plain operations."""
    values, _ = splines(place)
    return sum(value.unsqueeze(1) * table.index_select(0, at + q) for q, value in enumerate(values))  # type: ignore[return-value]


def table_gradient(to_w: Tensor, at: Tensor, place: Tensor, n_intervals: int) -> Tensor:
    """(n_intervals + 3, n): cotangent of the table from those of the weights of edges (n_edges, R, n) and, with R = 2, of their
    tangents."""
    parts = torch.ops.forgefield.interval_sums(to_w, at, place, n_intervals)
    total = to_w.new_zeros((n_intervals + 3, to_w.shape[2]))
    for q in range(4):
        total[q : q + n_intervals] += parts[:, q]
    return total


@torch.library.custom_op("forgefield::interval_sums", mutates_args=())
def _interval_sums(to_w: Tensor, at: Tensor, place: Tensor, n_intervals: int) -> Tensor:
    """(n_intervals, 4, n): what the edges of an interval have for each of the four rows of the table that they read."""
    segments = Segments(at, n_intervals)
    kernel = _kernel() if has_triton() and (to_w.is_cuda or interpreted()) else None
    if kernel is None:
        values, slopes = splines(place[:, 0])
        rows = [value.unsqueeze(1) * to_w[:, 0] for value in values]
        if to_w.shape[1] == 2:
            rows = [r + (slope * place[:, 1]).unsqueeze(1) * to_w[:, 1] for r, slope in zip(rows, slopes)]
        out = to_w.new_zeros((n_intervals, 4, to_w.shape[2]))
        return out.index_add_(0, at, torch.stack(rows, 1))
    columns = to_w.shape[2]
    block = min(128, 1 << (columns - 1).bit_length())
    parts = to_w.new_empty((n_intervals, SHARES, 4, columns))
    grid = (n_intervals * SHARES, -(-columns // block))
    kernel[grid](
        to_w, place, segments.order, segments.pointers, parts, columns, to_w.shape[1], SHARES, block, num_warps=1
    )
    return parts.sum(1)


@_interval_sums.register_fake
def _(to_w: Tensor, at: Tensor, place: Tensor, n_intervals: int) -> Tensor:
    return to_w.new_empty((n_intervals, 4, to_w.shape[2]))


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def add_interval(
        to_w,
        place,
        order,
        pointers,
        out,
        columns,
        rows: tl.constexpr,
        shares: tl.constexpr,
        block: tl.constexpr,
    ):
        program = tl.program_id(0)
        interval = program // shares
        share = program % shares
        c = tl.program_id(1) * block + tl.arange(0, block)
        inside = c < columns
        first = tl.load(pointers + interval)
        count = tl.load(pointers + interval + 1) - first
        begin = first + count * share // shares
        end = first + count * (share + 1) // shares
        a0 = tl.zeros([block], to_w.dtype.element_ty)
        a1 = tl.zeros([block], to_w.dtype.element_ty)
        a2 = tl.zeros([block], to_w.dtype.element_ty)
        a3 = tl.zeros([block], to_w.dtype.element_ty)
        for number in range(begin, end):
            edge = tl.load(order + number)
            u = tl.load(place + edge * rows)
            v = 1.0 - u
            b0 = v * v * v * 0.16666666666666666
            b3 = u * u * u * 0.16666666666666666
            b1 = 0.6666666666666666 - u * u * (1.0 - 0.5 * u)
            value = tl.load(to_w + edge * rows * columns + c, mask=inside, other=0.0)
            a0 += b0 * value
            a1 += b1 * value
            a2 += (1.0 - b0 - b1 - b3) * value
            a3 += b3 * value
            if rows == 2:
                du = tl.load(place + edge * 2 + 1)
                d0 = -0.5 * v * v
                d1 = (1.5 * u - 2.0) * u
                d3 = 0.5 * u * u
                moved = tl.load(to_w + (edge * 2 + 1) * columns + c, mask=inside, other=0.0) * du
                a0 += d0 * moved
                a1 += d1 * moved
                a2 += (-d0 - d1 - d3) * moved
                a3 += d3 * moved
        where = out + program.to(tl.int64) * 4 * columns + c
        tl.store(where, a0, mask=inside)
        tl.store(where + columns, a1, mask=inside)
        tl.store(where + 2 * columns, a2, mask=inside)
        tl.store(where + 3 * columns, a3, mask=inside)

    return add_interval
