"""Sums over edges of harmonics times weights, and their adjoint: the reference operations, differentiable any number of
times."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forgefield.ops.graph import Segments, cut, gather, join, segment_sum


def sum_weighted(weights: Tensor, directions: Sequence[Tensor], edges: Segments, *, shared: bool) -> Tensor:
    """(components, n_atoms, channels). weights: (n_edges, degrees x channels) or, shared by all degrees, (n_edges, channels).

    directions: (n_edges, 2l + 1) of each degree, the first of which is one and not read. edges: those of each atom.
    """
    parts = [weights] * len(directions) if shared else _by_degree(weights, len(directions))
    sums = [segment_sum(parts[0], edges).unsqueeze(0)]
    for direction, part in zip(directions[1:], parts[1:]):
        sums.append(segment_sum(direction.unsqueeze(2) * part.unsqueeze(1), edges).transpose(0, 1))
    return join(sums, 0)


def project(rows: Tensor, weights: Tensor, directions: Sequence[Tensor], edges: Segments) -> Tensor:
    """(n_edges, channels): rows (components, n_atoms, channels) of an edge's atom dotted with its weighted harmonics."""
    parts = _by_degree(weights, len(directions))
    of_degrees = cut(rows, [direction.shape[1] for direction in directions], 0)
    result = gather(of_degrees[0].squeeze(0), edges) * parts[0]
    for direction, part, of_degree in zip(directions[1:], parts[1:], of_degrees[1:]):
        at_edges = gather(of_degree.transpose(0, 1).contiguous(), edges)
        result = result + (at_edges * direction.unsqueeze(2)).sum(1) * part
    return result


def _by_degree(weights: Tensor, n_degrees: int) -> Sequence[Tensor]:
    return cut(weights, [weights.shape[1] // n_degrees] * n_degrees, 1)
