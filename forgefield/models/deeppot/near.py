"""Neighbours within a cutoff that may be shorter than that of the neighbour lists, in slots: as many for each atom.

Empty slots hold a neighbour beyond the cutoff, for which switches are zero, so that sums over slots are sums over neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.attention import Slots, count_edges, lay_out
from forgefield.models.deeppot.descriptor import switch
from forgefield.ops.graph import EdgeGraph, Segments, is_traced

MARGIN = 1.1
"""Factor by which compiled layouts have more slots than the largest number of neighbours in the training data."""


@dataclass(frozen=True)
class Near:
    """Neighbours of `n_atoms` atoms in `width` slots each, of which the last is empty.

    vectors: (n_atoms * width, 3) to the neighbour, A, float64. source: (n_atoms * width,) int64, the neighbour; in empty slots
    the atom itself. taken: (n_atoms, width) bool. counts: (n_atoms,) int64, neighbours within the cutoff, excluded or not.
    """

    vectors: Tensor
    source: Tensor
    taken: Tensor
    counts: Tensor

    @property
    def n_atoms(self) -> int:
        return self.taken.shape[0]

    @property
    def width(self) -> int:
        return self.taken.shape[1]

    @cached_property
    def by_source(self) -> Segments:
        """Slots by the atom that they hold."""
        return Segments(self.source, self.n_atoms)

    @cached_property
    def lengths(self) -> Tensor:
        """(n_atoms * width,), A."""
        lengths: Tensor = torch.linalg.vector_norm(self.vectors, dim=1)
        return lengths

    def fades(self, start: float, cutoff: float) -> Tensor:
        """(n_atoms * width,) switches; zero in empty slots."""
        return switch(self.lengths, start, cutoff)

    def per_slot(self, values: Tensor) -> Tensor:
        """(n_atoms,) -> (n_atoms * width,)."""
        return values.unsqueeze(1).expand(-1, self.width).reshape(-1)


def near_slots(
    vectors: Tensor,
    graph: EdgeGraph,
    mask: Tensor | None,
    seen: Tensor | None,
    cutoff: float,
    *,
    width: int | None,
    what: str,
    room: int | None,
) -> Near:
    """Neighbours within `cutoff`, A.

    vectors: (n_edges, 3), A. mask: (n_edges,), 0 for edges that are ignored. seen: (n_edges,) bool, neighbours that are not
    excluded. width: slots, where sizes must not depend on values; None: as many as needed. room: largest number of neighbours;
    what: the option that sets it, for the message.
    """
    near = torch.linalg.vector_norm(vectors.detach(), dim=1) < cutoff
    if mask is not None:
        near = near & (mask > 0)
    pointers = graph.by_destination.pointers
    counts = count_edges(near, pointers)
    if width is None:
        width = int(counts.max()) if graph.n_atoms else 0
        if room is not None and width > room:
            raise ForgefieldError(
                f"model.descriptor.{what} has room for {room} neighbours, but an atom has {width} within {cutoff:g} A; set it "
                f"to at least {width}, or to auto."
            )
    chosen = near if seen is None else near & seen
    slots = lay_out(chosen, graph.destination, pointers, width, vectors.dtype)
    empty = slots.is_empty()
    # Vectors of empty slots are beyond the cutoff. Made on the device: a capture cannot copy from the host.
    far = empty.to(vectors.dtype).unsqueeze(2) * (2 * cutoff)
    in_slots = slots.spread(vectors) + torch.nn.functional.pad(far, (0, 2))
    return Near(in_slots.flatten(0, 1), _sources(slots, graph, chosen), ~empty, counts)


def _sources(slots: Slots, graph: EdgeGraph, chosen: Tensor) -> Tensor:
    places = torch.arange(graph.n_atoms, device=graph.source.device).unsqueeze(1).expand(-1, slots.width).reshape(-1)
    last = graph.destination * slots.width + (slots.width - 1)
    return places.index_copy(0, slots.slot, torch.where(slots.slot < last, graph.source, graph.destination))


def refuse(result: Tensor, near: Near, width: int | None) -> Tensor:
    """Rows of atoms, NaN for those with more neighbours than slots. width: see `near_slots`."""
    if width is None:
        return result
    return result + torch.where(near.counts > width, torch.nan, 0.0).to(result.dtype).unsqueeze(1)


def fixed_width(tensor: Tensor, training: bool, width: int) -> int | None:
    """`width` where sizes must not depend on values: in a trace or a capture, or in training on a GPU; else None."""
    if is_traced(tensor):
        return width
    return width if tensor.is_cuda and (training or torch.cuda.is_current_stream_capturing()) else None


def slots_needed(environment: Mapping[str, Any], given: int | None, room: int | None, option: str) -> int:
    """Slots for compiled layouts: the option, or from the training data. environment: statistics of rows."""
    most = environment.get("max_neighbours")
    width = given or (None if most is None else max(1, math.ceil(MARGIN * sum(most))))
    if room is not None:
        width = room if width is None else min(width, room)
    if width is None:
        raise ForgefieldError(f"model.descriptor.{option} is not set and there is no training data to compute it from.")
    return width
