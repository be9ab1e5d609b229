"""What a batch carries, fixed before the first one is made: `BatchSpec`; and the random numbers that belong to its frames.

Random displacements and keys are functions of the seed, the epoch and the position of a frame in the order of the epoch, so
that they are the same on any number of ranks, with any number of threads and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_TRAINING, _EVALUATION, _KEYS = 1, 2, 3
"""Streams of random numbers, so that the same position gives unrelated numbers for each purpose."""


@dataclass(frozen=True)
class Noise:
    """Random displacements of atoms, for a model that learns to predict them.

    sigma: standard deviation along each direction, A. share: fraction of the frames that are displaced. keep_labels: whether
    displaced frames keep their other labels. alone: the displacement is the only target. fixed: for evaluation, the same
    displacements every time.
    """

    sigma: float
    seed: int
    share: float = 1.0
    keep_labels: bool = False
    alone: bool = False
    fixed: bool = False

    def displacements(self, n_atoms: int, *key: int) -> np.ndarray | None:
        """(n_atoms, 3), A, or None for a frame that is not displaced. The mean is zero, since a translated frame is the same
        frame. key: what identifies the frame, in training (epoch, position in the epoch), in evaluation (row,).
        """
        purpose = _EVALUATION if self.fixed else _TRAINING
        random = np.random.default_rng([self.seed, purpose, *key])
        if not self.fixed and random.random() >= self.share:
            return None
        displacements = self.sigma * random.standard_normal((n_atoms, 3))
        return displacements - displacements.mean(axis=0)


@dataclass(frozen=True)
class BatchSpec:
    """What batches carry in addition to structures and labels, in which order frames come, and for which device.

    targets: names of the fields that are learnt; blank frames have no value for them. frame_keys: training batches carry
    `frame_key`, as dropout needs it. noise: atoms are displaced at random and batches carry `denoise`. on_gpu: batches are
    copied to a GPU, which also builds the neighbour lists that would otherwise be built for each batch. keep_order: training
    frames come in the order of the data, each once, the same in every epoch.
    """

    targets: frozenset[str] = frozenset()
    frame_keys: bool = False
    noise: Noise | None = None
    on_gpu: bool = False
    keep_order: bool = False


def frame_keys(seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    """(n_frames,) int64 from 0 to 2^32. positions: of the frames in the order of the epoch."""
    keys = [np.random.SeedSequence([seed, _KEYS, epoch, int(p)]).generate_state(1)[0] for p in positions]
    return np.array(keys, dtype=np.int64)
