"""Atoms moved at random, for a model to learn by how much; and keys of frames, for whatever else is drawn in training.

Both are functions of the seed, the epoch and a frame's place in the order of the epoch, so that they are the same on any number
of ranks, with any number of threads and after a resume. The data itself is never changed: moves are added to a copy of the
positions, and neighbour lists are made for where the atoms are then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from forgefield.data.batch import SHAPES, Batch
from forgefield.data.dataset import GraphDataset

_TRAINING, _EVALUATION, _KEYS = 1, 2, 3
"""What numbers are drawn for, so that the same place gives unrelated ones."""


@dataclass(frozen=True)
class Noise:
    """sigma: standard deviation along each direction, A. share: of the frames that are moved. keep_labels: whether moved frames
    keep their other labels. alone: nothing else is learnt. fixed: for evaluation, always the same moves.
    """

    sigma: float
    seed: int
    share: float = 1.0
    keep_labels: bool = False
    alone: bool = False
    fixed: bool = False

    def moves(self, n_atoms: int, *place: int) -> np.ndarray | None:
        """(n_atoms, 3), A, with mean zero, since a frame moved as a whole is the same frame; None where it is not moved."""
        purpose = _EVALUATION if self.fixed else _TRAINING
        random = np.random.default_rng([self.seed, purpose, *place])
        if not self.fixed and random.random() >= self.share:
            return None
        moves = self.sigma * random.standard_normal((n_atoms, 3))
        return moves - moves.mean(axis=0)


def frame_keys(seed: int, epoch: int, places: np.ndarray) -> np.ndarray:
    """(n_frames,) int64 from 0 to 2^32. places: of the frames in the order of the epoch."""
    keys = [np.random.SeedSequence([seed, _KEYS, epoch, int(place)]).generate_state(1)[0] for place in places]
    return np.array(keys, dtype=np.int64)


def noised_batch(dataset: GraphDataset, rows: np.ndarray, noise: Noise, epoch: int, places: np.ndarray) -> Batch:
    """A batch of a training: some frames are moved and learn by how much, the others are as they are."""
    parts = [noise.moves(int(n), epoch, int(place)) for n, place in zip(dataset.n_atoms[rows], places)]
    return _moved(dataset, rows, parts, keep_labels=noise.keep_labels)


def with_noised_copies(dataset: GraphDataset, rows: np.ndarray, noise: Noise) -> Batch:
    """A batch of an evaluation: frames as they are, and behind them all of them moved, without any other label. So every frame
    counts once for each target."""
    parts: list[np.ndarray | None] = [noise.moves(int(dataset.n_atoms[row]), int(row)) for row in rows]
    if noise.alone:
        return _moved(dataset, rows, parts, keep_labels=False)
    return _moved(dataset, np.concatenate([rows, rows]), [*[None] * len(rows), *parts], keep_labels=False)


def _moved(dataset: GraphDataset, rows: np.ndarray, parts: list[np.ndarray | None], *, keep_labels: bool) -> Batch:
    sizes = dataset.n_atoms[rows]
    moves = np.concatenate([np.full((n, 3), np.nan) if part is None else part for n, part in zip(sizes, parts)])
    batch = dataset.batch(rows, moves)
    if keep_labels:
        return batch
    is_moved = torch.tensor([part is not None for part in parts])
    of_atoms = is_moved[batch["frame"]]
    for name in ("energy", "forces", "stress", *sorted(dataset.targets)):
        per_atom = SHAPES[name][0] == "atoms" if name in SHAPES else dataset.fields[name].per == "atom"
        batch[name][of_atoms if per_atom else is_moved] = torch.nan
    return batch
