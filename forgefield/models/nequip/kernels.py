"""NequIP with generated kernels: the geometry that these need, and the two passes of a step.

`model.py` defines what a layer computes, `passes.py` how it is computed on fields. Radial weights are read from a table
(`tables.py`) if that is precise enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.convolution.passes import Motion, Radial, Rows
from forgefield.kernels.core.runtime import Concurrent, Finished, use_kernels, use_tables
from forgefield.kernels.dense.readout import energies_by_kernel, moved_energies_by_kernel
from forgefield.kernels.edges.geometry import EdgeGeometry, moved_geometry
from forgefield.kernels.radial.layer import RadialTable
from forgefield.kernels.radial.packing import StoredTable
from forgefield.kernels.radial.table import Intervals, TableGradient
from forgefield.models.edges import Batch, EdgeContext, FixedWeights
from forgefield.models.interface import Tangents
from forgefield.models.nequip.passes import Network, NetworkMatrices, matrices_of
from forgefield.models.nequip.tables import radial_tables
from forgefield.models.terms import PairLengths
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction, carried, side_by_side, tangent_of
from forgefield.ops.execution import current
from forgefield.ops.graph import EdgeGraph, Segments, gather, is_traced

if TYPE_CHECKING:
    from forgefield.models.nequip.model import NequIP


def by_kernels(model: NequIP, batch: Batch, edges: EdgeContext) -> bool:
    """Whether a pass uses kernels: its forces are not differentiated again, nothing is traced, no atom is a ghost."""
    if edges.differentiated_again or edges.ghosts is not None or is_traced(batch["positions"]):
        return False
    return use_kernels(model.type_embedding) and model.one_hot_self_connection


# ---- geometry


@dataclass(frozen=True)
class Geometry:
    """Geometry of edges. harmonics: (n_edges, (l_max + 1)^2). Then either basis (n_pairs or n_edges, num_bessels), or
    directions (n_edges, 3), which have the gradient instead of harmonics, the position of every edge in its interval of the
    tables, and edges by interval."""

    harmonics: Tensor
    basis: Tensor | None
    direction: Tensor | None
    position: Tensor | None
    at: Intervals | None


@dataclass(frozen=True)
class Moved:
    """Tangents of harmonics and of positions; with a basis, it and its tangents stacked."""

    harmonics: Tensor
    basis: Tensor | None
    position: Tensor | None


def in_tables(model: NequIP) -> bool:
    """Whether radial weights are read from tables."""
    return use_tables(model.type_embedding) and model.adaptive_cutoff is None


def geometry_at_rest(
    model: NequIP, vectors: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph, *, trained: bool
) -> Geometry:
    """Geometry of edges, differentiable in the edge vectors (n_edges, 3). pairs: needed without tables. trained: gradients of
    tables will be needed, for which edges are sorted by interval."""
    dtype = model.type_embedding.dtype
    if in_tables(model):
        n_intervals = current().knots
        inverse = model.inverse_cutoffs(species, graph)
        harmonics, direction, position, at = EdgeGeometry.apply(
            vectors, inverse, model.options.l_max, n_intervals, dtype
        )
        intervals = Intervals(at, n_intervals)
        return Geometry(harmonics, None, direction, position, intervals.sort() if trained else intervals)
    assert pairs is not None
    harmonics = model.harmonics(vectors / pairs.lengths.unsqueeze(1)).to(dtype).contiguous()
    return Geometry(harmonics, model.radial_basis(pairs, graph).to(dtype), None, None, None)


def geometry_moved(model: NequIP, vectors: Tensor, species: Tensor, graph: EdgeGraph, geometry: Geometry) -> Moved:
    """Tangents of the geometry, for edge vectors with tangents, inside their level of forward-mode differentiation."""
    dtype = model.type_embedding.dtype
    if geometry.at is not None:
        value, tangent = forward_ad.unpack_dual(vectors)
        inverse = model.inverse_cutoffs(species, graph)
        harmonics, position = moved_geometry(value, tangent, inverse, model.options.l_max, geometry.at.count, dtype)
        return Moved(harmonics, None, position)
    pairs = model.pair_lengths(vectors, species, graph)
    harmonics = tangent_of(model.harmonics(vectors / pairs.lengths.unsqueeze(1))).to(dtype).contiguous()
    return Moved(harmonics, side_by_side(model.radial_basis(pairs, graph)).to(dtype), None)


# ---- the two passes of a step


@dataclass(frozen=True)
class ReadTables:
    """Tables of all layers, and their stored forms, for which a layer waits when it reads them."""

    tables: list[RadialTable]
    stored: list[Concurrent[StoredTable]]


@dataclass(frozen=True)
class Prepared:
    """Quantities that depend on the weights and not on the positions. tables: None if weights are computed for every edge."""

    network: Network
    tables: ReadTables | None


@dataclass(frozen=True)
class FirstPass:
    """Results of the first pass of a training step for the second one."""

    network: Network
    geometry: Geometry
    tables: list[RadialTable] | None
    pairs: PairLengths | None


def first_pass(prepared: Prepared, geometry: Geometry, pairs: PairLengths | None) -> FirstPass:
    """pairs: lengths of the edges, if they were computed."""
    tables = None if prepared.tables is None else prepared.tables.tables
    return FirstPass(prepared.network, geometry, tables, None if pairs is None else pairs.at_rest())


def prepare(
    model: NequIP, species: Tensor, graph: EdgeGraph, *, trained: bool, fixed: FixedWeights | None = None
) -> Prepared:
    """Start computing tables, concurrently with the geometry and the first layers. trained: with a gradient in the weights.
    fixed: tables and matrices are taken from there, and put there by the first pass."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        if fixed is not None and not trained:
            constants = _constants(model, fixed)
            network = Network(model, species, graph, trained=False, matrices=constants.matrices)
            return Prepared(network, constants.read_tables())
        tables = _start_tables(model) if in_tables(model) else None
        return Prepared(Network(model, species, graph, trained=trained), tables)


@dataclass(frozen=True)
class _Constants:
    """What depends on the weights alone. knots: number of intervals of the tables; zero without tables."""

    knots: int
    matrices: NetworkMatrices
    tables: list[StoredTable]

    def read_tables(self) -> ReadTables | None:
        return ReadTables([], [Finished(table) for table in self.tables]) if self.knots else None


def _constants(model: NequIP, fixed: FixedWeights) -> _Constants:
    knots = current().knots if in_tables(model) else 0
    state = fixed.state
    if not isinstance(state, _Constants) or state.knots != knots:
        tables = [table.stored() for table in radial_tables(model, knots)] if knots else []
        state = fixed.state = _Constants(knots, matrices_of(model, trained=False), tables)
    return state


def _start_tables(model: NequIP) -> ReadTables:
    computed = Concurrent("tables", partial(radial_tables, model, current().knots))
    tables = computed.unfinished()  # subsequent work is on the same stream, or waits for it
    return ReadTables(tables, [Concurrent("tables", table.stored) for table in tables])


def features_at_rest(model: NequIP, prepared: Prepared, geometry: Geometry, *, trained: bool) -> Tensor:
    """(n_atoms, feature_dim), the scalars of the last layer, with a gradient in the geometry and none in the weights."""
    network, read = prepared.network, prepared.tables
    if geometry.basis is not None:
        result: Tensor = _AtRest.apply(
            network, trained, [], None, geometry.harmonics, *model.radial_weights(geometry.basis)
        )
        return result
    assert read is not None
    edges = (geometry.harmonics, geometry.position, geometry.direction)
    features: Tensor = _AtRest.apply(network, trained, read.stored, geometry.at, *edges)
    return features


def _shared_rows(of_edges: Tensor, graph: EdgeGraph) -> Tensor:
    """Cotangents of rows that an edge and its reverse share, from those of every edge."""
    if graph.pair_edge is None or graph.reverse is None:
        return of_edges
    back = graph.reverse.index_select(0, graph.pair_edge)
    return of_edges.index_select(0, graph.pair_edge) + of_edges.index_select(0, back)


def _radial(table: StoredTable, at: Intervals, position: Tensor) -> Radial:
    return Radial(table.words, at.at, position, table.unit)


class _AtRest(TypedFunction):
    """Inputs: harmonics; then positions and directions of edges, or rows of weights of every layer."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        network: Network,
        trained: bool,
        tables: Sequence[Concurrent[StoredTable]],
        at: Intervals | None,
        harmonics: Tensor,
        *radial: Tensor,
    ) -> Tensor:
        radials: Iterable[Radial]
        ctx.network, ctx.in_tables = network, at is not None
        if at is not None:
            planned = [_radial(table.unfinished(), at, radial[0]) for table in tables]
            radials = (_radial(table.result(), at, radial[0]) for table in tables)  # a layer waits for its table
        else:
            graph = network.graph
            row = torch.arange(graph.n_edges, device=harmonics.device) if graph.pair is None else graph.pair
            radials = planned = [Radial(rows.contiguous(), row) for rows in radial]
        network.compile(harmonics, planned, trained=trained)
        return network.values(harmonics, radials)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, to_features: Tensor) -> Gradients:
        geometry, rows = ctx.network.forces(to_features)
        if ctx.in_tables:
            return None, None, None, None, None, geometry[:, 3], geometry[:, :3]
        return None, None, None, None, geometry, *(_shared_rows(of_edges, ctx.network.graph) for of_edges in rows)


def features_moved(model: NequIP, moved: Moved, first: FirstPass) -> Tensor:
    """Features of the last layer and then their tangents, (2 n_atoms, feature_dim), with a gradient in the weights.

    Valid if the tangents of the atomic energies have the cotangents with which forces were computed: one each.
    """
    network = first.network
    context = (network, moved, first.geometry, first.tables)
    if moved.basis is None:
        assert first.tables is not None
        tracked = [tensor for table in first.tables for tensor in table.tracked()]
        moved_rows: Tensor = _Moving.apply(*context, network.row, *tracked)
        return moved_rows
    rows = carried(lambda inputs: model.radial_weights(inputs[0]), [moved.basis])
    values_and_tangents = [column for pair in rows for column in (pair[:, 0], pair[:, 1])]
    result: Tensor = _Moving.apply(*context, network.row, *values_and_tangents)
    return result


class _Moving(TypedFunction):
    """Inputs: all matrices; then the tensors from which tables are computed, or rows of weights and their tangents of every
    layer."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        network: Network,
        moved: Moved,
        geometry: Geometry,
        tables: list[RadialTable] | None,
        matrices: Tensor,
        *tracked: Tensor,
    ) -> Tensor:
        if moved.basis is None:
            motions = [Motion(moved.harmonics, position=moved.position) for _ in network.layers]
        else:
            radial = [tensor.detach().contiguous() for tensor in tracked]
            motions = [Motion(moved.harmonics, weights=weights) for weights in radial[1::2]]
        ctx.network, ctx.motions, ctx.geometry, ctx.tables = network, motions, geometry, tables
        network.tangents(motions)
        return network.layers[-1].h.both(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, to_rows: Tensor) -> Gradients:
        network: Network = ctx.network
        to_features = to_rows[: network.graph.n_atoms]
        rows: _SummedRows | _SummedTables
        rows = _SummedRows(network.graph) if ctx.tables is None else _SummedTables(ctx.tables, ctx.geometry)
        matrices = network.back(to_features, ctx.motions, rows)
        return None, None, None, None, matrices, *rows.gradients()


class _SummedRows:
    """Cotangents of rows of weights and their tangents, from those of every edge."""

    def __init__(self, graph: EdgeGraph) -> None:
        self.graph = graph
        self._cotangents: list[Tensor] = []

    def begin(self, layer: int, motion: Motion) -> None:
        pass

    def add(self, layer: int, rows: Rows) -> None:
        self._cotangents = [
            _shared_rows(rows.of_w, self.graph),
            _shared_rows(rows.of_dw, self.graph),
            *self._cotangents,
        ]

    def end(self, layer: int) -> None:
        pass

    def gradients(self) -> list[Tensor]:
        return self._cotangents


class _SummedTables:
    """Cotangents of the tensors from which tables are computed: first sums over edges, which are limited by memory bandwidth
    and run concurrently with the rest of the layer, then products of small matrices, concurrently with the following
    layers."""

    def __init__(self, tables: list[RadialTable], geometry: Geometry) -> None:
        assert geometry.at is not None
        assert geometry.position is not None
        self.tables, self.at, self.position = tables, geometry.at, geometry.position.detach()
        self._sums: dict[int, TableGradient] = {}
        self._started: dict[int, Concurrent[list[Tensor]]] = {}

    def begin(self, layer: int, motion: Motion) -> None:
        assert motion.position is not None
        n_weights = self.tables[layer].matrix.shape[1]
        self._sums[layer] = TableGradient(self.at, self.position, motion.position, n_weights)

    def add(self, layer: int, rows: Rows) -> Concurrent[None]:
        columns = None if rows.block is None else rows.block.columns
        return Concurrent("sums", partial(self._sums[layer].add, rows.of_w, rows.of_dw, columns))

    def end(self, layer: int) -> None:
        to_table = Concurrent("sums", self._sums[layer].result)
        self._started[layer] = Concurrent("tables", lambda: self.tables[layer].gradients(to_table.result()))

    def gradients(self) -> list[Tensor]:
        return [gradient for layer in range(len(self.tables)) for gradient in self._started[layer].result()]


def moved_encoding(model: NequIP, species: Tensor, graph: EdgeGraph, edges: EdgeContext) -> Tangents | None:
    """See `AtomisticModel.tangents`; None where the first pass did not use kernels."""
    first = None if edges.memory is None else edges.memory.state
    if not isinstance(first, FirstPass):
        return None
    moved = geometry_moved(model, edges.vectors, species, graph, first.geometry)
    return partial(_encode_moved, model, moved, species, graph, first)


def _encode_moved(
    model: NequIP, moved: Moved, species: Tensor, graph: EdgeGraph, first: FirstPass
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the last layer at rest, atomic energies (n_atoms,), eV, float64, and their tangents. Terms of the tangents
    that do not depend on any weight are omitted."""
    rows = features_moved(model, moved, first)
    pairs, features = first.pairs, rows[: graph.n_atoms]
    if linear_readout(model):
        energies, slopes = moved_energies_by_kernel(rows, *_readout(model, species))
        return features, model.add_repulsion(energies, pairs, species, graph), slopes
    (read,) = carried(lambda inputs: [model.readout(inputs[0])], [rows.unflatten(0, (2, -1)).transpose(0, 1)])
    values, tangents = read.squeeze(2).double().unbind(1)
    scales = gather(model.energy_scales, Segments(species, len(model.species)))
    return features, model.energies(values, pairs, species, graph), scales * tangents


# ---- energies by a linear readout


def linear_readout(model: NequIP) -> bool:
    return len(model.readout.weights) == 1


def energies_at_rest(model: NequIP, features: Tensor, species: Tensor) -> Tensor:
    """(n_atoms,) eV, float64, with a gradient in the features alone."""
    return energies_by_kernel(features, *_readout(model, species))


def _readout(model: NequIP, species: Tensor) -> tuple[Tensor, float, Tensor, Tensor, Tensor]:
    weight, norm = model.readout.weights[0], model.readout.scales[0]
    return weight, norm, species, model.energy_scales, model.energy_shifts
