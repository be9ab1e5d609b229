"""Radial networks with one hidden layer, for tables: values and slopes of the hidden channels at the knots, the polynomials
between knots, and the gradient of the first weights.

With v = x W and v' = x' W for the basis x and its slope x', the hidden layer is h = f(v), h' = f'(v) v', f = silu. The
polynomials of its channels are computed in float64 and rounded; the last matrix is applied to them, since they are linear in h
and h'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.arguments import LaunchArguments
from forgefield.kernels.core.availability import interpreted

KNOTS, CHANNELS = 16, 32
"""Knots and channels of one program."""


def _tile() -> tuple[int, int]:
    """Larger for the interpreter, which takes time for every program, not for every element."""
    return (1024, 128) if interpreted() else (KNOTS, CHANNELS)


@dataclass(frozen=True)
class HiddenCurves:
    """Hidden channels of the radial network of one layer.

    basis: (n_intervals + 1, 2, n_basis) float64, values and slopes at the knots.
    first: (n_basis, width), first matrix. scale, gain: factors of the matrix and of the result.
    """

    basis: Tensor
    first: Tensor
    scale: float
    gain: float

    @torch.no_grad()
    def curves(self) -> Tensor:
        """Polynomials of the channels, (n_intervals, 4, width), in the precision of the weights."""
        curves = self.first.new_empty((self.basis.shape[0] - 1, 4, self.first.shape[1]))
        _kernels().curves[self._grid(curves.shape[0])](**self._arguments(self._first()), out=curves, num_warps=8)
        return curves

    @torch.no_grad()
    def gradient(self, to_curves: Tensor) -> Tensor:
        """Cotangent of the first matrix, from that of the curves."""
        first, grid = self._first(), self._grid(self.basis.shape[0])
        n_weights = first.numel()
        parts, gradient = self.basis.new_empty((grid[0], n_weights)), torch.empty_like(first)
        _kernels().to_first[grid](
            **self._arguments(first), given=to_curves.contiguous(), parts=parts, n_weights=n_weights, num_warps=8
        )
        _kernels().add_parts[(-(-n_weights // 128),)](
            parts=parts, out=gradient, n_parts=grid[0], n_columns=n_weights, block=128, num_warps=4
        )
        return gradient

    def _first(self) -> Tensor:
        return self.first.detach().contiguous()

    def _grid(self, n_knots: int) -> tuple[int, int]:
        knots, channels = _tile()
        return -(-n_knots // knots), -(-self.first.shape[1] // channels)

    def _arguments(self, first: Tensor) -> LaunchArguments:
        """Arguments that the kernels of both directions have."""
        (n_basis, width), (knots, channels) = first.shape, _tile()
        sizes = {"n_intervals": self.basis.shape[0] - 1, "n_basis": n_basis, "width": width}
        factors = {"scale": self.scale, "gain": self.gain}
        return {"basis": self.basis, "first": first, **sizes, **factors, "knots": knots, "channels": channels}


def _kernels() -> Any:
    from forgefield.kernels.radial import source as radial_source

    return radial_source
