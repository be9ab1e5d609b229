"""The matrices of a network from its weights in one launch, and the gradients of the weights from theirs in two.

Weights of unit variance are read directly from the parameters. Matrices are weights times a constant or, if they depend on the
species, sums over its embedding: matrix[u, s, w] = c sum_v weight[u, v, w] embedding[s, v]. Kernels that multiply with them
read them packed: also transposed, and each number as its leading bits and the remainder. Sums are computed in float64, because
an error of a matrix affects all atoms of a species.
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

DOWN, ACROSS, FORWARD_WARPS = 8, 32, 2
"""Rows and columns of a matrix per program, and its number of warps."""
EIGHT = 8
"""Numbers of an embedding read at a time."""
NUMBERS, ROWS, BACK_WARPS = 2048, 2, 4
"""Gradients of weights that a program computes at a time, rows of a matrix of species per program, and warps."""
SUMMED = 8192
"""Numbers that a program reads at a time to sum the gradient of the embedding of a species."""
MOST = 64
"""Maximum number of sets of weights whose addresses are cached; other sets are copied into one row."""


@dataclass(frozen=True)
class Matrix:
    """rows, width: of the matrix, or of that of each species. weight, out: its offset among the weights and among the
    matrices."""

    of_species: bool
    rows: int
    width: int
    weight: int
    out: int


@dataclass(frozen=True)
class Programs:
    """Tasks of the programs of a launch, one row each: whether the matrix depends on the species, index of the matrix, its
    rows and width, its offsets among the gradients of weights and among the matrices; then the first row (or number), the
    first column, and the last row (or number) + 1."""

    make: Tensor
    back: Tensor


class WeightOffsets(NamedTuple):
    """Offset of the weights of every matrix from the first tensor, in numbers. aligned: offsets and rows are multiples of 4."""

    starts: Tensor
    aligned: bool


class Matrices:
    """All matrices of a network. size: numbers from the first matrix to the end of the last. n_embedding: numbers per species.

    Packed matrices are four rows of this size: transposed, leading bits and remainders, and not transposed, leading bits and
    remainders. Matrices of species are (rows, n_species, width), and (n_species, width, rows) transposed.
    """

    def __init__(self, matrices: Sequence[Matrix], size: int, n_embedding: int) -> None:
        self.parts, self.size, self.n_embedding = tuple(matrices), size, n_embedding
        self.wide = max(16, 1 << (n_embedding - 1).bit_length())
        self.across = max(16, NUMBERS // self.wide)
        self._aligned = all(n % 4 == 0 for matrix in matrices for n in (matrix.width, matrix.weight, matrix.out))
        # never freed: captured graphs read them
        self._programs: dict[torch.device, Programs] = {}
        self._offsets: dict[_Key, WeightOffsets] = {}

    def __call__(self, weights: Sequence[Tensor], embedding: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices in a row (size,), and packed (4 * size,), without a gradient. weights: tensors that, concatenated, are
        the weights of all matrices. embedding: (n_species, n_embedding). constants: of each matrix, float64. Gaps between
        matrices are uninitialised."""
        if not self._read_in_place(weights):
            weights = [torch.cat(tuple(weights))]
        return _MakeMatrices.apply(self, embedding, constants, *weights)

    def _read_in_place(self, weights: Sequence[Tensor]) -> bool:
        """Whether weights are read without a copy: parameters, whose addresses do not change. During a capture only known
        addresses are possible."""
        if any(weight.grad_fn is not None or not weight.is_contiguous() for weight in weights):
            return False
        return _key(weights) in self._offsets or (len(self._offsets) < MOST and not capturing())

    def offsets(self, weights: Sequence[Tensor]) -> WeightOffsets:
        key = _key(weights)
        if key not in self._offsets:
            copied = (key[0], ((0, sum(length for _, length in key[1])),))  # which a capture may need
            for new in {key, copied} - self._offsets.keys():
                self._offsets[new] = self._find_offsets(*new)
        return self._offsets[key]

    def _find_offsets(self, device: torch.device, tensors: tuple[tuple[int, int], ...]) -> WeightOffsets:
        """tensors: offset from the first tensor, in numbers, and length of each."""
        first_number = list(accumulate((length for _, length in tensors), initial=0))[:-1]
        starts = []
        for matrix in self.parts:
            number = bisect_right(first_number, matrix.weight) - 1
            starts.append(tensors[number][0] + matrix.weight - first_number[number])
        aligned = self._aligned and all(start % 4 == 0 for start in starts)
        return WeightOffsets(torch.tensor(starts, dtype=torch.int64, device=device), aligned)

    def programs(self, device: torch.device) -> Programs:
        if device not in self._programs:
            rows = (self._forward_tasks(), [*self._species_tasks, *self._common_tasks])
            self._programs[device] = Programs(*(torch.tensor(r, dtype=torch.int64, device=device) for r in rows))
        return self._programs[device]

    def _forward_tasks(self) -> list[tuple[int, ...]]:
        """Tasks of the forward launch; matrices of species, which take longest, come first."""
        return [
            (*description, row, column, matrix.rows)
            for description, matrix in sorted(self._descriptions(), key=lambda pair: not pair[1].of_species)
            for row in range(0, matrix.rows, DOWN)
            for column in range(0, matrix.width, ACROSS)
        ]

    @cached_property
    def _species_tasks(self) -> list[tuple[int, ...]]:
        """Tasks of the backward launch for matrices of species; each also computes a partial gradient of the embedding."""
        return [
            (*description, row, column, min(row + ROWS, matrix.rows))
            for description, matrix in self._descriptions()
            if matrix.of_species
            for row in range(0, matrix.rows, ROWS)
            for column in range(0, matrix.width, self.across)
        ]

    @property
    def _common_tasks(self) -> list[tuple[int, ...]]:
        """Tasks of the backward launch for matrices that are the same for all species."""
        return [
            (*description, begin, 0, matrix.rows * matrix.width)
            for description, matrix in self._descriptions()
            if not matrix.of_species
            for begin in range(0, matrix.rows * matrix.width, self.wide * self.across)
        ]

    def _descriptions(self) -> Iterator[tuple[tuple[int, ...], Matrix]]:
        for number, matrix in enumerate(self.parts):
            yield (int(matrix.of_species), number, matrix.rows, matrix.width, matrix.weight, matrix.out), matrix

    @property
    def n_sums(self) -> int:
        """Number of partial gradients of the embedding."""
        return len(self._species_tasks)


class _MakeMatrices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrices: Matrices, embedding: Tensor, constants: Tensor, *weights: Tensor):
        ctx.matrices = matrices
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(embedding, constants, *weights)
        out, packed = weights[0].new_empty(matrices.size), weights[0].new_empty(4 * matrices.size)
        offsets, aligned = matrices.offsets(weights)
        table = matrices.programs(out.device).make
        _kernels().make_matrices[(len(table),)](
            weights=weights[0],
            places=offsets,
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
            num_warps=FORWARD_WARPS,
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
        offsets, aligned = matrices.offsets(weights)
        table = matrices.programs(to_out.device).back
        _kernels().matrices_to_weights[(len(table),)](
            weights=weights[0],
            places=offsets,
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
    """Device, and offset from the first tensor, in numbers, and length of each tensor."""
    first, size = weights[0].data_ptr(), weights[0].element_size()
    return weights[0].device, tuple(((weight.data_ptr() - first) // size, weight.numel()) for weight in weights)


def _kernels() -> Any:
    from forgefield.kernels.dense import matrix_source

    return matrix_source
