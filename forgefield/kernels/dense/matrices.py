"""The matrices of a network from its weights in one launch, and the gradients of the weights from theirs in two.

Weights are read where they lie, as they are trained: of unit variance. Matrices are these times a constant, or, where they
belong to a species, sums over its embedding: matrix[u, s, w] = c sum_v weight[u, v, w] embedding[s, v]. Kernels that multiply
with them read them packed: transposed too, and each number as its leading bits and the rest. Sums are made in float64: an error
of a matrix is that of all atoms of a species at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.kernels.core.runtime import capturing

DOWN, ACROSS, MADE_WARPS = 8, 32, 2
"""Rows and columns of a matrix that one program makes, and the warps of it."""
EIGHT = 8
"""Numbers of an embedding that are read at a time."""
NUMBERS, ROWS, BACK_WARPS = 2048, 2, 4
"""Gradients of weights that one program makes at a time; of a species' matrix it does so for so many rows of it."""
SUMMED = 8192
"""Numbers that one program reads at a time to sum up the gradient of a species' embedding."""
MOST = 64
"""Sets of weights whose places are kept; those of others are copied into one row."""


@dataclass(frozen=True)
class Matrix:
    """rows, width: of the matrix, for each species where there is one of each. weight, out: where it begins among the weights
    and among the matrices."""

    of_species: bool
    rows: int
    width: int
    weight: int
    out: int


@dataclass(frozen=True)
class Programs:
    """What every program of a launch does, a row each: whether it is of species, which matrix, its rows and width, where it
    begins among the gradients of weights and among the matrices; then the first row, or number, the first column, and where
    rows or numbers end."""

    make: Tensor
    back: Tensor


class Places(NamedTuple):
    """Where the weights of every part begin, in numbers behind the first tensor of them. aligned: in fours, as all rows do."""

    starts: Tensor
    aligned: bool


class Matrices:
    """All matrices of a network. size: numbers from the first of them to the last. n_embedding: numbers of a species.

    Packed they are four rows of this size: transposed, leading bits and rest, and as they are, leading bits and rest. A matrix
    of each species is (rows, n_species, width) as it is and (n_species, width, rows) transposed.
    """

    def __init__(self, parts: Sequence[Matrix], size: int, n_embedding: int) -> None:
        self.parts, self.size, self.n_embedding = tuple(parts), size, n_embedding
        self.wide = max(16, 1 << (n_embedding - 1).bit_length())
        self.across = max(16, NUMBERS // self.wide)
        self._aligned = all(n % 4 == 0 for part in parts for n in (part.width, part.weight, part.out))
        # for good: captured graphs read them
        self._programs: dict[torch.device, Programs] = {}
        self._places: dict[_Key, Places] = {}

    def __call__(self, weights: Sequence[Tensor], embedding: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices in a row (size,), and packed (4 * size,), which has no gradient. weights: rows which make up, one after
        the other, that of all parts. embedding: (n_species, n_embedding). constants: of each part, float64. What lies between
        two matrices is not filled."""
        if not self._can_stay(weights):
            weights = [torch.cat(tuple(weights))]
        return _Made.apply(self, embedding, constants, *weights)

    def _can_stay(self, weights: Sequence[Tensor]) -> bool:
        """Whether weights are read where they lie. Parameters are; a graph that is being captured reads them where they lay
        before. What is computed lies elsewhere every time."""
        if any(weight.grad_fn is not None or not weight.is_contiguous() for weight in weights):
            return False
        return _key(weights) in self._places or (len(self._places) < MOST and not capturing())

    def places(self, weights: Sequence[Tensor]) -> Places:
        key = _key(weights)
        if key not in self._places:
            in_a_row = (key[0], ((0, sum(length for _, length in key[1])),))  # which a capture may need
            for new in {key, in_a_row} - self._places.keys():
                self._places[new] = self._find(*new)
        return self._places[key]

    def _find(self, device: torch.device, tensors: tuple[tuple[int, int], ...]) -> Places:
        """tensors: where each begins behind the first, in numbers, and its length."""
        begun = list(accumulate((length for _, length in tensors), initial=0))[:-1]
        starts = []
        for part in self.parts:
            number = bisect_right(begun, part.weight) - 1
            starts.append(tensors[number][0] + part.weight - begun[number])
        aligned = self._aligned and all(start % 4 == 0 for start in starts)
        return Places(torch.tensor(starts, dtype=torch.int64, device=device), aligned)

    def programs(self, device: torch.device) -> Programs:
        if device not in self._programs:
            rows = (self._to_make(), [*self._of_species, *self._of_none])
            self._programs[device] = Programs(*(torch.tensor(r, dtype=torch.int64, device=device) for r in rows))
        return self._programs[device]

    def _to_make(self) -> list[tuple[int, ...]]:
        """Those of species first, which take longest."""
        return [
            (*about, row, column, part.rows)
            for about, part in sorted(self._about(), key=lambda pair: not pair[1].of_species)
            for row in range(0, part.rows, DOWN)
            for column in range(0, part.width, ACROSS)
        ]

    @cached_property
    def _of_species(self) -> list[tuple[int, ...]]:
        """Of the way back, each of which gives a part of the gradient of the embedding, too."""
        return [
            (*about, row, column, min(row + ROWS, part.rows))
            for about, part in self._about()
            if part.of_species
            for row in range(0, part.rows, ROWS)
            for column in range(0, part.width, self.across)
        ]

    @property
    def _of_none(self) -> list[tuple[int, ...]]:
        """Of the way back, for matrices that are the same for all species."""
        return [
            (*about, begin, 0, part.rows * part.width)
            for about, part in self._about()
            if not part.of_species
            for begin in range(0, part.rows * part.width, self.wide * self.across)
        ]

    def _about(self) -> Iterator[tuple[tuple[int, ...], Matrix]]:
        for number, part in enumerate(self.parts):
            yield (int(part.of_species), number, part.rows, part.width, part.weight, part.out), part

    @property
    def n_sums(self) -> int:
        """Parts of the gradient of the embedding."""
        return len(self._of_species)


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrices: Matrices, embedding: Tensor, constants: Tensor, *weights: Tensor):
        ctx.matrices = matrices
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(embedding, constants, *weights)
        out, packed = weights[0].new_empty(matrices.size), weights[0].new_empty(4 * matrices.size)
        places, aligned = matrices.places(weights)
        table = matrices.programs(out.device).make
        _kernels().make_matrices[(len(table),)](
            weights=weights[0],
            places=places,
            embedding=embedding.contiguous(),
            constants=constants,
            table=table,
            out=out,
            packed=packed,
            n_species=embedding.shape[0],
            n_embedding=embedding.shape[1],
            length=matrices.size,
            columns=table.shape[1],
            aligned=aligned,
            down=DOWN,
            across=ACROSS,
            eight=EIGHT,
            num_warps=MADE_WARPS,
        )
        ctx.mark_non_differentiable(packed)
        return out, packed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_out: Tensor, to_packed: None):
        matrices: Matrices = ctx.matrices
        embedding, constants, *weights = ctx.saved_tensors
        n_species, n_embedding = embedding.shape
        lengths = [weight.numel() for weight in weights]
        to_weights = to_out.new_empty(sum(lengths))
        sums = ctx.needs_input_grad[1] and matrices.n_sums > 0
        parts = to_out.new_empty((matrices.n_sums, n_species, n_embedding)) if sums else to_weights
        places, aligned = matrices.places(weights)
        table = matrices.programs(to_out.device).back
        _kernels().matrices_to_weights[(len(table),)](
            weights=weights[0],
            places=places,
            embedding=embedding.contiguous(),
            constants=constants,
            table=table,
            to_out=to_out.contiguous(),
            to_weights=to_weights,
            parts=parts,
            n_species=n_species,
            n_embedding=n_embedding,
            columns=table.shape[1],
            aligned=aligned,
            sums=sums,
            wide=matrices.wide,
            across=matrices.across,
            num_warps=BACK_WARPS,
        )
        to_embedding = None
        if sums:
            to_embedding = torch.empty_like(parts[0])
            many = max(1, SUMMED // matrices.wide)
            _kernels().add_embedding[(n_species,)](
                parts=parts,
                out=to_embedding,
                n_parts=matrices.n_sums,
                n_embedding=n_embedding,
                many=many,
                wide=matrices.wide,
                num_warps=8,
            )
        return None, to_embedding, None, *to_weights.split(lengths)


_Key = tuple[torch.device, tuple[tuple[int, int], ...]]


def _key(weights: Sequence[Tensor]) -> _Key:
    """Device, and of each tensor where it begins behind the first, in numbers, and its length."""
    first, size = weights[0].data_ptr(), weights[0].element_size()
    return weights[0].device, tuple(((weight.data_ptr() - first) // size, weight.numel()) for weight in weights)


def _kernels() -> Any:
    from forgefield.kernels.dense import matrix_source

    return matrix_source
