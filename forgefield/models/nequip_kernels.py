"""NequIP through generated kernels, in four passes: values, cotangents for the forces, tangents, cotangents for the weights.

What a layer does is written in `nequip.py`; here it is done on fields (`ops/kernels/fields.py`), and radial weights are read from
a table where that is precise enough. A training in the tangent form needs each pass once: tangents use the values of the first,
and cotangents of tangents are those that the forces were made of, so the last pass computes only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.models.terms import PairLengths
from forgefield.ops.graph import EdgeGraph, Segments, gather, is_traced, join
from forgefield.ops.kernels.convolution import Convolution, Motion, Radial
from forgefield.ops.kernels.fields import TANGENT, VALUE, Field, Shape, new_field
from forgefield.ops.kernels.form import form_of
from forgefield.ops.kernels.gate import GateByKernels, Nonlinearity
from forgefield.ops.kernels.geometry import EdgeGeometry, moved_geometry
from forgefield.ops.kernels.setting import setting, use_kernels, use_tables
from forgefield.ops.kernels.table import polynomials, table_gradient
from forgefield.ops.products import is_lowered, product
from forgefield.ops.radial import bessel_basis
from forgefield.ops.tangents import carried, side_by_side

if TYPE_CHECKING:
    from forgefield.models.nequip import Interaction, NequIP

_SHORTEST = 1e-8
"""First knot of a table, in units of the cutoff: the basis has a limit at zero and no value."""


def by_kernels(model: NequIP, batch: dict[str, Any]) -> bool:
    """Whether a pass goes through kernels: where nobody differentiates its forces, and nothing is traced."""
    if batch.get("differentiated_again", True) or is_traced(batch["positions"]):
        return False
    return use_kernels(model.type_embedding) and model.one_hot_self_connection


# ---- geometry


@dataclass(frozen=True)
class Geometry:
    """Of edges at rest. harmonics: (n_edges, (l_max + 1)^2). One of the two others: basis (n_pairs or n_edges, num_bessels), or
    the place of every edge in its interval of the tables, and edges by interval."""

    harmonics: Tensor
    basis: Tensor | None
    place: Tensor | None
    at: Segments | None


@dataclass(frozen=True)
class Moved:
    """Tangents of harmonics and of places; with a basis, it and its tangents side by side."""

    harmonics: Tensor
    basis: Tensor | None
    place: Tensor | None


def in_tables(model: NequIP) -> bool:
    """Whether radial weights are read from tables."""
    return use_tables(model.type_embedding) and model.adaptive_cutoff is None


def geometry_at_rest(
    model: NequIP, vectors: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph
) -> Geometry:
    """It has a gradient in the edge vectors (n_edges, 3). pairs: needed where there is no table."""
    dtype = model.type_embedding.dtype
    if in_tables(model):
        n_intervals = setting().knots
        inverse = model.inverse_cutoffs(species, graph)
        harmonics, place, at = EdgeGeometry.apply(vectors, inverse, model.options.l_max, n_intervals, dtype)
        return Geometry(harmonics, None, place, _by_interval(at, n_intervals))
    assert pairs is not None
    harmonics = model.harmonics(vectors / pairs.lengths.unsqueeze(1)).to(dtype).contiguous()
    return Geometry(harmonics, model.radial_basis(pairs, graph).to(dtype), None, None)


def _by_interval(at: Tensor, n_intervals: int) -> Segments:
    found, order = torch.sort(at, stable=True)
    knots = torch.arange(n_intervals + 1, dtype=at.dtype, device=at.device)
    return Segments(at, n_intervals, known=(order, torch.searchsorted(found, knots)))


def geometry_moved(model: NequIP, vectors: Tensor, species: Tensor, graph: EdgeGraph, rest: Geometry) -> Moved:
    """Of edge vectors that carry tangents, inside the level of differentiation that these belong to."""
    dtype = model.type_embedding.dtype
    if rest.at is not None:
        value, tangent = forward_ad.unpack_dual(vectors)
        inverse = model.inverse_cutoffs(species, graph)
        harmonics, place = moved_geometry(value, tangent, inverse, model.options.l_max, rest.at.count, dtype)
        return Moved(harmonics, None, place)
    pairs = model.pair_lengths(vectors, species, graph)
    harmonics = _tangent(model.harmonics(vectors / pairs.lengths.unsqueeze(1))).to(dtype).contiguous()
    return Moved(harmonics, side_by_side(model.radial_basis(pairs, graph)).to(dtype), None)


def _tangent(value: Tensor) -> Tensor:
    pair = forward_ad.unpack_dual(value)
    return torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent


# ---- radial weights


def radial_tables(model: NequIP, n_intervals: int) -> list[Tensor]:
    """Polynomials of every layer's radial weights, (n_intervals, 4, n_weights).

    They are linear in values and slopes at the knots, so that they are made of the last hidden layer, which is narrow.
    """
    dtype, frequencies = model.type_embedding.dtype, model.bessel_frequencies
    x = torch.linspace(0, 1, n_intervals + 1, dtype=torch.float64, device=frequencies.device).clamp_(min=_SHORTEST)
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(x, torch.full_like(x, 1 / n_intervals))
        basis = side_by_side(bessel_basis(moving, frequencies, float(model.options.polynomial_cutoff_p)))
    hidden = carried(lambda rows: model.radial_hidden(rows[0]), [basis])
    tables = []
    for layer, rows in zip(model.layers, hidden):
        curves = polynomials(rows[:, 0], rows[:, 1]).to(dtype)
        last = layer.radial.weights[-1] * layer.radial.scales[-1]
        tables.append(curves @ last)
    return tables


def _shared_rows(of_edges: Tensor, graph: EdgeGraph) -> Tensor:
    """Cotangents of rows that an edge and its reverse share, from those of every edge."""
    if graph.pair_edge is None or graph.reverse is None:
        return of_edges
    back = graph.reverse.index_select(0, graph.pair_edge)
    return of_edges.index_select(0, graph.pair_edge) + of_edges.index_select(0, back)


# ---- layers


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


class Layer:
    """One layer on one batch. x: what is convolved, z: what leaves the convolution and the features themselves, a: what goes into
    the nonlinearity, h: what comes out of it; each with its cotangents."""

    def __init__(self, source: Interaction, number: int, weights: LayerWeights, network: Network) -> None:
        self.network, self.first, self.self_pairs, self.resnet = network, number == 0, (), source.resnet
        self.enter = [matrix.detach() for matrix in weights.enter]
        self.leave = [matrix.detach() for matrix in weights.leave]
        if source.self_connection is not None:
            self.self_pairs = tuple(source.self_pairs)
        extra = [0] * len(source.targets)
        for i, target in self.self_pairs:
            extra[target] += source.in_blocks[i].mul * network.one_hot.shape[1]
        self.form = form_of(source.plan, tuple(tuple(paths) for _, paths in source.targets), tuple(extra))
        known = GateByKernels.knows(source.nonlinearity)
        self.nonlinearity = (GateByKernels if known else Nonlinearity)(source.nonlinearity)  # type: ignore[arg-type]
        shapes = (
            self.form.features,
            self.form.outputs,
            _shape(source.nonlinearity.in_blocks),
            _shape(source.out_blocks),
        )
        self.x, self.z, self.a, self.h = (network.field(shape) for shape in shapes)
        self.to_x, self.to_z, self.to_a, self.to_h = (network.field(shape) for shape in shapes)
        self.convolution: Convolution | None = None

    # -- forward: values and tangents differ only in the convolution and the nonlinearity

    def values(self, h: Field | None, convolution: Convolution) -> None:
        self.convolution = convolution
        if h is None:
            torch.mm(
                self.network.one_hot,
                self.enter[0],
                out=self.x.flat[: self.x.flat.numel() // 2].view(self.x.n_atoms, -1),
            )
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
        if self.network.scale is not None:
            for block in x.blocks(place):
                block.mul_(self.network.scale)

    def _leave(self, h: Field | None, place: int) -> None:
        for number, target in self.self_pairs:
            assert h is not None
            own = self._own(self.z, target, place, h.shape.blocks[number][1])
            torch.mul(h.block(number, place).unsqueeze(2), self.network.one_hot[:, None, :, None], out=own)
        for number, matrix in enumerate(self.leave):
            _multiply(self.z.rows(number, place), matrix, self.a.rows(number, place))

    def _own(self, z: Field, target: int, place: int, channels: int) -> Tensor:
        """(n_atoms, 2l + 1, n_species, channels): columns that hold the features of an atom in the place of its species."""
        n_species = self.network.one_hot.shape[1]
        return z.block(target, place)[:, :, -n_species * channels :].unflatten(2, (n_species, channels))

    def _add(self, old: Field | None, new: Field, place: int) -> None:
        if self.resnet and old is not None:
            for update, before in zip(new.blocks(place), old.blocks(place)):
                update.add_(before)

    # -- backward: to_h is filled, to_h of the layer before is asked for

    def forces(self, before: Field | None) -> tuple[Tensor, Tensor]:
        """Cotangents of harmonics, and of places or rows of weights."""
        self.nonlinearity.forces(self.a, self.to_h, self.to_a)
        self._back_to_z(TANGENT)
        found = self._known().forces(self.x, self.to_z, None if before is None else self.to_x)
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
            cotangents = self.to_x.flat[: self.to_x.flat.numel() // 2].view(self.to_x.n_atoms, -1)
            self._scale(self.to_x, VALUE)
            enter = [_transposed_product(self.network.one_hot, cotangents)]
        else:
            enter = [_transposed_product(h.both(i), self.to_x.both(i)) for i in range(len(self.enter))]
        leave = [_transposed_product(self.z.both(i), self.to_a.both(i)) for i in range(len(self.leave))]
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
                total.addcmul_(own[:, :, kind], self.network.one_hot[:, kind, None, None])
        self._add(self.to_h, before, place)

    def _known(self) -> Convolution:
        assert self.convolution is not None
        return self.convolution


def _transposed_product(rows: Tensor, others: Tensor) -> Tensor:
    """rows (n, a) transposed times others (n, b)."""
    return product(rows.t(), others) if is_lowered(rows) else torch.mm(rows.t(), others)


class Network:
    """The layers on one batch, with their weights as they were when it was made."""

    def __init__(self, model: NequIP, species: Tensor, graph: EdgeGraph) -> None:
        self.graph, self.dtype_of = graph, model.type_embedding
        self.one_hot = model.identity.index_select(0, species)
        scale = model.neighbour_scale(species)
        self.scale = None if scale is None else scale.view(-1, 1, 1)
        self.weights = [LayerWeights(model, layer, number) for number, layer in enumerate(model.layers)]
        self.layers = [
            Layer(layer, number, weights, self)
            for number, (layer, weights) in enumerate(zip(model.layers, self.weights))
        ]

    def field(self, shape: Shape) -> Field:
        return new_field(shape, self.graph.n_atoms, self.dtype_of)

    def values(self, harmonics: Tensor, radials: Sequence[Radial]) -> Tensor:
        """Features of the last layer, (n_atoms, feature_dim)."""
        h: Field | None = None
        for layer, radial in zip(self.layers, radials):
            convolution = Convolution(layer.form, self.graph, harmonics, radial, still=layer.first)
            layer.values(h, convolution)
            h = layer.h
        return self._last(VALUE)

    def forces(self, to_features: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Cotangents of harmonics, and of every layer's places or rows of weights."""
        self.layers[-1].to_h.block(0, TANGENT).copy_(to_features.unsqueeze(1))
        harmonics, radials = None, []
        for layer, before in self._backwards():
            of_harmonics, of_radial = layer.forces(None if before is None else before.to_h)
            harmonics = of_harmonics if harmonics is None else harmonics + of_harmonics
            radials.append(of_radial)
        assert harmonics is not None
        return harmonics, radials[::-1]

    def tangents(self, motions: Sequence[Motion]) -> Tensor:
        h: Field | None = None
        for layer, motion in zip(self.layers, motions):
            layer.tangents(h, motion)
            h = layer.h
        return self._last(TANGENT)

    def back(self, to_features: Tensor, motions: Sequence[Motion]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Gradients of all matrices, layer by layer; cotangents of the weights of edges and of their tangents."""
        self.layers[-1].to_h.block(0, VALUE).copy_(to_features.unsqueeze(1))
        matrices: list[list[Tensor]] = []
        radials = []
        for (layer, before), motion in zip(self._backwards(), reversed(motions)):
            radials.append(layer.back(None if before is None else before.to_h, motion))
            matrices.append(layer.gradients(None if before is None else before.h))
        return [gradient for layer in matrices[::-1] for gradient in layer], radials[::-1]

    def _last(self, place: int) -> Tensor:
        return self.layers[-1].h.block(0, place).squeeze(1)

    def _backwards(self) -> list[tuple[Layer, Layer | None]]:
        return list(zip(reversed(self.layers), [*reversed(self.layers[:-1]), None]))


# ---- the two passes of a step


def features_at_rest(
    model: NequIP, geometry: Geometry, species: Tensor, graph: EdgeGraph, remember: dict[str, Any] | None
) -> Tensor:
    """(n_atoms, feature_dim), the scalars of the last layer, with a gradient in the geometry and none in the weights."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and remember is not None):
        network = Network(model, species, graph)
        tables = [] if geometry.at is None else radial_tables(model, geometry.at.count)
    if remember is not None:
        remember["network"], remember["geometry"], remember["tables"] = network, geometry, tables
    if geometry.basis is not None:
        return _AtRest.apply(network, [], None, geometry.harmonics, *model.radial_weights(geometry.basis))
    return _AtRest.apply(network, [table.detach() for table in tables], geometry.at, geometry.harmonics, geometry.place)


class _AtRest(torch.autograd.Function):
    """Inputs: harmonics; then the place of every edge, or rows of weights of every layer."""

    @staticmethod
    def forward(ctx, network, tables, at, harmonics, *radial):
        ctx.network, ctx.in_tables = network, at is not None
        if at is not None:
            radials = [Radial(table, at.index, radial[0]) for table in tables]
        else:
            graph = network.graph
            row = torch.arange(graph.n_edges, device=harmonics.device) if graph.pair is None else graph.pair
            radials = [Radial(rows.contiguous(), row) for rows in radial]
        return network.values(harmonics, radials)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_features):
        harmonics, radials = ctx.network.forces(to_features)
        if ctx.in_tables:
            total = radials[0]
            for part in radials[1:]:
                total = total + part
            return None, None, None, harmonics, total
        return None, None, None, harmonics, *(_shared_rows(rows, ctx.network.graph) for rows in radials)


def features_moved(model: NequIP, moved: Moved, remembered: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Features of the last layer and their tangents, (n_atoms, feature_dim) both, with a gradient in the weights.

    It is right where the tangents of the atomic energies have the cotangents that forces were made with: one for each.
    """
    network: Network = remembered["network"]
    matrices = [matrix for weights in network.weights for matrix in weights.tracked()]
    if moved.basis is None:
        return _Moving.apply(network, moved, remembered["geometry"], *matrices, *remembered["tables"])
    rows = carried(lambda given: model.radial_weights(given[0]), [moved.basis])
    pieces = [piece for pair in rows for piece in (pair[:, 0], pair[:, 1])]
    return _Moving.apply(network, moved, remembered["geometry"], *matrices, *pieces)


class _Moving(torch.autograd.Function):
    """Inputs: all matrices; then the tables, or rows of weights and their tangents of every layer."""

    @staticmethod
    def forward(ctx, network, moved, geometry, *tracked):
        n_matrices = sum(len(weights.tracked()) for weights in network.weights)
        radial = [tensor.detach().contiguous() for tensor in tracked[n_matrices:]]
        if moved.basis is None:
            motions = [Motion(moved.harmonics, place=moved.place) for _ in network.layers]
        else:
            motions = [Motion(moved.harmonics, weights=weights) for weights in radial[1::2]]
        ctx.network, ctx.motions, ctx.geometry = network, motions, geometry
        tangents = network.tangents(motions)
        return network._last(VALUE).clone(), tangents.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_features, to_tangents):
        network, geometry, motions = ctx.network, ctx.geometry, ctx.motions
        matrices, radials = network.back(to_features, motions)
        gradients: list[Tensor] = []
        for (of_w, of_dw), motion in zip(radials, motions):
            if geometry.at is not None:
                gradients.append(table_gradient(of_w, of_dw, geometry.at, geometry.place.detach(), motion.place))
            else:
                gradients += [_shared_rows(of_w, network.graph), _shared_rows(of_dw, network.graph)]
        return None, None, None, *matrices, *gradients


def encode_moved(
    model: NequIP, moved: Moved, species: Tensor, graph: EdgeGraph, remembered: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the last layer at rest, atomic energies (n_atoms,), eV, float64, and how these change. What in the change
    does not depend on any weight is left out."""
    features = torch.stack(features_moved(model, moved, remembered), 1)
    (read,) = carried(lambda rows: [model.readout(rows[0])], [features])
    values, tangents = read.squeeze(2).double().unbind(1)
    scales = gather(model.energy_scales, Segments(species, len(model.species)))
    return features[:, 0], model.energies(values, remembered["pairs"], species, graph), scales * tangents
