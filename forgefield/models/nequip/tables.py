"""Radial weights of NequIP as tables: how they are made of its radial networks, and how far they are from them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.kernels.core.runtime import rounds_to_tf32, use_kernels
from forgefield.kernels.radial.hidden import HiddenCurves, deep_curves
from forgefield.kernels.radial.packing import StoredTable, pack, stored_table, unpack
from forgefield.kernels.radial.table import polynomials
from forgefield.ops.autograd import carried, side_by_side
from forgefield.ops.functions import bessel_basis
from forgefield.ops.graph import cut, join

if TYPE_CHECKING:
    from forgefield.models.nequip.model import NequIP

_SHORTEST = 1e-8
"""First knot of a table, in units of the cutoff: the basis has a limit at zero and no value."""
NOTICEABLE = 10.0
"""More intervals are advised where slopes from a table deviate more than this many times as much as float32 itself."""
_COMPARED = 2999
"""Lengths at which a table is compared with the network; a prime number, so that they lie anywhere in its intervals."""


class RadialTable:
    """The table of a layer, as the product that it is: polynomials of the last hidden channels of its network, the curves
    (n_intervals, 4, width), times its last matrix (width, n_weights). curves: with gradients in the network's weights, or how
    kernels make them, which they then do together with the table."""

    def __init__(self, curves: Tensor | HiddenCurves, matrix: Tensor) -> None:
        self.matrix = matrix
        self.hidden = curves if isinstance(curves, HiddenCurves) else None
        self._curves = curves if isinstance(curves, Tensor) else None

    def tracked(self) -> list[Tensor]:
        """What `gradients` gives the cotangents of: the curves, or the weights that they are made of; and the matrix."""
        first = self._curves if self.hidden is None else self.hidden.first
        assert first is not None
        return [first, self.matrix]

    @torch.no_grad()
    def polynomials(self) -> Tensor:
        """Of the radial weights, (n_intervals, 4, n_weights)."""
        result: Tensor = _product(self._known().flatten(0, 1), self.matrix).unflatten(0, (-1, 4))
        return result

    @torch.no_grad()
    def stored(self) -> StoredTable:
        """The same as kernels read them."""
        return stored_table(self.polynomials())

    @torch.no_grad()
    def gradients(self, to_table: Tensor) -> list[Tensor]:
        """Cotangents of what is tracked, from those of the polynomials."""
        rows, curves = to_table.flatten(0, 1), self._known()
        to_curves = _product(rows, self.matrix.t()).view_as(curves)
        to_first = to_curves if self.hidden is None else self.hidden.gradient(to_curves)
        return [to_first, _product(curves.flatten(0, 1).t(), rows)]

    def _known(self) -> Tensor:
        if self._curves is None:
            assert self.hidden is not None
            self._curves = self.hidden.curves()
        return self._curves


def radial_tables(model: NequIP, n_intervals: int) -> list[RadialTable]:
    """Of every layer. Polynomials are linear in values and slopes at the knots, so that they are made of the last hidden layer,
    which is narrow."""
    basis = _basis_at_knots(model, n_intervals)
    networks = [layer.radial for layer in model.layers]
    has_hidden = model.options.radial_mlp_depth > 0 and not model.options.bessel_trainable
    if has_hidden and use_kernels(model.type_embedding):
        first, *others, gain = networks[0].scales
        scales = (first * model.basis_scale, *others)
        curves: Iterable[Tensor | HiddenCurves]
        if others:
            curves = deep_curves(basis, [tuple(network.weights)[:-1] for network in networks], scales, gain)
        else:
            curves = [HiddenCurves(basis, network.weights[0], scales[0], gain) for network in networks]
        return [RadialTable(some, network.weights[-1]) for some, network in zip(curves, networks)]
    moving = carried(lambda rows: model.radial_hidden(rows[0]), [basis])
    parts = cut(polynomials(join(moving, 2)).to(model.dtype), [part.shape[2] for part in moving], 2)
    return [RadialTable(part, network.weights[-1] * network.scales[-1]) for part, network in zip(parts, networks)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Where matrices are multiplied in tf32, in float64: rounded one by one, polynomials would not meet at the knots."""
    if rounds_to_tf32() and a.is_cuda:
        return torch.mm(a.double(), b.double()).to(a.dtype)
    return torch.mm(a, b)


def _basis_at_knots(model: NequIP, n_intervals: int) -> Tensor:
    """(n_intervals + 1, 2, num_bessels) float64: the radial basis and its slope. Kept, unless its frequencies are trained."""
    if model.options.bessel_trainable:
        return _make_basis(model, n_intervals)
    frequencies = model.bessel_frequencies
    made_of = (n_intervals, frequencies.device, frequencies.data_ptr(), frequencies._version)
    known = model.knot_basis
    if known is not None and known[0] == made_of:
        return known[1]
    basis = _make_basis(model, n_intervals)
    if known is not None and known[1].shape == basis.shape and known[1].device == basis.device:
        basis = known[1].copy_(basis)  # where it lies: captured graphs read it
    model.knot_basis = (made_of, basis)
    return basis


def _make_basis(model: NequIP, n_intervals: int) -> Tensor:
    device = model.bessel_frequencies.device
    x = torch.linspace(0, 1, n_intervals + 1, dtype=torch.float64, device=device).clamp_(min=_SHORTEST)
    return _moving_basis(model, x, 1 / n_intervals)


def _moving_basis(model: NequIP, x: Tensor, speed: float) -> Tensor:
    """(n, 2, num_bessels) float64: the radial basis at lengths x, in units of the cutoff, and its change as they grow."""
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(x, torch.full_like(x, speed))
        return side_by_side(bessel_basis(moving, model.bessel_frequencies, float(model.options.polynomial_cutoff_p)))


# ---- how far a table is from the network


@dataclass(frozen=True)
class Deviation:
    """Root mean square and largest deviation of radial weights and of their slopes, each in units of the root mean square of
    the weights, or slopes, of all layers and lengths."""

    values: tuple[float, float]
    slopes: tuple[float, float]


@torch.no_grad()
def table_deviation(model: NequIP, knots: int) -> tuple[Deviation, Deviation]:
    """How far radial weights in float32 are from those of the network in float64, between 0.05 and 1 of the cutoff: read from
    tables of so many intervals, and, for comparison, computed by the network itself."""
    single = _in_precision(model, torch.float32)
    exact = _in_precision(single, torch.float64)  # the same weights: what rounding them does is not the table's doing
    x = torch.linspace(0.05, 1, _COMPARED, dtype=torch.float64, device=model.bessel_frequencies.device)
    basis = _moving_basis(model, x, 1.0)
    expected = _rows(exact, basis)
    read = [_read(unpack(pack(table.polynomials())), x) for table in radial_tables(single, knots)]
    return _deviation(read, expected), _deviation(_rows(single, basis.float()), expected)


def table_line(model: NequIP, knots: int) -> str:
    """The deviation as a sentence. It is not a verdict: before its first step a training with kernels is compared with one
    without, gradients included."""
    table, single = table_deviation(model, knots)
    advice = ""
    if table.slopes[0] > NOTICEABLE * single.slopes[0]:
        advice = " The table is too coarse for these weights: raise training.kernels.knots."
    return (
        f"Radial table, {knots} intervals: weights differ from the network by {_text(table)}; float32 itself: {_text(single)}. "
        f"Root mean squares, relative to that of all weights or slopes.{advice}"
    )


def _text(deviation: Deviation) -> str:
    (rms, largest), (rms_slope, largest_slope) = deviation.values, deviation.slopes
    return f"{rms:.1e} (largest {largest:.1e}), slopes by {rms_slope:.1e} ({largest_slope:.1e})"


def _in_precision(model: NequIP, dtype: torch.dtype) -> NequIP:
    """A copy whose radial networks have this precision. Nothing else of it is used."""
    twin = copy.deepcopy(model)
    twin.type_embedding = nn.Parameter(twin.type_embedding.detach().to(dtype))
    for layer in twin.layers:
        layer.radial.to(dtype)
    return twin


def _rows(model: NequIP, basis: Tensor) -> list[Tensor]:
    """Weights and slopes of every layer, (n, 2, n_weights)."""
    return carried(lambda given: model.radial_weights(given[0]), [basis])


def _read(table: Tensor, x: Tensor) -> Tensor:
    """The same from a table, at lengths x in units of the cutoff, as kernels read it."""
    n_intervals = table.shape[0]
    at = (x * n_intervals).long().clamp_(max=n_intervals - 1)
    u = (x * n_intervals - at - 0.5).to(table.dtype).unsqueeze(1)
    c0, c1, c2, c3 = table.index_select(0, at).unbind(1)
    return torch.stack([c0 + u * (c1 + u * (c2 + u * c3)), n_intervals * (c1 + u * (2 * c2 + 3 * u * c3))], 1)


def _deviation(found: list[Tensor], expected: list[Tensor]) -> Deviation:
    pairs = []
    for part in range(2):
        exact = torch.cat([rows[:, part].flatten() for rows in expected])
        difference = torch.cat([rows[:, part].flatten() for rows in found]).double() - exact
        size = exact.square().mean().sqrt()
        pairs.append((float(difference.square().mean().sqrt() / size), float(difference.abs().max() / size)))
    return Deviation(*pairs)
