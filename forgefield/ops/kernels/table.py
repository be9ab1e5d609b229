"""Radial weights as a table: cubic splines through the network's values at equally spaced lengths.

A kernel then reads four short rows for an edge where it would otherwise need hundreds of numbers of its own. The splines
are made in float64 and kept as one polynomial for each interval, because a slope taken from rounded values of the curve
would be far less precise than the slope of the network. The gradient of the table is a sum over the edges of each interval,
in a fixed order.
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

SHARES = 4
"""Programs among which the edges of an interval are divided."""


@lru_cache(maxsize=8)
def _polynomials_of_values(n_intervals: int, device: torch.device) -> Tensor:
    """(4 n_intervals, n_intervals + 1) float64: from values at the knots to polynomials of the intervals, lowest power first.

    The spline has two continuous derivatives. Its curvature is zero at the first knot, where no edge is so short, and its slope
    at the last, where interactions end.
    """
    with _disable_current_modes():  # it outlives a trace during which it may be asked for first
        size = n_intervals + 3
        system = torch.zeros(size, size, dtype=torch.float64)
        rows = torch.arange(n_intervals + 1)
        for offset, value in enumerate((1 / 6, 2 / 3, 1 / 6)):
            system[rows, rows + offset] = value
        system[-2, :3] = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)
        system[-1, -3:] = torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)
        coefficients = torch.linalg.solve(system, torch.eye(size, n_intervals + 1, dtype=torch.float64))
        c0, c1, c2, c3 = (coefficients[q : q + n_intervals] for q in range(4))
        powers = [(c0 + 4 * c1 + c2) / 6, (c2 - c0) / 2, (c0 - 2 * c1 + c2) / 2, (c3 - 3 * c2 + 3 * c1 - c0) / 6]
        return torch.stack(powers, 1).flatten(0, 1).to(device)


def spline_polynomials(values: Tensor) -> Tensor:
    """(4 n_intervals, n): polynomials of the curves through values (n_intervals + 1, n), float64. Linear in the values."""
    return _polynomials_of_values(values.shape[0] - 1, values.device) @ values


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


def read_table(table: Tensor, at: Tensor, place: Tensor) -> Tensor:
    """(n_edges, n): the curves of a table (n_intervals, 4, n) at the places (n_edges,), by plain operations."""
    c0, c1, c2, c3 = table.index_select(0, at).unbind(1)
    u = place.unsqueeze(1)
    return c0 + u * (c1 + u * (c2 + u * c3))


def table_gradient(to_w: Tensor, at: Tensor, place: Tensor, n_intervals: int) -> Tensor:
    """(n_intervals, 4, n): cotangent of the table from those of the weights of edges (n_edges, R, n) and, with R = 2, of their
    tangents."""
    return torch.ops.forgefield.interval_sums(to_w, at, place, n_intervals)


@torch.library.custom_op("forgefield::interval_sums", mutates_args=())
def _interval_sums(to_w: Tensor, at: Tensor, place: Tensor, n_intervals: int) -> Tensor:
    """(n_intervals, 4, n): what the edges of an interval have for each of the four rows of the table that they read."""
    by = interval_sums_by_kernel if to_w.is_cuda and has_triton() else interval_sums_by_rows
    return by(to_w, at, place, n_intervals)


def interval_sums_by_rows(to_w: Tensor, at: Tensor, place: Tensor, n_intervals: int) -> Tensor:
    """The same by plain operations."""
    u = place[:, 0]
    powers = torch.stack([torch.ones_like(u), u, u * u, u * u * u], 1)
    rows = powers.unsqueeze(2) * to_w[:, :1]
    if to_w.shape[1] == 2:
        slopes = torch.stack([torch.zeros_like(u), torch.ones_like(u), 2 * u, 3 * u * u], 1) * place[:, 1:]
        rows = rows + slopes.unsqueeze(2) * to_w[:, 1:]
    return to_w.new_zeros((n_intervals, 4, to_w.shape[2])).index_add_(0, at, rows)


def interval_sums_by_kernel(to_w: Tensor, at: Tensor, place: Tensor, n_intervals: int) -> Tensor:
    """The same in a fixed order, on a GPU."""
    segments, columns = Segments(at, n_intervals), to_w.shape[2]
    block = min(128, 1 << (columns - 1).bit_length())
    parts = to_w.new_empty((n_intervals, SHARES, 4, columns))
    order, pointers = segments.order, segments.pointers
    grid = (n_intervals * SHARES, -(-columns // block))
    _kernel()[grid](to_w, place, order, pointers, parts, columns, to_w.shape[1], SHARES, block, num_warps=1)
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
            value = tl.load(to_w + edge * rows * columns + c, mask=inside, other=0.0)
            a0 += value
            a1 += u * value
            a2 += u * u * value
            a3 += u * u * u * value
            if rows == 2:
                du = tl.load(place + edge * 2 + 1)
                moved = tl.load(to_w + (edge * 2 + 1) * columns + c, mask=inside, other=0.0) * du
                a1 += moved
                a2 += 2.0 * u * moved
                a3 += 3.0 * u * u * moved
        where = out + program.to(tl.int64) * 4 * columns + c
        tl.store(where, a0, mask=inside)
        tl.store(where + columns, a1, mask=inside)
        tl.store(where + 2 * columns, a2, mask=inside)
        tl.store(where + 3 * columns, a3, mask=inside)

    return add_interval
