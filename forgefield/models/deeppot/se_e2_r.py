"""`se_e2_r`: a descriptor from distances alone, a fifth of the mean embedding over neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forgefield.models.deeppot.environment import radial_rows
from forgefield.models.deeppot.neighbour_sum import neighbour_sum
from forgefield.models.deeppot.options import SeE2ROptions
from forgefield.models.deeppot.se_e2 import TwoBodyDescriptor
from forgefield.models.edges import Batch, EdgeContext
from forgefield.ops.graph import EdgeGraph

SCALE = 0.2


class SeE2R(TwoBodyDescriptor):
    """Two-body embedding, radial rows."""

    Options = SeE2ROptions
    columns = 1

    def __init__(self, options: SeE2ROptions, **made_of: Any) -> None:
        super().__init__(options, **made_of)
        self.dim_out = options.neuron[-1]

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        options, species, graph = self.options, batch["species"], edges.graph
        centre, neighbour, pair = self.edge_kinds(species, graph)
        rows = radial_rows(edges.vectors, options.rcut_smth, self.cutoff, options.env_protection)
        _, scalars = self.standardise(rows, centre)
        weights = torch.ones_like(scalars) if mask is None else mask
        seen = self.seen.index_select(0, pair) if self.excludes else None
        if seen is not None:
            scalars, weights = (scalars * seen, weights) if self.sel is not None else (scalars, weights * seen)
        kinds = neighbour if options.type_one_side else pair
        total = neighbour_sum(
            scalars,
            weights.unsqueeze(1),
            kinds,
            self.networks,
            graph,
            vectors=edges.vectors,
            switch=edges.gradient,
        ).squeeze(1)
        ends = self._ends(species, neighbour, pair, graph, mask if seen is None else weights)
        return (total + ends) * (SCALE / options.neighbour_norm), None

    def _ends(
        self, species: Tensor, neighbour: Tensor, pair: Tensor, graph: EdgeGraph, weights: Tensor | None
    ) -> Tensor:
        """(n_atoms, m): what makes the sum smooth at the cutoff, empty places or less the embedding at the cutoff."""
        if self.sel is not None:
            return self.empty_sum(species, neighbour, graph, weights)
        n = len(self.species)
        ones = torch.ones_like(pair, dtype=torch.float64) if weights is None else weights
        counts = ones.new_zeros(species.shape[0] * n * n).index_add_(0, graph.destination * (n * n) + pair, ones)
        return -(counts.view(species.shape[0], n * n).to(self.networks.dtype) @ self.empty_embedding())
