"""Radial networks with one hidden layer, as tables need them: values and slopes of the hidden channels at the knots, the
polynomials between these, and the way back to the first weights.

With v = x W and v' = x' W for the basis x and its slope x', the hidden layer is h = f(v), h' = f'(v) v', f = silu. The
polynomials of its channels are made in float64 and rounded; the last matrix is applied to them, as they are linear in h and h'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.availability import interpreted

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


def _kernels() -> Any:
    from forgefield.kernels.radial import source as radial_source

    return radial_source
