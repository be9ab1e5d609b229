"""NequIP through generated kernels: the geometry and the radial weights that these ask for, and the two halves of a step.

What a layer does is written in `nequip.py`, how it is done on fields in `nequip_passes.py`. Radial weights are read from a
table where that is precise enough.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.models.nequip_passes import Network
from forgefield.models.terms import PairLengths
from forgefield.ops.graph import EdgeGraph, Segments, cut, gather, is_traced, join
from forgefield.ops.kernels.convolution import Motion, Radial
from forgefield.ops.kernels.fields import VALUE
from forgefield.ops.kernels.geometry import EdgeGeometry, moved_geometry
from forgefield.ops.kernels.setting import setting, use_kernels, use_tables
from forgefield.ops.kernels.table import Intervals, edges_by_interval, polynomials, table_gradient
from forgefield.ops.radial import bessel_basis
from forgefield.ops.tangents import carried, side_by_side

if TYPE_CHECKING:
    from forgefield.models.nequip import NequIP

_SHORTEST = 1e-8
"""First knot of a table, in units of the cutoff: the basis has a limit at zero and no value."""
_COMPARED = 2999
"""Lengths at which a table is compared with the network; a prime number, so that they lie anywhere in its intervals."""


def by_kernels(model: NequIP, batch: dict[str, Any]) -> bool:
    """Whether a pass goes through kernels: where nobody differentiates its forces, and nothing is traced."""
    if batch.get("differentiated_again", True) or is_traced(batch["positions"]):
        return False
    return use_kernels(model.type_embedding) and model.one_hot_self_connection


# ---- geometry


@dataclass(frozen=True)
class Geometry:
    """Of edges at rest. harmonics: (n_edges, (l_max + 1)^2). One of the two others: basis (n_pairs or n_edges, num_bessels), or
    the place of every edge in its interval of the tables, and edges by interval."""

    harmonics: Tensor
    basis: Tensor | None
    place: Tensor | None
    at: Intervals | None


@dataclass(frozen=True)
class Moved:
    """Tangents of harmonics and of places; with a basis, it and its tangents side by side."""

    harmonics: Tensor
    basis: Tensor | None
    place: Tensor | None


def in_tables(model: NequIP) -> bool:
    """Whether radial weights are read from tables."""
    return use_tables(model.type_embedding) and model.adaptive_cutoff is None


def geometry_at_rest(
    model: NequIP, vectors: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph
) -> Geometry:
    """It has a gradient in the edge vectors (n_edges, 3). pairs: needed where there is no table."""
    dtype = model.type_embedding.dtype
    if in_tables(model):
        n_intervals = setting().knots
        inverse = model.inverse_cutoffs(species, graph)
        harmonics, place, at = EdgeGeometry.apply(vectors, inverse, model.options.l_max, n_intervals, dtype)
        return Geometry(harmonics, None, place, edges_by_interval(at, n_intervals))
    assert pairs is not None
    harmonics = model.harmonics(vectors / pairs.lengths.unsqueeze(1)).to(dtype).contiguous()
    return Geometry(harmonics, model.radial_basis(pairs, graph).to(dtype), None, None)


def geometry_moved(model: NequIP, vectors: Tensor, species: Tensor, graph: EdgeGraph, rest: Geometry) -> Moved:
    """Of edge vectors that carry tangents, inside the level of differentiation that these belong to."""
    dtype = model.type_embedding.dtype
    if rest.at is not None:
        value, tangent = forward_ad.unpack_dual(vectors)
        inverse = model.inverse_cutoffs(species, graph)
        harmonics, place = moved_geometry(value, tangent, inverse, model.options.l_max, rest.at.count, dtype)
        return Moved(harmonics, None, place)
    pairs = model.pair_lengths(vectors, species, graph)
    harmonics = _tangent(model.harmonics(vectors / pairs.lengths.unsqueeze(1))).to(dtype).contiguous()
    return Moved(harmonics, side_by_side(model.radial_basis(pairs, graph)).to(dtype), None)


def _tangent(value: Tensor) -> Tensor:
    pair = forward_ad.unpack_dual(value)
    return torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent


# ---- radial weights


def radial_tables(model: NequIP, n_intervals: int) -> list[Tensor]:
    """Polynomials of every layer's radial weights, (n_intervals, 4, n_weights).

    They are linear in values and slopes at the knots, so that they are made of the last hidden layer, which is narrow.
    """
    hidden = carried(lambda rows: model.radial_hidden(rows[0]), [_basis_at_knots(model, n_intervals)])
    curves = polynomials(join(hidden, 2)).to(model.dtype)
    parts = cut(curves, [part.shape[2] for part in hidden], 2)
    networks = [layer.radial for layer in model.layers]
    last = [network.weights[-1] * network.scales[-1] for network in networks]
    if (
        torch.backends.cuda.matmul.fp32_precision == "tf32"
    ):  # rounded one by one, polynomials would not meet at the knots
        return [(part.double() @ matrix.double()).to(model.dtype) for part, matrix in zip(parts, last)]
    return [part @ matrix for part, matrix in zip(parts, last)]


def _basis_at_knots(model: NequIP, n_intervals: int) -> Tensor:
    """(n_intervals + 1, 2, num_bessels) float64: the radial basis and its slope. Kept, unless its frequencies are trained."""
    if model.options.bessel_trainable:
        return _make_basis(model, n_intervals)
    frequencies = model.bessel_frequencies
    made_of = (n_intervals, frequencies.device, frequencies.data_ptr(), frequencies._version)
    if model.knot_basis is None or model.knot_basis[0] != made_of:
        model.knot_basis = (made_of, _make_basis(model, n_intervals))
    return model.knot_basis[1]


def _make_basis(model: NequIP, n_intervals: int) -> Tensor:
    device = model.bessel_frequencies.device
    x = torch.linspace(0, 1, n_intervals + 1, dtype=torch.float64, device=device).clamp_(min=_SHORTEST)
    return _moving_basis(model, x, 1 / n_intervals)


def _moving_basis(model: NequIP, x: Tensor, speed: float) -> Tensor:
    """(n, 2, num_bessels) float64: the radial basis at lengths x, in units of the cutoff, and its change as they grow."""
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(x, torch.full_like(x, speed))
        return side_by_side(bessel_basis(moving, model.bessel_frequencies, float(model.options.polynomial_cutoff_p)))


def _shared_rows(of_edges: Tensor, graph: EdgeGraph) -> Tensor:
    """Cotangents of rows that an edge and its reverse share, from those of every edge."""
    if graph.pair_edge is None or graph.reverse is None:
        return of_edges
    back = graph.reverse.index_select(0, graph.pair_edge)
    return of_edges.index_select(0, graph.pair_edge) + of_edges.index_select(0, back)


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
    read = [_read(table, x) for table in radial_tables(single, knots)]
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
    u = (x * n_intervals - at).to(table.dtype).unsqueeze(1)
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


# ---- the two passes of a step


def features_at_rest(
    model: NequIP, geometry: Geometry, species: Tensor, graph: EdgeGraph, remember: dict[str, Any] | None
) -> Tensor:
    """(n_atoms, feature_dim), the scalars of the last layer, with a gradient in the geometry and none in the weights."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and remember is not None):
        network = Network(model, species, graph)
        tables = [] if geometry.at is None else radial_tables(model, geometry.at.count)
    if remember is not None:
        remember["network"], remember["geometry"], remember["tables"] = network, geometry, tables
    if geometry.basis is not None:
        return _AtRest.apply(network, [], None, geometry.harmonics, *model.radial_weights(geometry.basis))
    return _AtRest.apply(network, [table.detach() for table in tables], geometry.at, geometry.harmonics, geometry.place)


class _AtRest(torch.autograd.Function):
    """Inputs: harmonics; then the place of every edge, or rows of weights of every layer."""

    @staticmethod
    def forward(ctx, network, tables, at, harmonics, *radial):
        ctx.network, ctx.in_tables = network, at is not None
        if at is not None:
            radials = [Radial(table, at.at, radial[0]) for table in tables]
        else:
            graph = network.graph
            row = torch.arange(graph.n_edges, device=harmonics.device) if graph.pair is None else graph.pair
            radials = [Radial(rows.contiguous(), row) for rows in radial]
        return network.values(harmonics, radials)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_features):
        geometry, rows = ctx.network.forces(to_features)
        if ctx.in_tables:
            return None, None, None, geometry[:, :-1], geometry[:, -1]
        return None, None, None, geometry, *(_shared_rows(of_edges, ctx.network.graph) for of_edges in rows)


def features_moved(model: NequIP, moved: Moved, remembered: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Features of the last layer and their tangents, (n_atoms, feature_dim) both, with a gradient in the weights.

    It is right where the tangents of the atomic energies have the cotangents that forces were made with: one for each.
    """
    network: Network = remembered["network"]
    matrices = [matrix for weights in network.weights for matrix in weights.tracked()]
    if moved.basis is None:
        return _Moving.apply(network, moved, remembered["geometry"], *matrices, *remembered["tables"])
    rows = carried(lambda given: model.radial_weights(given[0]), [moved.basis])
    pieces = [piece for pair in rows for piece in (pair[:, 0], pair[:, 1])]
    return _Moving.apply(network, moved, remembered["geometry"], *matrices, *pieces)


class _Moving(torch.autograd.Function):
    """Inputs: all matrices; then the tables, or rows of weights and their tangents of every layer."""

    @staticmethod
    def forward(ctx, network, moved, geometry, *tracked):
        n_matrices = sum(len(weights.tracked()) for weights in network.weights)
        radial = [tensor.detach().contiguous() for tensor in tracked[n_matrices:]]
        if moved.basis is None:
            motions = [Motion(moved.harmonics, place=moved.place) for _ in network.layers]
        else:
            motions = [Motion(moved.harmonics, weights=weights) for weights in radial[1::2]]
        ctx.network, ctx.motions, ctx.geometry = network, motions, geometry
        tangents = network.tangents(motions)
        return network.last(VALUE).clone(), tangents.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_features, to_tangents):
        network, geometry = ctx.network, ctx.geometry

        def summed(of_w: Tensor, of_dw: Tensor, motion: Motion) -> list[Tensor]:
            if geometry.at is None:
                return [_shared_rows(of_w, network.graph), _shared_rows(of_dw, network.graph)]
            assert motion.place is not None
            return [table_gradient(of_w, of_dw, geometry.at, geometry.place.detach(), motion.place)]

        return None, None, None, *network.back(to_features, ctx.motions, summed)


def encode_moved(
    model: NequIP, moved: Moved, species: Tensor, graph: EdgeGraph, remembered: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the last layer at rest, atomic energies (n_atoms,), eV, float64, and how these change. What in the change
    does not depend on any weight is left out."""
    features = torch.stack(features_moved(model, moved, remembered), 1)
    (read,) = carried(lambda rows: [model.readout(rows[0])], [features])
    values, tangents = read.squeeze(2).double().unbind(1)
    scales = gather(model.energy_scales, Segments(species, len(model.species)))
    return features[:, 0], model.energies(values, remembered["pairs"], species, graph), scales * tangents
