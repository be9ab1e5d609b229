"""Frames with their neighbour lists, put together as batches straight from columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forgefield.data.batch import Batch, assemble, without_labels
from forgefield.data.fields import Fields
from forgefield.data.frame import Frame
from forgefield.data.neighbours.edges import (
    BuiltEdges,
    DeviceEdges,
    MemoryEdges,
    Neighbourhoods,
    Progress,
    StoredEdges,
    build_block,
    geometry_of,
)
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.species import SpeciesTable
from forgefield.data.store.store import StoreColumns, holds_graph
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError


class GraphDataset:
    """Batches of any rows of a table.

    Neighbour lists are made at once and kept for frames in memory, read for stores that hold them, and made batch by batch for
    stores that do not. on_device: batches come without edges, which are then made where the model runs (`with_edges`).

    fields: further keys of its batches, by name. targets: those of them that are learnt; the others are what a model is given,
    which a blank frame needs too.
    """

    def __init__(
        self,
        frames: FrameTable | Sequence[Frame],
        species: SpeciesTable,
        graph: GraphOptions | float,
        progress: Progress | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self.frames = frames if isinstance(frames, FrameTable) else FrameTable.from_frames(frames)
        self.species = species
        self.fields: Fields = self.frames.fields
        self.targets: frozenset[str] = frozenset()
        self._branch: np.ndarray | None = None
        self.graph = graph if isinstance(graph, GraphOptions) else GraphOptions(float(graph))
        self._refuse_foreign_species()
        if on_device and (self.graph.adaptive_cutoff is not None or self.graph.max_neighbours is not None):
            raise ForgefieldError(
                "data.neighbours=device makes plain neighbour lists only; leave out data.adaptive_cutoff and "
                "data.max_neighbours, or use data.neighbours=auto"
            )
        self.edges: Neighbourhoods = DeviceEdges() if on_device else _neighbourhoods(self.frames, self.graph, progress)

    def set_branches(self, names: Sequence[str]) -> None:
        """From now on batches say which branch of the model each frame belongs to, by its place in `names`."""
        self._branch = self.frames.branch_of_frame(names)
        strange = np.flatnonzero(self._branch < 0)
        if len(strange):
            raise ForgefieldError(
                f"{self.frames.where(int(strange[0]))}: its source names no branch of the model; write {{path: ..., branch: "
                f"NAME}} in the data section, with NAME one of {', '.join(names)}"
            )

    def leave_edges_to_device(self) -> None:
        """From now on the model's device makes the lists that would be made for each batch, if it can make such."""
        if isinstance(self.edges, BuiltEdges) and self.graph == GraphOptions(self.cutoff, self.graph.neighbours):
            self.edges = DeviceEdges()

    @property
    def on_device(self) -> bool:
        """Whether batches come without edges."""
        return isinstance(self.edges, DeviceEdges)

    @property
    def cutoff(self) -> float:
        return self.graph.cutoff

    @property
    def n_atoms(self) -> np.ndarray:
        """(n_frames,)."""
        return self.frames.n_atoms

    @property
    def n_edges(self) -> np.ndarray | None:
        """(n_frames,), where known before the lists are made."""
        return self.edges.n_edges

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, row: int) -> Batch:
        """The batch of one frame."""
        return self.batch(np.array([row]))

    def batch(self, rows: np.ndarray | Sequence[int], moves: np.ndarray | None = None) -> Batch:
        """These frames in this order; `frame_id` is their row.

        moves: (n_atoms, 3), A: atoms are that far from where they are in the data, NaN where they are not moved; edges are made
        for where they are then, and the batch carries the moves as `denoise`.
        """
        found = self.frames.find(np.array(rows, dtype=np.int64))
        geometry = geometry_of(found)
        if moves is None:
            edges, more = self.edges.read(found, geometry), {}
        else:
            geometry = replace(geometry, positions=geometry.positions + np.nan_to_num(moves))
            where = self.frames.where
            edges = (
                None
                if self.on_device
                else build_block(geometry, self.graph, lambda i: f"{where(int(found.rows[i]))}, its atoms moved")[0]
            )
            more = {"denoise": moves}
        return assemble(
            geometry,
            edges,
            **more,
            species=self.species.index(found.atoms("numbers")),
            energy=found.column("energy"),
            forces=found.atoms("forces"),
            stress=found.column("stress"),
            weight=found.column("weight"),
            frame_id=found.rows,
            **({} if self._branch is None else {"branch": self._branch[found.rows]}),
            **{name: found.field(name) for name in self.fields},
        )

    def blank(self) -> Batch:
        """The batch of a frame that counts for nothing, for a rank that would be left without one."""
        return without_labels(self[int(self.n_atoms.argmin())], self.targets)

    def _refuse_foreign_species(self) -> None:
        found = self.frames.components
        present = np.flatnonzero(np.bincount(found.number))
        strange = np.setdiff1d(present, self.species.numbers)
        if len(strange):
            first = int(np.flatnonzero(np.isin(found.number, strange))[0])
            self.species.index(found.number[first : first + 1], self.frames.where(int(found.frame[first])))


def _neighbourhoods(table: FrameTable, graph: GraphOptions, progress: Progress | None) -> Neighbourhoods:
    if holds_graph(table, graph):
        return StoredEdges(table)
    if any(isinstance(part.columns, StoreColumns) for part in table.parts):
        return BuiltEdges(table, graph)
    return MemoryEdges(table, graph, progress)
