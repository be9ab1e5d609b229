"""Allegro: a strictly local equivariant potential (Musaelian et al., Nat. Commun. 14, 579, 2023), as in Allegro 0.8.

Every ordered pair of neighbours has scalar and tensor features; layers couple the tensors with the environment of the
centre and mix the scalar part of the result into the scalars. The energy of an atom is the sum over its edges plus its
species' shift and depends on nothing beyond the cutoff. Geometry and energies are float64, everything else has the precision
of the weights. Consecutive linear maps are multiplied before they are applied to edges, and tensor features are carried by
atoms (`tensors.py`); the function is Allegro's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from forgefield.kernels.convolution.dispatch import WeightedHarmonics
from forgefield.kernels.cpu.splines import coefficients, collocation_points, read_splines, spline_intervals
from forgefield.models.allegro.options import PRESETS, AllegroOptions, complete_options, preset_options
from forgefield.models.allegro.tensors import EnvironmentCoupling, harmonic_irreps, layer_irreps
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import LastLayer
from forgefield.models.terms import PairLengths, SpeciesTerms, adaptive_bessel_basis
from forgefield.ops.functions import activate, bessel_basis
from forgefield.ops.graph import (
    EdgeGraph,
    GradientSwitch,
    Segments,
    barrier,
    cut,
    gather,
    join,
    segment_sum,
)
from forgefield.ops.harmonics import SphericalHarmonics
from forgefield.ops.linear import Perceptron, WeightArguments, unit_normal, unit_uniform
from forgefield.ops.products import add_product, product

FEW_KINDS = 16
"""Up to this number of pairs of species, all splines are evaluated as one matrix product; above, weights are gathered."""


_SHORTEST = 1e-8
"""First point of splines, in units of the cutoff: at zero the basis has a limit, but its formula no value."""


class FirstStage(NamedTuple):
    """tensor_weights: (n_edges, tensor weights). sums: (n_edges, n), the products of the first features with the matrices of
    all latents and of the readout. environment: (components, n_atoms, channels), not normalised."""

    tensor_weights: Tensor
    sums: Tensor
    environment: Tensor


class Allegro(SpeciesTerms[AllegroOptions]):
    """Atomic energies from edge vectors. Built from resolved options.

    State: `centre_embedding` and `neighbour_embedding` (n_species, half of the embedding) and `radial` for bessel,
    `splines` (n_species^2, n_splines, embedding) for spline; `scalar_embed`; `tensor_weights` and `first_projection`,
    linear; one of `latents` and of `couplings` per layer; `readout`. Weights of tensors have columns by degree, then
    channel.
    """

    sums_over_edges = True
    ghost_atoms = "local"
    latents: list[Dense]
    couplings: list[EnvironmentCoupling]
    bessel_frequencies: Tensor
    identity: Tensor
    Options = AllegroOptions
    presets = PRESETS

    def __init__(
        self,
        options: AllegroOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        adaptive_cutoff: float | None = None,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species, cutoff, adaptive_cutoff)
        scalars, tensors = options.num_scalar_features, options.num_tensor_features
        self.degrees = [2 * degree + 1 for degree in range(options.l_max + 1)]
        self.n_tensor_weights = tensors * len(self.degrees)
        self.n_env = self.n_tensor_weights if options.weight_individual_irreps else tensors
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        width = self._make_embedding(options, **make)
        dense = partial(Dense, forward_normalise=options.forward_normalize, **make)
        embed = [options.scalar_embed_mlp_width] * options.scalar_embed_mlp_depth
        self.scalar_embed = dense([width, *embed, scalars], options.scalar_embed_mlp_nonlinearity)
        self.tensor_weights = dense([scalars, self.n_tensor_weights], None)
        self.first_projection = Dense([scalars, scalars + self.n_env], None, forward_normalise=True, **make)
        self.harmonics = SphericalHarmonics(options.l_max)
        irreps = layer_irreps(options.l_max, options.parity, options.num_layers)
        latents, couplings = nn.ModuleList(), nn.ModuleList()
        hidden = [options.allegro_mlp_width] * options.allegro_mlp_depth
        for number in range(options.num_layers):
            result = scalars + (self.n_env if number < options.num_layers - 1 else 0)
            sizes = [scalars * (number + 1) + tensors, *hidden, result]
            latents.append(dense(sizes, options.allegro_mlp_nonlinearity))
            couplings.append(
                EnvironmentCoupling(
                    irreps[number],
                    harmonic_irreps(options.l_max),
                    irreps[number + 1],
                    tensors if options.tp_path_channel_coupling else 1,
                    generator=generator,
                    dtype=dtype,
                )
            )
        self.latents, self.couplings = cast(list[Dense], latents), cast(list[EnvironmentCoupling], couplings)
        sizes = [scalars * (options.num_layers + 1), *[options.readout_mlp_width] * options.readout_mlp_depth, 1]
        self.readout = dense(sizes, options.readout_mlp_nonlinearity)
        self.register_buffer("identity", torch.eye(len(self.species), dtype=dtype), persistent=False)
        self.feature_dim = scalars

    def _make_embedding(self, options: AllegroOptions, *, generator: torch.Generator, dtype: torch.dtype) -> int:
        """Parameters of the embedding of length and species; returns its width."""
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        n_species, width = len(self.species), options.radial_chemical_embed_dim or options.num_scalar_features
        if options.radial_chemical_embed == "bessel":
            number = options.num_bessels or 8
            frequencies = torch.arange(1, number + 1, dtype=torch.float64)
            self.register_trainable("bessel_frequencies", frequencies, bool(options.bessel_trainable))
            self.centre_embedding = nn.Parameter(unit_normal(n_species, width // 2, **make))
            self.neighbour_embedding = nn.Parameter(unit_normal(n_species, width // 2, **make))
            self.radial = Dense([number, width], None, forward_normalise=options.forward_normalize, **make)
        else:
            number, span = options.num_splines or 16, options.spline_span or 12
            spread = span if options.forward_normalize else width
            splines = unit_uniform(n_species**2, number, width, **make) / math.sqrt(spread)
            self.splines = nn.Parameter(splines)
        return width

    def weight_dtype(self) -> torch.dtype:
        return self.identity.dtype

    @classmethod
    def preset_options(cls, name: str, section: Mapping[str, Any]) -> dict[str, object]:
        return preset_options(name, section)

    @classmethod
    def complete_options(
        cls, options: AllegroOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> AllegroOptions:
        return complete_options(options, species, cutoff, statistics)

    def forward(self, batch: Batch, edges: EdgeContext | None = None) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64."""
        _, energies = self._evaluate(batch, edges or EdgeContext.of(batch), features=False, energies=True)
        assert energies is not None
        return energies

    def encode(
        self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Scalar features of the last layer, summed over the edges of each atom and normalised, (n_atoms, feature_dim) in
        the precision of the weights, and atomic energies."""
        features, atomic = self._evaluate(batch, edges or EdgeContext.of(batch), features=True, energies=energies)
        assert features is not None
        return features, atomic

    def _evaluate(
        self, batch: Batch, edges: EdgeContext, *, features: bool, energies: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        species, graph = batch["species"], edges.graph
        pairs = self.pair_lengths(edges.vectors, species, graph)
        x, to_features, *readout = self._stages(pairs, edges, species, self.readout.matrix(0))
        atom_features = None
        if features:
            scale = self.feature_scale.to(x.dtype).index_select(0, species).unsqueeze(1)
            atom_features = segment_sum(product(x, to_features), graph.by_destination) * scale
        if not energies:
            return atom_features, None
        edge_energies = self._edge_energies(x, to_features, *readout)
        atomic = segment_sum(edge_energies.double(), graph.by_destination) * self._energy_norm(species)
        return atom_features, self.energies(atomic, pairs, species, graph)

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        species, graph, linear = batch["species"], edges.graph, len(self.readout.weights) == 1
        pairs = self.pair_lengths(edges.vectors, species, graph)
        first = self.readout.matrix(0)
        # With the identity in place of a single matrix, the readout returns its inputs.
        reader = torch.eye(first.shape[0], dtype=first.dtype, device=first.device) if linear else first
        x, to_features, before, rows = self._stages(pairs, edges, species, reader)
        hidden, _ = self.readout.after_first(_read(before, x, to_features, [rows]))
        features = segment_sum(hidden.double(), graph.by_destination) * self._energy_norm(species).unsqueeze(1)
        return self.scaled_last_layer(features, self.readout.matrix(-1).squeeze(1), pairs, species, graph)

    def _energy_norm(self, species: Tensor) -> Tensor:
        """(n_atoms,) what sums of edge energies are multiplied by. Forces have two equal parts, from an edge and from its
        reverse; the factor sqrt(1/2) gives them unit variance."""
        return (self.feature_scale * math.sqrt(0.5)).index_select(0, species)

    def _stages(
        self, pairs: PairLengths, edges: EdgeContext, species: Tensor, readout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`_last_stage` of edges. readout: the matrix that reads the features of all stages first."""
        entries = self._entries(readout)
        n_intervals = 0
        if pairs.radii is None and self.options.radial_chemical_embed == "bessel":
            n_intervals = spline_intervals(self.identity, pairs.scaled, len(self.species) ** 2)
        embedding = None if n_intervals else self._embed(pairs, species, edges.graph, edges.gradient)
        harmonics = self.harmonics(edges.vectors / pairs.lengths.unsqueeze(1)).to(self.identity.dtype)
        tensors = WeightedHarmonics(harmonics, edges.graph, edges.gradient)
        if embedding is None:
            lengths, kinds = barrier(pairs.scaled, edges.gradient), self.edge_kinds(species, edges.graph)
            first = self._splined_first_stage(n_intervals, lengths, kinds, tensors, entries, edges.gradient)
        else:
            first = self._first_stage(embedding, tensors, entries)
        return self._last_stage(first, tensors, species, entries)

    def _embed(self, pairs: PairLengths, species: Tensor, graph: EdgeGraph, switch: GradientSwitch | None) -> Tensor:
        """(n_edges, embedding): length and species of every edge; zero where the interaction ends."""
        if self.options.radial_chemical_embed == "spline":
            basis = barrier(self._spline_basis(pairs.scaled).to(self.identity.dtype), switch)
            return self._by_kind(basis, self.edge_kinds(species, graph))
        p = float(self.options.polynomial_cutoff_p or 6.0)
        if pairs.radii is None or self.adaptive_cutoff is None:
            basis = bessel_basis(pairs.scaled, self.bessel_frequencies, p)
        else:
            frequencies = self.bessel_frequencies
            basis = adaptive_bessel_basis(pairs.lengths, pairs.radii, self.adaptive_cutoff, frequencies, p)
        basis = barrier(basis.to(self.identity.dtype), None if self.bessel_frequencies.requires_grad else switch)
        one_hot = self.identity.index_select(0, species)
        centre = gather(one_hot @ self.centre_embedding, graph.by_destination)
        neighbour = gather(one_hot @ self.neighbour_embedding, graph.by_source)
        result: Tensor = join([centre, neighbour], 1) * self.radial(basis)
        return result

    def _spline_basis(self, x: Tensor) -> Tensor:
        """(n_edges, num_splines) float64: bumps of equal width that end at x = 1, with three continuous derivatives."""
        number, span = self.options.num_splines or 16, self.options.spline_span or 12
        first = torch.arange(-span, number - span, dtype=x.dtype, device=x.device)
        phase = ((x.unsqueeze(1) * number - first) / (span + 1)).clamp(0.0, 1.0)
        return 0.25 * (1 - torch.cos(2 * math.pi * phase)).square()

    def _by_kind(self, basis: Tensor, kinds: Tensor) -> Tensor:
        """The basis times the spline weights of each edge's pair of species: (n_edges, embedding)."""
        n_kinds, number, width = self.splines.shape
        if n_kinds > FEW_KINDS:
            return (gather(self.splines, Segments(kinds, n_kinds)) * basis.unsqueeze(2)).sum(1)
        one_hot = torch.eye(n_kinds, dtype=basis.dtype, device=basis.device).index_select(0, kinds)
        placed = (one_hot.unsqueeze(2) * basis.unsqueeze(1)).flatten(1)
        return placed @ self.splines.reshape(n_kinds * number, width)

    def _last_stage(
        self, first: FirstStage, tensors: WeightedHarmonics, species: Tensor, entries: Sequence[tuple[Tensor, ...]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the last stage: x (n_edges, width), the matrix that maps it to scalar features, the product of the readout's first
        matrix with the features of all previous stages, and the rows of that matrix that read the last features.

        Stage m computes the scalar features m of every edge and its weights for environment m. Features are only read by
        linear maps, the first ones of the latents from m on and of the readout, whose sums are accumulated stage by stage.
        """
        scale = self.feature_scale.to(self.identity.dtype).index_select(0, species).unsqueeze(1)
        environments: list[Tensor] = []
        tensor_weights, sums, environment = first
        features, weights, x = None, None, sums
        for number, (latent, coupling) in enumerate(zip(self.latents, self.couplings)):
            if features is not None:
                sums = _read(sums, x, features, [entry[number] for entry in entries[number:]])
            width = entries[number][-1].shape[1]
            read, sums = cut(sums, [width, sums.shape[1] - width], 1)
            if weights is not None:
                environment = self._environment(x, weights, tensors)
            environments.append(environment * scale)
            row = coupling.scalar_row(environments[-1])
            for below in reversed(range(number)):
                row = self.couplings[below].pull(environments[below], row)
            scalars = tensors.project(row, tensor_weights)
            x, last = latent.after_first(add_product(read, scalars, entries[number][-1]))
            features, weights = self._columns(last)
        assert features is not None
        return x, features, sums, entries[-1][-1]

    def _edge_energies(self, x: Tensor, features: Tensor, before: Tensor, reader: Tensor) -> Tensor:
        """(n_edges,) in units of the energy scale, before normalisation, in the interior precision."""
        x, last = self.readout.after_first(_read(before, x, features, [reader]))
        return (x @ last).squeeze(1)

    def _entries(self, readout: Tensor) -> list[tuple[Tensor, ...]]:
        """First matrix of every latent and of the readout, split by its inputs: features by stage, scalars of the layer."""
        scalars, tensors = self.options.num_scalar_features, self.options.num_tensor_features
        entries = [
            cut(latent.matrix(0), [*[scalars] * (number + 1), tensors], 0) for number, latent in enumerate(self.latents)
        ]
        return [*entries, cut(readout, [scalars] * (len(entries) + 1), 0)]

    def _columns(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns of features, and columns of weights of the next environment, if there is one."""
        scalars = self.options.num_scalar_features
        if matrix.shape[1] == scalars:
            return matrix, None
        features, weights = cut(matrix, [scalars, matrix.shape[1] - scalars], 1)
        return features, weights

    def _first_stage(
        self, embedding: Tensor, tensors: WeightedHarmonics, entries: Sequence[tuple[Tensor, ...]]
    ) -> FirstStage:
        x, tensor_matrix, weights, features = self._embedded(embedding)
        sums = _read(None, x, features, [entry[0] for entry in entries])
        return FirstStage(product(x, tensor_matrix), sums, self._environment(x, weights, tensors))

    def _splined_first_stage(
        self,
        n_intervals: int,
        lengths: Tensor,
        kinds: Tensor,
        tensors: WeightedHarmonics,
        entries: Sequence[tuple[Tensor, ...]],
        switch: GradientSwitch | None,
    ) -> FirstStage:
        """As `_first_stage`, which depends on the length of an edge and its pair of species alone, read from splines.

        lengths: (n_edges,) in units of the cutoff. kinds: (n_edges,), pairs of species.
        """
        x, tensor_matrix, weights, features = self._embedded(self._embed_points(n_intervals))
        n_kinds = x.shape[1]
        of_x = coefficients(x.flatten(1)).view_as(x).transpose(0, 1).flatten(0, 1)
        following = features @ join([entry[0] for entry in entries], 1).double()
        read = [
            read_splines(lengths, of_x @ matrix, self.identity.dtype, switch, kinds=kinds, n_kinds=n_kinds)
            for matrix in (tensor_matrix, following, weights)
        ]
        environment = tensors.summed(read[2], shared=self.n_env < self.n_tensor_weights)
        return FirstStage(read[0], read[1], environment)

    def _embed_points(self, n_intervals: int) -> Tensor:
        """(n_intervals + DEGREE, n_species^2, embedding) float64: `_embed` at the points that splines interpolate, bessel."""
        points = collocation_points(n_intervals).clamp_(min=_SHORTEST)
        basis = bessel_basis(points, self.bessel_frequencies, float(self.options.polynomial_cutoff_p or 6.0))
        n_species = len(self.species)
        centre, neighbour = self.centre_embedding, self.neighbour_embedding
        of_kinds = join(
            [
                centre.unsqueeze(1).expand(-1, n_species, -1).flatten(0, 1),
                neighbour.unsqueeze(0).expand(n_species, -1, -1).flatten(0, 1),
            ],
            1,
        )
        return of_kinds.double() * (basis @ self.radial.matrix(0).double()).unsqueeze(1)

    def _embedded(self, embedding: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (n_edges, ..., width) and the matrices that map it to tensor weights, environment weights and scalar features, in
        the precision of the embedding."""
        x, last = self.scalar_embed.before_last(embedding)
        features, weights = self._columns(self.first_projection.matrix(0))
        assert weights is not None
        combined = last @ join([self.tensor_weights.matrix(0), weights, features], 1).to(last.dtype)
        tensor_matrix, weights, features = cut(
            combined, [self.n_tensor_weights, self.n_env, self.options.num_scalar_features], 1
        )
        return x, tensor_matrix, weights, features

    def _environment(self, x: Tensor, weights: Tensor, tensors: WeightedHarmonics) -> Tensor:
        """(components, n_atoms, channels): weighted harmonics of each atom's edges, summed.

        x: (n_edges, width); weights: (width, n_env), the matrix that maps x of an edge to its weights. The matrix can be
        applied after the sum over edges, to atoms, which are fewer; but a wide x is more to sum.
        """
        shared = self.n_env < self.n_tensor_weights
        widest = 2 * self.n_env if tensors.by_operators else self.options.num_tensor_features
        if x.shape[1] > widest:
            return tensors.summed(product(x, weights), shared=shared)
        summed = tensors.summed(x, shared=True)
        if shared:
            return summed @ weights
        by_degree = cut(weights, [self.options.num_tensor_features] * len(self.degrees), 1)
        matrices = [matrix.expand(size, -1, -1) for size, matrix in zip(self.degrees, by_degree)]
        return summed @ join(matrices, 0)


class Dense(Perceptron):
    """A perceptron whose first and last matrices can be combined with adjacent linear maps."""

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str | None,
        *,
        forward_normalise: bool,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(sizes, activation=activation, generator=generator, dtype=dtype)
        if not forward_normalise:
            gain, end = 1.0 if activation is None else math.sqrt(2), len(sizes) - 2
            self.scales = [(1.0 if i == end else gain) / math.sqrt(n_out) for i, n_out in enumerate(sizes[1:])]

    def matrix(self, number: int) -> Tensor:
        result: Tensor = self.weights[number] * self.scales[number]
        return result

    def before_last(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the last matrix, and that matrix."""
        first = self.matrix(0).to(x.dtype)
        return (x, first) if len(self.weights) == 1 else self.after_first(product(x, first))

    def after_first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `before_last`, from the product with the first matrix on; the identity for a single layer."""
        if len(self.weights) == 1:
            return x, torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        for number in range(1, len(self.weights)):
            x = x if self.activation is None else activate(self.activation, x)
            if number < len(self.weights) - 1:
                x = product(x, self.matrix(number).to(x.dtype))
        return x, self.matrix(-1).to(x.dtype)


def _read(sums: Tensor | None, x: Tensor, features: Tensor, readers: Sequence[Tensor]) -> Tensor:
    """(n_edges, n): x @ features @ reader for each of the readers, concatenated, in the cheaper order; added to `sums`.

    x: (n_edges, width); features: (width, n_features); readers: (n_features, n of each).
    """
    following = join(readers, 1)
    (width, n_features), n_following = features.shape, following.shape[1]
    if width * n_following <= n_features * (width + n_following):
        following = features @ following
    else:
        x = product(x, features)
    return product(x, following) if sums is None else add_product(sums, x, following)
