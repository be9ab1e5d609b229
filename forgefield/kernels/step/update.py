"""A step of Adam or AdamW for all weights in one launch, including the average of the weights; a second launch if gradients are
clipped by their norm.

The result is that of PyTorch's fused optimisers, to rounding. Those assign 65536 numbers to a block of threads, so that a
million weights occupy few processors; here a program has 1024. Gradients are clipped when they are read and are not modified.
Numbers that change from step to step are on the device: learning rates, step counts, the share of the weights in their
average, and whether to skip the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

BLOCK = 1024
"""Numbers that a program updates."""
SUMMED = 4096
"""Numbers of a gradient that a program squares and sums at a time."""
PARTS = 512
"""Approximate number of partial sums of squares: every program of the update reads them all."""
LANES = 256
"""Partial sums, or counts, that are read at a time; at least the number of threads of a program."""
WARPS = 4


@dataclass(frozen=True)
class Group:
    """Settings of a group of weights, with PyTorch's names. rate: float32, on the device. decoupled: weight decay as in
    AdamW."""

    rate: Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool

    def numbers(self) -> tuple[float, ...]:
        """Numbers of a group that the kernel reads."""
        (first, second), decay = self.betas, self.weight_decay
        decays = (0.0, decay) if self.decoupled else (decay, 0.0)
        return (1 - first, 1 - second, _log(first), _log(second), self.eps, *decays)


@dataclass(frozen=True)
class Weight:
    """A tensor of weights with its state, float32, contiguous and of the same shape. count: number of steps so far, a scalar.
    Without a gradient there is no state, and only the average is updated."""

    weight: Tensor
    average: Tensor | None = None
    gradient: Tensor | None = None
    mean: Tensor | None = None
    square: Tensor | None = None
    count: Tensor | None = None
    group: int = 0


class AdamStep:
    """A step over tensors whose addresses do not change: it can be captured.

    share: of the weights in their average, float32. found_inf: 1 to skip the step, including counts and average. clip: the
    largest norm of all gradients together, or the largest absolute value of a number ("norm", "value"). It must be built, and
    `compile` called, before a capture. All of its tables stay on the device as long as it exists.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        groups: Sequence[Group],
        *,
        share: Tensor | None = None,
        found_inf: Tensor | None = None,
        clip: tuple[str, float] | None = None,
    ) -> None:
        device = weights[0].weight.device
        # Not the gradients: if new ones are allocated in every step, old ones would accumulate.
        self._alive = (tuple(replace(weight, gradient=None) for weight in weights), tuple(groups))
        self._clip, limit = clip or ("", 0.0)
        counts = [weight.count.data_ptr() for weight in weights if weight.count is not None]
        total = sum(weight.gradient.numel() for weight in weights if weight.gradient is not None)
        self._chunk = SUMMED * max(1, math.ceil(total / (SUMMED * PARTS)))
        rows, chunks = self._addresses(weights, groups)
        self._table, self._chunks = rows.to(device), chunks.to(device)
        self._counts = torch.tensor(counts, dtype=torch.int64, device=device)
        self._groups = torch.tensor([group.numbers() for group in groups], dtype=torch.float64, device=device)
        self._limit = torch.tensor(limit, dtype=torch.float64, device=device)
        self._parts = torch.zeros(len(self._chunks), dtype=torch.float64, device=device)
        self._done = torch.zeros((), dtype=torch.int32, device=device)
        self._share = share
        self._found_inf = torch.zeros((), device=device) if found_inf is None else found_inf

    def bind(self, weights: Sequence[Weight]) -> None:
        """Use other tensors of the same shapes, in captured launches too: gradients that were made during a capture, when
        nothing can be copied to the device."""
        for table, addresses in zip((self._table, self._chunks), self._addresses(weights, self._alive[1])):
            table.copy_(addresses)

    def _addresses(self, weights: Sequence[Weight], groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
        """Tables of the programs of the update, and of those of the sums of squares."""
        gradients = [weight.gradient for weight in weights if weight.gradient is not None]
        rows = [row for weight in weights for row in _rows(weight, groups)]
        chunks = [row for gradient in gradients for row in _chunks(gradient, self._chunk)]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 9), torch.tensor(chunks, dtype=torch.int64).view(-1, 2)

    def launch(self) -> None:
        if self._clip == "norm" and len(self._chunks):
            self._add_squares(self._chunks)
        if len(self._table):
            self._adam(self._table, len(self._counts))

    def compile(self) -> None:
        """Launch everything once without work: kernels cannot be compiled or loaded during a capture."""
        if self._clip == "norm":
            self._add_squares(self._chunks.new_zeros((1, 2)), self._parts.new_zeros(1))
        self._adam(self._table.new_zeros((1, self._table.shape[1])), 0)

    def _adam(self, table: Tensor, n_counts: int) -> None:
        _kernels().adam[(len(table),)](
            table=table,
            groups=self._groups,
            counts=self._counts,
            done=self._done,
            share=self._groups if self._share is None else self._share,
            found_inf=self._found_inf,
            limit=self._limit,
            parts=self._parts,
            n_counts=n_counts,
            n_parts=len(self._parts),
            averages=self._share is not None,
            clip=self._clip,
            columns=table.shape[1],
            settings=self._groups.shape[1],
            block=BLOCK,
            lanes=LANES,
            num_warps=WARPS,
        )

    def _add_squares(self, table: Tensor, parts: Tensor | None = None) -> None:
        parts = self._parts if parts is None else parts
        _kernels().add_squares[(len(table),)](
            table=table, parts=parts, chunk=self._chunk, columns=table.shape[1], block=SUMMED, num_warps=8
        )


def _rows(of: Weight, groups: Sequence[Group]) -> Iterator[tuple[int, ...]]:
    """One for each program: addresses, with zero for what is not there, number of the group, and how many numbers."""
    if of.gradient is None and of.average is None:
        return
    length = of.weight.numel()
    tensors = (of.weight, of.gradient, of.mean, of.square, of.average)
    for begin in range(0, max(length, 1), BLOCK):
        places = [0 if t is None else t.data_ptr() + begin * t.element_size() for t in tensors]
        count = 0 if of.count is None else of.count.data_ptr()
        yield (*places, count, groups[of.group].rate.data_ptr(), of.group, min(BLOCK, length - begin))


def _chunks(gradient: Tensor, chunk: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, gradient.numel(), chunk):
        yield gradient.data_ptr() + begin * gradient.element_size(), min(chunk, gradient.numel() - begin)


def _log(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf


def _kernels() -> Any:
    from forgefield.kernels.step import source

    return source
