"""MACE: message passing with many-body messages (Batatia et al., NeurIPS 35, 2022), as in mace-torch 0.3.16.

Atoms carry features of several rotation orders. Each layer couples those of the neighbours to the harmonics of the edge
vectors, weighted by a network of the length, and sums them; polynomials of these sums, up to a given degree, are the new
features. Every layer contributes to the energy. Geometry and energies are float64, the interior has the precision of the
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.kernels.convolution.dispatch import EdgeHarmonics
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import LastLayer, RegisteredModel, Tangents, unknown_species
from forgefield.models.mace.interaction import EdgeInputs, Interaction, Product
from forgefield.models.mace.kernels import by_kernels, moved_encoding, needs_lengths, read_at_rest, scalars_at_rest
from forgefield.models.mace.options import (
    PRESETS,
    MACEOptions,
    branch_names,
    check,
    complete_options,
    correlations,
    hidden_blocks,
    readout_width,
    sent_blocks,
)
from forgefield.models.mace.radial import RadialBasis, pair_radii, repulsion
from forgefield.models.mace.readout import GatedReadout, LinearReadout
from forgefield.models.mace.tables import table_line
from forgefield.models.mace.variants import branch_shifts, extended_options, extended_state, more_branches, one_branch
from forgefield.ops.convolution_plan import Block
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, barrier, gather, join, segment_sum
from forgefield.ops.harmonics import SphericalHarmonics
from forgefield.ops.linear import WeightArguments, unit_normal


class MACE(RegisteredModel[MACEOptions]):
    """Atomic energies from edge vectors. Built from resolved options: every number is given."""

    only_edge_vectors = True
    ghost_atoms = "exchange"
    convolves = True
    Options = MACEOptions
    presets = PRESETS
    adds_branches = True
    interactions: list[Interaction]
    products: list[Product]
    energy_scales: Tensor
    energy_shifts: Tensor
    pair_radii: Tensor
    atomic_numbers: Tensor
    inverse_cutoff: Tensor

    def __init__(
        self,
        options: MACEOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff)
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        hidden, n_species, n_layers = hidden_blocks(options), len(self.species), options.num_interactions
        channels = hidden[0].mul
        self.branches = branch_names(options)
        n_heads = max(1, len(self.branches))
        self.embedding = nn.Parameter(unit_normal(n_species, channels, **make))
        self.embedding_scale = n_species**-0.5
        self.radial = RadialBasis(options, self.cutoff)
        self.harmonics = SphericalHarmonics(options.max_ell)
        interactions, products, readouts = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        blocks = hidden[:1]
        for number, correlation in enumerate(correlations(options)):
            is_first, is_last = number == 0, number == n_layers - 1
            kept = hidden[:1] if is_last and not (options.keep_last_layer_irreps and n_layers > 1) else hidden
            kind = options.interaction_first if is_first else options.interaction
            targets = _target_blocks(options.max_ell, channels, both=not is_first and (0, -1) in _kinds(hidden))
            sent = sent_blocks(options, first=is_first)
            interactions.append(Interaction(blocks, sent, targets, kept, options, kind, n_species, **make))
            products.append(Product(targets, kept, correlation, options, n_species, **make))
            if is_last and n_layers > 1:
                width = readout_width(options)
                gated = GatedReadout(channels, width, n_heads, gate=options.gate, bias=options.readout_bias, **make)
                readouts.append(gated)
            elif not options.use_last_readout_only:
                readouts.append(LinearReadout(channels, n_heads, **make))
            blocks = kept
        self.interactions, self.products = cast(list[Interaction], interactions), cast(list[Product], products)
        self.readouts = readouts
        self.register_buffer("energy_scales", _per_head(options.energy_scales, self.branches))
        shifts = _per_head(options.energy_shifts, self.branches, self.species)
        self.register_buffer("energy_shifts", shifts)
        numbers = [atomic_numbers.get(symbol, 0) for symbol in self.species]
        self.register_buffer("atomic_numbers", torch.tensor(numbers, dtype=torch.float64), persistent=False)
        self.register_buffer("pair_radii", pair_radii(numbers), persistent=False)
        inverse = torch.tensor([1 / self.cutoff], dtype=torch.float64)
        self.register_buffer("inverse_cutoff", inverse, persistent=False)
        self.knot_functions: tuple[Any, Tensor, Tensor | None] | None = None
        """The radial basis and envelope at the knots of a table, after their key: a cache of the kernels."""
        self.is_directed = "nonlinear" in (options.interaction_first, options.interaction)
        self.feature_dim = channels * n_layers
        self.isolated_limit = options.interaction_first in ("plain", "density") and not options.readout_bias

    @classmethod
    def check_options(cls, section: Mapping[str, Any], *, make: Callable[..., object] | None = None) -> None:
        check(MACEOptions(**section))

    @classmethod
    def complete(
        cls,
        options: MACEOptions,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> MACEOptions:
        if options.distance_transform or options.pair_repulsion:
            for symbol in species:
                if not atomic_numbers.get(symbol):
                    name = "distance_transform" if options.distance_transform else "pair_repulsion"
                    raise ForgefieldError(f"model.{name} needs chemical elements; {symbol} is not one.")
        return complete_options(options, species, statistics)

    @classmethod
    def branch_names(cls, section: Mapping[str, Any]) -> list[str]:
        names = section.get("branches") or []
        return list(names) if len(names) > 1 else []

    @classmethod
    def branch(
        cls, resolved: Mapping[str, Any], state: Mapping[str, Tensor] | None, name: str | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return one_branch(resolved, state, name)

    @classmethod
    def measure(
        cls,
        section: Mapping[str, Any],
        batches: Callable[[], Iterable[Batch]],
        *,
        species: tuple[str, ...],
        cutoff: float,
    ) -> dict[str, object]:
        names = cls.branch_names(section)
        if not names or section.get("energy_shifts") is not None:
            return {}
        return {"branch_shifts": branch_shifts(names, batches, species)}

    @classmethod
    def check_new_species(cls, resolved: Mapping[str, Any], new: Sequence[str], source: str) -> None:
        if resolved.get("predicts"):
            raise ForgefieldError(
                f"{unknown_species(resolved, new, source)} it has heads in addition to its energy, for its species only; "
                "train a new model."
            )

    @classmethod
    def add_species(
        cls, resolved: Mapping[str, Any], new: Sequence[str], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        return extended_options(resolved, new)

    @classmethod
    def add_species_to_state(
        cls, fresh: Mapping[str, Tensor], trained: Mapping[str, Tensor], n_old: int, n_new: int
    ) -> dict[str, Tensor]:
        return extended_state(fresh, trained, n_old, n_new)

    @classmethod
    def isolated_energies(cls, resolved: Mapping[str, Any]) -> dict[str, float] | None:
        isolated = resolved["interaction_first"] in ("plain", "density") and not resolved["readout_bias"]
        return super().isolated_energies(resolved) if isolated and not resolved.get("branches") else None

    @classmethod
    def set_shifts(cls, resolved: dict[str, Any], values: Sequence[float]) -> None:
        names, species = cls.branch_names(resolved), resolved["species"]
        parts = [values[start : start + len(species)] for start in range(0, len(values), len(species))]
        tables = [dict(zip(species, part)) for part in parts]
        resolved["energy_shifts"] = dict(zip(names, tables)) if names else tables[0]

    @classmethod
    def add_branches(
        cls, resolved: Mapping[str, Any], state: Mapping[str, Tensor], names: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return more_branches(resolved, state, names)

    def branch_shifts(self) -> Tensor | None:
        return self.energy_shifts if self.branches else None

    def species_shifts(self) -> Tensor | None:
        return None if self.branches else self.energy_shifts

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        return self.readouts.parameters()

    def weight_dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, batch: Batch, edges: EdgeContext | None = None) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64."""
        _, energies = self.encode(batch, edges)
        assert energies is not None
        return energies

    def encode(
        self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Scalar features of all layers, (n_atoms, feature_dim) in the interior precision, and atomic energies."""
        species = batch["species"]
        edges = edges or EdgeContext.of(batch)
        scalars, lengths, graph = self._scalars(batch, edges)
        features = join(scalars, 1)
        if not energies:
            return features, None
        head, last = self.heads(batch), scalars[-len(self.readouts) :]
        atomic = read_at_rest(self, last) if by_kernels(self, batch, edges) else None
        atomic = self.read(last, head) if atomic is None else atomic
        return features, self._energies(atomic.double(), lengths, species, graph, head)

    def tangents(self, batch: Batch, edges: EdgeContext) -> Tangents | None:
        return moved_encoding(self, batch, edges)

    def kernel_refusal(self) -> str | None:
        return None

    def radial_table_line(self, knots: int) -> str | None:
        return table_line(self, knots)

    def read(self, scalars: Sequence[Tensor], head: Tensor | None) -> Tensor:
        """(n_atoms,) sum of the readouts, of the scalars (n_atoms, channels) of their layers. head: (n_atoms,) or None."""
        atomic = sum(_selected(readout(x), head) for readout, x in zip(self.readouts, scalars))
        assert isinstance(atomic, Tensor)
        return atomic

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        if self.branches:
            raise ForgefieldError(
                "this model has several heads; its last layer is defined for one of them (head=NAME)."
            )
        species = batch["species"]
        scalars, lengths, graph = self._scalars(batch, edges)
        readouts = cast(list[LinearReadout | GatedReadout], list(self.readouts))
        layers = [readout.last_layer(x) for readout, x in zip(readouts, scalars[-len(readouts) :])]
        features = torch.cat([features for features, _ in layers], 1)
        offsets = self._energies(torch.zeros_like(features[:, 0]), lengths, species, graph, None)
        return LastLayer(self.energy_scales * features, torch.cat([weights for _, weights in layers]), offsets)

    def _scalars(self, batch: Batch, edges: EdgeContext) -> tuple[list[Tensor], Tensor | None, EdgeGraph]:
        """Scalar features of each layer, lengths of the edges (n_edges,), A, where they were needed, and their graph."""
        graph, species = edges.graph, batch["species"]
        if self.is_directed:
            graph = replace(graph, in_pairs=False)
        kernels = by_kernels(self, batch, edges)
        lengths = None
        if not kernels or needs_lengths(self):
            lengths = torch.linalg.vector_norm(edges.vectors, dim=1)
        if kernels:
            return scalars_at_rest(self, edges, graph, species, lengths), lengths, graph
        assert lengths is not None
        inputs = self.edge_inputs(edges.vectors, lengths, species, graph, edges.gradient)
        return self._features(edges, inputs), lengths, graph

    def edge_inputs(
        self, vectors: Tensor, lengths: Tensor, species: Tensor, graph: EdgeGraph, switch: GradientSwitch | None = None
    ) -> EdgeInputs:
        """What layers read of edges with these vectors (n_edges, 3) and lengths (n_edges,), A."""
        dtype = self.embedding.dtype
        harmonics = self.harmonics(vectors / lengths.unsqueeze(1)).to(dtype)
        radii = self._radii(species, graph) if self.options.distance_transform is not None else None
        if graph.pair_edge is not None:
            lengths = lengths.index_select(0, graph.pair_edge)
            radii = None if radii is None else radii.index_select(0, graph.pair_edge)
        basis, envelope = self.radial(lengths, radii)
        return EdgeInputs(
            EdgeHarmonics(harmonics, graph, switch),
            barrier(basis.to(dtype), switch),
            None if envelope is None else barrier(envelope.to(dtype), switch),
            species,
        )

    def _features(self, edges: EdgeContext, inputs: EdgeInputs) -> list[Tensor]:
        """(n_atoms, channels) scalars after each layer."""
        table = (self.embedding * self.embedding_scale).unsqueeze(1)
        kind = Segments(inputs.species, len(self.species))
        blocks, scalars = [gather(table, kind)], []
        for number, (interaction, product) in enumerate(zip(self.interactions, self.products)):
            if number == 0:  # depends on species alone, which ghost atoms have, too
                sent = gather(interaction.send([table]), kind)
            else:
                sent = edges.fill_ghosts(interaction.send(blocks))
            sums, residual = interaction(sent, blocks, inputs)
            blocks = product(sums, inputs.species)
            if residual is not None:
                blocks = [new + old for new, old in zip(blocks, residual)]
            scalars.append(blocks[0].squeeze(1))
        return scalars

    def _radii(self, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_edges,) sum of the covalent radii of both atoms, A."""
        kinds = species.index_select(0, graph.destination) * len(self.species) + species.index_select(0, graph.source)
        return self.pair_radii.index_select(0, kinds)

    def heads(self, batch: Batch) -> Tensor | None:
        """(n_atoms,) number of each atom's head; None for a model with one."""
        if not self.branches:
            return None
        if "branch" not in batch:
            raise ForgefieldError("this model has several heads; choose one by its name (head=NAME, --head NAME).")
        return batch["branch"].index_select(0, batch["frame"])

    def _energies(
        self, atomic: Tensor, lengths: Tensor | None, species: Tensor, graph: EdgeGraph, head: Tensor | None
    ) -> Tensor:
        """(n_atoms,) eV, from the sum of the readouts (n_atoms,), float64."""
        if self.options.pair_repulsion:
            assert lengths is not None
            z = self.atomic_numbers.index_select(0, species)
            z_i, z_j = z.index_select(0, graph.destination), z.index_select(0, graph.source)
            p = float(self.options.num_polynomial_cutoff)
            pairs = repulsion(lengths, z_i, z_j, self._radii(species, graph), p)
            atomic = atomic + segment_sum(pairs, graph.by_destination)
        scales = self.energy_scales if head is None else gather(self.energy_scales, Segments(head, len(self.branches)))
        return self.shifts(species, head) + scales * atomic

    def shifts(self, species: Tensor, head: Tensor | None) -> Tensor:
        """(n_atoms,) energy shift of each atom, eV."""
        if head is None:
            return gather(self.energy_shifts, Segments(species, len(self.species)))
        kinds = Segments(head * len(self.species) + species, self.energy_shifts.shape[0])
        return gather(self.energy_shifts, kinds)


def _kinds(blocks: Iterable[Block]) -> set[tuple[int, int]]:
    return {(block.l, block.p) for block in blocks}


def _target_blocks(max_ell: int, channels: int, *, both: bool) -> tuple[Block, ...]:
    """Irreps of sums over neighbours: those of harmonics, or all up to their degree; odd before even."""
    parities = {l: (-1, 1) if both else ((-1) ** l,) for l in range(max_ell + 1)}
    return tuple(Block(channels, l, p) for l, values in parities.items() for p in values)


def _per_head(values: Any, heads: Sequence[str], species: Sequence[str] = ()) -> Tensor:
    """Float64 numbers: one for each head, or for each species of each head, one head after another."""
    rows = [values[head] for head in heads] if heads else [values]
    if species:
        rows = [row[symbol] if isinstance(row, Mapping) else row for row in rows for symbol in species]
    return torch.tensor([float(value) for value in rows], dtype=torch.float64)


def _selected(values: Tensor, head: Tensor | None) -> Tensor:
    """(n,) column `head` (n,) of each row of values (n, n_heads)."""
    return values.squeeze(1) if head is None else values.gather(1, head.unsqueeze(1)).squeeze(1)
