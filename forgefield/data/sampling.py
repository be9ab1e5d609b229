"""The order of frames and the loader of batches.

An order depends on (seed, epoch) and on nothing else. It is read from the raw Philox stream, which NumPy keeps
the same in all versions. The loader can start at any batch of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forgefield.data.batch import Batch, collate
from forgefield.data.dataset import GraphDataset
from forgefield.errors import ForgefieldError


def seeded_permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of 0..n-1 fixed by the integers in `key`."""
    entropy = [int(k) & (2**64 - 1) for k in key]
    stream = np.random.Philox(np.random.SeedSequence(entropy))
    return np.argsort(stream.random_raw(n), kind="stable")


def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Order of n frames in an epoch, (n,) int64."""
    return seeded_permutation(n, seed, epoch)


class FrameLoader:
    """Batches of a fixed number of frames (the last one may be smaller), in order or freshly shuffled each epoch."""

    def __init__(self, dataset: GraphDataset, frames: int, *, shuffle: bool = False, seed: int = 0) -> None:
        if frames < 1:
            raise ForgefieldError(f"data.batch.frames is {frames}; a batch holds at least one frame")
        self.dataset = dataset
        self.frames = int(frames)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._start = 0

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.frames)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration takes."""
        self.epoch = int(epoch)

    def start_at(self, batch_index: int) -> None:
        """Let the next iteration, and only that one, begin at this batch of its epoch."""
        if not 0 <= batch_index <= len(self):
            raise ValueError(f"an epoch has {len(self)} batches; it cannot start at batch {batch_index}")
        self._start = int(batch_index)

    def order(self) -> np.ndarray:
        """Frames of the present epoch in the order in which they come."""
        if self.shuffle:
            return epoch_permutation(len(self.dataset), self.seed, self.epoch)
        return np.arange(len(self.dataset))

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing is taken from `start_at` until the first batch is asked for. Lightning makes an iterator
        # just to see that it can.
        order, start = self.order(), self._start
        self._start = 0
        groups = [order[at : at + self.frames] for at in range(start * self.frames, len(order), self.frames)]
        yield from map(self._batch, groups)

    def _batch(self, rows: np.ndarray) -> Batch:
        return collate([self.dataset[int(i)] for i in rows])
