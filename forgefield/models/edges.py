"""The edges of a batch as models receive them: vectors, index lists, and what is known about the pass they belong to.

A batch holds only tensors that the data layer made. What one part of Forgefield has to tell another about a pass (how it will
be differentiated, what an earlier pass computed) is in an `EdgeContext`, which is passed next to the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.core.runtime import use_kernels
from forgefield.kernels.edges.segments import vectors_by_kernel
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, edge_graph, gather, is_traced

Batch = dict[str, Tensor]
"""Tensors of several frames by name; see `forgefield.data.batch`."""


class StepMemory:
    """What the first pass of a training step leaves for the second pass over the same batch.

    Empty until a model fills it. state: belongs to the model that wrote it.
    """

    __slots__ = ("graph", "state", "vectors")

    vectors: Tensor | None
    graph: EdgeGraph | None
    state: object

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.vectors, self.graph, self.state = None, None, None

    def fill(self, vectors: Tensor, graph: EdgeGraph, state: object) -> None:
        """Keep edge vectors (n_edges, 3), A, the graph they belong to, and whatever the model needs again."""
        self.vectors, self.graph, self.state = vectors.detach(), graph, state


class FixedWeights:
    """What a model has computed from its weights alone, for evaluations between which the weights do not change.

    Empty until a model fills it. state: belongs to the model that wrote it.
    """

    __slots__ = ("state",)

    state: object

    def __init__(self) -> None:
        self.state = None


class GhostAtoms(Protocol):
    """Atoms at the end of a batch that belong to other processes: they are neighbours, but no edge ends at them."""

    def fill(self, rows: Tensor) -> Tensor:
        """`rows` (n_rows, ...), with those of ghost atoms replaced by the rows that their owners have; differentiable.

        All processes call it equally often, with rows of the same size, one call after the other.
        """
        ...


@dataclass(frozen=True)
class EdgeContext:
    """The edges of one pass through a model.

    vectors: (n_edges, 3) from the centre to its neighbour, A, float64.
    batch: the batch they belong to.
    graph_if_known: its index lists, where they have been made already.
    gradient: turned off once nobody needs gradients with respect to the edge vectors any more; None if there is no such moment.
    differentiated_again: whether derivatives with respect to the edge vectors will themselves be differentiated.
    memory: where a pass may leave what the second pass of the step needs; None if there is no second pass.
    ghosts: atoms of other processes, in a structure that is divided among several; None in all other cases.
    fixed_weights: where a model keeps what depends on its weights alone, if these do not change between passes; None if they
        do.
    """

    vectors: Tensor
    batch: Mapping[str, Tensor]
    graph_if_known: EdgeGraph | None = None
    gradient: GradientSwitch | None = None
    differentiated_again: bool = True
    memory: StepMemory | None = None
    ghosts: GhostAtoms | None = None
    fixed_weights: FixedWeights | None = None

    def fill_ghosts(self, rows: Tensor) -> Tensor:
        """`rows` of atoms that the next layer gathers along edges, those of ghost atoms included; see `GhostAtoms`."""
        return rows if self.ghosts is None else self.ghosts.fill(rows)

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> EdgeContext:
        """The edges of a batch, with the vectors in `edge_vectors` if it has that key."""
        vectors = batch.get("edge_vectors")
        return cls(edge_vectors(batch) if vectors is None else vectors, batch)

    @cached_property
    def graph(self) -> EdgeGraph:
        """Index lists of the edges."""
        return edge_graph(self.batch) if self.graph_if_known is None else self.graph_if_known


def edge_vectors(batch: Mapping[str, Tensor]) -> Tensor:
    """(n_edges, 3) from destination (centre) to source (neighbour), A, float64."""
    return displacements(batch["positions"], batch["cell"], batch)


def displacements(positions: Tensor, cell: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
    """The same for other positions (n_atoms, 3) and cells (n_frames, 3, 3); without `cell`, lattice vectors are zero."""
    fixed = not (positions.requires_grad or forward_ad.unpack_dual(positions).tangent is not None)
    fixed = fixed and not (cell is not None and cell.requires_grad)
    if fixed and not is_traced(positions) and use_kernels(positions):
        return vectors_by_kernel(positions, cell, *(batch[key] for key in ("frame", "edge_index", "edge_shift")))
    source, destination = batch["edge_index"]
    n_atoms = positions.shape[0]
    to_destination = Segments(destination, n_atoms, rows_are_sorted=True)
    difference = gather(positions, Segments(source, n_atoms)) - gather(positions, to_destination)
    if cell is None:
        return difference
    cells = cell.index_select(0, batch["frame"].index_select(0, destination))
    return difference + rows_times(batch["edge_shift"], cells)


def rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Each row times its matrix: (n, 3), (n, 3, 3) -> (n, 3)."""
    return (rows.unsqueeze(2) * matrices).sum(1)


def volumes(cell: Tensor) -> Tensor:
    """(n_frames,), A^3; zero where there is no cell. cell: (n_frames, 3, 3)."""
    a, b, c = cell.unbind(1)
    result: Tensor = (a * torch.linalg.cross(b, c)).sum(1).abs()
    return result
