"""The table of radial weights of one layer, as a product of the curves of the last hidden channels with the last matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from forgefield.kernels.core.runtime import rounds_to_tf32
from forgefield.kernels.radial.hidden import HiddenCurves
from forgefield.kernels.radial.packing import StoredTable, stored_table


class RadialTable:
    """The table of a layer as a product: polynomials of the last hidden channels of its network, the curves (n_intervals, 4,
    width), times its last matrix (width, n_weights). curves: a tensor that is differentiable in the weights of the network, or
    a description from which kernels compute it together with the table."""

    def __init__(self, curves: Tensor | HiddenCurves, matrix: Tensor) -> None:
        self.matrix = matrix
        self.hidden = curves if isinstance(curves, HiddenCurves) else None
        self._curves = curves if isinstance(curves, Tensor) else None

    def tracked(self) -> list[Tensor]:
        """Tensors whose cotangents `gradients` returns: the curves, or the weights from which they are computed; and the
        matrix."""
        first = self._curves if self.hidden is None else self.hidden.first
        assert first is not None
        return [first, self.matrix]

    @torch.no_grad()
    def polynomials(self) -> Tensor:
        """Polynomials of the radial weights, (n_intervals, 4, n_weights)."""
        result: Tensor = _product(self._computed_curves().flatten(0, 1), self.matrix).unflatten(0, (-1, 4))
        return result

    @torch.no_grad()
    def stored(self) -> StoredTable:
        """The polynomials in the format that kernels read."""
        return stored_table(self.polynomials())

    @torch.no_grad()
    def gradients(self, to_table: Tensor) -> list[Tensor]:
        """Cotangents of the tracked tensors, from those of the polynomials."""
        rows, curves = to_table.flatten(0, 1), self._computed_curves()
        to_curves = _product(rows, self.matrix.t()).view_as(curves)
        to_first = to_curves if self.hidden is None else self.hidden.gradient(to_curves)
        return [to_first, _product(curves.flatten(0, 1).t(), rows)]

    def _computed_curves(self) -> Tensor:
        if self._curves is None:
            assert self.hidden is not None
            self._curves = self.hidden.curves()
        return self._curves


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product; in float64 where products use tf32, because with rounded factors polynomials would be discontinuous at
    the knots."""
    if rounds_to_tf32() and a.is_cuda:
        return torch.mm(a.double(), b.double()).to(a.dtype)
    return torch.mm(a, b)
