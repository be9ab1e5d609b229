"""The order of points that are read from disk while they are used: near a full shuffle, and read in long stretches.

Pure functions of (seed, epoch). All points are cut into blocks of equal length, at places that are fresh every epoch. A window
is a set of blocks that fits into memory: one from every part of the data, drawn at random, so that each window is a sample of
all snapshots. Within a window the places go round its blocks: place p takes a point of block p mod n_blocks; which point is
decided by a permutation of that block's own. So a stretch of an epoch has equally many points of each block, and with W ranks,
rank r needs only the blocks r, r + W, ... of a window. The few points that are left between blocks (fewer than one for each
block, evenly spread) come last.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forgefield.data.sampling.order import seeded_permutation
from forgefield.ldos.data.permutation import Permutation, positions_tensor, round_keys
from forgefield.ldos.data.staging import Stretch

BLOCKS = 960
"""Blocks of a window: with any number of ranks that divides it each rank reads its own blocks only."""
OFFSET, LEFT_OVER, WITHIN, DEALT = 11, 12, 13, 14


class EpochWindows(Protocol):
    """An epoch as windows, one after the other, and what a rank needs of each."""

    ends: list[int]
    """Place at which each window ends."""

    def stretches(self, window: int, rank: int, world_size: int) -> list[Stretch]:
        """What the rank reads, and where it goes in its buffer."""

    def buffer_rows(self, window: int, places: range) -> Tensor:
        """Row of the buffer for each of a rank's places, all of which are in this window."""


class InOrder:
    """Points as they lie, in windows of equal length. Every rank reads all of a window and takes its own."""

    def __init__(self, n: int, window: int, device: torch.device | str = "cpu") -> None:
        self.ends = [min(start + window, n) for start in range(0, n, window)]
        self._window, self._device = window, device

    def stretches(self, window: int, rank: int, world_size: int) -> list[Stretch]:
        return [Stretch(window * self._window, self.ends[window], 0)]

    def buffer_rows(self, window: int, places: range) -> Tensor:
        return positions_tensor(places.start, places.stop, places.step, self._device) - window * self._window


class ShuffledBlocks:
    """Blocks of all snapshots in windows, shuffled. window: points of a window, at most, but at least one of each block."""

    def __init__(
        self, n: int, window: int, seed: int, epoch: int, blocks: int = BLOCKS, device: torch.device | str = "cpu"
    ) -> None:
        self.blocks = max(1, min(blocks, n))
        self.n_windows = max(1, min(-(-n // max(window, 1)), n // self.blocks))
        n_blocks = self.n_windows * self.blocks
        self.length = n // n_blocks
        """Points of each block."""
        self._n, self._device = n, device
        self._key = (seed, epoch)
        starts = (
            np.arange(n_blocks, dtype=np.int64) * (n // n_blocks) + np.arange(n_blocks) * (n % n_blocks) // n_blocks
        )
        offset = round_keys(seed, epoch, OFFSET, count=1)[0] % n
        self._starts = (starts + offset)[self._blocks_in_order()]
        """First place of each block in the selection, in the order of use; beyond n it goes on at 0."""
        last = starts + self.length
        left_over = last[np.append(starts[1:], n) > last]
        self._left_over = ((left_over + offset) % n)[seeded_permutation(len(left_over), seed, epoch, LEFT_OVER)]
        size = self.blocks * self.length
        self.ends = [size * (window + 1) for window in range(self.n_windows)]
        if len(left_over):
            self.ends.append(n)

    def _blocks_in_order(self) -> np.ndarray:
        """Numbers of blocks as they are used, (n_windows * blocks,): of each stretch of n_windows blocks one in each window."""
        stretch = torch.from_numpy(seeded_permutation(self.blocks, *self._key)).repeat(self.n_windows)
        window = torch.arange(self.n_windows).repeat_interleave(self.blocks)
        which = Permutation(self.n_windows, *self._key, DEALT)(window, stretch)
        return (stretch * self.n_windows + which).numpy()

    def stretches(self, window: int, rank: int, world_size: int) -> list[Stretch]:
        if window == self.n_windows:
            first = self.ends[window - 1]
            own = range(first + (rank - first) % world_size, self._n, world_size)
            chosen = self._left_over[np.array(own, dtype=np.int64) - first]
            return [Stretch(int(place), int(place) + 1, at) for at, place in enumerate(chosen)]
        lanes = range(rank, self.blocks, world_size) if self.blocks % world_size == 0 else range(self.blocks)
        found: list[Stretch] = []
        for at, lane in enumerate(lanes):
            found += self._around(int(self._starts[window * self.blocks + lane]), at * self.length)
        return found

    def _around(self, start: int, at: int) -> list[Stretch]:
        """The block that begins at `start`, in two parts where it runs over the end of the data."""
        start %= self._n
        stop = start + self.length
        if stop <= self._n:
            return [Stretch(start, stop, at)]
        return [Stretch(start, self._n, at), Stretch(0, stop - self._n, at + self._n - start)]

    def buffer_rows(self, window: int, places: range) -> Tensor:
        if window == self.n_windows:
            first = self.ends[window - 1]
            wanted = positions_tensor(places.start, places.stop, places.step, self._device)
            return torch.div(wanted - first, places.step, rounding_mode="floor")
        wanted = positions_tensor(places.start, places.stop, places.step, self._device)
        turn = torch.div(wanted, self.blocks, rounding_mode="floor")
        lane = wanted - turn * self.blocks
        within = Permutation(self.length, *self._key, WITHIN, window)(turn - window * self.length, lane)
        ranks = places.step
        if self.blocks % ranks == 0:
            lane = torch.div(lane, ranks, rounding_mode="floor")
        return lane * self.length + within
