"""The layers of NequIP on the atoms of one batch, in four passes: values, cotangents for forces, tangents, cotangents again.

Everything lies in fields (`ops/kernels/fields.py`). A training needs each pass once: tangents use the values of the first pass,
and cotangents of tangents are those that the forces were made of, so the last pass computes only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgefield.ops.graph import EdgeGraph, join
from forgefield.ops.kernels.convolution import Convolution, Motion, Radial
from forgefield.ops.kernels.fields import TANGENT, VALUE, Field, Shape, new_field
from forgefield.ops.kernels.form import form_of
from forgefield.ops.kernels.gate import GateByKernels, Nonlinearity
from forgefield.ops.products import is_lowered, product

if TYPE_CHECKING:
    from forgefield.models.nequip import Interaction, NequIP


def _shape(blocks: Sequence[Any]) -> Shape:
    return Shape(tuple((2 * block.l + 1, block.mul) for block in blocks))


def _multiply(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    if is_lowered(rows):
        out.copy_(product(rows, matrix))
    else:
        torch.mm(rows, matrix, out=out)


class LayerWeights:
    """Matrices of a layer. enter: for every block of the features; of the first layer, rows for every species. leave: for every
    block of the results, of the convolution's columns and, species by species, of the features themselves."""

    def __init__(self, model: NequIP, layer: Interaction, number: int) -> None:
        if number == 0:
            self.enter = [layer.enter([model.type_embedding.unsqueeze(1)])]
        else:
            self.enter = layer.linear_in.matrices()
        leave = [[matrix] for matrix in layer.linear_out.matrices()]
        if layer.self_connection is not None:
            for (i, target), matrix in zip(layer.self_pairs, layer.self_connection.matrices(model.type_embedding)):
                channels = layer.in_blocks[i].mul
                leave[target].append(matrix.unflatten(0, (channels, -1)).transpose(0, 1).flatten(0, 1))
        self.leave = [join(parts, 0) for parts in leave]

    def tracked(self) -> list[Tensor]:
        return [*self.enter, *self.leave]


@dataclass(frozen=True)
class Atoms:
    """What layers know of the atoms. one_hot: (n_atoms, n_species). scale: (n_atoms, 1, 1), or None, of what is convolved."""

    one_hot: Tensor
    scale: Tensor | None

    def field(self, shape: Shape) -> Field:
        return new_field(shape, self.one_hot.shape[0], self.one_hot)


class Layer:
    """One layer on one batch. x: what is convolved; z: what leaves the convolution, and the features themselves; a: what goes
    into the nonlinearity; h: what comes out of it. Each has its cotangents."""

    def __init__(self, source: Interaction, number: int, weights: LayerWeights, atoms: Atoms) -> None:
        self.atoms, self.first, self.resnet = atoms, number == 0, source.resnet
        self.self_pairs: tuple[tuple[int, int], ...] = ()
        self.enter = [matrix.detach() for matrix in weights.enter]
        self.leave = [matrix.detach() for matrix in weights.leave]
        if source.self_connection is not None:
            self.self_pairs = tuple(source.self_pairs)
        extra = [0] * len(source.targets)
        for i, target in self.self_pairs:
            extra[target] += source.in_blocks[i].mul * atoms.one_hot.shape[1]
        self.form = form_of(source.plan, tuple(tuple(paths) for _, paths in source.targets), tuple(extra))
        known = GateByKernels.knows(source.nonlinearity)
        self.nonlinearity = (GateByKernels if known else Nonlinearity)(source.nonlinearity)  # type: ignore[arg-type]
        shapes = (
            self.form.features,
            self.form.outputs,
            _shape(source.nonlinearity.in_blocks),  # type: ignore[arg-type]
            _shape(source.out_blocks),
        )
        self.x, self.z, self.a, self.h = (atoms.field(shape) for shape in shapes)
        self.to_x, self.to_z, self.to_a, self.to_h = (atoms.field(shape) for shape in shapes)
        self.convolution: Convolution | None = None

    # -- forward: values and tangents differ only in the convolution and the nonlinearity

    def values(self, h: Field | None, convolution: Convolution) -> None:
        self.convolution = convolution
        if h is None:
            torch.mm(self.atoms.one_hot, self.enter[0], out=self.x.rows(0, VALUE))
            self._scale(self.x, VALUE)
        else:
            self._enter(h, VALUE)
        convolution.values(self.x, self.z)
        self._leave(h, VALUE)
        self.nonlinearity.values(self.a, self.h)
        self._add(h, self.h, VALUE)

    def tangents(self, h: Field | None, motion: Motion) -> None:
        if h is not None:
            self._enter(h, TANGENT)
        self._known().tangents(self.x, self.z, motion)
        self._leave(h, TANGENT)
        self.nonlinearity.tangents(self.a, self.h)
        self._add(h, self.h, TANGENT)

    def _enter(self, h: Field, place: int) -> None:
        for number, matrix in enumerate(self.enter):
            _multiply(h.rows(number, place), matrix, self.x.rows(number, place))
        self._scale(self.x, place)

    def _scale(self, x: Field, place: int) -> None:
        if self.atoms.scale is not None:
            for block in x.blocks(place):
                block.mul_(self.atoms.scale)

    def _leave(self, h: Field | None, place: int) -> None:
        for number, target in self.self_pairs:
            assert h is not None
            own = self._own(self.z, target, place, h.shape.blocks[number][1])
            torch.mul(h.block(number, place).unsqueeze(2), self.atoms.one_hot[:, None, :, None], out=own)
        for number, matrix in enumerate(self.leave):
            _multiply(self.z.rows(number, place), matrix, self.a.rows(number, place))

    def _own(self, z: Field, target: int, place: int, channels: int) -> Tensor:
        """(n_atoms, 2l + 1, n_species, channels): columns that hold the features of an atom in the place of its species."""
        n_species = self.atoms.one_hot.shape[1]
        return z.block(target, place)[:, :, -n_species * channels :].unflatten(2, (n_species, channels))

    def _add(self, old: Field | None, new: Field, place: int) -> None:
        if self.resnet and old is not None:
            for update, before in zip(new.blocks(place), old.blocks(place)):
                update.add_(before)

    # -- backward: to_h is filled, to_h of the layer before is asked for

    def forces(self, before: Field | None, parts: Tensor) -> Tensor:
        """Writes cotangents of harmonics (and places) for every chunk of the convolution to `parts` (n_chunks, n_edges, ...),
        and returns those of rows of weights, of which there are none with a table."""
        self.nonlinearity.forces(self.a, self.to_h, self.to_a)
        self._back_to_z(TANGENT)
        found = self._known().forces(self.x, self.to_z, None if before is None else self.to_x, parts)
        self._back_to_h(before, TANGENT)
        return found

    def back(self, before: Field | None, motion: Motion) -> tuple[Tensor, Tensor]:
        """Cotangents of the weights of every edge and of their tangents."""
        self.nonlinearity.back(self.a, self.to_h, self.to_a)
        self._back_to_z(VALUE)
        found = self._known().back(self.x, self.to_z, self.to_x, motion)
        self._back_to_h(before, VALUE)
        return found

    def gradients(self, h: Field | None) -> list[Tensor]:
        """Of what `LayerWeights.tracked` names; both backward passes have been made."""
        if h is None:
            self._scale(self.to_x, VALUE)
            enter = [torch.mm(self.atoms.one_hot.t(), self.to_x.rows(0, VALUE))]
        else:
            enter = [_gradient(h, self.to_x, number) for number in range(len(self.enter))]
        leave = [_gradient(self.z, self.to_a, number) for number in range(len(self.leave))]
        return [*enter, *leave]

    def _back_to_z(self, place: int) -> None:
        for number, matrix in enumerate(self.leave):
            _multiply(self.to_a.rows(number, place), matrix.t(), self.to_z.rows(number, place))

    def _back_to_h(self, before: Field | None, place: int) -> None:
        if before is None:
            return
        self._scale(self.to_x, place)
        for number, matrix in enumerate(self.enter):
            _multiply(self.to_x.rows(number, place), matrix.t(), before.rows(number, place))
        for number, target in self.self_pairs:
            own = self._own(self.to_z, target, place, before.shape.blocks[number][1])
            total = before.block(number, place)
            for kind in range(own.shape[2]):
                total.addcmul_(own[:, :, kind], self.atoms.one_hot[:, kind, None, None])
        self._add(self.to_h, before, place)

    @property
    def columns_of_geometry(self) -> int:
        return self.form.n_harmonics + (1 if self._known().radial.in_table else 0)

    def _known(self) -> Convolution:
        assert self.convolution is not None
        return self.convolution


def _gradient(rows: Field, cotangents: Field, block: int) -> Tensor:
    """Of the matrix that a block is multiplied with, from values and tangents."""
    if not is_lowered(rows.flat):
        return torch.mm(rows.both(block).t(), cotangents.both(block))
    # Rounded factors are scaled by their largest entry, and tangents may be far smaller than values.
    parts = [product(rows.rows(block, place).t(), cotangents.rows(block, place)) for place in (VALUE, TANGENT)]
    return parts[0] + parts[1]


class Network:
    """The layers on one batch, with their weights as they were when it was made."""

    def __init__(self, model: NequIP, species: Tensor, graph: EdgeGraph) -> None:
        self.graph = graph
        scale = model.neighbour_scale(species)
        one_hot = model.identity.index_select(0, species)
        atoms = Atoms(one_hot, None if scale is None else scale.view(-1, 1, 1))
        self.weights = [LayerWeights(model, layer, number) for number, layer in enumerate(model.layers)]
        self.layers = [
            Layer(layer, number, weights, atoms)
            for number, (layer, weights) in enumerate(zip(model.layers, self.weights))
        ]

    def values(self, harmonics: Tensor, radials: Sequence[Radial]) -> Tensor:
        """Features of the last layer, (n_atoms, feature_dim)."""
        h: Field | None = None
        for layer, radial in zip(self.layers, radials):
            convolution = Convolution(layer.form, self.graph, harmonics, radial, still=layer.first)
            layer.values(h, convolution)
            h = layer.h
        return self.last(VALUE)

    def forces(self, to_features: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Cotangents of harmonics, with one column more, for places, where there are tables; and of every layer's rows of
        weights where there are none."""
        self.layers[-1].to_h.block(0, TANGENT).copy_(to_features.unsqueeze(1))
        n_chunks = [layer.form.n_chunks for layer in self.layers]
        columns = self.layers[0].columns_of_geometry
        parts = to_features.new_empty((sum(n_chunks), self.graph.n_edges, columns))
        rows = []
        for (layer, before), part in zip(self._backwards(), reversed(parts.split(n_chunks))):
            rows.append(layer.forces(None if before is None else before.to_h, part))
        return parts.sum(0), rows[::-1]

    def tangents(self, motions: Sequence[Motion]) -> Tensor:
        h: Field | None = None
        for layer, motion in zip(self.layers, motions):
            layer.tangents(h, motion)
            h = layer.h
        return self.last(TANGENT)

    def back(
        self, to_features: Tensor, motions: Sequence[Motion], summed: Callable[[Tensor, Tensor, Motion], list[Tensor]]
    ) -> list[Tensor]:
        """Gradients of all matrices, layer by layer, and then of what radial weights are read from: what `summed` makes,
        layer by layer, of the cotangents of the weights of every edge and of their tangents, which are too large to be
        kept."""
        self.layers[-1].to_h.block(0, VALUE).copy_(to_features.unsqueeze(1))
        matrices: list[list[Tensor]] = []
        radials: list[list[Tensor]] = []
        for (layer, before), motion in zip(self._backwards(), reversed(motions)):
            radials.append(summed(*layer.back(None if before is None else before.to_h, motion), motion))
            matrices.append(layer.gradients(None if before is None else before.h))
        return [gradient for layers in (matrices, radials) for layer in layers[::-1] for gradient in layer]

    def last(self, place: int) -> Tensor:
        return self.layers[-1].h.block(0, place).squeeze(1)

    def _backwards(self) -> list[tuple[Layer, Layer | None]]:
        return list(zip(reversed(self.layers), [*reversed(self.layers[:-1]), None]))
