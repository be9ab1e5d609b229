"""The order of frames and the loader of batches.

An order depends on (seed, epoch) and on nothing else. It is read from the raw Philox stream, which NumPy keeps
the same in all versions; ranks divide it among themselves. The loader can start anywhere in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forgefield.data.batch import Batch, collate, without_labels
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
    """Batches of `frames` frames for each of `world_size` ranks, in order or freshly shuffled each epoch.

    Step k of an epoch takes the next `world_size * frames` frames of the epoch's one global order; rank r gets its share of
    them, in order. The last step divides what is left evenly; a rank that is left without a frame gets a blank one, which
    counts for nothing. So every frame is seen exactly once per epoch by exactly one rank, all ranks take equally many steps,
    and what the ranks together see in a step is what one rank with the larger batch would see.
    """

    def __init__(
        self,
        dataset: GraphDataset,
        frames: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if frames < 1:
            raise ForgefieldError(f"data.batch.frames is {frames}; a batch holds at least one frame")
        if not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank} among {world_size}")
        self.dataset = dataset
        self.frames = int(frames)
        self.shuffle = shuffle
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self._begin = 0
        self._origin = (-1, 0, 0)

    @property
    def frames_per_step(self) -> int:
        """Frames of all ranks in a full step."""
        return self.frames * self.world_size

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.frames_per_step)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order the next iteration takes."""
        self.epoch = int(epoch)

    def start_at(self, sample: int) -> int:
        """Let the next iteration, and only that one, begin behind the first `sample` frames of its epoch's order.

        Returns the number of the batch it begins with, such that the epoch ends with batch `len(self) - 1` as any other. The
        place need not be one where this number of ranks would have stopped.
        """
        n = len(self.dataset)
        if not 0 <= sample <= n:
            raise ValueError(f"an epoch has {n} frames; it cannot start behind frame {sample}")
        first_batch = len(self) - -(-(n - sample) // self.frames_per_step)
        self._begin = int(sample)
        self._origin = (self.epoch, self._begin, first_batch)
        return first_batch

    def position(self, batch: int) -> int:
        """How many frames of the present epoch's order come before this batch, over all ranks."""
        epoch, sample, first_batch = self._origin
        if epoch != self.epoch:
            sample, first_batch = 0, 0
        return min(sample + (batch - first_batch) * self.frames_per_step, len(self.dataset))

    def own_frames(self, batch: int) -> int:
        """How many real frames this rank has in that batch; 0 where it only keeps step with the others."""
        first, last = self._share(self.position(batch + 1) - self.position(batch))
        return last - first

    def order(self) -> np.ndarray:
        """Frames of the present epoch in the order in which they come."""
        if self.shuffle:
            return epoch_permutation(len(self.dataset), self.seed, self.epoch)
        return np.arange(len(self.dataset))

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing is taken from `start_at` until the first batch is asked for. Lightning makes an iterator
        # just to see that it can.
        order, begin = self.order(), self._begin
        self._begin = 0
        for at in range(begin, len(order), self.frames_per_step):
            step = order[at : at + self.frames_per_step]
            first, last = self._share(len(step))
            yield self._batch(step[first:last])

    def _share(self, n: int) -> tuple[int, int]:
        """First and last + 1 of this rank's frames among the n of a step; ranks differ by one frame at most."""
        return n * self.rank // self.world_size, n * (self.rank + 1) // self.world_size

    def _batch(self, rows: np.ndarray) -> Batch:
        if len(rows) == 0:
            return without_labels(self.dataset[int(self.dataset.n_atoms.argmin())])
        return collate([self.dataset[int(i)] for i in rows])
