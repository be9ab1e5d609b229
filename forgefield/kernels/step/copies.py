"""Copies into many tensors of any types in one launch, each from a source that may be shorter and at another address every
time.

Addresses and lengths of the sources are written to the device before every launch, which can be part of a captured graph.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 1024
"""Elements that a program copies."""


class Copies:
    """to: tensors to fill. rest: tensors like these, from which everything after the end of a source is copied. All are
    contiguous and on one device, and their elements have at most 8 bytes."""

    def __init__(self, to: Sequence[Tensor], rest: Sequence[Tensor]) -> None:
        if any(tensor.element_size() > 8 for tensor in to):
            raise ValueError("elements of more than 8 bytes are not supported")
        self._alive = (tuple(to), tuple(rest))
        self.lengths = [tensor.numel() for tensor in to]
        device = to[0].device
        rows: list[tuple[int, ...]] = []
        for number, (tensor, others) in enumerate(zip(to, rest, strict=True)):
            about = (number, tensor.element_size(), tensor.data_ptr(), others.data_ptr())
            rows += [(*about, begin, tensor.numel()) for begin in range(0, tensor.numel(), BLOCK)]
        self._table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 6)
        self._sources = torch.zeros(2 * len(to), dtype=torch.int64, device=device)
        self._numbers = bytearray(8 * len(self._sources))
        self._on_host = torch.frombuffer(self._numbers, dtype=torch.int64)

    def set_sources(self, numbers: Sequence[int]) -> None:
        """Set address and length, in elements, of every source in turn. Sources must stay alive until the launch has
        started."""
        if any(length > most for length, most in zip(numbers[1::2], self.lengths)):
            raise ValueError(f"sources of lengths {numbers[1::2]} do not fit into tensors of lengths {self.lengths}")
        struct.pack_into(f"{len(numbers)}q", self._numbers, 0, *numbers)
        # The driver copies pageable memory to a staging buffer before it returns, so the next call may overwrite it.
        self._sources.copy_(self._on_host, non_blocking=True)

    def launch(self) -> None:
        if len(self._table):
            _kernels().fill[(len(self._table),)](
                table=self._table, sources=self._sources, columns=self._table.shape[1], block=BLOCK, num_warps=4
            )


def _kernels() -> Any:
    from forgefield.kernels.step import source

    return source
