"""The convolution as a trilinear form, in the terms a kernel is written in: places of blocks and paths, lists of coefficients.

For one edge and channel a path maps x_i, y_j, w to `sum_ij C_ijk x_i y_j w`. Zeros among the coefficients are left out here, so
that no kernel multiplies by them. Features and outputs lie in fields; paths with results of one kind share a block of the
output, each with columns of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from forgefield.kernels.core.fields import Shape
from forgefield.ops.convolution_plan import ConvolutionPlan
from forgefield.ops.harmonics import clebsch_gordan

LANES = 32
WIDEST = 128
"""Channels that one program holds at most: four to a lane of a warp."""
REGISTERS = 80
"""Of each lane, that a program may use for cotangents of its outputs, values and tangents; with more, too few programs run at a
time."""
_ZERO = 1e-12


@dataclass(frozen=True)
class FormPath:
    """weight: where the path begins in a row of weights. start, width, column: of its block of the output, and its first column
    there; component k of an atom begins at k * width + column.

    terms: for (i, k) the coefficients and harmonics (numbered over all degrees) that couple them. row: length of a row of
    outputs where these lie as rows of atoms, zero where they lie in a field.
    """

    weight: int
    start: int
    width: int
    column: int
    n_out: int
    terms: dict[tuple[int, int], tuple[tuple[float, int], ...]]
    row: int = 0


@dataclass(frozen=True)
class FormBlock:
    """Source block of `channels` channels and `n_in` components that begins at `start` among the numbers of an atom; its paths.

    tile: channels that one program takes; chunk: number of its first program among those of an atom. row: length of a row of
    features where these lie as rows of atoms, zero where they lie in a field.
    """

    start: int
    channels: int
    n_in: int
    tile: int
    chunk: int
    paths: tuple[FormPath, ...]
    row: int = 0

    @property
    def n_chunks(self) -> int:
        return -(-self.channels // self.tile)

    @property
    def dim(self) -> int:
        return self.n_in * self.channels

    @property
    def columns(self) -> tuple[int, ...]:
        """Which numbers of a row of weights are those of its paths, in their order."""
        return tuple(path.weight + c for path in self.paths for c in range(self.channels))

    @property
    def harmonics(self) -> list[int]:
        """Numbers of the harmonics that its paths use, but for the first, which is one."""
        return sorted({j for path in self.paths for terms in path.terms.values() for _, j in terms if j})


@dataclass(frozen=True, eq=False)
class Form:
    """Everything a kernel is generated from. features, outputs: shapes of the fields; rows of weights and harmonics have these
    lengths."""

    blocks: tuple[FormBlock, ...]
    features: Shape
    outputs: Shape
    n_weights: int
    n_harmonics: int

    @property
    def n_chunks(self) -> int:
        """Programs for each atom."""
        return sum(block.n_chunks for block in self.blocks)

    @property
    def n_couplings(self) -> int:
        """Pairs of components of features and outputs that are coupled, of all paths."""
        return sum(len(path.terms) for block in self.blocks for path in block.paths)

    @cached_property
    def parts(self) -> tuple[Form, ...]:
        """The same in forms of one block each."""
        return tuple(replace(self, blocks=(block,)) for block in self.blocks)

    @property
    def unused(self) -> list[tuple[int, int]]:
        """Ranges of a row of features that no path reads."""
        ranges, column = [], 0
        for block in self.blocks:
            if block.start > column:
                ranges.append((column, block.start))
            column = block.start + block.dim
        return [*ranges, (column, self.features.dim)] if column < self.features.dim else ranges


@lru_cache(maxsize=64)
def form_of(
    plan: ConvolutionPlan, targets: tuple[tuple[int, ...], ...], extra: tuple[int, ...], rows: bool = False
) -> Form:
    """The form of a planned convolution. targets: for every block of the output the paths whose results it holds side by side;
    extra: how many columns it has after these, which are left alone. rows: features and outputs lie as rows of atoms, of values
    and then, where a pass has both, of tangents."""
    places, shape = _places(plan, targets, extra)
    features = Shape(tuple((2 * block.l + 1, block.mul) for block in plan.in_blocks))
    weights = _starts([block.mul for block in plan.out_blocks])
    blocks: list[FormBlock] = []
    chunk = 0
    for number, source in enumerate(plan.in_blocks):
        paths = []
        for place, path in enumerate(plan.paths):
            if path.source == number:
                terms = _terms(source.l, path.l2, path.l3)
                row = shape.dim if rows else 0
                paths.append(FormPath(weights[place], *places[place], 2 * path.l3 + 1, terms, row))
        if paths:
            tile = _tile(source.mul, paths)
            row = features.dim if rows else 0
            block = FormBlock(features.starts[number], source.mul, 2 * source.l + 1, tile, chunk, tuple(paths), row)
            blocks.append(block)
            chunk += block.n_chunks
    return Form(tuple(blocks), features, shape, plan.n_weights, (plan.l_max + 1) ** 2)


def _tile(channels: int, paths: Sequence[FormPath]) -> int:
    """Channels of one program: a power of two."""
    tile = min(WIDEST, 1 << (channels - 1).bit_length())
    while tile > LANES and 2 * sum(path.n_out for path in paths) * (tile // LANES) > REGISTERS:
        tile //= 2
    return tile


def _places(
    plan: ConvolutionPlan, targets: Sequence[Sequence[int]], extra: Sequence[int]
) -> tuple[dict[int, tuple[int, int, int]], Shape]:
    """Start, width and column of every path, and the shape of the output."""
    blocks: list[tuple[int, int]] = []
    places = {}
    for paths, more in zip(targets, extra):
        muls = [plan.out_blocks[path].mul for path in paths]
        width = sum(muls) + more
        start = sum(k * c for k, c in blocks)
        blocks.append((2 * plan.out_blocks[paths[0]].l + 1, width))
        for path, column in zip(paths, _starts(muls)):
            places[path] = (start, width, column)
    return places, Shape(tuple(blocks))


def _starts(sizes: Sequence[int]) -> list[int]:
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
