"""Random numbers that are a function of keys: the same keys give the same numbers on any device, on any number of ranks,
compiled or not, and in any order.

Keys are integers from 0 to 2^32 - 1, in int64 tensors. Products stay below 2^63, so that nothing depends on how a device or a
compiler handles integer overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANGE = 1 << 32
_LOW = RANGE - 1
_STEP = 0x1E3779B9


def mixed(keys: Tensor) -> Tensor:
    """Keys, each mapped one-to-one to another that looks unrelated."""
    keys = torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 16))
    keys = torch.bitwise_and(keys * 0x21F0AAAD, _LOW)
    keys = torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 15))
    keys = torch.bitwise_and(keys * 0x735A2D97, _LOW)
    return torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 15))


def combined(keys: Tensor, numbers: Tensor) -> Tensor:
    """A key for each pair; both are broadcast. numbers: from 0 to 2^32."""
    return mixed(torch.bitwise_and(keys + mixed(torch.bitwise_and(numbers + _STEP, _LOW)), _LOW))


def in_subset(keys: Tensor, share: float) -> Tensor:
    """Whether each key belongs to a random subset with this share of all keys."""
    return keys < round(share * RANGE)
