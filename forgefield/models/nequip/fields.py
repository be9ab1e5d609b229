"""Where the fields of NequIP's layers lie in memory, where their matrices lie in a row, and the products between them.

All of this follows from the shapes of the layers, so that it is worked out once for models of one shape.
"""

from __future__ import annotations

from collections.abc import Iterator
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

if TYPE_CHECKING:
    from forgefield.models.nequip.model import Interaction, NequIP

STEP = 16
"""Fields and matrices begin at multiples of so many numbers, so that they can be read in wide pieces."""
FIELDS = ("x", "z", "a", "h")
"""Of every layer: what is convolved, what leaves the convolution, what goes into the nonlinearity, what comes out of it."""


@dataclass(frozen=True)
class LayerShape:
    """Shapes of the fields of a layer; self_pairs: blocks of the features before and of a that the self-connection joins."""

    x: Shape
    z: Shape
    a: Shape
    h: Shape
    self_pairs: tuple[tuple[int, int], ...]
    resnet: bool


class LayerProducts(NamedTuple):
    """The products of a layer; the first has no features before it."""

    enter: Products | None
    leave: Products
    to_z: Products
    to_h: Products | None


class Place(NamedTuple):
    """Of a matrix in the row of all: where it begins, its rows and columns."""

    start: int
    rows: int
    width: int


class LayerMatrices(NamedTuple):
    """One for every block of the features before; for every block of a; and for blocks of a with a self-connection, the block
    of the features before and a matrix of each species."""

    enter: list[Place]
    leave: list[Place]
    own: dict[int, tuple[int, Place]]


class Layout:
    """starts: for every layer where its fields begin in the arena, in numbers of an atom, cotangents as `to_x` and so on. What
    comes out of the last layer is no factor of a product and outlives the others: it is not there. dim: numbers of an atom in
    the arena. one_hot: where species lie in it, as so many channels (`n_columns`). species: matrix of the first layer, a row
    for each species."""

    def __init__(self, shapes: tuple[LayerShape, ...], n_species: int, n_embedding: int) -> None:
        self.shapes, self.n_species = shapes, n_species
        self.one_hot, self.n_columns = 0, _round_up(n_species)
        self.dim = self.n_columns
        self.starts: list[dict[str, int]] = []
        for number, shape in enumerate(shapes):
            self.starts.append({})
            for name in (*FIELDS, *(f"to_{name}" for name in FIELDS)):
                if name == "h" and number == len(shapes) - 1:
                    continue
                self.starts[-1][name] = self.dim
                self.dim += _round_up(getattr(shape, name.removeprefix("to_")).dim)
        self._row = _Row(n_embedding)
        channels = shapes[0].x.blocks[0][1]
        # its gradient has a row for each column of one_hot
        self.species = self._row.add(1, channels, n_species, room=self.n_columns * channels)
        placed = [self._place(number) for number in range(len(shapes))]
        self.matrices = Matrices(self._row.parts, self._row.size, n_embedding)
        self.layers = [self._products(number, *matrices) for number, matrices in enumerate(placed)]
        first = self.starts[0]["to_x"]
        species = Gradient(1, self.n_columns, channels, 0, first, self.species.start, channels, places=1)
        self.gradients = [
            Gradients([*([species] if number == 0 else []), *self._gradients(number, *matrices)])
            for number, matrices in enumerate(placed)
        ]
        self.sorts = n_species > 1 and any(shape.self_pairs for shape in shapes)

    def _place(self, number: int) -> LayerMatrices:
        shape, before = self.shapes[number], None if number == 0 else self.shapes[number - 1].h
        enter = [] if before is None else [self._row.add(c, c) for _, c in before.blocks]
        leave = [self._row.add(z, a) for (_, z), (_, a) in zip(shape.z.blocks, shape.a.blocks)]
        own: dict[int, tuple[int, Place]] = {}
        for block, target in shape.self_pairs:
            assert before is not None
            own[target] = (block, self._row.add(before.blocks[block][1], shape.a.blocks[target][1], self.n_species))
        return LayerMatrices(enter, leave, own)

    def _products(
        self, number: int, enter: list[Place], leave: list[Place], own: dict[int, tuple[int, Place]]
    ) -> LayerProducts:
        back = {block: (target, matrix) for target, (block, matrix) in own.items()}
        to_h = [self._to_h(number, block, matrix, back.get(block)) for block, matrix in enumerate(enter)]
        return LayerProducts(
            Products([self._forwards(number, "x", block, "h", m) for block, m in enumerate(enter)]) if enter else None,
            Products([self._leave(number, block, matrix, own.get(block)) for block, matrix in enumerate(leave)]),
            Products([self._backwards(number, "to_z", block, "to_a", matrix) for block, matrix in enumerate(leave)]),
            Products(to_h) if to_h else None,
        )

    def _forwards(self, number: int, out: str, block: int, a: str, matrix: Place) -> Product:
        """With a matrix, which lies transposed first among the packed ones."""
        start, rows, width = matrix
        factor = self._at(number - 1 if a == "h" else number, a, block)
        return Product(
            self._components(number, out, block), width, self._at(number, out, block), factor, rows, start, rows
        )

    def _backwards(self, number: int, out: str, block: int, a: str, matrix: Place) -> Product:
        """With the transpose of a matrix, which lies as it is behind those."""
        start, rows, width = matrix
        result = self._at(number - 1 if out == "to_h" else number, out, block)
        components = self._components(number, a, block)
        return Product(components, rows, result, self._at(number, a, block), width, start + 2 * self._row.size, width)

    def _leave(self, number: int, block: int, matrix: Place, own: tuple[int, Place] | None) -> Product:
        """a from z and, where there is a self-connection, from the features before."""
        product = self._forwards(number, "a", block, "z", matrix)
        if own is None:
            return product
        before, (start, rows, width) = own
        h = self._at(number - 1, "h", before)
        return replace(product, own=h, own_depth=rows, own_b=start, own_pitch=rows, own_step=rows * width)

    def _to_h(self, number: int, block: int, matrix: Place, own: tuple[int, Place] | None) -> Product:
        """Cotangents of the features before from those of x and, through the self-connection, of a."""
        product = self._backwards(number, "to_h", block, "to_x", matrix)
        if self.shapes[number].resnet:
            product = replace(product, add=self._at(number, "to_h", block))
        if own is None:
            return product
        target, (start, _, width) = own
        to_a, start, pitch = self._at(number, "to_a", target), start + 2 * self._row.size, self.n_species * width
        return replace(product, own=to_a, own_depth=width, own_b=start, own_pitch=pitch, own_step=width)

    def _gradients(
        self, number: int, enter: list[Place], leave: list[Place], own: dict[int, tuple[int, Place]]
    ) -> Iterator[Gradient]:
        n_kinds = self.n_species if self.n_species > 1 else 0
        for block, (start, rows, width) in enumerate(enter):
            h, to_x = self._at(number - 1, "h", block), self._at(number, "to_x", block)
            yield Gradient(self._components(number, "x", block), rows, width, h, to_x, start, width)
        for block, (start, rows, width) in enumerate(leave):
            components, to_a = self._components(number, "a", block), self._at(number, "to_a", block)
            yield Gradient(components, rows, width, self._at(number, "z", block), to_a, start, width)
            if block in own:
                before, (start, rows, width) = own[block]
                h, pitch = self._at(number - 1, "h", before), self.n_species * width
                yield Gradient(components, rows, width, h, to_a, start, pitch, n_kinds, width)

    def _components(self, number: int, name: str, block: int) -> int:
        shape: Shape = getattr(self.shapes[number], name.removeprefix("to_"))
        return shape.blocks[block][0]

    def _at(self, number: int, name: str, block: int) -> int:
        shape: Shape = getattr(self.shapes[number], name.removeprefix("to_"))
        return self.starts[number][name] + shape.starts[block]


class _Row:
    """Matrices one after another, in the order of the weights they are made of."""

    def __init__(self, n_embedding: int) -> None:
        self.parts: list[Matrix] = []
        self.size = self._n_weights = 0
        self._n_embedding = n_embedding

    def add(self, rows: int, width: int, n_species: int = 0, room: int = 0) -> Place:
        """n_species: zero where the matrix is one for all."""
        place = Place(self.size, rows, width)
        self.parts.append(Matrix(n_species > 0, rows, width, self._n_weights, self.size))
        self._n_weights += rows * width * (self._n_embedding if n_species else 1)
        self.size += _round_up(max(room, rows * width * max(1, n_species)))
        return place


def _round_up(number: int) -> int:
    return -(-number // STEP) * STEP


layout_of = cache(Layout)  # never given back: captured graphs read what products need


def forms(model: NequIP) -> list[Form]:
    """Of the convolution of every layer."""
    return [
        form_of(layer.plan, tuple(tuple(paths) for _, paths in layer.targets), (0,) * len(layer.targets))
        for layer in model.layers
    ]


def layout(model: NequIP) -> Layout:
    shapes = tuple(_layer_shape(layer, form) for layer, form in zip(model.layers, forms(model)))
    return layout_of(shapes, *model.type_embedding.shape)


def _layer_shape(layer: Interaction, form: Form) -> LayerShape:
    pairs = tuple(layer.self_pairs) if layer.self_connection is not None else ()
    before, after = (_shape(blocks) for blocks in (layer.nonlinearity.in_blocks, layer.out_blocks))
    return LayerShape(form.features, form.outputs, before, after, pairs, layer.resnet)


def _shape(blocks: Any) -> Shape:
    return Shape(tuple((2 * block.l + 1, block.mul) for block in blocks))


def all_matrices(model: NequIP, where: Layout) -> tuple[Tensor, Tensor]:
    """In a row (where.matrices.size,), with a gradient in the weights and in the embedding of species; and packed."""
    weights = [linear.weight for linear in _linears(model)]
    return where.matrices(weights, model.type_embedding, _constants(model))


def _linears(model: NequIP) -> list[Any]:
    """In the order of `Layout`."""
    found: list[Any] = []
    for layer in model.layers:
        found += [layer.linear_in, layer.linear_out]
        if layer.self_connection is not None:
            found.append(layer.self_connection)
    return found


_kept_constants: WeakKeyDictionary[NequIP, Tensor] = WeakKeyDictionary()


def _constants(model: NequIP) -> Tensor:
    """What every matrix is scaled by, in the order of `Layout`, float64; they never change."""
    kept = _kept_constants.get(model)
    if kept is None or kept.device != model.type_embedding.device:
        norms = [norm for linear in _linears(model) for norm in linear.norms]
        kept = _kept_constants[model] = torch.tensor(norms, dtype=torch.float64, device=model.type_embedding.device)
    return kept
