"""Fields: the features of all atoms at one stage of a network, with their tangents.

A field is one contiguous tensor with its blocks one after another, and of every block first the values of all atoms, then the
tangents: (n_atoms, 2l + 1, channels) each. A linear map of a block is therefore one matrix product, of values, of tangents or
of both, and nothing is copied between products and kernels. Cotangents are fields, too: those of values in the slot of values,
those of tangents in the slot of tangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

VALUE, TANGENT = 0, 1
"""Slots of a field."""


@dataclass(frozen=True)
class Shape:
    """Components and channels of every block."""

    blocks: tuple[tuple[int, int], ...]

    @property
    def starts(self) -> list[int]:
        """Offset of each block in the numbers of an atom."""
        return [sum(k * c for k, c in self.blocks[:number]) for number in range(len(self.blocks))]

    @property
    def dim(self) -> int:
        return sum(k * c for k, c in self.blocks)


@dataclass(frozen=True)
class Field:
    """flat: (2 * n_atoms * shape.dim,)."""

    flat: Tensor
    n_atoms: int
    shape: Shape

    def both(self, block: int) -> Tensor:
        """Values and then tangents of a block as rows of channels, (2 * n_atoms * (2l + 1), channels)."""
        components, channels = self.shape.blocks[block]
        begin = 2 * self.n_atoms * self.shape.starts[block]
        return self.flat[begin : begin + 2 * self.n_atoms * components * channels].view(-1, channels)

    def rows(self, block: int, slot: int) -> Tensor:
        """Values or tangents of a block, (n_atoms * (2l + 1), channels)."""
        length = self.n_atoms * self.shape.blocks[block][0]
        return self.both(block)[slot * length : (slot + 1) * length]

    def block(self, block: int, slot: int) -> Tensor:
        """Values or tangents of a block, (n_atoms, 2l + 1, channels)."""
        return self.rows(block, slot).view(self.n_atoms, *self.shape.blocks[block])

    def blocks(self, slot: int) -> list[Tensor]:
        return [self.block(number, slot) for number in range(len(self.shape.blocks))]

    def fill(self, slot: int, blocks: Sequence[Tensor]) -> None:
        for number, values in enumerate(blocks):
            self.block(number, slot).copy_(values)


def new_field(shape: Shape, n_atoms: int, like: Tensor) -> Field:
    """An uninitialised field in the precision and on the device of `like`."""
    return Field(torch.empty(2 * n_atoms * shape.dim, dtype=like.dtype, device=like.device), n_atoms, shape)
