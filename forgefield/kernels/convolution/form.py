"""Description of a convolution for the code generator: what a kernel computes (`Kind`), its arguments, and the trilinear
form (`Form`) with the addresses of blocks and paths and the lists of coefficients.

For one edge and channel a path maps x_i, y_j, w to `sum_ij C_ijk x_i y_j w`. Coefficients that are zero are dropped here, so
that no kernel multiplies by them. Features and outputs are fields (`core/fields.py`); paths whose results have the same irrep
share a block of the output, in separate columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from torch.utils._python_dispatch import _disable_current_modes

from forgefield.errors import ForgefieldError
from forgefield.kernels.core.fields import TANGENT, VALUE, Shape
from forgefield.kernels.core.generation import ArgumentTable, mark_of_code
from forgefield.ops.convolution_plan import Block, ConvolutionPlan, plan_convolution
from forgefield.ops.harmonics import clebsch_gordan

ARGUMENTS = ArgumentTable(
    x="field of features",
    y="(n_edges, n_harmonics), harmonics",
    dy="tangents of y",
    w="(n_rows, n_weights), rows of weights; or a table (n_intervals, 4, n_weights), packed (n_intervals, 3, n_weights)",
    dw="tangents of rows of weights",
    u="(n_edges,), position of an edge in its interval of the table, from -1/2 to 1/2",
    du="tangents of u",
    unit="(n_intervals,), units of a packed table",
    g="field of cotangents of the output",
    out="field of outputs",
    to_x="(n_edges, dim of features), cotangents of features; of one block if `apart`; of a range of edges if `ranged`",
    to_w="(n_edges, n_weights), cotangents of weights; of one block if `apart`",
    to_dw="as to_w, of tangents of weights",
    to_y="(n_chunks, n_edges, n_harmonics), cotangents of harmonics; with a table (n_chunks, n_edges, 4), of direction and u",
    source="(n_edges,), source atom of each edge",
    pointers="(n_atoms + 1,), first edge of each atom",
    row="(n_edges,), row of weights of an edge, or its interval in the table",
    n_atoms="number of atoms",
    n_edges="number of edges",
    first_edge="first edge of the range, if `ranged`",
    end_edge="end of the range",
)
"""Arguments of every kernel of the convolution."""


@dataclass(frozen=True)
class Kind:
    """What a kernel computes.

    dual, backward: which of the four passes of a training it is.
        neither: values of the output;
        `backward`: from cotangents of the output's tangents, which are those of a total of the values, the cotangents of
        features, harmonics and weights (the pass of the forces);
        `dual`: tangents of the output;
        both: from cotangents of values and tangents, those of features, weights and tangents of weights.
    table: weights are read from a table of cubic polynomials at the position of each edge; in the pass of the forces that
        position has a cotangent in place of rows of weights.
    packed: the two highest coefficients of the table share a word (`radial/packing.py`).
    still: features have no tangents.
    features: cotangents of features are computed.
    narrow: features, a table that is not packed and what is written for edges are stored in fewer bits than float32, in which
        everything is computed.
    apart: rows that are written for edges belong to the only block of the form.
    ranged: only a range of edges is processed, because cotangents of features of all would not fit into the memory.
    shares: number of programs that share the edges of an atom, each of which writes an output of its own.
    """

    dual: bool = False
    backward: bool = False
    table: bool = False
    packed: bool = False
    still: bool = False
    features: bool = True
    narrow: bool = False
    apart: bool = False
    ranged: bool = False
    shares: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel."""
        words = [word for word, is_set in vars(self).items() if is_set is True]
        words += [f"shares{self.shares}"] if self.shares > 1 else []
        return "_".join(["convolution", *words])

    @property
    def pass_name(self) -> str:
        """Which of the four passes of a training it is: values, forces, tangents or back."""
        return ("back" if self.backward else "tangents") if self.dual else ("forces" if self.backward else "values")

    @property
    def geometry(self) -> bool:
        """Whether cotangents of harmonics are computed."""
        return self.backward and not self.dual

    @property
    def weights(self) -> bool:
        """Whether cotangents of weights are written for every edge."""
        return self.backward and (self.dual or not self.table)

    @property
    def moves(self) -> bool:
        """Whether tangents of features are read."""
        return self.dual and not self.still

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that the kernel uses; it is launched with any tensor for the others."""
        conditions = {
            "dy": self.dual,
            "dw": self.dual and not self.table,
            "u": self.table,
            "du": self.table and self.dual,
            "unit": self.packed,
            "g": self.backward,
            "out": not self.backward,
            "to_x": self.backward and self.features,
            "to_w": self.weights,
            "to_dw": self.weights and self.dual,
            "to_y": self.geometry,
            "first_edge": self.ranged,
            "end_edge": self.ranged,
        }
        return tuple(name for name in ARGUMENTS if conditions.get(name, True))

    @property
    def output_slots(self) -> list[tuple[str, int]]:
        """Outputs by the letter of their accumulators, and the slot of the field that holds them: o values, p tangents."""
        if not self.backward:
            return [("p", TANGENT)] if self.dual else [("o", VALUE)]
        return [("o", VALUE), ("p", TANGENT)] if self.dual else [("o", TANGENT)]


LANES = 32
WIDEST = 128
"""Largest number of channels of one program: four per lane of a warp."""
REGISTERS = 80
"""Registers of a lane that a program may use for cotangents of its outputs, values and tangents; with more, too few programs
run at the same time."""
_ZERO = 1e-12


@dataclass(frozen=True)
class FormPath:
    """A path of the convolution.

    weight: offset of the path in a row of weights.
    start, width, column: of its block of the output, and its first column there; component k of an atom begins at
        k * width + column.
    n_out: number of components of the result.
    terms: for (i, k) the coefficients and harmonics (numbered over all degrees) that couple them.
    row: length of a row of outputs where outputs are rows of atoms; 0 where they are a field.
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
    """Source block of `channels` channels and `n_in` components, at offset `start` in the features of an atom, with its paths.

    tile: number of channels of one program. chunk: index of its first program among those of an atom.
    row: length of a row of features where features are rows of atoms; 0 where they are a field.
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
        """Columns of a row of weights that belong to its paths, in their order."""
        return tuple(path.weight + c for path in self.paths for c in range(self.channels))

    @property
    def harmonics(self) -> list[int]:
        """Indices of the harmonics that its paths use, except the first, which is one."""
        return sorted({j for path in self.paths for terms in path.terms.values() for _, j in terms if j})


@dataclass(frozen=True, eq=False)
class Form:
    """Everything that a kernel is generated from. features, outputs: shapes of the fields. n_weights, n_harmonics: lengths of
    the rows of weights and harmonics."""

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
        """Number of coupled pairs of components of features and outputs, of all paths."""
        return sum(len(path.terms) for block in self.blocks for path in block.paths)

    @cached_property
    def parts(self) -> tuple[Form, ...]:
        """The same as forms of one block each."""
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
    """The form of a planned convolution.

    targets: for every block of the output, the paths whose results it holds in adjacent columns.
    extra: for every block, the number of columns after these, which are not written.
    rows: features and outputs are rows of atoms, of values and then, where a pass has both, of tangents.
    """
    locations, shape = _locations(plan, targets, extra)
    features = Shape(tuple((2 * block.l + 1, block.mul) for block in plan.in_blocks))
    weights = _starts([block.mul for block in plan.out_blocks])
    blocks: list[FormBlock] = []
    chunk = 0
    for number, source in enumerate(plan.in_blocks):
        paths = []
        for index, path in enumerate(plan.paths):
            if path.source == number:
                terms = _terms(source.l, path.l2, path.l3)
                row = shape.dim if rows else 0
                paths.append(FormPath(weights[index], *locations[index], 2 * path.l3 + 1, terms, row))
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


def _locations(
    plan: ConvolutionPlan, targets: Sequence[Sequence[int]], extra: Sequence[int]
) -> tuple[dict[int, tuple[int, int, int]], Shape]:
    """Start, width and column of every path, and the shape of the output."""
    blocks: list[tuple[int, int]] = []
    locations = {}
    for paths, extra_columns in zip(targets, extra):
        muls = [plan.out_blocks[path].mul for path in paths]
        width = sum(muls) + extra_columns
        start = sum(k * c for k, c in blocks)
        blocks.append((2 * plan.out_blocks[paths[0]].l + 1, width))
        for path, column in zip(paths, _starts(muls)):
            locations[path] = (start, width, column)
    return locations, Shape(tuple(blocks))


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _terms(l1: int, l2: int, l3: int) -> dict[tuple[int, int], tuple[tuple[float, int], ...]]:
    """Coefficients in e3nn's scale for component normalisation."""
    values = clebsch_gordan(l1, l2, l3) * (2 * l3 + 1) ** 0.5
    terms = {}
    for i in range(2 * l1 + 1):
        for k in range(2 * l3 + 1):
            coupled = [(float(values[i, j, k]), l2 * l2 + j) for j in range(2 * l2 + 1)]
            coupled = [(value, j) for value, j in coupled if abs(value) > _ZERO]
            if coupled:
                terms[i, k] = tuple(coupled)
    return terms


# ---- keys: plans as arguments of operators


def code_mark() -> str:
    """A hash of the code that generates the kernels of the convolution."""
    from forgefield.kernels.convolution import form, source  # not at the top: source imports this module

    return mark_of_code(form, source)


def key_of_plan(plan: ConvolutionPlan) -> str:
    """The plan as a line of JSON, so that an operator in an exported graph is self-contained: blocks of features as
    [channels, l, parity], l_max of harmonics, irreps of the results as [l, parity].

    `code` is a hash of the code generator, so that compiled graphs are not mistaken for those of other code.
    """
    out = sorted({(path.l3, path.p3) for path in plan.paths})
    content = {"features": plan.in_blocks, "l_max": plan.l_max, "outputs": out, "code": code_mark()}
    return json.dumps(content, separators=(",", ":"))


@lru_cache(maxsize=256)
def plan_of_key(key: str) -> ConvolutionPlan:
    """The plan of a key, in any process."""
    try:
        content = json.loads(key)
        blocks = tuple(Block(*block) for block in content["features"])
        with _disable_current_modes():  # its coefficients outlive the trace that may be the first to need them
            return plan_convolution(blocks, content["l_max"], frozenset((l3, p) for l3, p in content["outputs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ForgefieldError(
            f"forgefield::convolve was called with the form {key!r}; it has to be the key of a plan (key_of_plan)."
        ) from error


@lru_cache(maxsize=256)
def form_of_key(key: str) -> Form:
    """The form whose features and outputs are rows of atoms, as in the reference convolution: a block for every path."""
    plan = plan_of_key(key)
    paths = range(len(plan.paths))
    with _disable_current_modes():
        return form_of(plan, tuple((path,) for path in paths), tuple(0 for _ in paths), rows=True)
