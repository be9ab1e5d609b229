"""Heads whose values turn with the structure: vectors (dipoles, forces, noise) and tensors (polarisabilities).

They are sums over an atom's neighbours of directions r, weighted by a network of both atoms' features and their distance. The
weights do not turn, so the value does so exactly, whatever the encoder is: a vector is the sum of w r; a tensor that of
u 1 + w (r r^T), and of products of such vectors, which also have an antisymmetric part. An atom without neighbours has
its shift: none for a vector, a multiple of the unit matrix for a tensor. Everything ends smoothly at the cutoff.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.models.adaptive import pair_radii
from forgefield.models.heads.network import HeadNetwork
from forgefield.models.heads.values import frame_values, hold_scaling, without_net
from forgefield.ops.graph import EdgeGraph, Segments, gather, segment_sum
from forgefield.ops.products import product
from forgefield.ops.radial import polynomial_cutoff

N_BASIS = 8
"""Functions of the distance that the network reads."""
N_PRODUCTS = 4
"""Products of two vectors that a tensor has."""
ENVELOPE = 6.0
SHAPES = {"vector": (3,), "symmetric": (3, 3), "tensor": (3, 3)}
"""Kinds of values that turn, and the shape of one."""


@dataclass(frozen=True)
class EdgeGeometry:
    """Of every edge, float64: unit vector from centre to neighbour (n_edges, 3), functions of the distance (n_edges, N_BASIS)
    and the envelope (n_edges,), both zero from the cutoff on."""

    graph: EdgeGraph
    directions: Tensor
    basis: Tensor
    envelope: Tensor


def edge_geometry(vectors: Tensor, graph: EdgeGraph, cutoff: float, adaptive_cutoff: float | None) -> EdgeGeometry:
    """vectors: (n_edges, 3), A, of the edges of `graph`. cutoff, adaptive_cutoff: A."""
    lengths = vectors.square().sum(1).sqrt()
    limit = cutoff if adaptive_cutoff is None else adaptive_cutoff
    radii: Tensor | float = cutoff
    if adaptive_cutoff is not None:
        radii = pair_radii(lengths, graph, cutoff, adaptive_cutoff)
    envelope = polynomial_cutoff(lengths / radii, ENVELOPE)
    waves = torch.arange(1, N_BASIS + 1, dtype=lengths.dtype, device=lengths.device) * (math.pi / limit)
    basis = torch.sin(lengths.unsqueeze(1) * waves) * (envelope * limit / (math.pi * lengths)).unsqueeze(1)
    return EdgeGeometry(graph, vectors / lengths.unsqueeze(1), basis, envelope)


class EdgeHead(HeadNetwork):
    """From features (n_atoms, n_features) and edges to values (n_frames, *shape) or (n_atoms, *shape), float64.

    options: `HeadOptions`, whose `kind` is vector, symmetric or tensor.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self, name: str, options: Any, *, n_features: int, n_species: int, dtype: torch.dtype, seed: int
    ) -> None:
        n_out = 1 if options.kind == "vector" else 2 + 2 * N_PRODUCTS
        super().__init__(name, n_in=2 * n_features + N_BASIS, n_out=n_out, **options.network, dtype=dtype, seed=seed)
        self.options, self.n_features, self.n_species = options, n_features, n_species
        self.per_neighbour = 1.0 / math.sqrt(max(options.neighbours, 1.0))
        hold_scaling(self, options, n_species)

    def forward(self, features: Tensor, batch: Mapping[str, Tensor], edges: EdgeGeometry | None = None) -> Tensor:
        assert edges is not None
        weights = self._weights(features.to(self.dtype), batch, edges) * (
            self.per_neighbour * edges.envelope
        ).unsqueeze(1)
        made = self._vectors(weights, edges) if self.options.kind == "vector" else self._tensors(weights, edges)
        values = gather(self.shift, Segments(batch["species"], self.n_species)) + self.scale * made
        if self.options.net_zero:
            values = without_net(values, batch)
        if self.options.per == "frame":
            values = frame_values(values, batch, self.options.reduce)
        return values.reshape(-1, *self.options.output_shape)

    def _weights(self, features: Tensor, batch: Mapping[str, Tensor], edges: EdgeGeometry) -> Tensor:
        """(n_edges, n_out) float64. The first layer's products are made once per atom."""
        n, first = self.n_features, self.weights[0]
        centre, neighbour = product(features, first[:n]), product(features, first[n : 2 * n])
        of_edges = gather(centre, edges.graph.by_destination) + gather(neighbour, edges.graph.by_source)
        of_edges = of_edges + edges.basis.to(self.dtype) @ first[2 * n :]
        if len(self.weights) == 1:
            result: Tensor = (of_edges + self.biases[0]).double()
            return result
        return self.last(self.hidden_from(of_edges, batch)).double()

    def _vectors(self, weights: Tensor, edges: EdgeGeometry) -> Tensor:
        """(n_atoms, 3)."""
        return segment_sum(weights * edges.directions, edges.graph.by_destination)

    def _tensors(self, weights: Tensor, edges: EdgeGeometry) -> Tensor:
        """(n_atoms, 9)."""
        r = edges.directions
        unit = torch.eye(3, dtype=r.dtype, device=r.device)
        dyads = r.unsqueeze(2) * r.unsqueeze(1)
        direct = weights[:, 0].view(-1, 1, 1) * unit + weights[:, 1].view(-1, 1, 1) * dyads
        vectors = weights[:, 2:].unsqueeze(2) * r.unsqueeze(1)
        sums = segment_sum(vectors, edges.graph.by_destination)
        first, second = sums[:, :N_PRODUCTS], sums[:, N_PRODUCTS:]
        made = segment_sum(direct, edges.graph.by_destination)
        made = made + (first.unsqueeze(3) * second.unsqueeze(2)).sum(1)
        if self.options.kind == "symmetric":
            made = 0.5 * (made + made.transpose(1, 2))
        return made.reshape(-1, 9)
