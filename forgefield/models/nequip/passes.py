"""The layers of NequIP on the atoms of one batch, in four passes: values, cotangents for forces, tangents, cotangents again.

All features are fields (`kernels/core/fields.py`). A training needs each pass once: tangents use the values of the first pass,
and cotangents of tangents are those of the pass for forces, so the last pass computes only what is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from forgefield.kernels.convolution.form import Form
from forgefield.kernels.convolution.passes import Convolution, Motion, Planned, Radial, Rows, Take, compile_together
from forgefield.kernels.core.fields import TANGENT, VALUE, Field, new_field
from forgefield.kernels.core.runtime import Concurrent
from forgefield.kernels.dense.gate import nonlinearity_on_fields
from forgefield.kernels.dense.products import AtomsBySpecies, Products, sort_by_species
from forgefield.models.nequip.fields import FIELDS, Layout, all_matrices, forms, layout
from forgefield.ops.graph import EdgeGraph
from forgefield.ops.products import is_lowered

if TYPE_CHECKING:
    from forgefield.models.nequip.model import Interaction, NequIP


@dataclass(frozen=True)
class Atoms:
    """Data of the atoms for all layers. arena: (2 * n_atoms * layout.dim,), all fields except the last. species: (n_atoms,);
    sorted_atoms: atoms by species, if products need them. scale: (n_atoms, 1, 1) or None, factor of the input of convolutions.
    row, packed: matrices of all layers."""

    layout: Layout
    arena: Tensor
    species: Tensor
    sorted_atoms: AtomsBySpecies | None
    scale: Tensor | None
    row: Tensor
    packed: Tensor

    @property
    def count(self) -> int:
        return self.species.shape[0]

    @property
    def one_hot(self) -> Tensor:
        """(n_atoms, n_species)."""
        return _padded_one_hot(self.arena, self.layout, self.count)[:, : self.layout.n_species]

    def field(self, number: int, name: str) -> Field:
        """A field of a layer."""
        shape = self.layout.shapes[number].of_field(name)
        if name not in self.layout.starts[number]:
            return new_field(shape, self.count, self.arena)
        begin = 2 * self.count * self.layout.starts[number][name]
        return Field(self.arena[begin : begin + 2 * self.count * shape.dim], self.count, shape)

    def multiply(self, products: Products | None, slot: int, *, precise: bool = False) -> None:
        assert products is not None
        if is_lowered(self.arena):
            products.make_by_reference(self.arena, self.packed, self.one_hot, self.count, slot)
        else:
            products.make(self.arena, self.packed, self.sorted_atoms, self.count, slot, precise=precise)

    def gradients(self, number: int, out: Tensor) -> None:
        """Gradients of the matrices of a layer that has completed all passes, written into the row of all matrices."""
        gradients = self.layout.gradients[number]
        if is_lowered(self.arena):
            gradients.make_by_reference(self.arena, self.one_hot, self.count, out)
        else:
            gradients.make(self.arena, self.sorted_atoms, self.count, out)


def _padded_one_hot(arena: Tensor, where: Layout, n_atoms: int) -> Tensor:
    """(n_atoms, n_columns), a view of the arena."""
    begin, columns = 2 * n_atoms * where.one_hot, where.n_columns
    return arena[begin : begin + n_atoms * columns].view(-1, columns)


class Layer:
    """One layer on one batch. x, z: input and output of the convolution; a, h: input and output of the nonlinearity. Each has
    cotangents."""

    def __init__(self, source: Interaction, number: int, form: Form, atoms: Atoms) -> None:
        self.atoms, self.first, self.resnet, self.form = atoms, number == 0, source.resnet, form
        self.products = atoms.layout.layers[number]
        self.nonlinearity = nonlinearity_on_fields(source.nonlinearity)
        self.x, self.z, self.a, self.h = (atoms.field(number, name) for name in FIELDS)
        self.to_x, self.to_z, self.to_a, self.to_h = (atoms.field(number, f"to_{name}") for name in FIELDS)
        self.convolution: Convolution | None = None

    # -- forward: values and tangents differ only in the convolution and the nonlinearity

    def values(self, h: Field | None, convolution: Convolution) -> None:
        self.convolution = convolution
        if h is None:
            atoms, (start, _, channels) = self.atoms, self.atoms.layout.species
            rows = atoms.row[start : start + atoms.layout.n_species * channels].view(-1, channels)
            torch.index_select(rows, 0, atoms.species, out=self.x.rows(0, VALUE))
            self._scale(self.x, VALUE)
        else:
            self._enter(VALUE)
        convolution.values(self.x, self.z)
        self.atoms.multiply(self.products.leave, VALUE, precise=True)
        self.nonlinearity.values(self.a, self.h)
        self._add(h, self.h, VALUE)

    def tangents(self, h: Field | None, motion: Motion) -> None:
        if h is not None:
            self._enter(TANGENT)
        self._required_convolution().tangents(self.x, self.z, motion)
        self.atoms.multiply(self.products.leave, TANGENT)
        self.nonlinearity.tangents(self.a, self.h)
        self._add(h, self.h, TANGENT)

    def _enter(self, slot: int) -> None:
        self.atoms.multiply(self.products.enter, slot, precise=slot == VALUE)
        self._scale(self.x, slot)

    def _scale(self, x: Field, slot: int) -> None:
        if self.atoms.scale is not None:
            for block in x.blocks(slot):
                block.mul_(self.atoms.scale)

    def _add(self, old: Field | None, new: Field, slot: int) -> None:
        if self.resnet and old is not None:
            for update, before in zip(new.blocks(slot), old.blocks(slot)):
                update.add_(before)

    # -- backward: from to_h of this layer to that of the previous one

    def forces(self, parts: Tensor) -> Tensor:
        """Write cotangents of harmonics (and positions in the table) for every chunk of the convolution to `parts` (n_chunks,
        n_edges, ...), and return those of rows of weights, which do not exist with a table."""
        self.nonlinearity.forces(self.a, self.to_h, self.to_a)
        self.atoms.multiply(self.products.to_z, TANGENT, precise=True)
        row_cotangents = self._required_convolution().forces(
            self.x, self.to_z, None if self.first else self.to_x, parts
        )
        if not self.first:
            self._back_to_h(TANGENT)
        return row_cotangents

    def back(self, motion: Motion, take: Take, before: Concurrent[None] | None) -> Concurrent[None] | None:
        """take: receives the cotangents of the weights of every edge and of their tangents. before: the work that it has
        started with those of the next layer, whose memory is reused; the result is the work for this layer."""
        self.nonlinearity.back(self.a, self.to_h, self.to_a)
        self.atoms.multiply(self.products.to_z, VALUE)
        if before is not None:
            before.result()
        begun = self._required_convolution().back(self.x, self.to_z, self.to_x, motion, take)
        if self.first:
            self._scale(self.to_x, VALUE)
        else:
            self._back_to_h(VALUE)
        return begun

    def _back_to_h(self, slot: int) -> None:
        self._scale(self.to_x, slot)
        self.atoms.multiply(self.products.to_h, slot, precise=slot == TANGENT)

    @property
    def columns_of_geometry(self) -> int:
        return 4 if self._required_convolution().radial.in_table else self.form.n_harmonics

    def _required_convolution(self) -> Convolution:
        assert self.convolution is not None
        return self.convolution


@cache  # never freed: captured graphs read it
def _identity(n_species: int, n_columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(n_species, n_columns, dtype=dtype, device=device)


class NetworkMatrices(NamedTuple):
    """Matrices of all layers in a row, differentiable in the weights, and packed."""

    row: Tensor
    packed: Tensor


def matrices_of(model: NequIP, *, trained: bool) -> NetworkMatrices:
    """trained: as of `Network`."""
    return NetworkMatrices(*all_matrices(model, layout(model, trained=trained)))


def _prepare(
    model: NequIP, where: Layout, species: Tensor, arena: Tensor, matrices: NetworkMatrices | None
) -> tuple[Tensor, Tensor, AtomsBySpecies | None]:
    """Matrices, unless they are given, and atoms by species. Writes one-hot species to the arena."""
    row, packed = all_matrices(model, where) if matrices is None else matrices
    identity = _identity(where.n_species, where.n_columns, arena.dtype, arena.device)
    torch.index_select(identity, 0, species, out=_padded_one_hot(arena, where, species.shape[0]))
    return row, packed, sort_by_species(species, where.n_species) if where.sorts else None


class Radials(Protocol):
    """Sums the cotangents of radial weights, layer by layer: those of all edges are too large to be stored."""

    def begin(self, layer: int, motion: Motion) -> None: ...

    def add(self, layer: int, rows: Rows) -> Concurrent[None] | None: ...

    def end(self, layer: int) -> None: ...


class Network:
    """The layers on one batch, with the weights at the time of construction. row: matrices of all layers, differentiable in the
    weights.

    trained: all four passes will be computed; otherwise only values and forces, in less memory. matrices: of the layers, if
    they have been computed already."""

    def __init__(
        self,
        model: NequIP,
        species: Tensor,
        graph: EdgeGraph,
        *,
        trained: bool = True,
        matrices: NetworkMatrices | None = None,
    ) -> None:
        self.graph = graph
        where = layout(model, trained=trained)
        arena = model.type_embedding.detach().new_empty(2 * species.shape[0] * where.dim)
        self._prepared = Concurrent("matrices", partial(_prepare, model, where, species, arena, matrices))
        self.row, packed, sorted_atoms = self._prepared.unfinished()
        scale = model.neighbour_scale(species)
        scale = None if scale is None else scale.view(-1, 1, 1)
        self.atoms = Atoms(where, arena, species, sorted_atoms, scale, self.row.detach(), packed)
        self.layers = [
            Layer(layer, number, form, self.atoms)
            for number, (layer, form) in enumerate(zip(model.layers, forms(model)))
        ]

    def compile(self, harmonics: Tensor, radials: Sequence[Radial], *, trained: bool) -> None:
        """Compile the kernels of all convolutions, for a training or for values and forces, unless that has been done."""
        planned = [
            Planned(layer.form, radial, layer.first, layer.x, layer.z, layer.to_x, layer.to_z, trained)
            for layer, radial in zip(self.layers, radials)
        ]
        compile_together(planned, self.graph, harmonics)

    def values(self, harmonics: Tensor, radials: Iterable[Radial]) -> Tensor:
        """Features of the last layer, (n_atoms, feature_dim)."""
        self._prepared.result()
        h: Field | None = None
        for layer, radial in zip(self.layers, radials):
            convolution = Convolution(layer.form, self.graph, harmonics, radial, still=layer.first)
            layer.values(h, convolution)
            h = layer.h
        return self.last(VALUE)

    def forces(self, to_features: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Cotangents of harmonics, and of every layer's rows of weights; with tables, of directions and positions."""
        self.layers[-1].to_h.block(0, TANGENT).copy_(to_features.unsqueeze(1))
        n_chunks = [layer.form.n_chunks for layer in self.layers]
        columns = self.layers[0].columns_of_geometry
        parts = to_features.new_empty((sum(n_chunks), self.graph.n_edges, columns))
        rows = []
        for layer, layer_parts in zip(reversed(self.layers), reversed(parts.split(n_chunks))):
            rows.append(layer.forces(layer_parts))
        return parts.sum(0), rows[::-1]

    def tangents(self, motions: Sequence[Motion]) -> Tensor:
        h: Field | None = None
        for layer, motion in zip(self.layers, motions):
            layer.tangents(h, motion)
            h = layer.h
        return self.last(TANGENT)

    def back(self, to_features: Tensor, motions: Sequence[Motion], radials: Radials) -> Tensor:
        """Gradients of all matrices, in a row. radials: receives, layer by layer, the cotangents of the weights of every edge
        and of their tangents."""
        self.layers[-1].to_h.block(0, VALUE).copy_(to_features.unsqueeze(1))
        out = torch.empty_like(self.atoms.row)
        started: list[Concurrent[None]] = []
        summed: Concurrent[None] | None = None
        for number in reversed(range(len(self.layers))):
            radials.begin(number, motions[number])
            summed = self.layers[number].back(motions[number], partial(radials.add, number), summed)
            started.append(Concurrent("matrices", partial(self.atoms.gradients, number, out)))
            radials.end(number)
        for gradients in started if summed is None else [*started, summed]:
            gradients.result()
        return out

    def last(self, slot: int) -> Tensor:
        return self.layers[-1].h.block(0, slot).squeeze(1)
