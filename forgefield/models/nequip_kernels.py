"""NequIP through generated kernels: the geometry that these ask for, and the two halves of a step.

What a layer does is written in `nequip.py`, how it is done on fields in `nequip_passes.py`. Radial weights are read from a
table (`nequip_tables.py`) where that is precise enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.models.nequip_passes import Network
from forgefield.models.nequip_tables import radial_tables
from forgefield.models.terms import PairLengths
from forgefield.ops.graph import EdgeGraph, Segments, gather, is_traced
from forgefield.ops.kernels.convolution import Motion, Radial
from forgefield.ops.kernels.geometry import EdgeGeometry, moved_geometry
from forgefield.ops.kernels.readout import energies_by_kernel, moved_energies_by_kernel
from forgefield.ops.kernels.setting import setting, use_kernels, use_tables
from forgefield.ops.kernels.table import Intervals, edges_by_interval, table_gradient
from forgefield.ops.tangents import carried, side_by_side, tangent_of

if TYPE_CHECKING:
    from forgefield.models.nequip import NequIP


def by_kernels(model: NequIP, batch: dict[str, Any]) -> bool:
    """Whether a pass goes through kernels: where nobody differentiates its forces, and nothing is traced."""
    if batch.get("differentiated_again", True) or is_traced(batch["positions"]):
        return False
    return use_kernels(model.type_embedding) and model.one_hot_self_connection


# ---- geometry


@dataclass(frozen=True)
class Geometry:
    """Of edges at rest. harmonics: (n_edges, (l_max + 1)^2). Then either basis (n_pairs or n_edges, num_bessels), or directions
    (n_edges, 3), which have the gradient in place of harmonics, the place of every edge in its interval of the tables, and
    edges by interval."""

    harmonics: Tensor
    basis: Tensor | None
    direction: Tensor | None
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
        harmonics, direction, place, at = EdgeGeometry.apply(vectors, inverse, model.options.l_max, n_intervals, dtype)
        return Geometry(harmonics, None, direction, place, edges_by_interval(at, n_intervals))
    assert pairs is not None
    harmonics = model.harmonics(vectors / pairs.lengths.unsqueeze(1)).to(dtype).contiguous()
    return Geometry(harmonics, model.radial_basis(pairs, graph).to(dtype), None, None, None)


def geometry_moved(model: NequIP, vectors: Tensor, species: Tensor, graph: EdgeGraph, rest: Geometry) -> Moved:
    """Of edge vectors that carry tangents, inside the level of differentiation that these belong to."""
    dtype = model.type_embedding.dtype
    if rest.at is not None:
        value, tangent = forward_ad.unpack_dual(vectors)
        inverse = model.inverse_cutoffs(species, graph)
        harmonics, place = moved_geometry(value, tangent, inverse, model.options.l_max, rest.at.count, dtype)
        return Moved(harmonics, None, place)
    pairs = model.pair_lengths(vectors, species, graph)
    harmonics = tangent_of(model.harmonics(vectors / pairs.lengths.unsqueeze(1))).to(dtype).contiguous()
    return Moved(harmonics, side_by_side(model.radial_basis(pairs, graph)).to(dtype), None)


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
    edges = (geometry.harmonics, geometry.place, geometry.direction)
    return _AtRest.apply(network, [table.detach() for table in tables], geometry.at, *edges)


def _shared_rows(of_edges: Tensor, graph: EdgeGraph) -> Tensor:
    """Cotangents of rows that an edge and its reverse share, from those of every edge."""
    if graph.pair_edge is None or graph.reverse is None:
        return of_edges
    back = graph.reverse.index_select(0, graph.pair_edge)
    return of_edges.index_select(0, graph.pair_edge) + of_edges.index_select(0, back)


class _AtRest(torch.autograd.Function):
    """Inputs: harmonics; then places and directions of edges, or rows of weights of every layer."""

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
            return None, None, None, None, geometry[:, 3], geometry[:, :3]
        return None, None, None, geometry, *(_shared_rows(of_edges, ctx.network.graph) for of_edges in rows)


def features_moved(model: NequIP, moved: Moved, remembered: dict[str, Any]) -> Tensor:
    """Features of the last layer and then their tangents, (2 n_atoms, feature_dim), with a gradient in the weights.

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
        network.tangents(motions)
        return network.layers[-1].h.both(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_rows):
        network, geometry = ctx.network, ctx.geometry
        to_features = to_rows[: network.graph.n_atoms]

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
    rows = features_moved(model, moved, remembered)
    pairs, features = remembered["pairs"], rows[: graph.n_atoms]
    if linear_readout(model):
        energies, slopes = moved_energies_by_kernel(rows, *_readout(model, species))
        return features, model.repelled(energies, pairs, species, graph), slopes
    (read,) = carried(lambda given: [model.readout(given[0])], [rows.unflatten(0, (2, -1)).transpose(0, 1)])
    values, tangents = read.squeeze(2).double().unbind(1)
    scales = gather(model.energy_scales, Segments(species, len(model.species)))
    return features, model.energies(values, pairs, species, graph), scales * tangents


# ---- energies by a linear readout


def linear_readout(model: NequIP) -> bool:
    return len(model.readout.weights) == 1


def energies_at_rest(model: NequIP, features: Tensor, species: Tensor) -> Tensor:
    """(n_atoms,) eV, float64, with a gradient in the features alone."""
    return energies_by_kernel(features, *_readout(model, species))


def _readout(model: NequIP, species: Tensor) -> tuple[Tensor, float, Tensor, Tensor, Tensor]:
    weight, norm = model.readout.weights[0], model.readout.scales[0]
    return weight, norm, species, model.energy_scales, model.energy_shifts
