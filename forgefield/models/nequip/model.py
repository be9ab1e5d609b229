"""NequIP: E(3)-equivariant message passing (Batzner et al., Nat. Commun. 13, 2453, 2022), as in NequIP 0.19.

Atoms carry features of several rotation orders; each layer convolves them with the harmonics of the edge vectors,
weighted by a perceptron of the length, mixes channels and gates. The energy of an atom without neighbours is exactly
its species' shift. Geometry and energies are float64, the interior has the precision of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from forgefield.kernels.convolution.dispatch import EdgeHarmonics
from forgefield.kernels.convolution.form import key_of_plan
from forgefield.kernels.cpu.splines import read_splines, spline_intervals
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import LastLayer, Tangents
from forgefield.models.nequip.kernels import (
    by_kernels,
    energies_at_rest,
    features_at_rest,
    first_pass,
    geometry_at_rest,
    in_tables,
    linear_readout,
    moved_encoding,
    prepare,
)
from forgefield.models.nequip.options import PRESETS, NequIPOptions, complete_options, preset_options
from forgefield.models.nequip.tables import radial_splines, table_line
from forgefield.models.terms import PairLengths, SpeciesTerms, adaptive_bessel_basis
from forgefield.ops.convolution_plan import Block, list_paths, plan_convolution
from forgefield.ops.functions import activate, bessel_basis
from forgefield.ops.graph import (
    EdgeGraph,
    GradientSwitch,
    barrier,
    cut,
    join,
)
from forgefield.ops.harmonics import SphericalHarmonics
from forgefield.ops.linear import (
    Gate,
    IrrepsLinear,
    NormActivation,
    Perceptron,
    SpeciesLinear,
    WeightArguments,
    unit_normal,
)
from forgefield.ops.products import product


class NequIP(SpeciesTerms[NequIPOptions]):
    """Atomic energies from edge vectors. Built from resolved options: every number is given."""

    layers: list[Interaction]
    bessel_frequencies: Tensor
    identity: Tensor
    Options = NequIPOptions
    presets = PRESETS
    ghost_atoms = "exchange"
    convolves = True

    def __init__(
        self,
        options: NequIPOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        adaptive_cutoff: float | None = None,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species, cutoff, adaptive_cutoff)
        n_species = len(self.species)
        features = options.num_features
        features = [features] * (options.l_max + 1) if isinstance(features, int) else list(features)
        n_embedding = options.type_embed_num_features or features[0]
        self.type_embedding = nn.Parameter(unit_normal(n_species, n_embedding, generator=generator, dtype=dtype))
        self.one_hot_self_connection = n_species <= n_embedding

        frequencies = torch.arange(1, options.num_bessels + 1, dtype=torch.float64)
        self.register_trainable("bessel_frequencies", frequencies, options.bessel_trainable)
        self.harmonics = SphericalHarmonics(options.l_max)
        layers = nn.ModuleList()
        blocks: tuple[Block, ...] = (Block(n_embedding, 0, 1),)
        for number in range(options.num_layers):
            hidden = (
                _hidden_blocks(features, options.parity)
                if number < options.num_layers - 1
                else (Block(features[0], 0, 1),)
            )
            layer = Interaction(blocks, hidden, options, number, n_embedding, generator=generator, dtype=dtype)
            layers.append(layer)
            blocks = layer.out_blocks
        self.layers = cast(list[Interaction], layers)
        width = options.readout_mlp_width or features[0]
        sizes = [features[0], *[width] * options.readout_mlp_depth, 1]
        self.readout = Perceptron(sizes, activation=options.readout_mlp_nonlinearity, generator=generator, dtype=dtype)

        self.knot_basis: tuple[Any, Tensor] | None = None
        """The radial basis at the knots of a table, and its key: a cache of the kernels."""
        self.register_buffer("identity", torch.eye(n_species, dtype=dtype), persistent=False)
        self.feature_dim = blocks[0].mul

    @classmethod
    def preset_options(cls, name: str, section: Mapping[str, Any]) -> dict[str, object]:
        return preset_options(name, section)

    @classmethod
    def complete_options(
        cls, options: NequIPOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> NequIPOptions:
        return complete_options(options, species, cutoff, statistics)

    def forward(self, batch: Batch, edges: EdgeContext | None = None) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64."""
        _, energies = self.encode(batch, edges)
        assert energies is not None
        return energies

    def encode(
        self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Scalar features of the last layer, (n_atoms, feature_dim) in the interior precision, and atomic energies."""
        edges = edges or EdgeContext.of(batch)
        vectors, species, graph = edges.vectors, batch["species"], self._graph(edges)
        kernels = by_kernels(self, batch, edges)
        need_pairs = not kernels or not in_tables(self) or bool(self._zbl)
        pairs = self.pair_lengths(vectors, species, graph) if need_pairs else None
        if kernels:
            memory = edges.memory
            trained = memory is not None
            prepared = prepare(self, species, graph, trained=trained, fixed=edges.fixed_weights)
            geometry = geometry_at_rest(self, vectors, pairs, species, graph, trained=trained)
            features = features_at_rest(self, prepared, geometry, trained=trained)
            if memory is not None:
                memory.fill(vectors, graph, first_pass(prepared, geometry, pairs))
        else:
            assert pairs is not None
            features = self._features(edges, pairs, species, graph)
        if not energies:
            return features, None
        if kernels and linear_readout(self):
            return features, self.add_repulsion(energies_at_rest(self, features, species), pairs, species, graph)
        atomic = self.readout(features).squeeze(1)
        return features, self.energies(atomic.double(), pairs, species, graph)

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        features, _ = self.encode(batch, edges, energies=False)
        weights = self.readout.weights[-1].squeeze(1).double() * self.readout.scales[-1]
        species, graph = batch["species"], self._graph(edges)
        pairs = self.pair_lengths(edges.vectors, species, graph) if self._zbl else None
        return self.scaled_last_layer(self.readout.hidden(features), weights, pairs, species, graph)

    def radial_basis(self, pairs: PairLengths, graph: EdgeGraph) -> Tensor:
        """(n_edges or n_pairs, num_bessels) float64."""
        p = float(self.options.polynomial_cutoff_p)
        lengths, scaled, radii = pairs
        if graph.pair_edge is not None:
            scaled = scaled.index_select(0, graph.pair_edge)
        if radii is None or self.adaptive_cutoff is None:
            return bessel_basis(scaled, self.bessel_frequencies, p)
        if graph.pair_edge is not None:
            lengths, radii = lengths.index_select(0, graph.pair_edge), radii.index_select(0, graph.pair_edge)
        return adaptive_bessel_basis(lengths, radii, self.adaptive_cutoff, self.bessel_frequencies, p)

    def _features(self, edges: EdgeContext, pairs: PairLengths, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_atoms, feature_dim): the scalars of the last layer."""
        dtype, switch = self.type_embedding.dtype, edges.gradient
        harmonics = self.harmonics(edges.vectors / pairs.lengths.unsqueeze(1)).to(dtype)
        radial = self._radial(pairs, graph, switch)

        one_hot = self.identity.index_select(0, species)
        attributes = one_hot if self.one_hot_self_connection else one_hot @ self.type_embedding
        table = self.type_embedding if self.one_hot_self_connection else None
        scale = self.neighbour_scale(species)
        blocks: list[Tensor] = []
        convolutions = EdgeHarmonics(harmonics, graph, switch)
        for layer, weights in zip(self.layers, radial):
            if blocks:
                x = edges.fill_ghosts(layer.enter(blocks))
            else:
                x = one_hot @ layer.enter([self.type_embedding.unsqueeze(1)])
            if scale is not None:
                x = x * scale.unsqueeze(1)
            summed = convolutions.convolve(x, weights, layer.plan, layer.coupling_matrix, layer.form_key)
            blocks = layer.leave(summed, blocks, attributes, table)
        return blocks[0].squeeze(1)

    def _radial(self, pairs: PairLengths, graph: EdgeGraph, switch: GradientSwitch | None) -> list[Tensor]:
        """Weights of every layer, (n_edges or n_pairs, plan.n_weights), read from splines where that is faster."""
        scaled = pairs.scaled if graph.pair_edge is None else pairs.scaled.index_select(0, graph.pair_edge)
        n_intervals = 0 if pairs.radii is not None else spline_intervals(self.type_embedding, scaled)
        if n_intervals:
            lengths = barrier(scaled, switch)
            return [read_splines(lengths, table, self.dtype, switch) for table in radial_splines(self, n_intervals)]
        geometry_alone = None if self.bessel_frequencies.requires_grad else switch
        return self.radial_weights(barrier(self.radial_basis(pairs, graph).to(self.dtype), geometry_alone))

    def neighbour_scale(self, species: Tensor) -> Tensor | None:
        """(n_atoms,): one over the root of the usual number of neighbours, where that differs between species."""
        if not isinstance(self.options.avg_num_neighbours, Mapping):
            return None
        return self.feature_scale.to(self.type_embedding.dtype).index_select(0, species)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights and of everything that is computed with them."""
        return self.type_embedding.dtype

    def weight_dtype(self) -> torch.dtype:
        return self.dtype

    def kernel_refusal(self) -> str | None:
        if not self.one_hot_self_connection:
            return "they are made for models with no more species than numbers in a species' embedding; use double or tangent."
        return None

    def tangents(self, batch: Batch, edges: EdgeContext) -> Tangents | None:
        return moved_encoding(self, batch["species"], self._graph(edges), edges)

    def radial_table_line(self, knots: int) -> str | None:
        return None if self.adaptive_cutoff is not None else table_line(self, knots)

    def _graph(self, edges: EdgeContext) -> EdgeGraph:
        graph = edges.graph
        if self.inverse_cutoff.numel() > 1:  # an edge and its reverse may end at different lengths
            graph = replace(graph, in_pairs=False)
        return graph

    @property
    def basis_scale(self) -> float:
        """What the basis is multiplied by before the first weights."""
        reach = self.cutoff if self.adaptive_cutoff is None else self.adaptive_cutoff
        return 2 * math.pi / reach**2

    def radial_weights(self, basis: Tensor) -> list[Tensor]:
        """Weights of every layer, (n_edges or n_pairs, plan.n_weights)."""
        last = [layer.radial.weights[-1] * layer.radial.scales[-1] for layer in self.layers]
        hidden = self.radial_hidden(basis)
        if self.options.radial_mlp_depth == 0:  # geometry enters here
            return [part @ matrix for part, matrix in zip(hidden, last)]
        return [product(part, matrix) for part, matrix in zip(hidden, last)]

    def radial_hidden(self, basis: Tensor) -> list[Tensor]:
        """What the last matrix of every layer's radial network is applied to, in the precision of the basis; the first
        perceptron layers run as one."""
        networks = [layer.radial for layer in self.layers]
        if self.options.radial_mlp_depth == 0:
            return [basis * self.basis_scale] * len(networks)
        first = join([network.weights[0] for network in networks], 1).to(basis.dtype)
        scale = networks[0].scales[0] * self.basis_scale
        hidden = activate("silu", basis @ (first * scale))
        parts = list(cut(hidden, [network.weights[0].shape[1] for network in networks], 1))
        for depth in range(1, self.options.radial_mlp_depth):
            matrices = [network.weights[depth].to(basis.dtype) * network.scales[depth] for network in networks]
            parts = [activate("silu", product(part, matrix)) for part, matrix in zip(parts, matrices)]
        return parts


class Interaction(nn.Module):
    """One layer: mix channels, convolve over edges, mix channels and add the self-connection, gate."""

    coupling_matrix: Tensor

    def __init__(
        self,
        in_blocks: tuple[Block, ...],
        hidden: tuple[Block, ...],
        options: NequIPOptions,
        number: int,
        n_embedding: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        reachable = frozenset((block.l, block.p) for block in hidden)
        reachable = frozenset((path.l3, path.p3) for path in list_paths(in_blocks, options.l_max, reachable))
        scalars = [block for block in hidden if block.l == 0 and (0, block.p) in reachable]
        gated = [block for block in hidden if block.l > 0 and (block.l, block.p) in reachable]
        if options.nonlinearity == "gate":
            self.nonlinearity: Gate | NormActivation = Gate(
                scalars,
                gated,
                even=options.nonlinearity_scalars,
                odd=options.nonlinearity_odd_scalars,
                gate=options.nonlinearity_gates,
            )
        else:
            self.nonlinearity = NormActivation(scalars, gated, even=options.nonlinearity_scalars)
        self.out_blocks: tuple[Block, ...] = self.nonlinearity.out_blocks
        targets = self.nonlinearity.in_blocks
        self.in_blocks = in_blocks
        self.plan = plan_convolution(in_blocks, options.l_max, frozenset((block.l, block.p) for block in targets))
        self.form_key = key_of_plan(self.plan)
        self.register_buffer("coupling_matrix", self.plan.coupling_matrix().to(dtype), persistent=False)
        self.targets = tuple(
            (block.l, [i for i, out in enumerate(self.plan.out_blocks) if (out.l, out.p) == (block.l, block.p)])
            for block in targets
        )
        fan_in = [sum(self.plan.out_blocks[i].mul for i in pieces) for _, pieces in self.targets]

        neighbours = 1.0 if isinstance(options.avg_num_neighbours, Mapping) else float(options.avg_num_neighbours or 1)
        channels = [(block.mul, block.mul) for block in in_blocks]
        self.linear_in = IrrepsLinear(channels, scale=1 / math.sqrt(neighbours), **make)
        widths = [options.radial_mlp_width] * options.radial_mlp_depth
        sizes = [options.num_bessels, *widths, self.plan.n_weights]
        self.radial = Perceptron(sizes, activation="silu", **make)
        self.linear_out = IrrepsLinear(list(zip(fan_in, (block.mul for block in targets))), **make)
        target_of = {(block.l, block.p): i for i, block in enumerate(targets)}
        self.self_pairs = [
            (i, target_of[block.l, block.p]) for i, block in enumerate(in_blocks) if (block.l, block.p) in target_of
        ]
        self.self_connection: SpeciesLinear | None = None
        if options.convnet_sc and number > 0:
            channels = [(in_blocks[i].mul, targets[j].mul) for i, j in self.self_pairs]
            self.self_connection = SpeciesLinear(channels, n_embedding, **make)
        self.resnet = options.convnet_resnet and number > 0 and self.out_blocks == in_blocks

    def enter(self, blocks: Sequence[Tensor]) -> Tensor:
        """Mixed features as rows, divided by sqrt(neighbours): blocks (n, 2l + 1, mul) -> (n, plan.in_dim)."""
        mixed = [product(block, matrix).flatten(1) for block, matrix in zip(blocks, self.linear_in.matrices())]
        return join(mixed, 1)

    def leave(self, summed: Tensor, blocks: Sequence[Tensor], attributes: Tensor, table: Tensor | None) -> list[Tensor]:
        """New features from the convolution's rows (n, plan.out_dim) and the old blocks.

        `attributes` (n, a) and `table` are what `SpeciesLinear.matrices` asks for.
        """
        pieces = cut(summed, [block.dim for block in self.plan.out_blocks], 1)
        inputs = [[pieces[i].unflatten(1, (2 * l + 1, -1)) for i in numbers] for l, numbers in self.targets]
        matrices = [[matrix] for matrix in self.linear_out.matrices()]
        if self.self_connection is not None:
            for (i, target), matrix in zip(self.self_pairs, self.self_connection.matrices(table)):
                one_species = table is not None and table.shape[0] == 1
                self_input = (
                    blocks[i] if one_species else (blocks[i].unsqueeze(3) * attributes[:, None, None]).flatten(2)
                )
                inputs[target].append(self_input)
                matrices[target].append(matrix)
        mixed = [product(join(parts, 2), join(parts_of_matrix, 0)) for parts, parts_of_matrix in zip(inputs, matrices)]
        new = self.nonlinearity(mixed)
        return [old + update for old, update in zip(blocks, new)] if self.resnet else new


def _hidden_blocks(features: Sequence[int], parity: bool) -> tuple[Block, ...]:
    """Blocks by degree; with both parities even comes before odd."""
    return tuple(
        Block(mul, degree, p) for degree, mul in enumerate(features) for p in ((1, -1) if parity else ((-1) ** degree,))
    )
