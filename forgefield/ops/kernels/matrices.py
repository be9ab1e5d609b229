"""The matrices of a network from its weights in one launch, and the gradients of the weights from theirs in three.

Weights come in one row, as they are trained: of unit variance. Matrices are these times a constant, or, where they belong to a
species, sums over its embedding: matrix[u, s, w] = c sum_v weight[u, v, w] embedding[s, v]. Kernels that multiply with them
read them packed: transposed too, and each number as its leading bits and the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
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


@cache
def _kernels() -> dict[str, Any]:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["n_species", "n_embedding", "length"])
    def make_matrices(
        weights,
        embedding,
        constants,
        out,
        packed,
        table,
        numbers,
        n_species,
        n_embedding,
        length,
        columns: tl.constexpr,
        block: tl.constexpr,
        across: tl.constexpr,
        wide: tl.constexpr,
        eight: tl.constexpr,
    ):
        about = table + tl.program_id(1) * columns
        of_species = tl.load(about)
        rows = tl.load(about + 1).to(tl.int32)
        width = tl.load(about + 2).to(tl.int32)
        weights += tl.load(about + 3)
        start = tl.load(about + 4)
        constant = tl.load(constants + tl.program_id(1))
        begin = tl.program_id(0) * block
        e = begin + tl.arange(0, block)
        n_kinds = tl.where(of_species == 0, 1, n_species)
        size = rows * width * n_kinds
        if begin < size:
            inside = e < size
            column = e % width
            kind = e // width % n_kinds
            row = e // (width * n_kinds)
            if of_species == 0:
                total = tl.load(weights + e, mask=inside, other=0.0)
            else:
                total = tl.zeros([block], out.dtype.element_ty)
                for first in range(0, n_embedding, eight):
                    v = first + tl.arange(0, eight)[:, None]
                    known = inside[None, :] & (v < n_embedding)
                    line = (row[None, :] * n_embedding + v) * width + column[None, :]
                    weight = tl.load(weights + line, mask=known, other=0.0)
                    given = tl.load(embedding + kind[None, :] * n_embedding + v, mask=known, other=0.0)
                    total += tl.sum(weight * given, 0)
            total *= constant
            high = total
            if out.dtype.element_ty == tl.float32:  # to the nearest number of tensor cores
                high = ((total.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
                high = tl.where(total == total, high, total)  # the bits of a NaN may become those of zero
            turned = (kind * width + column) * rows + row
            packed += start
            tl.store(out + start + e, total, mask=inside)
            tl.store(packed + turned, high, mask=inside)
            tl.store(packed + length + turned, total - high, mask=inside)
            tl.store(packed + 2 * length + e, high, mask=inside)
            tl.store(packed + 3 * length + e, total - high, mask=inside)

    @triton.jit(do_not_specialize=["n_species", "n_embedding", "length"])
    def matrices_to_weights(
        weights,
        embedding,
        constants,
        to_out,
        to_weights,
        table,
        numbers,
        n_species,
        n_embedding,
        length,
        columns: tl.constexpr,
        block: tl.constexpr,
        across: tl.constexpr,
        wide: tl.constexpr,
        eight: tl.constexpr,
    ):
        about = table + tl.program_id(1) * columns
        of_species = tl.load(about)
        width = tl.load(about + 2).to(tl.int32)
        size = tl.load(about + 1).to(tl.int32) * width
        to_weights += tl.load(about + 3)
        to_out += tl.load(about + 4)
        constant = tl.load(constants + tl.program_id(1))
        begin = tl.program_id(0) * block
        e = begin + tl.arange(0, block)
        if of_species == 0:
            if begin < size:
                tl.store(to_weights + e, constant * tl.load(to_out + e, mask=e < size, other=0.0), mask=e < size)
        elif begin < size * n_embedding:
            inside = e < size * n_embedding
            column = e % width
            v = e // width % n_embedding
            row = e // (width * n_embedding)
            total = tl.zeros([block], to_weights.dtype.element_ty)
            for species in range(n_species):
                given = tl.load(to_out + (row * n_species + species) * width + column, mask=inside, other=0.0)
                total += given * tl.load(embedding + species * n_embedding + v, mask=inside, other=0.0)
            tl.store(to_weights + e, constant * total, mask=inside)

    @triton.jit(do_not_specialize=["n_species", "n_embedding", "length"])
    def matrices_to_embedding(
        weights,
        embedding,
        constants,
        to_out,
        parts,
        table,
        numbers,
        n_species,
        n_embedding,
        length,
        columns: tl.constexpr,
        block: tl.constexpr,
        across: tl.constexpr,
        wide: tl.constexpr,
        eight: tl.constexpr,
    ):
        row = tl.program_id(0)
        species = tl.program_id(2)
        number = tl.load(numbers + tl.program_id(1))
        about = table + number * columns
        n_rows = tl.load(about + 1)
        width = tl.load(about + 2).to(tl.int32)
        weights += tl.load(about + 3)
        to_out += tl.load(about + 4) + (row * n_species + species) * width
        v = tl.arange(0, wide)
        known = v < n_embedding
        total = tl.zeros([wide], parts.dtype.element_ty)
        if row < n_rows:
            for begin in range(0, width, across):
                column = begin + tl.arange(0, across)
                inside = column < width
                given = tl.load(to_out + column, mask=inside, other=0.0)
                line = (row * n_embedding + v)[:, None] * width + column[None, :]
                weight = tl.load(weights + line, mask=known[:, None] & inside[None, :], other=0.0)
                total += tl.sum(weight * given[None, :], 1)
        total = total * tl.load(constants + number)
        slot = (row * tl.num_programs(1) + tl.program_id(1)) * n_species + species
        tl.store(parts + slot * n_embedding + v, total, mask=known)

    return {"make": make_matrices, "to_weights": matrices_to_weights, "to_embedding": matrices_to_embedding}
