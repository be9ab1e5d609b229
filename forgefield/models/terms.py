"""Terms that models of atomic energies share: scale and shift of each species, radii of pairs, adaptive cutoff, ZBL repulsion.

A model that inherits from `SpeciesTerms` has the state `energy_scales` and `energy_shifts`; the energy of an atom is its shift
plus its scale times the output of the network, so an atom without neighbours has exactly its shift. All float64.

With `data.adaptive_cutoff` the cutoff grows where an atom would be isolated. An atom's coordination is a smooth count of its
neighbours within the cutoff; it determines how isolated the atom is and the radius of each of its pairs, between the cutoff and
the limit. The interaction of a pair ends at its own radius, which changes smoothly with the positions, so that energy and
forces are continuous when atoms enter or leave. The radius of an isolated atom ends where its nearest neighbours count fully
(`adaptive_radius: nearest`). The edge list of the data layer contains all pairs within the radius that grows to the limit, and
therefore all pairs within their own radius and within the cutoff.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.interface import LastLayer, RegisteredModel
from forgefield.models.options import TermOptions, check_values, complete_terms, pair_cutoff
from forgefield.ops.functions import polynomial_cutoff
from forgefield.ops.graph import EdgeGraph, Segments, gather, segment_sum
from forgefield.physics.zbl import zbl_pair_energy

OptionsT = TypeVar("OptionsT", bound=TermOptions)


class PairLengths(NamedTuple):
    """Of every edge, (n_edges,) float64.

    lengths: A.
    scaled: length over the radius at which the interaction ends.
    radii: these radii, A; None where they are constants.
    """

    lengths: Tensor
    scaled: Tensor
    radii: Tensor | None

    def at_rest(self) -> PairLengths:
        """A detached copy."""
        radii = None if self.radii is None else self.radii.detach()
        return PairLengths(self.lengths.detach(), self.scaled.detach(), radii)


class SpeciesTerms(RegisteredModel[OptionsT]):
    """Base of models that compute atomic energies from edge vectors."""

    only_edge_vectors = True
    supports_adaptive_cutoff = True
    energy_scales: Tensor
    energy_shifts: Tensor
    feature_scale: Tensor
    inverse_cutoff: Tensor
    atomic_numbers: Tensor

    def __init__(self, options: OptionsT, species: Sequence[str], cutoff: float, adaptive_cutoff: float | None) -> None:
        super().__init__(options, species=species, cutoff=cutoff, adaptive_cutoff=adaptive_cutoff)
        self._zbl = options.zbl
        self.grows_to_nearest = options.adaptive_radius == "nearest"
        self.register_trainable(
            "energy_scales", self._per_species(options.energy_scales, 1.0), options.energy_scales_trainable
        )
        self.register_trainable(
            "energy_shifts", self._per_species(options.energy_shifts, 0.0), options.energy_shifts_trainable
        )
        neighbours = self._per_species(options.avg_num_neighbours, 1.0)
        self.register_buffer("feature_scale", neighbours.rsqrt(), persistent=False)
        cutoffs = self._inverse_cutoffs(options.per_edge_type_cutoff)
        self.register_buffer("inverse_cutoff", cutoffs, persistent=False)
        numbers = [atomic_numbers.get(symbol, 0) for symbol in self.species]
        self.register_buffer("atomic_numbers", torch.tensor(numbers, dtype=torch.float64), persistent=False)

    @classmethod
    def complete(
        cls,
        options: OptionsT,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> OptionsT:
        if adaptive_cutoff is not None and options.per_edge_type_cutoff is not None:
            raise ForgefieldError(
                "model.per_edge_type_cutoff and data.adaptive_cutoff cannot be used together; set one of them to null."
            )
        if adaptive_cutoff is None and options.adaptive_radius is not None:
            raise ForgefieldError("model.adaptive_radius needs data.adaptive_cutoff, which is not set; leave it out.")
        completed = cls.complete_options(options, species, cutoff, statistics)
        if adaptive_cutoff is not None and completed.adaptive_radius is None:
            completed = replace(completed, adaptive_radius="nearest")
        return completed

    @classmethod
    def complete_options(
        cls, options: OptionsT, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> OptionsT:
        """As `complete`, without the check of the adaptive cutoff; subclasses with options to complete override it."""
        check_values(options)
        return replace(options, **complete_terms(options, species, cutoff, statistics))

    def species_shifts(self) -> Tensor:
        return self.energy_shifts

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        for name, parameter in self.named_parameters():
            if name.startswith(("readout.", "energy_scales", "energy_shifts")):
                yield parameter

    def _per_species(self, value: float | Mapping[str, float] | None, default: float) -> Tensor:
        """(n_species,) float64."""
        if isinstance(value, Mapping):
            return torch.tensor([float(value[symbol]) for symbol in self.species], dtype=torch.float64)
        return torch.full((len(self.species),), default if value is None else float(value), dtype=torch.float64)

    def _inverse_cutoffs(self, table: Mapping[str, Any] | None) -> Tensor:
        """(n_species^2,) float64, 1/A, by centre then neighbour; a single number where all are equal."""
        if table is None:
            return torch.tensor([1 / self.cutoff], dtype=torch.float64)
        return torch.tensor(
            [1 / pair_cutoff(table, i, j, self.cutoff) for i in self.species for j in self.species], dtype=torch.float64
        )

    def edge_kinds(self, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_edges,) int64: species of the centre times the number of species, plus that of the neighbour."""
        return species.index_select(0, graph.destination) * len(self.species) + species.index_select(0, graph.source)

    def pair_lengths(self, vectors: Tensor, species: Tensor, graph: EdgeGraph) -> PairLengths:
        """Lengths of the edge vectors (n_edges, 3), A, also in units of the radius at which each interaction ends."""
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        if self.adaptive_cutoff is not None:
            limit, to_nearest = self.adaptive_cutoff, self.grows_to_nearest
            radii = pair_radii(lengths, graph, self.cutoff, limit, to_nearest=to_nearest)
            return PairLengths(lengths, lengths / radii, radii)
        return PairLengths(lengths, lengths * self.inverse_cutoffs(species, graph), None)

    def inverse_cutoffs(self, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(1,), or (n_edges,) where pairs of species have different cutoffs, 1/A."""
        if self.inverse_cutoff.numel() == 1:
            return self.inverse_cutoff
        return self.inverse_cutoff.index_select(0, self.edge_kinds(species, graph))

    def energies(self, atomic: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_atoms,) eV: the network's output (n_atoms,) float64, scaled and shifted, with the ZBL repulsion if it is enabled.
        pairs: needed for the repulsion only."""
        kind = Segments(species, len(self.species))
        energies = torch.addcmul(gather(self.energy_shifts, kind), gather(self.energy_scales, kind), atomic)
        return self.add_repulsion(energies, pairs, species, graph)

    def scaled_last_layer(
        self, features: Tensor, weights: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph
    ) -> LastLayer:
        """The last layer of a network whose output is features (n_atoms, n) @ weights (n,), before scales and shifts."""
        features = features.double() * self.energy_scales.index_select(0, species).unsqueeze(1)
        offsets = self.add_repulsion(self.energy_shifts.index_select(0, species), pairs, species, graph)
        return LastLayer(features, weights.double(), offsets)

    def add_repulsion(self, energies: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph) -> Tensor:
        """Energies (n_atoms,) with the ZBL repulsion if it is enabled."""
        if not self._zbl:
            return energies
        assert pairs is not None
        return energies + self._repulsion(pairs, species, graph)

    def _repulsion(self, pairs: PairLengths, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_atoms,) half of each pair's ZBL energy, eV."""
        p = self._zbl.get("polynomial_cutoff_p", 6.0) if isinstance(self._zbl, Mapping) else 6.0
        z = self.atomic_numbers.index_select(0, species)
        z_i, z_j = z.index_select(0, graph.destination), z.index_select(0, graph.source)
        pair = zbl_pair_energy(pairs.lengths, z_i, z_j)
        return segment_sum(0.5 * pair * polynomial_cutoff(pairs.scaled, p), graph.by_destination)


SWITCH_START = 0.7
"""Fraction of the cutoff up to which a neighbour counts fully; the same number as in the data layer."""


NEAREST_P = 16.0
"""Exponent of the power mean in place of the smallest distance: hundreds of neighbours at one distance are still one shell."""


def pair_radii(lengths: Tensor, graph: EdgeGraph, cutoff: float, limit: float, *, to_nearest: bool = False) -> Tensor:
    """(n_edges,) radius of every edge's pair, A, float64; equal to `cutoff` where neither atom is isolated.

    lengths: (n_edges,), A, of a list that contains every edge within the radius without `to_nearest`.
    limit: largest radius, A.
    to_nearest: whether the radius of an isolated atom is such that its nearest neighbours count fully, instead of the limit.
    """
    x = (lengths / cutoff - SWITCH_START) / (1 - SWITCH_START)
    coordination = segment_sum(1 - _smoothstep(x), graph.by_destination)
    bonded = _smoothstep(coordination)
    both_bonded = gather(bonded, graph.by_destination) * gather(bonded, graph.by_source)
    radii = cutoff + (limit - cutoff) * (1 - both_bonded)
    if not to_nearest:
        return radii
    growth = (1 - bonded) * (_needed_radii(lengths, radii, graph, cutoff, limit) - cutoff).clamp(min=0.0)
    one, other = gather(growth, graph.by_destination), gather(growth, graph.by_source)
    return cutoff + one + other - one * other / (limit - cutoff)


def _needed_radii(lengths: Tensor, largest: Tensor, graph: EdgeGraph, cutoff: float, limit: float) -> Tensor:
    """(n_atoms,) radius at which the nearest neighbours of each atom count fully, A; `limit` for atoms without any.

    Neighbours at less than `SWITCH_START` of the cutoff count as if they were there: their atoms are not isolated. largest:
    (n_edges,), A, where the edges of the list end; their weights are zero there, so nothing jumps.
    """
    x = lengths.clamp(min=SWITCH_START * cutoff) / (SWITCH_START * limit)
    weights = polynomial_cutoff(lengths / largest, 6.0) * x**-NEAREST_P
    return limit * (1 + segment_sum(weights, graph.by_destination)) ** (-1 / NEAREST_P)


def adaptive_bessel_basis(lengths: Tensor, radii: Tensor, limit: float, frequencies: Tensor, p: float) -> Tensor:
    """sin(n pi x) / (pi x) with x = length / limit, times the envelope that ends at the pair's radius.

    lengths, radii: (n_edges,), A; n of `frequencies` (n_basis,) -> (n_edges, n_basis).
    """
    column = (lengths / limit).unsqueeze(1)
    envelope = polynomial_cutoff(lengths / radii, p).unsqueeze(1)
    return torch.sin(column * (math.pi * frequencies)) * (envelope / (math.pi * column))


def _smoothstep(x: Tensor) -> Tensor:
    """0 up to x = 0, 1 from x = 1 on, with two continuous derivatives."""
    x = x.clamp(0.0, 1.0)
    return x * x * x * (10 - x * (15 - 6 * x))
