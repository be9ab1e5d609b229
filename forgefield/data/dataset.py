"""Frames with their neighbour lists, assembled into batches directly from columns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from forgefield.data.batch import SHAPES, Batch, BatchSpec, Noise, assemble, without_labels
from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Fields
from forgefield.data.neighbours.edges import (
    BuiltEdges,
    DeviceEdges,
    MemoryEdges,
    NeighbourLists,
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

    Neighbour lists are built once and kept for frames in memory, read from stores that contain them, and otherwise built for
    each batch.

    graph: options of the neighbour lists, or the cutoff in A. on_device: batches come without edges, which are then built on
    the device of the model (`with_edges`). branches: names of the branches of the model; batches carry the index of the branch
    that each frame is for. targets: names of the fields that are trained on; the other fields are inputs of the model, which
    blank frames need too.
    """

    def __init__(
        self,
        frames: FrameTable | Sequence[Frame],
        species: SpeciesTable,
        graph: GraphOptions | float,
        progress: Progress | None = None,
        *,
        on_device: bool = False,
        branches: Sequence[str] = (),
        targets: frozenset[str] = frozenset(),
    ) -> None:
        self.frames = frames if isinstance(frames, FrameTable) else FrameTable.from_frames(frames)
        self.species = species
        self.fields: Fields = self.frames.fields
        self.targets = targets & self.fields.keys()
        self._branch = _branch_indices(self.frames, branches) if branches else None
        self.graph = graph if isinstance(graph, GraphOptions) else GraphOptions(float(graph))
        self._require_species()
        if on_device and (self.graph.adaptive_cutoff is not None or self.graph.max_neighbours is not None):
            raise ForgefieldError(
                "data.neighbours=device supports neighbour lists with one cutoff only; leave out data.adaptive_cutoff and "
                "data.max_neighbours, or use data.neighbours=auto"
            )
        self.edges: NeighbourLists = DeviceEdges() if on_device else _neighbour_lists(self.frames, self.graph, progress)

    def serve(self, spec: BatchSpec, *, device_may_build_edges: bool) -> GraphDataset:
        """The same frames and neighbour lists, for batches as `spec` describes them.

        device_may_build_edges: lists that would be built for each batch are built on the GPU, if `spec` uses one and it
        supports them.
        """
        served = copy.copy(self)
        served.targets = spec.targets & self.fields.keys()
        if (
            spec.on_gpu
            and device_may_build_edges
            and isinstance(self.edges, BuiltEdges)
            and self.graph == GraphOptions(self.cutoff, self.graph.neighbours)
        ):
            served.edges = DeviceEdges()
        return served

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
        """(n_frames,), or None if unknown before the lists are built."""
        return self.edges.n_edges

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, row: int) -> Batch:
        """The batch of one frame."""
        return self.batch(np.array([row]))

    def batch(self, rows: np.ndarray | Sequence[int], displacements: np.ndarray | None = None) -> Batch:
        """These frames in this order; `frame_id` is their row.

        displacements: (n_atoms, 3), A, added to the positions, NaN for atoms that stay. Edges are those of the displaced
        structure, and the batch carries the displacements as `denoise`.
        """
        view = self.frames.find(np.array(rows, dtype=np.int64))
        geometry = geometry_of(view)
        if displacements is None:
            edges, extra = self.edges.read(view, geometry), {}
        else:
            geometry = replace(geometry, positions=geometry.positions + np.nan_to_num(displacements))
            where = self.frames.where
            edges = (
                None
                if self.on_device
                else build_block(geometry, self.graph, lambda i: f"{where(int(view.rows[i]))}, with displaced atoms")[0]
            )
            extra = {"denoise": displacements}
        return assemble(
            geometry,
            edges,
            **extra,
            species=self.species.index(view.atoms("numbers")),
            energy=view.column("energy"),
            forces=view.atoms("forces"),
            stress=view.column("stress"),
            weight=view.column("weight"),
            frame_id=view.rows,
            **({} if self._branch is None else {"branch": self._branch[view.rows]}),
            **{name: view.field(name) for name in self.fields},
        )

    def noised_training_batch(self, rows: np.ndarray, noise: Noise, epoch: int, positions: np.ndarray) -> Batch:
        """A batch in which some frames are displaced, with the displacements as labels.

        positions: of the frames in the order of the epoch, (n_frames,).
        """
        displaced = [noise.displacements(int(n), epoch, int(p)) for n, p in zip(self.n_atoms[rows], positions)]
        return self._displaced(rows, displaced, keep_labels=noise.keep_labels)

    def noised_evaluation_batch(self, rows: np.ndarray, noise: Noise) -> Batch:
        """The unchanged frames, followed by displaced copies of all of them without other labels, so that every frame counts
        once for each target. Only the copies if the displacement is the only target."""
        displaced: list[np.ndarray | None] = [noise.displacements(int(self.n_atoms[row]), int(row)) for row in rows]
        if noise.alone:
            return self._displaced(rows, displaced, keep_labels=False)
        return self._displaced(np.concatenate([rows, rows]), [*[None] * len(rows), *displaced], keep_labels=False)

    def _displaced(self, rows: np.ndarray, by_frame: list[np.ndarray | None], *, keep_labels: bool) -> Batch:
        """by_frame: displacements of each frame, (n_atoms, 3), A; None for a frame that is not displaced."""
        sizes = self.n_atoms[rows]
        batch = self.batch(
            rows, np.concatenate([np.full((n, 3), np.nan) if d is None else d for n, d in zip(sizes, by_frame)])
        )
        if keep_labels:
            return batch
        is_displaced = torch.tensor([d is not None for d in by_frame])
        of_atoms = is_displaced[batch["frame"]]
        for name in ("energy", "forces", "stress", *sorted(self.targets)):
            per_atom = SHAPES[name][0] == "atoms" if name in SHAPES else self.fields[name].per == "atom"
            batch[name][of_atoms if per_atom else is_displaced] = torch.nan
        return batch

    def blank(self) -> Batch:
        """The batch of one frame without labels and weight, for a rank that would have no frames in a step."""
        return without_labels(self[int(self.n_atoms.argmin())], self.targets)

    def _require_species(self) -> None:
        """Refuse frames with an element that is not in the species table."""
        components = self.frames.components
        present = np.flatnonzero(np.bincount(components.number))
        missing = np.setdiff1d(present, self.species.numbers)
        if len(missing):
            first = int(np.flatnonzero(np.isin(components.number, missing))[0])
            where = self.frames.where(int(components.frame[first]))
            self.species.index(components.number[first : first + 1], where)


def _branch_indices(frames: FrameTable, branches: Sequence[str]) -> np.ndarray:
    """(n_frames,) index of each frame's branch in `branches`."""
    indices = frames.branch_of_frame(branches)
    without = np.flatnonzero(indices < 0)
    if len(without):
        raise ForgefieldError(
            f"{frames.where(int(without[0]))}: its source does not name a branch of the model; write {{path: ..., branch: "
            f"NAME}} in the data section, where NAME is one of {', '.join(branches)}"
        )
    return indices


def _neighbour_lists(table: FrameTable, graph: GraphOptions, progress: Progress | None) -> NeighbourLists:
    if holds_graph(table, graph):
        return StoredEdges(table)
    if any(isinstance(part.columns, StoreColumns) for part in table.parts):
        return BuiltEdges(table, graph)
    return MemoryEdges(table, graph, progress)
