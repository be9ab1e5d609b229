"""`se_e2_a`, the descriptor of DeepPot-SE (Zhang et al., NeurIPS 2018): distances and angles through products of rows.

With T the sum over neighbours of embedding (x) row, the descriptor of an atom is T T_<^T, where T_< holds the first
`axis_neuron` rows of T: invariant, because rows enter by their scalar products alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forgefield.models.deeppot.environment import environment_rows
from forgefield.models.deeppot.neighbour_sum import neighbour_sum
from forgefield.models.deeppot.options import SeE2AOptions
from forgefield.models.deeppot.se_e2 import TwoBodyDescriptor
from forgefield.models.edges import Batch, EdgeContext


class SeE2A(TwoBodyDescriptor):
    """Two-body embedding, full rows."""

    Options = SeE2AOptions
    columns = 4

    def __init__(self, options: SeE2AOptions, **made_of: Any) -> None:
        super().__init__(options, **made_of)
        self.dim_rotation = options.neuron[-1]
        self.dim_out = options.neuron[-1] * options.axis_neuron

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        options, species, graph = self.options, batch["species"], edges.graph
        centre, neighbour, pair = self.edge_kinds(species, graph)
        rows = environment_rows(edges.vectors, options.rcut_smth, self.cutoff, options.env_protection)
        rows, scalars = self.standardise(rows, centre)
        if self.excludes:
            rows = rows * self.seen.index_select(0, pair).unsqueeze(1)
        if mask is not None:
            rows = rows * mask.unsqueeze(1)
        dtype = self.networks.dtype
        kinds = neighbour if options.type_one_side else pair
        total = neighbour_sum(
            scalars,
            rows,
            kinds,
            self.networks,
            graph,
            vectors=edges.vectors,
            switch=edges.gradient,
        )
        if self.sel is not None and self.standardise.has_shift:
            empty = self.standardise.empty.to(dtype).index_select(0, species)
            total = total + empty.unsqueeze(2) * self.empty_sum(species, neighbour, graph, mask).unsqueeze(1)
        elif self.sel is not None:
            self.empty_places(species, neighbour, graph, mask)
        total = total / options.neighbour_norm
        turned = total.transpose(1, 2)
        descriptor = torch.bmm(turned, total[:, :, : options.axis_neuron])
        return descriptor.flatten(1), turned[:, :, 1:]
