"""NequIP through the generated kernels: values alone, or values and tangents side by side (`ops/tangents.py`).

What a layer does is written in `nequip.py`; here is what is different where kernels convolve: they take harmonics, not
couplings, and read radial weights from a table where that is precise enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgefield.models.terms import PairLengths
from forgefield.ops.activations import activate
from forgefield.ops.graph import EdgeGraph, Segments, gather
from forgefield.ops.kernels.convolution import Rows, Table, convolve_by_kernels
from forgefield.ops.kernels.setting import setting, use_kernels, use_tables
from forgefield.ops.kernels.table import Places, interval_of, place_in, spline_polynomials
from forgefield.ops.radial import bessel_basis
from forgefield.ops.tangents import carried, side_by_side

if TYPE_CHECKING:
    from forgefield.models.nequip import NequIP

_SHORTEST = 1e-8
"""First knot of a table, in units of the cutoff: the basis has a limit at zero and no value."""


@dataclass(frozen=True)
class Geometry:
    """What kernels ask of the edges. harmonics: (n_edges, R, (l_max + 1)^2). One of the two others: basis (n_pairs or n_edges,
    R, num_bessels), or places in the tables."""

    harmonics: Tensor
    basis: Tensor | None
    places: Places | None
    pairs: PairLengths


def by_kernels(model: NequIP, batch: dict[str, Any]) -> bool:
    """Whether a pass goes through kernels; they can be differentiated once."""
    return not batch.get("differentiated_again", False) and use_kernels(model.type_embedding)


def _in_tables(model: NequIP) -> bool:
    return use_tables(model.type_embedding) and model.adaptive_cutoff is None


def fixed_geometry(model: NequIP, vectors: Tensor, pairs: PairLengths, graph: EdgeGraph) -> Geometry:
    """Of edges at rest; it has a gradient in the edge vectors."""
    dtype = model.type_embedding.dtype
    harmonics = model.harmonics(vectors / pairs.lengths.unsqueeze(1)).to(dtype).unsqueeze(1)
    if not _in_tables(model):
        return Geometry(harmonics, model.radial_basis(pairs, graph).to(dtype).unsqueeze(1), None, pairs)
    at = interval_of(pairs.scaled, setting().knots)
    place = place_in(pairs.scaled, at, setting().knots).to(dtype).unsqueeze(1)
    return Geometry(harmonics, None, Places(at, place, setting().knots), pairs)


def moving_geometry(model: NequIP, vectors: Tensor, species: Tensor, graph: EdgeGraph) -> Geometry:
    """Of edge vectors that carry tangents, inside the level of differentiation that these belong to."""
    dtype = model.type_embedding.dtype
    pairs = model.pair_lengths(vectors, species, graph)
    harmonics = side_by_side(model.harmonics(vectors / pairs.lengths.unsqueeze(1))).to(dtype)
    at_rest = PairLengths(*(None if value is None else side_by_side(value)[:, 0] for value in pairs))  # type: ignore[arg-type]
    if not _in_tables(model):
        return Geometry(harmonics, side_by_side(model.radial_basis(pairs, graph)).to(dtype), None, at_rest)
    at = interval_of(at_rest.scaled, setting().knots)
    place = side_by_side(place_in(pairs.scaled, at, setting().knots)).to(dtype)
    return Geometry(harmonics, None, Places(at, place, setting().knots), at_rest)


def row_features(
    model: NequIP, geometry: Geometry, species: Tensor, graph: EdgeGraph, *, fixed_weights: bool = False
) -> Tensor:
    """(n_atoms, R, feature_dim): the scalars of the last layer. fixed_weights: nobody asks for a gradient in the weights, so
    that none is made where that is costly, in the tables."""
    one_hot = model.identity.index_select(0, species)
    attributes = one_hot if model.one_hot_self_connection else one_hot @ model.type_embedding
    table = model.type_embedding if model.one_hot_self_connection else None
    scale = model.neighbour_scale(species)
    blocks: list[Tensor] = []
    for layer, radial in zip(model.layers, _radial(model, geometry, fixed_weights)):
        if blocks:
            x = layer.enter(blocks)
        else:
            x = (one_hot @ layer.enter([model.type_embedding.unsqueeze(1)])).unsqueeze(1)
            if geometry.harmonics.shape[1] == 2:
                x = torch.cat([x, torch.zeros_like(x)], 1)
        if scale is not None:
            x = x * scale.view(-1, 1, 1)
        summed = convolve_by_kernels(x, geometry.harmonics, radial, graph, layer.plan)
        blocks = layer.leave_rows(summed, blocks, attributes, table)
    return blocks[0].squeeze(2)


def encode_moving(
    model: NequIP, geometry: Geometry, species: Tensor, graph: EdgeGraph
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the last layer at rest, atomic energies (n_atoms,), eV, float64, and how these change. What in the change
    does not depend on any weight is left out."""
    features = row_features(model, geometry, species, graph)
    (read,) = carried(lambda rows: [model.readout(rows[0])], [features])
    values, tangents = read.squeeze(2).double().unbind(1)
    scales = gather(model.energy_scales, Segments(species, len(model.species)))
    return features[:, 0], model.energies(values, geometry.pairs, species, graph), scales * tangents


def _radial(model: NequIP, geometry: Geometry, fixed_weights: bool) -> Sequence[Rows | Table]:
    """Radial weights of every layer."""
    places = geometry.places
    if places is not None:
        dtype = model.type_embedding.dtype
        with torch.set_grad_enabled(torch.is_grad_enabled() and not fixed_weights):
            tables = [table.to(dtype) for table in radial_tables(model, places.n_intervals)]
        return [Table(table, places) for table in tables]
    assert geometry.basis is not None
    return [Rows(weights) for weights in carried(lambda rows: model.radial_weights(rows[0]), [geometry.basis])]


def radial_tables(model: NequIP, n_intervals: int) -> list[Tensor]:
    """Splines of every layer's radial weights, (n_intervals, 4, n_weights) float64.

    Splines are linear in the values at the knots, so that they are made of the last hidden layer, which is narrow.
    """
    frequencies = model.bessel_frequencies
    x = torch.linspace(0, 1, n_intervals + 1, dtype=torch.float64, device=frequencies.device).clamp_(min=_SHORTEST)
    basis = bessel_basis(x, frequencies, float(model.options.polynomial_cutoff_p)) * model.basis_scale
    tables = []
    for layer in model.layers:
        hidden, network = basis, layer.radial
        *inner, last = [weight.double() * scale for weight, scale in zip(network.weights, network.scales)]
        for weight in inner:
            hidden = activate("silu", hidden @ weight)
        tables.append((spline_polynomials(hidden) @ last).unflatten(0, (n_intervals, 4)))
    return tables
