"""The convolution as a trilinear form, in the terms a kernel is written in: offsets of blocks and paths, lists of coefficients.

For one edge and channel a path maps x_i, y_j, w to `sum_ij C_ijk x_i y_j w`. Zeros among the coefficients are left out here, so
that no kernel multiplies by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.harmonics import clebsch_gordan

WIDEST = 128
"""Channels that one program holds at most: four to a lane of a warp."""
_ZERO = 1e-12


@dataclass(frozen=True)
class FormPath:
    """weight, out: where the path begins in a row of weights and of outputs; component k lies at out + k * channels.

    terms: for (i, k) the coefficients and harmonics (numbered over all degrees) that couple them.
    """

    weight: int
    out: int
    n_out: int
    terms: dict[tuple[int, int], tuple[tuple[float, int], ...]]


@dataclass(frozen=True)
class FormBlock:
    """Source block of `channels` channels and `n_in` components that begins at `features` in a row; its paths.

    tile: channels that one program takes; chunk: number of its first program among those of an atom.
    """

    features: int
    channels: int
    n_in: int
    tile: int
    chunk: int
    paths: tuple[FormPath, ...]

    @property
    def n_chunks(self) -> int:
        return -(-self.channels // self.tile)

    @property
    def harmonics(self) -> list[int]:
        """Numbers of the harmonics that its paths use."""
        return sorted({j for path in self.paths for terms in path.terms.values() for _, j in terms})


@dataclass(frozen=True, eq=False)
class Form:
    """Everything a kernel is generated from. Rows of features, weights, harmonics and outputs have these lengths."""

    blocks: tuple[FormBlock, ...]
    in_dim: int
    out_dim: int
    n_weights: int
    n_harmonics: int

    @property
    def n_chunks(self) -> int:
        """Programs for each atom."""
        return sum(block.n_chunks for block in self.blocks)

    @property
    def unused(self) -> list[tuple[int, int]]:
        """Ranges of a row of features that no path reads."""
        ranges, column = [], 0
        for block in self.blocks:
            if block.features > column:
                ranges.append((column, block.features))
            column = block.features + block.channels * block.n_in
        return [*ranges, (column, self.in_dim)] if column < self.in_dim else ranges


@lru_cache(maxsize=64)
def form_of(plan: ConvolutionPlan) -> Form:
    """The form of a planned convolution, rows laid out as the plan says."""
    starts = _starts([block.dim for block in plan.in_blocks])
    outputs = _starts([block.dim for block in plan.out_blocks])
    weights = _starts([block.mul for block in plan.out_blocks])
    blocks: list[FormBlock] = []
    chunk = 0
    for number, source in enumerate(plan.in_blocks):
        paths = []
        for place, path in enumerate(plan.paths):
            if path.source == number:
                terms = _terms(source.l, path.l2, path.l3)
                paths.append(FormPath(weights[place], outputs[place], 2 * path.l3 + 1, terms))
        if paths:
            tile = min(WIDEST, 1 << (source.mul - 1).bit_length())
            block = FormBlock(starts[number], source.mul, 2 * source.l + 1, tile, chunk, tuple(paths))
            blocks.append(block)
            chunk += block.n_chunks
    return Form(tuple(blocks), plan.in_dim, plan.out_dim, plan.n_weights, (plan.l_max + 1) ** 2)


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _terms(l1: int, l2: int, l3: int) -> dict[tuple[int, int], tuple[tuple[float, int], ...]]:
    """Coefficients as e3nn scales them for component normalisation."""
    values = clebsch_gordan(l1, l2, l3) * (2 * l3 + 1) ** 0.5
    terms = {}
    for i in range(2 * l1 + 1):
        for k in range(2 * l3 + 1):
            found = [(float(values[i, j, k]), l2 * l2 + j) for j in range(2 * l2 + 1)]
            found = [(value, j) for value, j in found if abs(value) > _ZERO]
            if found:
                terms[i, k] = tuple(found)
    return terms
