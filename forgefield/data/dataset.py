"""Frames with their neighbour lists, built once at construction and kept as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forgefield.data.batch import Batch, frame_to_batch
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable

Progress = Callable[[int, int], None]


class GraphDataset:
    """Single-frame batches by position. A batch of one frame shares these tensors: treat them as read-only."""

    def __init__(
        self,
        frames: Sequence[Frame],
        species: SpeciesTable,
        cutoff: float,
        neighbours: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        self.frames = list(frames)
        self.species = species
        self.cutoff = float(cutoff)
        self._samples: list[Batch] = []
        for i, frame in enumerate(self.frames):
            self._samples.append(frame_to_batch(frame, species, self.cutoff, neighbours, i))
            if progress is not None:
                progress(i + 1, len(self.frames))
        self.n_atoms = np.array([len(frame) for frame in self.frames], dtype=np.int64)
        self.n_edges = np.array([sample["edge_index"].shape[1] for sample in self._samples], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, i: int) -> Batch:
        return self._samples[i]
