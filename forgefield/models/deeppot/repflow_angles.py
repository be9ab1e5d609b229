"""The angles between the neighbours of each atom: pairs of edges of one centre, arranged in dense blocks.

An atom with n near neighbours has n x n ordered pairs of them. Atoms with the same n form a block (m, n, n, ...), in which
values of edges are broadcast to angles instead of gathered. Where the host must not read values, all atoms are in one block,
with a fixed number of places for near neighbours; empty places have weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.models.deeppot.attention import Slots, lay_out
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.graph import EdgeGraph, Segments, cut, gather, join

BLOCK = 1 << 18
"""Numbers of one feature array that a block of atoms may have on a CPU: larger ones do not fit into the cache."""


class _Pick(TypedFunction):
    """Rows of different numbers: rows[place], no place twice."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, place: Tensor) -> Tensor:
        ctx.place, ctx.count = place, rows.shape[0]
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return _Put.apply(grad, ctx.place, ctx.count), None

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, place: None) -> Tensor:
        result: Tensor = _Pick.apply(tangent, ctx.place)
        return result


class _Put(TypedFunction):
    """Inverse of `_Pick`: rows to their places among `count`, zero elsewhere."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.place, ctx.count = place, count
        return rows.new_zeros(count, rows.shape[1]).index_copy_(0, place, rows)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        return _Pick.apply(grad, ctx.place), None, None

    @staticmethod
    def jvp(ctx: AutogradContext, tangent: Tensor, place: None, count: None) -> Tensor:
        result: Tensor = _Put.apply(tangent, ctx.place, ctx.count)
        return result


@dataclass(frozen=True)
class Angles:
    """Places of near neighbours, in blocks of atoms that have equally many.

    centre: (n_places,) int64, the atom of each place. shapes: (m, n) of each block, m atoms with n places each; m * n of all
    blocks add up to n_places. edge: (n_places,) the edge of each place; or slots: the place of each edge, where some places
    are empty.
    """

    centre: Segments
    shapes: tuple[tuple[int, int], ...]
    edge: Tensor | None = None
    slots: Slots | None = None

    def rows(self, values: Tensor) -> Tensor:
        """Values of edges (n_edges, c) at the places (n_places, c); zero in empty ones."""
        if self.slots is not None:
            return self.slots.spread(values).flatten(0, 1)
        result: Tensor = _Pick.apply(values, self.edge)
        return result

    def of_centres(self, values: Tensor) -> Tensor:
        """Values of atoms (n_atoms, c) at the places of their neighbours (n_places, c)."""
        return gather(values, self.centre)

    def blocks(self, rows: Tensor) -> list[Tensor]:
        """(n_places, c) -> (m, n, c) of each block."""
        if not self.shapes:
            return []
        parts = cut(rows, [m * n for m, n in self.shapes], 0)
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes)]

    def to_edges(self, blocks: Sequence[Tensor], n_edges: int, like: Tensor) -> Tensor:
        """(m, n, c) of each block -> (n_edges, c), zero for edges without a place. like: (n_edges, c), for an empty result."""
        if self.slots is not None:
            return self.slots.collect(blocks[0])
        if not blocks:
            return torch.zeros_like(like)
        result: Tensor = _Put.apply(join([block.flatten(0, 1) for block in blocks], 0), self.edge, n_edges)
        return result


def nearest(near: Tensor, lengths: Tensor, graph: EdgeGraph, limit: int) -> Tensor:
    """(n_edges,) bool: those of the near edges that are among the `limit` shortest of their centre. lengths: (n_edges,), A."""
    order = torch.argsort(torch.where(near, lengths, torch.inf), stable=True)
    order = order.index_select(0, torch.argsort(graph.destination.index_select(0, order), stable=True))
    first = graph.by_destination.pointers.index_select(
        0, graph.destination
    )  # `order` is sorted by centre, as edges are
    numbers = torch.arange(graph.n_edges, device=near.device)
    rank = torch.zeros_like(order).index_copy_(0, order, numbers - first)
    return near & (rank < limit)


def exact_angles(near: Tensor, graph: EdgeGraph, width: int) -> Angles:
    """Blocks without empty places. near: (n_edges,) bool. width: numbers of each angle."""
    edge = near.nonzero().squeeze(1)
    centre = graph.destination.index_select(0, edge)
    counts = torch.bincount(centre, minlength=graph.n_atoms)
    order = torch.argsort(counts.index_select(0, centre) * graph.n_atoms + centre, stable=True)
    edge, centre = edge.index_select(0, order), centre.index_select(0, order)
    shapes = []
    for n, atoms in enumerate(torch.bincount(counts).tolist()):
        step = max(1, BLOCK // (n * n * width)) if n and not near.is_cuda else max(1, atoms)
        shapes += [(min(step, atoms - first), n) for first in range(0, atoms if n else 0, step)]
    return Angles(Segments(centre, graph.n_atoms), tuple(shapes), edge=edge)


def padded_angles(near: Tensor, graph: EdgeGraph, places: int, dtype: torch.dtype) -> Angles:
    """One block with `places` and an empty place for every atom; further near neighbours get none."""
    slots = lay_out(near, graph.destination, graph.by_destination.pointers, places, dtype)
    atoms = torch.arange(graph.n_atoms, device=near.device).repeat_interleave(slots.width)
    centre = Segments(atoms, graph.n_atoms, rows_are_sorted=True)
    return Angles(centre, ((graph.n_atoms, slots.width),), slots=slots)


def no_angles(graph: EdgeGraph) -> Angles:
    """Without angles."""
    empty = graph.source[:0]
    return Angles(Segments(empty, graph.n_atoms), (), edge=empty)
