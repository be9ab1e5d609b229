"""The batch as one graph object of PyTorch Geometric, for models that are called as `forward(data)`.

The graph records which of its values a model reads: one that reads neither image shifts nor lengths or vectors of edges cannot
be right for periodic frames.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.edges import Batch

PERIODIC = ("edge_weight", "edge_attr", "edge_vec", "edge_shift", "shift_vec")
"""Values of edges that take periodic images into account."""


def takes_graph(module: nn.Module) -> bool:
    """Whether `forward` has a single required argument, which is not one of those by which models take plain tensors."""
    parameters = inspect.signature(module.forward).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1 and required[0] not in ("z", "x", "pos", "positions")


def graph_of(batch: Batch, numbers: Tensor, values: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """A graph of all frames.

    Per atom: z and atomic_numbers, pos, batch. Per edge: edge_index (neighbour, centre), edge_shift (images), shift_vec (the
    same in A), and `values`. Per frame: ptr, natoms, cell, pbc. numbers: (n_atoms,) atomic numbers.
    """
    n_atoms, cell = batch["n_atoms"], batch["cell"].to(dtype)
    shift = batch["edge_shift"].to(dtype)
    frames = batch["frame"].index_select(0, batch["edge_index"][1])
    return _graph_class()(
        z=numbers,
        atomic_numbers=numbers,
        pos=batch["positions"].to(dtype),
        batch=batch["frame"],
        ptr=torch.cat([n_atoms.new_zeros(1), n_atoms.cumsum(0)]),
        natoms=n_atoms,
        cell=cell,
        pbc=batch["pbc"],
        edge_shift=shift,
        shift_vec=torch.bmm(shift.unsqueeze(1), cell.index_select(0, frames)).squeeze(1),
        **values,
    )


def reads_images(graph: Any) -> bool:
    """Whether the model that was called with this graph has read a value that takes periodic images into account."""
    return not graph.recorded.isdisjoint(PERIODIC)


@lru_cache(maxsize=1)
def _graph_class() -> type[Any]:
    try:
        from torch_geometric.data import Data
    except ImportError as error:
        raise ForgefieldError("PyTorch Geometric is not installed; pip install torch-geometric") from error

    class Graph(Data):  # type: ignore[misc]
        """A graph that records which of its values are read."""

        def __init__(self, **values: Tensor) -> None:
            super().__init__(**values)
            self.__dict__["recorded"] = set()

        @property
        def num_graphs(self) -> int:
            return int(self._store["natoms"].shape[0])

        def __getattr__(self, name: str) -> Any:
            self.__dict__.get("recorded", set()).add(name)
            return super().__getattr__(name)

        def __getitem__(self, name: str) -> Any:
            self.__dict__.get("recorded", set()).add(name)
            return super().__getitem__(name)

    return Graph
