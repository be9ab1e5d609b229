"""Models of PyTorch Geometric, `forward(z, pos, batch)` or `forward(data)` to an energy per frame, with the edges of the batch.

Such models search neighbours themselves, only among the atoms of the cell. If they accept edges instead, with lengths or
vectors, they get those of the batch and see periodic images: SchNet and ViSNet, and any model whose forward takes `edge_index`
with `edge_weight`, `edge_attr` (lengths) or `edge_vec`. The others (DimeNet, DimeNet++) get the edges of frames that are not
periodic and raise an error for periodic ones.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.adapters.adapter import Adapter, record_input
from forgefield.models.adapters.graphs import graph_of, reads_images, takes_graph
from forgefield.models.edges import Batch, EdgeContext

GRAPH_MAKERS = {"RadiusInteractionGraph": False, "Distance": True}
"""Classes of PyTorch Geometric that compute edges from (pos, batch): whether they also return vectors and self-loops."""
OF_EDGES = ("edge_weight", "edge_attr", "edge_vec")


class Edges(NamedTuple):
    """ends: (2, n) source, destination; lengths: (n,); vectors: (n, 3), destination to source, A; is_crossing: (n,) bool."""

    ends: Tensor
    lengths: Tensor
    vectors: Tensor
    is_crossing: Tensor

    def by_name(self) -> dict[str, Tensor]:
        """The arguments of models that accept edges."""
        return {
            "edge_index": self.ends,
            "edge_weight": self.lengths,
            "edge_attr": self.lengths.unsqueeze(1),
            "edge_vec": self.vectors,
        }


class BatchEdges(nn.Module):
    """Replaces the neighbour search of a model. with_vectors: it also returns vectors, and an edge from each atom to itself."""

    edges: Edges | None

    def __init__(self, with_vectors: bool) -> None:
        super().__init__()
        self.with_vectors, self.edges = with_vectors, None

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, ...]:
        assert self.edges is not None
        ends, lengths, vectors, _ = self.edges
        if not self.with_vectors:
            return ends, lengths
        n_atoms = pos.shape[0]
        loops = torch.arange(n_atoms, device=ends.device).expand(2, n_atoms)
        zeros = vectors.new_zeros(n_atoms, 3)
        return torch.cat([ends, loops], 1), torch.cat([lengths, zeros[:, 0]]), torch.cat([vectors, zeros])


class PyG(Adapter):
    """model.features: name of the submodule whose inputs are features of atoms (`lin1` of SchNet)."""

    @classmethod
    def check_options(cls, section: Mapping[str, Any], *, make: Callable[..., object] | None = None) -> None:
        super().check_options(section, make=make)
        for key in ("max_num_neighbors", "interaction_graph"):
            if key in (section.get("options") or {}):
                raise ForgefieldError(f"model.options.{key} does not apply: the edges are those of the data section.")

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module with submodules that return the edges of the batch instead of searching neighbours."""
        for parent in list(module.modules()):
            for name, part in list(parent.named_children()):
                if type(part).__name__ in GRAPH_MAKERS and type(part).__module__.startswith("torch_geometric."):
                    setattr(parent, name, BatchEdges(GRAPH_MAKERS[type(part).__name__]))
        return module

    def evaluate(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        lists = _edges(batch, edges, self.dtype, self.cutoff)
        if takes_graph(self.module):
            return self._evaluate_graph(batch, lists)
        replaced = [part for part in self.module.modules() if isinstance(part, BatchEdges)]
        accepts = [
            name for name in inspect.signature(self.module.forward).parameters if name in ("edge_index", *OF_EDGES)
        ]
        arguments: dict[str, Any] = {
            "z": self.numbers.index_select(0, batch["species"]),
            "pos": batch["positions"].to(self.dtype),
            "batch": batch["frame"],
        }
        offered = lists.by_name()
        arguments |= {name: offered[name] for name in accepts}
        if not replaced and not any(name in OF_EDGES for name in accepts):
            self._refuse_crossing(lists)
        if any(part.with_vectors for part in replaced):
            self._refuse_self_images(lists)
        with ExitStack() as stack:
            inputs = self._record_features(stack)
            stack.enter_context(_set(replaced, lists))
            stack.enter_context(_neighbours_from(self.module, lists))
            result = self.module(**arguments)
        return result[0] if isinstance(result, tuple) else result, inputs[0] if inputs else None

    def _evaluate_graph(self, batch: Batch, lists: Edges) -> tuple[Tensor, Tensor | None]:
        """With one graph object as the only argument."""
        graph = graph_of(batch, self.numbers.index_select(0, batch["species"]), lists.by_name(), self.dtype)
        with ExitStack() as stack:
            inputs = self._record_features(stack)
            stack.enter_context(_neighbours_from(self.module, lists))
            result = self.module(graph)
        if not reads_images(graph):
            self._refuse_crossing(lists)
        return result[0] if isinstance(result, tuple) else result, inputs[0] if inputs else None

    def _record_features(self, stack: ExitStack) -> list[Tensor]:
        if self.options.features is None:
            return []
        return stack.enter_context(record_input(self.module, self.options.features))

    def _refuse_crossing(self, edges: Edges) -> None:
        if bool(edges.is_crossing.any()):
            raise ForgefieldError(
                f"{self.options.module} computes distances between the atoms of a cell without periodic images, and some "
                "frames are periodic: their energies would be wrong. Train it on molecules, or use a model that accepts "
                "edges (SchNet and ViSNet of PyTorch Geometric, or the built-in ones)."
            )

    def _refuse_self_images(self, edges: Edges) -> None:
        if bool((edges.is_crossing & (edges.ends[0] == edges.ends[1])).any()):
            raise ForgefieldError(
                f"{self.options.module} ignores edges from an atom to its own periodic image, and some frames have cells "
                "shorter than the cutoff; repeat their cells, or use a shorter data.cutoff."
            )


def _edges(batch: Batch, edges: EdgeContext, dtype: torch.dtype, cutoff: float) -> Edges:
    vectors = edges.vectors
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    crossing = (batch["edge_shift"] != 0).any(dim=1) & (lengths < cutoff)
    return Edges(batch["edge_index"], lengths.to(dtype), vectors.to(dtype), crossing)


@contextmanager
def _set(parts: list[BatchEdges], edges: Edges) -> Iterator[None]:
    for part in parts:
        part.edges = edges
    try:
        yield
    finally:
        for part in parts:
            part.edges = None


@contextmanager
def _neighbours_from(module: nn.Module, edges: Edges) -> Iterator[None]:
    """In the `with` block, `radius_graph` in the modules of the model's classes returns these edges, of frames that are not
    periodic, and `triplets` (of DimeNet) needs no compiled package."""
    files = {type(part).__module__ for part in module.modules()} - {__name__}

    def radius_graph(x: Tensor, r: float, batch: Tensor | None = None, loop: bool = False, **_: object) -> Tensor:
        if loop:
            raise ForgefieldError(
                "this model needs edges from atoms to themselves, which Forgefield's lists do not contain."
            )
        return edges.ends[:, edges.lengths <= r]

    replacements = {"radius_graph": radius_graph, "triplets": triplets}
    originals = [
        (sys.modules[file].__dict__, name, sys.modules[file].__dict__[name])
        for file in files
        for name in replacements
        if file in sys.modules and name in sys.modules[file].__dict__
    ]
    for namespace, name, _ in originals:
        namespace[name] = replacements[name]
    try:
        yield
    finally:
        for namespace, name, original in originals:
            namespace[name] = original


def triplets(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
    """All k -> j -> i with k other than i: destination and source of all edges; then for every triplet the atoms i, j, k and
    the indices of its edges k -> j and j -> i. edge_index: (2, n_edges) source, destination."""
    source, destination = edge_index
    order = torch.argsort(destination, stable=True)
    into = torch.bincount(destination, minlength=num_nodes)
    first = torch.cumsum(into, 0) - into
    count = into[source]
    second_edge = torch.repeat_interleave(count)
    offset = torch.arange(second_edge.shape[0], device=source.device) - (torch.cumsum(count, 0) - count)[second_edge]
    first_edge = order[first[source[second_edge]] + offset]
    i, j, k = destination[second_edge], source[second_edge], source[first_edge]
    distinct = i != k
    return destination, source, i[distinct], j[distinct], k[distinct], first_edge[distinct], second_edge[distinct]
