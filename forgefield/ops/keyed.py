"""Random numbers that are a function of keys: whoever asks with the same keys gets the same numbers, on any device, on any
number of ranks, compiled or not, and in any order.

Keys are whole numbers from 0 to 2^32, in int64 tensors. Products stay below 2^63, so that nothing depends on how a device
or a compiler lets an integer overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

RANGE = 1 << 32
_LOW = RANGE - 1
_STEP = 0x1E3779B9


def mixed(keys: Tensor) -> Tensor:
    """Keys, each replaced by another one that looks unrelated; one to one."""
    keys = torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 16))
    keys = torch.bitwise_and(keys * 0x21F0AAAD, _LOW)
    keys = torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 15))
    keys = torch.bitwise_and(keys * 0x735A2D97, _LOW)
    return torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, 15))


def combined(keys: Tensor, numbers: Tensor) -> Tensor:
    """A key for each pair; both are broadcast. numbers: from 0 to 2^32."""
    return mixed(torch.bitwise_and(keys + mixed(torch.bitwise_and(numbers + _STEP, _LOW)), _LOW))


def kept(keys: Tensor, share: float) -> Tensor:
    """Whether each key is among the chosen, of which there are this share."""
    return keys < round(share * RANGE)
