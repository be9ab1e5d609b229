"""A layer of MACE: features of neighbours are coupled to harmonics and summed (`Interaction`), then polynomials of the sums
give new features (`Product`).

Features are lists of blocks (n_atoms, 2l + 1, channels), one for each irrep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgefield.kernels.convolution.dispatch import EdgeHarmonics
from forgefield.kernels.convolution.form import key_of_plan
from forgefield.models.mace.basis import full_basis_map
from forgefield.models.mace.options import MACEOptions
from forgefield.models.mace.radial import NormalisedNetwork, RadialNetwork
from forgefield.ops.convolution_plan import Block, plan_convolution
from forgefield.ops.graph import EdgeGraph, Segments, cut, gather, join, segment_sum
from forgefield.ops.linear import (
    Gate,
    IrrepsLinear,
    SpeciesLinear,
    WeightArguments,
    product_by_species,
    unit_normal,
    unit_uniform,
)
from forgefield.ops.products import product
from forgefield.ops.symmetric_contraction import Irrep, plan_contraction, symmetric_contraction

DENSITY_WIDTH = 64
"""Neurons of the network that computes densities in the nonlinear interaction."""


@dataclass(frozen=True)
class EdgeInputs:
    """What all layers read of the edges.

    harmonics: with the graph of the edges. basis: (n_edges or n_pairs, num_bessel), in the precision of the weights. envelope:
    the same with one column, if it is not part of the basis. species: (n_atoms,) int64.
    """

    harmonics: EdgeHarmonics
    basis: Tensor
    envelope: Tensor | None
    species: Tensor

    @property
    def graph(self) -> EdgeGraph:
        return self.harmonics.graph

    def cut_off(self, values: Tensor) -> Tensor:
        """Values (n, c) that end smoothly at the cutoff."""
        return values if self.envelope is None else values * self.envelope

    def sum_at_atoms(self, values: Tensor) -> Tensor:
        """(n_atoms, c): sum over the edges of each atom of values (n_edges or n_pairs, c)."""
        if self.graph.pair is not None:
            values = gather(values, Segments(self.graph.pair, values.shape[0]))
        return segment_sum(values, self.graph.by_destination)


class Interaction(nn.Module):
    """Sums over neighbours, as one block for each irrep of `targets`.

    in_blocks: features before. sent: what neighbours send. targets: irreps of the sums, with their channels. kept: features of
    the next layer, to which the old ones are mapped (with a residual).
    """

    coupling_matrix: Tensor

    def __init__(
        self,
        in_blocks: tuple[Block, ...],
        sent: tuple[Block, ...],
        targets: tuple[Block, ...],
        kept: tuple[Block, ...],
        options: MACEOptions,
        kind: str,
        n_species: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        self.kind, self.in_blocks, self.sent, self.targets = kind, in_blocks, sent, targets
        self.is_nonlinear, self.has_density = kind == "nonlinear", kind in ("density", "density_residual", "nonlinear")
        self.plan = plan_convolution(sent, options.max_ell, frozenset((block.l, block.p) for block in targets))
        self.form_key = key_of_plan(self.plan)
        self.register_buffer("coupling_matrix", self.plan.coupling_matrix().to(dtype), persistent=False)
        self.up_from = [_number_of(block, in_blocks) for block in sent]
        self.linear_up = IrrepsLinear([(in_blocks[i].mul, block.mul) for i, block in zip(self.up_from, sent)], **make)
        self.gate = Gate(targets[:1], targets[1:], gate="sigmoid") if self.is_nonlinear else None
        summed = targets if self.gate is None else self.gate.in_blocks
        self.summed = tuple(block for block in summed if self.paths(block))
        fan_in = [sum(self.plan.out_blocks[i].mul for i in self.paths(block)) for block in self.summed]
        scale = 1.0 if self.has_density else 1 / float(options.avg_num_neighbours or 1)
        self.linear = IrrepsLinear(list(zip(fan_in, (block.mul for block in self.summed))), scale=scale, **make)
        sizes = [options.num_bessel, *options.radial_mlp, self.plan.n_weights]
        self.residual_pairs = [(i, j) for j, block in enumerate(kept) for i in _all_of(block, in_blocks)]
        self.kept = kept
        residual = [(in_blocks[i].mul, kept[j].mul) for i, j in self.residual_pairs]
        if self.is_nonlinear:
            self._add_nonlinear(options, sizes, residual, n_species, make)
            return
        self.radial = RadialNetwork(sizes, **make)
        if self.has_density:
            self.density = RadialNetwork([options.num_bessel, 1], **make)
        maps = residual if "residual" in kind else [(block.mul, block.mul) for block in self.summed]
        self.by_species = SpeciesLinear(maps, n_species, **make)

    def _add_nonlinear(
        self,
        options: MACEOptions,
        sizes: list[int],
        residual: list[tuple[int, int]],
        n_species: int,
        make: WeightArguments,
    ) -> None:
        channels = self.in_blocks[0].mul
        embeddings = [0.001 / 3**0.5 * unit_uniform(n_species, channels, **make) for _ in range(2)]
        self.source_embedding, self.target_embedding = (nn.Parameter(value * n_species**0.5) for value in embeddings)
        self.embedding_scale = n_species**-0.5
        inputs = sizes[0] + 2 * channels
        self.radial_normalised = NormalisedNetwork([inputs, *sizes[1:]], **make)
        self.density_normalised = NormalisedNetwork([inputs, DENSITY_WIDTH, 1], **make)
        self.skip = IrrepsLinear(residual, **make)
        assert self.gate is not None
        self.own_from = [
            (_number_of(block, self.sent), i)
            for i, block in enumerate(self.gate.in_blocks)
            if _all_of(block, self.sent)
        ]
        self.linear_own = IrrepsLinear(
            [(self.sent[i].mul, self.gate.in_blocks[j].mul) for i, j in self.own_from], **make
        )
        self.linear_out = IrrepsLinear([(block.mul, block.mul) for block in self.targets], **make)
        self.alpha = nn.Parameter(torch.tensor(20.0, dtype=make["dtype"]))
        self.beta = nn.Parameter(torch.tensor(0.0, dtype=make["dtype"]))

    def paths(self, block: Block) -> list[int]:
        """Numbers of the blocks of the convolution with the irrep of `block`."""
        return _all_of(block, self.plan.out_blocks)

    def send(self, blocks: Sequence[Tensor]) -> Tensor:
        """What neighbours read, (n, plan.in_dim)."""
        mixed = [product(blocks[i], matrix).flatten(1) for i, matrix in zip(self.up_from, self.linear_up.matrices())]
        return join(mixed, 1)

    def forward(
        self, sent: Tensor, blocks: Sequence[Tensor], edges: EdgeInputs
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Blocks of `targets`, and what is added to the features that follow; None where nothing is.

        sent: result of `send`, that of ghost atoms included.
        """
        weights, density = self.radial_weights(edges)
        rows = edges.harmonics.convolve(sent, weights, self.plan, self.coupling_matrix, self.form_key)
        return self.finish(self._mixed(rows), density, sent, blocks, edges.species)

    def finish(
        self,
        sums: list[Tensor],
        density: Tensor | None,
        sent: Tensor,
        blocks: Sequence[Tensor],
        species: Tensor,
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """What `forward` returns, from sums over neighbours (n_atoms, 2l + 1, mul), one for each block of `summed`, and the
        density (n_atoms, 1)."""
        if density is not None:
            below = density * self.beta + self.alpha if self.is_nonlinear else density + 1
            sums = [block / below.unsqueeze(2) for block in sums]
        if self.gate is not None:
            return self._nonlinear(sums, sent, blocks)
        matrices = self.by_species.by_species()
        if "residual" not in self.kind:
            return self.complete([product_by_species(x, m, species) for x, m in zip(sums, matrices)]), None
        return self.complete(sums), self.residual(blocks, species)

    def residual(self, blocks: Sequence[Tensor], species: Tensor) -> list[Tensor]:
        """Old features mapped by species, one block for each of `kept`."""
        matrices = self.by_species.by_species()
        old = [(j, product_by_species(blocks[i], m, species)) for (i, j), m in zip(self.residual_pairs, matrices)]
        return _added(old, self.kept, blocks[0])

    def radial_weights(self, edges: EdgeInputs) -> tuple[Tensor, Tensor | None]:
        """Weights (n_edges or n_pairs, plan.n_weights), and density (n_atoms, 1)."""
        if not self.is_nonlinear:
            weights = edges.cut_off(self.radial(edges.basis))
            return weights, self.plain_density(edges) if self.has_density else None
        networks = (self.radial_normalised, self.density_normalised)
        tables = [table * self.embedding_scale for table in (self.source_embedding, self.target_embedding)]
        ends = [edges.species.index_select(0, end) for end in (edges.graph.source, edges.graph.destination)]
        weights, value = (network(edges.basis, tables, ends) for network in networks)
        return edges.cut_off(weights), self._summed_density(value, edges)

    def plain_density(self, edges: EdgeInputs) -> Tensor:
        """(n_atoms, 1), where radial functions do not depend on the species."""
        return self._summed_density(self.density(edges.basis), edges)

    def _summed_density(self, value: Tensor, edges: EdgeInputs) -> Tensor:
        return edges.sum_at_atoms(edges.cut_off(torch.tanh(value.square())))

    def _mixed(self, rows: Tensor) -> list[Tensor]:
        """(n, 2l + 1, mul) for each block of `summed`, from rows of the convolution (n, plan.out_dim)."""
        pieces = cut(rows, [block.dim for block in self.plan.out_blocks], 1)
        inputs = [
            join([pieces[i].unflatten(1, (2 * block.l + 1, -1)) for i in self.paths(block)], 2) for block in self.summed
        ]
        return [product(x, matrix) for x, matrix in zip(inputs, self.linear.matrices())]

    def complete(self, sums: list[Tensor]) -> list[Tensor]:
        """One block for each target, zero for those that no coupling leads to."""
        parts = [(_number_of(block, self.targets), x) for block, x in zip(self.summed, sums)]
        return _added(parts, self.targets, sums[0])

    def _nonlinear(
        self, sums: list[Tensor], sent: Tensor, blocks: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        assert self.gate is not None
        pieces = cut(sent, [block.dim for block in self.sent], 1)
        parts = [(_number_of(block, self.gate.in_blocks), x) for block, x in zip(self.summed, sums)]
        for (i, j), matrix in zip(self.own_from, self.linear_own.matrices()):
            parts.append((j, product(pieces[i].unflatten(1, (2 * self.sent[i].l + 1, -1)), matrix)))
        gated = self.gate(_added(parts, self.gate.in_blocks, sent))
        new = [product(x, matrix) for x, matrix in zip(gated, self.linear_out.matrices())]
        old = [(j, product(blocks[i], m)) for (i, j), m in zip(self.residual_pairs, self.skip.matrices())]
        return new, _added(old, self.kept, sent)


def _all_of(block: Block, among: Sequence[Block]) -> list[int]:
    return [i for i, other in enumerate(among) if (other.l, other.p) == (block.l, block.p)]


def _number_of(block: Block, among: Sequence[Block]) -> int:
    return _all_of(block, among)[0]


def _added(parts: Sequence[tuple[int, Tensor]], blocks: Sequence[Block], like: Tensor) -> list[Tensor]:
    """For each block the sum of its parts (n, 2l + 1, mul), zero without any. like: (n, ...)."""
    result: list[Tensor | None] = [None] * len(blocks)
    for number, value in parts:
        before = result[number]
        result[number] = value if before is None else before + value
    return [
        like.new_zeros(like.shape[0], 2 * block.l + 1, block.mul) if value is None else value
        for block, value in zip(blocks, result)
    ]


class Product(nn.Module):
    """Polynomials of the sums over neighbours, with weights for each species, and a linear map of the result.

    in_blocks, out_blocks: with the same number of channels.
    """

    def __init__(
        self,
        in_blocks: tuple[Block, ...],
        out_blocks: tuple[Block, ...],
        correlation: int,
        options: MACEOptions,
        n_species: int,
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        inputs, outputs = (tuple(Irrep(block.l, block.p) for block in blocks) for blocks in (in_blocks, out_blocks))
        self.inputs, self.outputs, self.correlation = inputs, outputs, correlation
        self.plan = plan_contraction(inputs, outputs, correlation)
        channels, rows = in_blocks[0].mul, 1 if options.use_agnostic_product else n_species
        self.weights = nn.ParameterList()
        self.maps: list[str | None] = []
        """Names of the matrices that give the weights of independent polynomials; None where these are the parameters."""
        for output in self.plan.outputs:
            for degree, count in enumerate(output.counts, 1):
                if count == 0:
                    continue
                name = None
                if not options.use_reduced_cg and degree > 1:
                    name = f"map_{len(self.weights)}"
                    matrix = full_basis_map(inputs, outputs, correlation, output.irrep, degree)
                    # Part of the state: the last bits of a solution depend on the machine, and resumed runs must not.
                    self.register_buffer(name, matrix)
                    count = matrix.shape[1]
                values = unit_normal(rows, count, channels, generator=generator, dtype=dtype) / count
                self.maps.append(name)
                self.weights.append(nn.Parameter(values))
        self.linear = IrrepsLinear([(channels, block.mul) for block in out_blocks], generator=generator, dtype=dtype)

    def forward(self, sums: Sequence[Tensor], species: Tensor) -> list[Tensor]:
        """New features. sums: blocks of the input."""
        return [product(x, matrix) for x, matrix in zip(self.polynomials(sums, species), self.linear.matrices())]

    def polynomials(self, sums: Sequence[Tensor], species: Tensor) -> list[Tensor]:
        """(n_atoms, 2l + 1, channels) for each output."""
        features = join(list(sums), 1).transpose(0, 1).contiguous()
        results = symmetric_contraction(features, self._species_weights(species), self.plan)
        return [x.transpose(0, 1) for x in results]

    def _species_weights(self, species: Tensor) -> Tensor:
        """(plan.n_weights, n_atoms or 1, channels)."""
        table = self.table()
        if table.shape[0] == 1:
            return table.transpose(0, 1)
        return gather(table, Segments(species, table.shape[0])).transpose(0, 1).contiguous()

    def table(self) -> Tensor:
        """(n_species or 1, plan.n_weights, channels): weights of the independent polynomials."""
        parts = [
            weight if name is None else torch.matmul(self.get_buffer(name).to(weight.dtype), weight)
            for weight, name in zip(self.weights, self.maps)
        ]
        return join(parts, 1)
