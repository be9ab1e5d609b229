"""Radial weights of NequIP as tables: how they are made of its radial networks, and how far they are from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.ops.graph import cut, join
from forgefield.ops.kernels.packing import StoredTable, pack, stored_table, unpack
from forgefield.ops.kernels.radial import curves_by_kernels
from forgefield.ops.kernels.setting import use_kernels
from forgefield.ops.kernels.table import polynomials
from forgefield.ops.radial import bessel_basis
from forgefield.ops.tangents import carried, side_by_side

if TYPE_CHECKING:
    from forgefield.models.nequip import NequIP

_SHORTEST = 1e-8
"""First knot of a table, in units of the cutoff: the basis has a limit at zero and no value."""
_COMPARED = 2999
"""Lengths at which a table is compared with the network; a prime number, so that they lie anywhere in its intervals."""


@dataclass(frozen=True)
class RadialTables:
    """Tables of every layer, as the products that they are: polynomials of a network's last hidden channels, `curves`
    (n_intervals, 4, width), times its last matrix (width, n_weights). Both have gradients in the network's weights."""

    curves: list[Tensor]
    matrices: list[Tensor]

    def tracked(self) -> list[Tensor]:
        return [*self.curves, *self.matrices]

    @torch.no_grad()
    def polynomials(self) -> list[Tensor]:
        """Of every layer's radial weights, (n_intervals, 4, n_weights)."""
        return [
            _product(curves.flatten(0, 1), matrix).unflatten(0, (-1, 4))
            for curves, matrix in zip(self.curves, self.matrices)
        ]

    @torch.no_grad()
    def stored(self) -> list[StoredTable]:
        """The same as kernels read them."""
        return [stored_table(table) for table in self.polynomials()]

    @torch.no_grad()
    def gradients(self, layer: int, to_table: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of the curves and the matrix of a layer, from those of its polynomials."""
        rows, curves = to_table.flatten(0, 1), self.curves[layer]
        to_curves = _product(rows, self.matrices[layer].t())
        return to_curves.view_as(curves), _product(curves.flatten(0, 1).t(), rows)


def radial_tables(model: NequIP, n_intervals: int) -> RadialTables:
    """Polynomials are linear in values and slopes at the knots, so that they are made of the last hidden layer, which is
    narrow."""
    basis = _basis_at_knots(model, n_intervals)
    networks = [layer.radial for layer in model.layers]
    one_hidden = model.options.radial_mlp_depth == 1 and not model.options.bessel_trainable
    if one_hidden and use_kernels(model.type_embedding):
        scale, gain = networks[0].scales
        first, last = ([network.weights[depth] for network in networks] for depth in range(2))
        return RadialTables(curves_by_kernels(basis, first, scale * model.basis_scale, gain), last)
    hidden = carried(lambda rows: model.radial_hidden(rows[0]), [basis])
    curves = polynomials(join(hidden, 2)).to(model.dtype)
    parts = cut(curves, [part.shape[2] for part in hidden], 2)
    return RadialTables(list(parts), [network.weights[-1] * network.scales[-1] for network in networks])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Where matrices are multiplied in tf32, in float64: rounded one by one, polynomials would not meet at the knots."""
    if _rounds_to_tf32() and a.is_cuda:
        return torch.mm(a.double(), b.double()).to(a.dtype)
    return torch.mm(a, b)


def _rounds_to_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


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
    read = [_read(unpack(pack(table)), x) for table in radial_tables(single, knots).polynomials()]
    return _deviation(read, expected), _deviation(_rows(single, basis.float()), expected)


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
