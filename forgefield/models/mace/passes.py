"""The layers of MACE on the atoms of one batch by generated kernels, in the two passes of a training step.

The first pass computes values, and cotangents for the forces; the second tangents along a direction of motion, and gradients of
weights. Features are stacks (R, n_atoms, 2l + 1, channels): values alone in the first pass (R = 1), values and tangents in the
second (R = 2). Convolution and contraction are functions of autograd around kernels. What the first pass has computed is not
computed again: the second pass needs tangents of what has values already, and cotangents of its tangents are those with which
forces were computed. Everything else is linear in stacks, or differentiated by PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forgefield.kernels.contraction.passes import Contraction, compile_contractions, contraction_refusal
from forgefield.kernels.convolution.form import Form, form_of
from forgefield.kernels.convolution.passes import Convolution, Motion, Planned, Radial, Rows, compile_together
from forgefield.kernels.core.fields import TANGENT, VALUE, new_field
from forgefield.kernels.core.runtime import Concurrent
from forgefield.kernels.dense.products import AtomsBySpecies
from forgefield.kernels.radial.layer import RadialTable
from forgefield.kernels.radial.table import Intervals, TableGradient
from forgefield.models.mace.stacks import Started, cut_list, linear, matrix_gradient, moving, with_tangents
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.graph import EdgeGraph
from forgefield.ops.linear import IrrepsLinear, SpeciesLinear, product_by_species
from forgefield.ops.products import is_lowered, product

if TYPE_CHECKING:
    from forgefield.models.mace.interaction import Interaction, Product


Residual = list[Tensor | None]
"""What is added to each block of new features; None where nothing is."""


@dataclass(frozen=True)
class Atoms:
    """species: (n_atoms,). one_hot: (n_atoms, n_species). by_species: atoms sorted by species, where gradients of weights of
    several species are computed."""

    species: Tensor
    one_hot: Tensor
    by_species: AtomsBySpecies | None

    @property
    def n_species(self) -> int:
        return self.one_hot.shape[1]


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a layer as its passes use them.

    up, sums, results: (c, d) for each block, of the linear maps before and after the sum over neighbours, and after the
    polynomials. residual: (c, n_species, d) for each of `residual_pairs`; empty for other interactions than `residual`. table:
    weights of polynomials, (n_species or 1, n_weights, channels).
    """

    up: list[Tensor]
    sums: list[Tensor]
    results: list[Tensor]
    residual: list[Tensor]
    table: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self.up, *self.sums, *self.results, *self.residual, self.table]

    def replaced(self, tensors: list[Tensor]) -> LayerWeights:
        """The same with other tensors, in the order of `tensors()`."""
        lengths = [len(part) for part in (self.up, self.sums, self.results, self.residual)]
        up, sums, results, residual, (table,) = cut_list(tensors, lengths)
        return LayerWeights(up, sums, results, residual, table)

    def detached(self) -> LayerWeights:
        return self.replaced([tensor.detach() for tensor in self.tensors()])


def layer_weights(interactions: Sequence[Interaction], products: Sequence[Product]) -> list[LayerWeights]:
    """Of all layers. Weights of linear maps are scaled together, and their gradients together."""
    linears: list[IrrepsLinear | SpeciesLinear] = []
    for interaction, polynomials in zip(interactions, products):
        linears += [interaction.linear_up, interaction.linear, polynomials.linear]
        linears += [interaction.by_species] if interaction.kind == "residual" else []
    scaled = torch.cat([x.weight for x in linears]) * torch.cat([x.norm for x in linears])
    parts = iter(scaled.split([size for x in linears for size in x.sizes]))

    def matrices(linear: IrrepsLinear) -> list[Tensor]:
        return [next(parts).view(shape) for shape in linear.channels]

    result = []
    for interaction, polynomials in zip(interactions, products):
        up, sums, results = map(matrices, (interaction.linear_up, interaction.linear, polynomials.linear))
        by_species = interaction.by_species if interaction.kind == "residual" else None
        residual = (
            []
            if by_species is None
            else [next(parts).view(c, by_species.n_embedding, d) for c, d in by_species.channels]
        )
        result.append(LayerWeights(up, sums, results, residual, polynomials.table().contiguous()))
    return result


@dataclass(frozen=True)
class EdgePass:
    """What a layer reads of the edges in the first pass: with a table, positions and directions have gradients; without,
    harmonics and rows of weights.

    density: (n_atoms, 1), or with tangents (n_atoms, 2, 1) in the second pass, for interactions that have one.
    """

    harmonics: Tensor
    radial: Radial
    tracked: tuple[Tensor, Tensor]
    density: Tensor | None


@dataclass(frozen=True)
class MovedPass:
    """What a layer reads of the edges in the second pass.

    tracked: tensors that the radial weights are computed from: with a table those of `RadialTable.tracked`, without it rows of
    weights and their tangents. at, position: edges by interval of the table, and their positions.
    """

    motion: Motion
    tracked: tuple[Tensor, Tensor]
    density: Tensor | None
    table: RadialTable | None = None
    at: Intervals | None = None
    position: Tensor | None = None


ONE_HOT_UP_TO = 16
"""Number of species up to which one product with all matrices is cheaper than a copy of a matrix for each atom."""


class Layer:
    """One layer on one batch, with what the first pass leaves for the second."""

    def __init__(
        self,
        interaction: Interaction,
        polynomials: Product,
        weights: LayerWeights,
        graph: EdgeGraph,
        atoms: Atoms,
        *,
        first: bool,
    ) -> None:
        self.interaction, self.product, self.weights = interaction, polynomials, weights
        self.graph, self.atoms, self.first = graph, atoms, first
        self.form = form_of_interaction(interaction)
        like = interaction.linear.weight.detach()
        self.x, self.to_x = (new_field(self.form.features, graph.n_atoms, like) for _ in range(2))
        self.z, self.to_z = (new_field(self.form.outputs, graph.n_atoms, like) for _ in range(2))
        self.sums = [self._stack(like, 2 * block.l + 1, block.mul) for block in interaction.summed]
        self.by_kernels = contraction_refusal(polynomials.plan) is None
        channels = polynomials.weights[0].shape[2]
        self.results = [self._stack(like, output.irrep.dim, channels) for output in polynomials.plan.outputs]
        self.to_features: list[Tensor] = []
        self.started: Started | None = None
        """Gradients that are computed concurrently, in the second pass."""
        self.convolution: Convolution | None = None

    def _stack(self, like: Tensor, components: int, channels: int) -> Tensor:
        return like.new_empty((2, self.graph.n_atoms, components, channels))

    def planned(self, radial: Radial) -> Planned:
        return Planned(self.form, radial, self.first, self.x, self.z, self.to_x, self.to_z)

    # ---- the two passes: blocks of stacks -> blocks of stacks. In the first layer, blocks are those of species.

    def at_rest(self, blocks: list[Tensor], edges: EdgePass) -> list[Tensor]:
        weights = self.weights.detached()
        sent = self._sent(blocks, weights)
        sums = _Sums.apply(self, edges.harmonics, edges.radial, weights.sums, *edges.tracked, *sent)
        features, residual = self._features(list(sums), sent, blocks, weights, edges.density)
        if not self.by_kernels:
            return self._by_reference(features, weights, residual)
        results = _Contracted.apply(self, weights.table, *(stack.contiguous() for stack in features))
        return self._new_blocks(list(results), weights, residual)

    def moved(self, blocks: list[Tensor], weights: LayerWeights, edges: MovedPass, started: Started) -> list[Tensor]:
        self.started = started
        sent = self._sent(blocks, weights)
        sums = _MovingSums.apply(self, edges, *edges.tracked, *weights.sums, *sent)
        features, residual = self._features(list(sums), sent, blocks, weights, edges.density)
        if not self.by_kernels:
            return self._by_reference(features, weights, residual)
        results = _MovingContracted.apply(self, weights.table, *(stack.contiguous() for stack in features))
        return self._new_blocks(list(results), weights, residual)

    def _sent(self, blocks: list[Tensor], weights: LayerWeights) -> list[Tensor]:
        """What neighbours read, in the first layer values alone."""
        mixed = [
            linear(blocks[i], matrix, None, self.started) for i, matrix in zip(self.interaction.up_from, weights.up)
        ]
        return [self._of_atoms(stack, 1) for stack in mixed] if self.first else mixed

    def _features(
        self,
        sums: list[Tensor],
        sent: list[Tensor],
        blocks: list[Tensor],
        weights: LayerWeights,
        density: Tensor | None,
    ) -> tuple[list[Tensor], Residual | None]:
        """Features that polynomials are taken of, and what is added to the result."""
        interaction, species, n_rows = self.interaction, self.atoms.species, sums[0].shape[0]
        if interaction.kind == "residual":
            complete = interaction.complete([stack.flatten(0, 1) for stack in sums])
            return [x.unflatten(0, (n_rows, -1)) for x in complete], self._residual(blocks, weights)
        inputs = [*sums, *(with_tangents(x, n_rows) for x in sent), *(self._of_atoms(x, n_rows) for x in blocks)]
        inputs += [] if density is None else [density.unsqueeze(0) if n_rows == 1 else density.transpose(0, 1)]

        def finish(tensors: list[Tensor]) -> list[Tensor]:
            parts, sources, old, rest = cut_list(tensors, [len(sums), len(sent), len(blocks)])
            joined = torch.cat([source.flatten(1) for source in sources], 1)
            new, residual = interaction.finish(parts, rest[0] if rest else None, joined, old, species)
            return [*new, *(residual or [])]

        new, old_features = cut_list(moving(finish, inputs), [len(interaction.targets)])
        return new, list(old_features) or None

    def _residual(self, blocks: list[Tensor], weights: LayerWeights) -> Residual:
        """Old features mapped by species, one stack for each of `kept`. In the first layer they depend on species alone."""
        interaction = self.interaction
        result: list[Tensor | None] = [None] * len(interaction.kept)
        for (i, j), matrix in zip(interaction.residual_pairs, weights.residual):
            if self.first:
                table = torch.bmm(blocks[i].squeeze(0), matrix.transpose(0, 1))
                mapped = self._of_atoms(table.unsqueeze(0), 1)
            else:
                mapped = self._by_species(blocks[i], matrix)
            before = result[j]
            result[j] = mapped if before is None else before + mapped
        return result

    def _by_species(self, x: Tensor, matrix: Tensor) -> Tensor:
        """x (R, n_atoms, k, c) times the matrix of each atom's species. matrix: (c, n_species, d)."""
        count = self.atoms.n_species
        if count > ONE_HOT_UP_TO:
            species = self.atoms.species.repeat(len(x))
            return product_by_species(x.flatten(0, 1), matrix.transpose(0, 1), species).view(*x.shape[:3], -1)
        if count > 1:
            x = (x.unsqueeze(4) * self.atoms.one_hot.view(1, -1, 1, 1, count)).flatten(3)
        return linear(x, matrix.flatten(0, 1), None, self.started)

    def _of_atoms(self, stack: Tensor, n_rows: int) -> Tensor:
        """Features of atoms; those of the first layer are given for species."""
        if self.first:
            stack = _OfAtoms.apply(stack.squeeze(0), self.atoms).unsqueeze(0)
        return with_tangents(stack, n_rows)

    def _by_reference(self, features: list[Tensor], weights: LayerWeights, residual: Residual | None) -> list[Tensor]:
        results = moving(lambda parts: self.product.polynomials(parts, self.atoms.species), features)
        return self._new_blocks(results, weights, residual)

    def _new_blocks(self, results: list[Tensor], weights: LayerWeights, residual: Residual | None) -> list[Tensor]:
        added = residual or [None] * len(results)
        return [linear(x, matrix, old, self.started) for x, matrix, old in zip(results, weights.results, added)]


def form_of_interaction(interaction: Interaction) -> Form:
    """The form of its convolution: results of the same irrep are adjacent."""
    targets = tuple(tuple(interaction.paths(block)) for block in interaction.summed)
    return form_of(interaction.plan, targets, (0,) * len(targets))


def compile_layers(layers: Sequence[Layer], edges: Sequence[EdgePass]) -> None:
    """Compile the kernels of all convolutions and contractions for a training, unless that has been done."""
    planned = [layer.planned(edge_pass.radial) for layer, edge_pass in zip(layers, edges)]
    compile_together(planned, layers[0].graph, edges[0].harmonics)
    contractions = [
        Contraction(layer.product.plan, layer.weights.table.detach(), layer.atoms.species)
        for layer in layers
        if layer.by_kernels
    ]
    compile_contractions(contractions, layers[0].atoms.by_species)


class _OfAtoms(TypedFunction):
    """Rows (n_species, ...) -> rows (n_atoms, ...)."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, atoms: Atoms) -> Tensor:
        ctx.atoms, ctx.shape = atoms, rows.shape
        return rows.index_select(0, atoms.species)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, to_atoms: Tensor) -> Gradients:
        return matrix_gradient(ctx.atoms.one_hot, to_atoms.flatten(1)).view(ctx.shape), None


# ---- sums over neighbours


def _multiply(rows: Sequence[Tensor], matrices: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Write products of rows, one for each block, concurrently: those of small batches are limited by latency."""
    first, *others = zip(rows, matrices, out)
    started = [Concurrent(f"block {number}", partial(_write_product, *parts)) for number, parts in enumerate(others)]
    _write_product(*first)
    for work in started:
        work.result()


def _write_product(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    if is_lowered(x):
        out.copy_(product(x, matrix))
    else:
        torch.mm(x, matrix, out=out)


class _Sums(TypedFunction):
    """Inputs: the two tensors of the radial weights; then what neighbours send."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        layer: Layer,
        harmonics: Tensor,
        radial: Radial,
        matrices: list[Tensor],
        first: Tensor,
        second: Tensor,
        *sent: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.layer, ctx.matrices, ctx.in_table = layer, matrices, radial.in_table
        layer.x.fill(VALUE, [stack[0] for stack in sent])
        layer.convolution = Convolution(layer.form, layer.graph, harmonics, radial, still=layer.first)
        layer.convolution.values(layer.x, layer.z)
        rows = [layer.z.rows(number, VALUE) for number in range(len(matrices))]
        _multiply(rows, matrices, [stack[VALUE].flatten(0, 1) for stack in layer.sums])
        return tuple(stack[:1] for stack in layer.sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *to_sums: Tensor) -> Gradients:
        layer: Layer = ctx.layer
        assert layer.convolution is not None
        rows = [to_stack.reshape(-1, matrix.shape[1]) for to_stack, matrix in zip(to_sums, ctx.matrices)]
        transposed = [matrix.t() for matrix in ctx.matrices]
        _multiply(rows, transposed, [layer.to_z.rows(number, TANGENT) for number in range(len(rows))])
        columns = 4 if ctx.in_table else layer.form.n_harmonics
        parts = layer.z.flat.new_empty((layer.form.n_chunks, layer.graph.n_edges, columns))
        to_x = None if layer.first else layer.to_x
        of_rows = layer.convolution.forces(layer.x, layer.to_z, to_x, parts)
        geometry = parts.sum(0)
        radial = (geometry[:, 3], geometry[:, :3])
        if not ctx.in_table:
            radial = (geometry, _shared_rows(of_rows, layer.graph))
        to_sent: list[Tensor | None] = [None] * len(layer.x.shape.blocks)
        if not layer.first:
            to_sent = [block.unsqueeze(0) for block in layer.to_x.blocks(TANGENT)]
        return None, None, None, None, *radial, *to_sent


class _MovingSums(TypedFunction):
    """Inputs: the two tensors that radial weights are computed from; then the matrices of the linear map after the sum; then
    what neighbours send."""

    @staticmethod
    def forward(
        ctx: AutogradContext, layer: Layer, edges: MovedPass, first: Tensor, second: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        matrices, sent = inputs[: len(layer.sums)], inputs[len(layer.sums) :]
        ctx.layer, ctx.edges, ctx.matrices = layer, edges, [matrix.detach() for matrix in matrices]
        assert layer.convolution is not None
        if not layer.first:
            layer.x.fill(TANGENT, [stack[TANGENT] for stack in sent])
        layer.convolution.tangents(layer.x, layer.z, edges.motion)
        rows = [layer.z.rows(number, TANGENT) for number in range(len(matrices))]
        _multiply(rows, matrices, [stack[TANGENT].flatten(0, 1) for stack in layer.sums])
        return tuple(stack.detach() for stack in layer.sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *to_sums: Tensor) -> Gradients:
        layer: Layer = ctx.layer
        edges: MovedPass = ctx.edges
        started = layer.started
        assert layer.convolution is not None
        assert started is not None
        rows = [to_stack.reshape(-1, matrix.shape[1]) for to_stack, matrix in zip(to_sums, ctx.matrices)]
        to_matrices = [
            started.run("matrices", partial(matrix_gradient, layer.z.both(number), both))
            for number, both in enumerate(rows)
        ]
        to_z = [layer.to_z.rows(number, VALUE) for number in range(len(rows))]
        _multiply([both[: len(both) // 2] for both in rows], [matrix.t() for matrix in ctx.matrices], to_z)
        collected: _RowGradients | _TableGradients
        collected = _RowGradients(layer.graph) if edges.table is None else _TableGradients(edges, started)
        started.wait_for_rows()  # of the next layer, whose memory is reused
        started.rows = layer.convolution.back(layer.x, layer.to_z, layer.to_x, edges.motion, collected.add)
        blocks, n_atoms = layer.x.shape.blocks, layer.graph.n_atoms
        if layer.first:
            to_sent = [block.unsqueeze(0) for block in layer.to_x.blocks(VALUE)]
        else:
            to_sent = [layer.to_x.both(i).view(2, n_atoms, *blocks[i]) for i in range(len(blocks))]
        return None, None, *collected.result(), *to_matrices, *to_sent


class _RowGradients:
    """Cotangents of rows of weights and of their tangents, from those of every edge."""

    def __init__(self, graph: EdgeGraph) -> None:
        self.graph = graph
        self._rows: list[Tensor] = []

    def add(self, rows: Rows) -> None:
        self._rows = [_shared_rows(rows.of_w, self.graph), _shared_rows(rows.of_dw, self.graph)]

    def result(self) -> list[Tensor]:
        return self._rows


class _TableGradients:
    """Cotangents of the tensors that a table is computed from, from those of the weights of every edge."""

    def __init__(self, edges: MovedPass, started: Started) -> None:
        assert edges.table is not None
        assert edges.at is not None
        assert edges.position is not None
        assert edges.motion.position is not None
        self.table, self.started = edges.table, started
        n_weights = self.table.matrix.shape[1]
        self._sums = TableGradient(edges.at, edges.position, edges.motion.position, n_weights)

    def add(self, rows: Rows) -> Concurrent[None]:
        columns = None if rows.block is None else rows.block.columns
        return Concurrent("sums", partial(self._sums.add, rows.of_w, rows.of_dw, columns))

    def result(self) -> list[Tensor]:
        """Unfinished, as results of `Started.run` are."""
        to_table = Concurrent("sums", self._sums.result)
        return self.started.run("tables", lambda: self.table.gradients(to_table.result()))


def _shared_rows(of_edges: Tensor, graph: EdgeGraph) -> Tensor:
    """Cotangents of rows that an edge and its reverse share, from those of every edge."""
    if graph.pair_edge is None or graph.reverse is None:
        return of_edges
    back = graph.reverse.index_select(0, graph.pair_edge)
    return of_edges.index_select(0, graph.pair_edge) + of_edges.index_select(0, back)


# ---- polynomials


class _Contracted(TypedFunction):
    """Inputs: weights of the polynomials, without a gradient; then features (1, n_atoms, 2l + 1, channels)."""

    @staticmethod
    def forward(ctx: AutogradContext, layer: Layer, table: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.contraction = Contraction(layer.product.plan, table, layer.atoms.species)
        ctx.features = [stack[0] for stack in features]
        ctx.contraction.values(ctx.features, [stack[VALUE] for stack in layer.results])
        return tuple(stack[:1] for stack in layer.results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *to_results: Tensor) -> Gradients:
        layer: Layer = ctx.layer
        layer.to_features = [x.new_empty((2, *x.shape)) for x in ctx.features]
        to_features = [stack[TANGENT] for stack in layer.to_features]
        ctx.contraction.forces(ctx.features, [stack[0].contiguous() for stack in to_results], to_features)
        return None, None, *(x.unsqueeze(0) for x in to_features)


class _MovingContracted(TypedFunction):
    """Inputs: weights of the polynomials; then features with tangents, (2, n_atoms, 2l + 1, channels)."""

    @staticmethod
    def forward(ctx: AutogradContext, layer: Layer, table: Tensor, *features: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        ctx.contraction = Contraction(layer.product.plan, table.detach(), layer.atoms.species)
        ctx.values, ctx.tangents = ([stack[slot] for stack in features] for slot in (VALUE, TANGENT))
        ctx.contraction.tangents(ctx.values, ctx.tangents, [stack[TANGENT] for stack in layer.results])
        return tuple(stack.detach() for stack in layer.results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *to_results: Tensor) -> Gradients:
        layer: Layer = ctx.layer
        to_values, to_tangents = ([stack[slot].contiguous() for stack in to_results] for slot in (VALUE, TANGENT))
        to_features = [stack[VALUE] for stack in layer.to_features]
        atoms = layer.atoms.by_species
        to_table = ctx.contraction.back(ctx.values, ctx.tangents, to_values, to_tangents, to_features, atoms)
        return None, to_table, *layer.to_features
