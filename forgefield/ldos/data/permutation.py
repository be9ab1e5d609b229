"""Permutations that are computed, not stored: any range of them, on any device, without an array of indices.

A Feistel network over a x b positions, the smallest such rectangle with a near b that contains all n; positions beyond n (about
one in sqrt(n)) are mapped again until they are below n. Integer arithmetic only, so CPU and GPU agree exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ROUNDS = 6
_MIX_A, _MIX_B = -0x61C8864680B583EB, -0x4B47D0C52E1ED359  # odd, with well distributed bits; as signed integers
_LOW = 0xFFFFFFFF


def round_keys(*key: int, count: int = ROUNDS) -> list[int]:
    """Signed 64-bit numbers determined by the integers in `key`."""
    entropy = [int(k) & (2**64 - 1) for k in key]
    return np.random.SeedSequence(entropy).generate_state(count, np.uint64).view(np.int64).tolist()


def hash_integers(values: Tensor, key: int, size: int) -> Tensor:
    """A pseudorandom number from 0 to size - 1 for each value and key. values: int64; size: below 2^31."""
    mixed = (values + key) * _MIX_A
    mixed ^= mixed >> 32
    mixed *= _MIX_B
    mixed >>= 32
    mixed &= _LOW
    mixed *= size
    mixed >>= 32
    return mixed


class Permutation:
    """A permutation of 0..n-1 determined by `key`.

    Called with positions, int64 of any shape, it returns the value at each; `inverse` returns the position of each value.
    `stream`: optional, an integer for each position that selects one of several permutations.
    """

    def __init__(self, n: int, *key: int) -> None:
        if n < 1:
            raise ValueError(f"there is no permutation of {n} elements")
        if n >= 2**50:
            raise ValueError(f"{n} elements are more than this permutation supports")
        self.n = int(n)
        self._rows = math.isqrt(self.n - 1) + 1
        self._columns = -(-self.n // self._rows)
        self._keys = round_keys(*key)

    def __call__(self, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        return self._walk(positions, stream, self._forward)

    def inverse(self, values: Tensor, stream: Tensor | None = None) -> Tensor:
        return self._walk(values, stream, self._backward)

    def _walk(
        self, positions: Tensor, stream: Tensor | None, step: Callable[[Tensor, Tensor | None], Tensor]
    ) -> Tensor:
        offset = None if stream is None else stream * _MIX_B
        result = step(positions, offset)
        if self._rows * self._columns == self.n:
            return result
        flat = result.reshape(-1)
        beyond = (flat >= self.n).nonzero().squeeze(1)
        while beyond.numel():
            again = step(flat[beyond], None if offset is None else offset.reshape(-1)[beyond])
            flat[beyond] = again
            beyond = beyond[again >= self.n]
        return result

    def _split(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        # Exact below 2^50, and much faster than a division of integers.
        row = positions.to(torch.float64).div_(self._columns).to(torch.int64)
        return row, positions - row * self._columns

    def _forward(self, positions: Tensor, offset: Tensor | None) -> Tensor:
        row, column = self._split(positions)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                row = _rotate(row, _seed(column, offset), key, self._rows)
            else:
                column = _rotate(column, _seed(row, offset), key, self._columns)
        return row * self._columns + column

    def _backward(self, positions: Tensor, offset: Tensor | None) -> Tensor:
        row, column = self._split(positions)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2 == 0:
                row = _rotate(row, _seed(column, offset), key, self._rows, back=True)
            else:
                column = _rotate(column, _seed(row, offset), key, self._columns, back=True)
        return row * self._columns + column


def _seed(half: Tensor, offset: Tensor | None) -> Tensor:
    return half if offset is None else half + offset


def _rotate(half: Tensor, by: Tensor, key: int, size: int, back: bool = False) -> Tensor:
    """`half` plus (or minus) a pseudorandom number determined by `by`, modulo `size`."""
    turn = hash_integers(by, key, size)
    if back:
        turn = half - turn
    else:
        turn += half
        turn -= size
    around = turn >> 63  # all bits set if negative: cheaper than a comparison
    around &= size
    turn += around
    return turn


def positions_tensor(start: int, stop: int, step: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """start, start + step, ... below stop, int64."""
    return torch.arange(start, max(stop, start), step, dtype=torch.int64, device=device)
