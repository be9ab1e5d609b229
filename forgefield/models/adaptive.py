"""A cutoff that grows where an atom would be isolated, differentiable: the torch side of `data.adaptive_cutoff`.

An atom's coordination is a smooth count of its neighbours within the cutoff; from it follow how isolated the atom is
and the radius of each of its pairs, between the cutoff and the limit. A pair's interaction ends at its own radius, and
the radius changes smoothly with the positions, so energy and forces are continuous while atoms come and go. The edge
list of the data layer holds all pairs within their radius; those within the cutoff are always among them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forgefield.ops.graph import EdgeGraph, gather, segment_sum
from forgefield.ops.radial import polynomial_cutoff

SWITCH_START = 0.7
"""Share of the cutoff up to which a neighbour counts fully; the same number as in the data layer."""


def pair_radii(lengths: Tensor, graph: EdgeGraph, cutoff: float, limit: float) -> Tensor:
    """(n_edges,) radius of every edge's pair, A, float64; it equals `cutoff` where neither atom is isolated.

    lengths: (n_edges,), A, of a list that holds every edge within the cutoff.
    """
    x = (lengths / cutoff - SWITCH_START) / (1 - SWITCH_START)
    coordination = segment_sum(1 - _smoothstep(x), graph.by_destination)
    bonded = _smoothstep(coordination)
    both_bonded = gather(bonded, graph.by_destination) * gather(bonded, graph.by_source)
    return cutoff + (limit - cutoff) * (1 - both_bonded)


def adaptive_bessel_basis(lengths: Tensor, radii: Tensor, limit: float, frequencies: Tensor, p: float) -> Tensor:
    """sin(n pi x) / (pi x) with x = length / limit, under the envelope that ends at the pair's radius.

    lengths, radii: (n_edges,), A; n of `frequencies` (n_basis,) -> (n_edges, n_basis).
    """
    column = (lengths / limit).unsqueeze(1)
    envelope = polynomial_cutoff(lengths / radii, p).unsqueeze(1)
    return torch.sin(column * (math.pi * frequencies)) * (envelope / (math.pi * column))


def _smoothstep(x: Tensor) -> Tensor:
    """0 up to x = 0, 1 from x = 1 on, with two continuous derivatives."""
    x = x.clamp(0.0, 1.0)
    return x * x * x * (10 - x * (15 - 6 * x))
