"""The sum at the heart of the descriptors: over the neighbours of each atom, rows (x) embeddings of a scalar.

`plain_neighbour_sum` is written with torch's operations edge by edge: it can be traced, differentiated in any way, and is what
the fast way, by moments, is compared with.
"""

from __future__ import annotations

from torch import Tensor

from forgefield.models.deeppot.grouping import EDGE_BLOCK, group_rows
from forgefield.models.deeppot.moments import expand, sum_by_moments
from forgefield.models.deeppot.networks import Networks
from forgefield.ops import products
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, is_traced, segment_sum


def neighbour_sum(
    scalars: Tensor,
    rows: Tensor,
    kinds: Tensor,
    networks: Networks,
    graph: EdgeGraph,
    *,
    vectors: Tensor,
    switch: GradientSwitch | None,
) -> Tensor:
    """(n_atoms, c, m): the sum over the edges of each atom of row (x) g(scalar), g the network of the edge's kind.

    scalars: (n_edges,); rows: (n_edges, c), both float64; kinds: (n_edges,) int64. vectors: edge vectors they were made of. The
    result has the networks' precision.
    """
    rows = rows.to(networks.dtype)
    if can_use_moments(networks, vectors, switch):
        expansion = expand(networks, scalars)
        if expansion is not None:
            sums, cells = sum_by_moments(expansion, scalars, rows, kinds, graph, switch)
            return segment_sum(sums, Segments(cells.atom, graph.n_atoms))
    return plain_neighbour_sum(scalars.to(networks.dtype), rows, kinds, networks, graph)


def can_use_moments(networks: Networks, vectors: Tensor, switch: GradientSwitch | None) -> bool:
    """Whether sizes are known, and no derivative will be asked for that moments do not have."""
    return (
        not vectors.is_cuda
        and not is_traced(vectors)
        and not products.is_lowered(networks.layers[0].w)
        and (not vectors.requires_grad or (switch is not None and vectors.is_leaf))
    )


def plain_neighbour_sum(scalars: Tensor, rows: Tensor, kinds: Tensor, networks: Networks, graph: EdgeGraph) -> Tensor:
    """The same, edge by edge; scalars and rows in the networks' precision."""
    groups = group_rows(kinds, networks.count, EDGE_BLOCK)
    embedded = groups.collect(networks(groups.spread(scalars.unsqueeze(1)), groups))
    return segment_sum(rows.unsqueeze(2) * embedded.unsqueeze(1), graph.by_destination)
