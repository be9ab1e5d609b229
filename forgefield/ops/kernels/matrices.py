"""The matrices of a network from its weights in one launch, and the gradients of the weights from theirs in three.

Weights come in one row, as they are trained: of unit variance. Matrices are these times a constant, or, where they belong to a
species, sums over its embedding: matrix[u, s, w] = c sum_v weight[u, v, w] embedding[s, v]. Kernels that multiply with them
read them packed: transposed too, and each number as its leading bits and the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Numbers of a matrix, or of its weights, that one program makes."""
EIGHT = 8
"""Numbers of an embedding that are read at a time."""
COLUMNS = 128
"""Of a matrix that one program reads at a time for the gradient of the embedding."""


@dataclass(frozen=True)
class Matrix:
    """rows, width: of the matrix, for each species where there is one of each. weight, out: where it begins among the weights
    and among the matrices."""

    of_species: bool
    rows: int
    width: int
    weight: int
    out: int


class Matrices:
    """All matrices of a network. size: numbers from the first of them to the last. n_embedding: numbers of a species.

    Packed they are four rows of this size: transposed, leading bits and rest, and as they are, leading bits and rest. A matrix
    of each species is (rows, n_species, width) as it is and (n_species, width, rows) transposed.
    """

    def __init__(self, parts: Sequence[Matrix], size: int, n_embedding: int) -> None:
        self.parts, self.size, self.n_embedding = tuple(parts), size, n_embedding
        self.of_species = tuple(number for number, part in enumerate(parts) if part.of_species)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}  # for good: captured graphs read them

    def __call__(self, weights: Tensor, embedding: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices in a row (size,), and packed (4 * size,), which has no gradient. weights: of all parts, in a row.
        embedding: (n_species, n_embedding). constants: one for each part. What lies between two matrices is not filled."""
        return _Made.apply(self, weights, embedding, constants)

    def launch(self, name: str, grid: tuple[int, ...], weights: Tensor, embedding: Tensor, *more: Tensor) -> None:
        table, numbers = self._on(weights.device)
        n_species = embedding.shape[0]
        given = (weights, embedding, *more, table, numbers)
        wide = max(16, 1 << (self.n_embedding - 1).bit_length())
        sizes = (n_species, self.n_embedding, self.size, table.shape[1], BLOCK, COLUMNS, wide, EIGHT)
        _kernels()[name][grid](*given, *sizes, num_warps=4)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            rows = torch.tensor([astuple(part) for part in self.parts], dtype=torch.int64, device=device)
            numbers = torch.tensor(self.of_species, dtype=torch.int64, device=device)
            self._tables[device] = (rows, numbers)
        return self._tables[device]


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrices: Matrices, weights: Tensor, embedding: Tensor, constants: Tensor):
        ctx.matrices = matrices
        ctx.save_for_backward(weights, embedding, constants)
        out = weights.new_empty(matrices.size)
        largest = max(part.rows * part.width for part in matrices.parts)
        n_blocks = -(-largest * embedding.shape[0] // BLOCK)
        grid = (n_blocks, len(matrices.parts))
        packed = weights.new_empty(4 * matrices.size)
        matrices.launch("make", grid, weights, embedding.contiguous(), constants, out, packed)
        ctx.mark_non_differentiable(packed)
        return out, packed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_out: Tensor, to_packed: None):
        matrices: Matrices = ctx.matrices
        weights, embedding, constants = ctx.saved_tensors
        embedding, to_out = embedding.contiguous(), to_out.contiguous()
        n_species, n_embedding = embedding.shape
        to_weights = torch.empty_like(weights)
        largest = max(p.rows * p.width * (n_embedding if p.of_species else 1) for p in matrices.parts)
        grid = (-(-largest // BLOCK), len(matrices.parts))
        matrices.launch("to_weights", grid, weights, embedding, constants, to_out, to_weights)
        numbers = matrices.of_species
        if not ctx.needs_input_grad[2] or not numbers:
            return None, to_weights, None, None
        rows = max(matrices.parts[number].rows for number in numbers)
        parts = weights.new_empty((rows, len(numbers), n_species, n_embedding))
        matrices.launch("to_embedding", (rows, len(numbers), n_species), weights, embedding, constants, to_out, parts)
        return None, to_weights, parts.sum((0, 1)), None


def _kernels() -> dict[str, Any]:
    from forgefield.ops.kernels import matrix_source as of

    return {"make": of.make_matrices, "to_weights": of.matrices_to_weights, "to_embedding": of.matrices_to_embedding}
