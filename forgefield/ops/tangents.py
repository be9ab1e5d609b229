"""Values and tangents side by side: tensors (n, 2, ...) whose second dimension holds a value and how it changes.

Linear maps act on both rows alike, as one product. Everything else goes through torch's forward-mode differentiation here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


def carried(function: Callable[[list[Tensor]], list[Tensor]], rows: Sequence[Tensor]) -> list[Tensor]:
    """What `function` makes of tensors (n, ...), for rows (n, R, ...): R is 1 for values alone, 2 with tangents."""
    if rows[0].shape[1] == 1:
        return [value.unsqueeze(1) for value in function([row.squeeze(1) for row in rows])]
    with forward_ad.dual_level():
        made = function([forward_ad.make_dual(row[:, 0], row[:, 1]) for row in rows])
        pairs = [forward_ad.unpack_dual(value) for value in made]
        return [torch.stack([pair.primal, _tangent(pair)], 1) for pair in pairs]


def side_by_side(value: Tensor) -> Tensor:
    """(n, 2, ...) from a value that carries a tangent, inside the level of differentiation that this belongs to."""
    pair = forward_ad.unpack_dual(value)
    return torch.stack([pair.primal, _tangent(pair)], 1)


def tangent_of(value: Tensor) -> Tensor:
    """What a value carries, zero where it carries nothing, inside the level of differentiation that this belongs to."""
    return _tangent(forward_ad.unpack_dual(value))


def _tangent(pair: forward_ad.UnpackedDualTensor) -> Tensor:
    return torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent
