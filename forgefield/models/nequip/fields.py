"""Memory layout of the fields and matrices of NequIP's layers, and the products between them.

The layout follows from the shapes of the layers, and is computed once for models of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forgefield.kernels.convolution.form import Form, form_of
from forgefield.kernels.core.fields import Shape
from forgefield.kernels.dense.matrices import Matrices, Matrix
from forgefield.kernels.dense.products import Gradient, Gradients, Product, Products
from forgefield.ops.convolution_plan import Block

if TYPE_CHECKING:
    from forgefield.models.nequip.model import Interaction, NequIP

STEP = 16
"""Offsets of fields and matrices are multiples of this, so that wide loads are possible."""
FIELDS = ("x", "z", "a", "h")
"""Fields of every layer: input and output of the convolution, input and output of the nonlinearity."""


@dataclass(frozen=True)
class LayerShape:
    """Shapes of the fields of a layer; self_pairs: blocks of the layer's input and of a that the self-connection connects."""

    x: Shape
    z: Shape
    a: Shape
    h: Shape
    self_pairs: tuple[tuple[int, int], ...]
    resnet: bool

    def of_field(self, name: str) -> Shape:
        """Shape of the field with this name; cotangents (`to_x`) have that of their field."""
        shapes = {"x": self.x, "z": self.z, "a": self.a, "h": self.h}
        return shapes[name.removeprefix("to_")]


class LayerProducts(NamedTuple):
    """The products of a layer; the first layer has no input features."""

    enter: Products | None
    leave: Products
    to_z: Products
    to_h: Products | None


class MatrixLocation(NamedTuple):
    """Offset of a matrix in the row of all matrices, its rows and columns."""

    start: int
    rows: int
    width: int


class LayerMatrices(NamedTuple):
    """Matrices for every block of the input features, for every block of a, and, for blocks of a with a self-connection, the
    block of the input features and the matrices of species."""

    enter: list[MatrixLocation]
    leave: list[MatrixLocation]
    self_connection: dict[int, tuple[int, MatrixLocation]]


class Layout:
    """starts: for every layer, offsets of its fields in the arena, in numbers of an atom; cotangents are `to_x` and so on. The
    output of the last layer is not a factor of a product and outlives the others, so it is not in the arena. dim: numbers of
    an atom in the arena. one_hot: offset of the one-hot species, with `n_columns` channels. species: matrix of the first
    layer, a row for each species.

    trained: a training needs all fields at the end. Otherwise only values and then cotangents of tangents are computed, and
    fields share memory (`_shared_starts`)."""

    def __init__(
        self, shapes: tuple[LayerShape, ...], n_species: int, n_embedding: int, *, trained: bool = True
    ) -> None:
        self.shapes, self.n_species = shapes, n_species
        self.one_hot, self.n_columns = 0, _round_up(n_species)
        self.starts, self.dim = (_separate_starts if trained else _shared_starts)(shapes, self.n_columns)
        self._row = _Row(n_embedding)
        channels = shapes[0].x.blocks[0][1]
        # its gradient has a row for each column of one_hot
        self.species = self._row.add(1, channels, n_species, room=self.n_columns * channels)
        layer_matrices = [self._add_matrices(number) for number in range(len(shapes))]
        self.matrices = Matrices(self._row.parts, self._row.size, n_embedding)
        self.layers = [self._products(number, *matrices) for number, matrices in enumerate(layer_matrices)]
        first = self.starts[0]["to_x"]
        species = Gradient(1, self.n_columns, channels, 0, first, self.species.start, channels, slots=1)
        self.gradients = [
            Gradients([*([species] if number == 0 else []), *self._gradients(number, *matrices)])
            for number, matrices in enumerate(layer_matrices)
        ]
        self.sorts = n_species > 1 and any(shape.self_pairs for shape in shapes)

    def _add_matrices(self, number: int) -> LayerMatrices:
        shape, before = self.shapes[number], None if number == 0 else self.shapes[number - 1].h
        enter = [] if before is None else [self._row.add(c, c) for _, c in before.blocks]
        leave = [self._row.add(z, a) for (_, z), (_, a) in zip(shape.z.blocks, shape.a.blocks)]
        self_connection: dict[int, tuple[int, MatrixLocation]] = {}
        for block, target in shape.self_pairs:
            assert before is not None
            self_connection[target] = (
                block,
                self._row.add(before.blocks[block][1], shape.a.blocks[target][1], self.n_species),
            )
        return LayerMatrices(enter, leave, self_connection)

    def _products(
        self,
        number: int,
        enter: list[MatrixLocation],
        leave: list[MatrixLocation],
        self_connection: dict[int, tuple[int, MatrixLocation]],
    ) -> LayerProducts:
        back = {block: (target, matrix) for target, (block, matrix) in self_connection.items()}
        to_h = [self._to_h(number, block, matrix, back.get(block)) for block, matrix in enumerate(enter)]
        return LayerProducts(
            Products([self._forwards(number, "x", block, "h", m) for block, m in enumerate(enter)]) if enter else None,
            Products(
                [self._leave(number, block, matrix, self_connection.get(block)) for block, matrix in enumerate(leave)]
            ),
            Products([self._backwards(number, "to_z", block, "to_a", matrix) for block, matrix in enumerate(leave)]),
            Products(to_h) if to_h else None,
        )

    def _forwards(self, number: int, out: str, block: int, a: str, matrix: MatrixLocation) -> Product:
        """Product with a matrix; transposed matrices come first among the packed ones."""
        start, rows, width = matrix
        factor = self._at(number - 1 if a == "h" else number, a, block)
        return Product(
            self._components(number, out, block), width, self._at(number, out, block), factor, rows, start, rows
        )

    def _backwards(self, number: int, out: str, block: int, a: str, matrix: MatrixLocation) -> Product:
        """Product with the transpose of a matrix; matrices that are not transposed come after the transposed ones."""
        start, rows, width = matrix
        result = self._at(number - 1 if out == "to_h" else number, out, block)
        components = self._components(number, a, block)
        return Product(components, rows, result, self._at(number, a, block), width, start + 2 * self._row.size, width)

    def _leave(
        self, number: int, block: int, matrix: MatrixLocation, self_connection: tuple[int, MatrixLocation] | None
    ) -> Product:
        """a from z and, with a self-connection, from the input features."""
        product = self._forwards(number, "a", block, "z", matrix)
        if self_connection is None:
            return product
        before, (start, rows, width) = self_connection
        h = self._at(number - 1, "h", before)
        return replace(
            product,
            species_input=h,
            species_depth=rows,
            species_matrix=start,
            species_pitch=rows,
            species_step=rows * width,
        )

    def _to_h(
        self, number: int, block: int, matrix: MatrixLocation, self_connection: tuple[int, MatrixLocation] | None
    ) -> Product:
        """Cotangents of the features before from those of x and, through the self-connection, of a."""
        product = self._backwards(number, "to_h", block, "to_x", matrix)
        if self.shapes[number].resnet:
            product = replace(product, add=self._at(number, "to_h", block))
        if self_connection is None:
            return product
        target, (start, _, width) = self_connection
        to_a, start, pitch = self._at(number, "to_a", target), start + 2 * self._row.size, self.n_species * width
        return replace(
            product,
            species_input=to_a,
            species_depth=width,
            species_matrix=start,
            species_pitch=pitch,
            species_step=width,
        )

    def _gradients(
        self,
        number: int,
        enter: list[MatrixLocation],
        leave: list[MatrixLocation],
        self_connection: dict[int, tuple[int, MatrixLocation]],
    ) -> Iterator[Gradient]:
        n_kinds = self.n_species if self.n_species > 1 else 0
        for block, (start, rows, width) in enumerate(enter):
            h, to_x = self._at(number - 1, "h", block), self._at(number, "to_x", block)
            yield Gradient(self._components(number, "x", block), rows, width, h, to_x, start, width)
        for block, (start, rows, width) in enumerate(leave):
            components, to_a = self._components(number, "a", block), self._at(number, "to_a", block)
            yield Gradient(components, rows, width, self._at(number, "z", block), to_a, start, width)
            if block in self_connection:
                before, (start, rows, width) = self_connection[block]
                h, pitch = self._at(number - 1, "h", before), self.n_species * width
                yield Gradient(components, rows, width, h, to_a, start, pitch, n_kinds, width)

    def _components(self, number: int, name: str, block: int) -> int:
        return self.shapes[number].of_field(name).blocks[block][0]

    def _at(self, number: int, name: str, block: int) -> int:
        return self.starts[number][name] + self.shapes[number].of_field(name).starts[block]


Starts = tuple[list[dict[str, int]], int]
"""Offsets of the fields of every layer in the arena, and the length of the arena, in numbers of an atom."""


def _separate_starts(shapes: Sequence[LayerShape], first: int) -> Starts:
    """Every field has its own memory, from `first` on."""
    starts: list[dict[str, int]] = []
    dim = first
    for number, shape in enumerate(shapes):
        starts.append({})
        for name in (*FIELDS, *(f"to_{name}" for name in FIELDS)):
            if name == "h" and number == len(shapes) - 1:
                continue
            starts[-1][name] = dim
            dim += _round_up(shape.of_field(name).dim)
    return starts, dim


def _shared_starts(shapes: Sequence[LayerShape], first: int) -> Starts:
    """For values, then forces. Only values of features and only tangents of cotangents are used, so a field and its cotangents
    share one place. The pass of forces reads x and a of every layer; z is read by the next product alone, h by the next layer
    alone, so that all layers share one z, and layers of even and of odd number one h each."""
    z, h = first, first + _round_up(max(shape.z.dim for shape in shapes))
    length = _round_up(max(shape.h.dim for shape in shapes))
    dim = h + 2 * length
    starts: list[dict[str, int]] = []
    for number, shape in enumerate(shapes):
        place = {"x": dim, "z": z, "a": dim + _round_up(shape.x.dim), "h": h + number % 2 * length}
        dim = place["a"] + _round_up(shape.a.dim)
        starts.append(place | {f"to_{name}": begin for name, begin in place.items()})
        if number == len(shapes) - 1:
            del starts[-1]["h"]
    return starts, dim


class _Row:
    """Offsets of consecutive matrices, in the order of their weights."""

    def __init__(self, n_embedding: int) -> None:
        self.parts: list[Matrix] = []
        self.size = self._n_weights = 0
        self._n_embedding = n_embedding

    def add(self, rows: int, width: int, n_species: int = 0, room: int = 0) -> MatrixLocation:
        """n_species: zero where the matrix is one for all."""
        location = MatrixLocation(self.size, rows, width)
        self.parts.append(Matrix(n_species > 0, rows, width, self._n_weights, self.size))
        self._n_weights += rows * width * (self._n_embedding if n_species else 1)
        self.size += _round_up(max(room, rows * width * max(1, n_species)))
        return location


def _round_up(number: int) -> int:
    return -(-number // STEP) * STEP


layout_of = cache(Layout)  # never freed: captured graphs read the tables of products


def forms(model: NequIP) -> list[Form]:
    """Form of the convolution of every layer."""
    return [
        form_of(layer.plan, tuple(tuple(paths) for _, paths in layer.targets), (0,) * len(layer.targets))
        for layer in model.layers
    ]


def layout(model: NequIP, *, trained: bool = True) -> Layout:
    """trained: see `Layout`."""
    shapes = tuple(_layer_shape(layer, form) for layer, form in zip(model.layers, forms(model)))
    return layout_of(shapes, *model.type_embedding.shape, trained=trained)


def _layer_shape(layer: Interaction, form: Form) -> LayerShape:
    pairs = tuple(layer.self_pairs) if layer.self_connection is not None else ()
    before, after = _shape(layer.nonlinearity.in_blocks), _shape(layer.out_blocks)
    return LayerShape(form.features, form.outputs, before, after, pairs, layer.resnet)


def _shape(blocks: Iterable[Block]) -> Shape:
    return Shape(tuple((2 * block.l + 1, block.mul) for block in blocks))


def all_matrices(model: NequIP, where: Layout) -> tuple[Tensor, Tensor]:
    """Matrices of all layers in a row (where.matrices.size,), differentiable in the weights and the embedding of species; and
    packed."""
    weights = [linear.weight for linear in _linears(model)]
    return where.matrices(weights, model.type_embedding, _constants(model))


def _linears(model: NequIP) -> list[Any]:
    """Linear maps in the order of `Layout`."""
    linears: list[Any] = []
    for layer in model.layers:
        linears += [layer.linear_in, layer.linear_out]
        if layer.self_connection is not None:
            linears.append(layer.self_connection)
    return linears


_constants_cache: WeakKeyDictionary[NequIP, Tensor] = WeakKeyDictionary()


def _constants(model: NequIP) -> Tensor:
    """Scale of every matrix, in the order of `Layout`, float64; constant."""
    constants = _constants_cache.get(model)
    if constants is None or constants.device != model.type_embedding.device:
        norms = [norm for linear in _linears(model) for norm in linear.norms]
        constants = _constants_cache[model] = torch.tensor(
            norms, dtype=torch.float64, device=model.type_embedding.device
        )
    return constants
