"""What potentials with atomic energies share: scale and shift of each species, radii of pairs, the ZBL repulsion.

A model that inherits from `SpeciesTerms` has the state `energy_scales` and `energy_shifts`; the energy of an atom is its
shift plus its scale times what the network says, so an atom without neighbours has exactly its shift. All float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.adaptive import pair_radii
from forgefield.models.interface import RegisteredModel
from forgefield.models.options import TermOptions, pair_cutoff
from forgefield.ops.graph import EdgeGraph, Segments, gather, segment_sum
from forgefield.ops.radial import polynomial_cutoff
from forgefield.physics.zbl import zbl_pair_energy

O = TypeVar("O", bound=TermOptions)  # noqa: E741


class PairLengths(NamedTuple):
    """Of every edge, (n_edges,) float64: length (A), length over the radius where the interaction ends, that radius.

    `radii` is None where they are constants.
    """

    lengths: Tensor
    scaled: Tensor
    radii: Tensor | None

    def at_rest(self) -> PairLengths:
        """The same without a gradient."""
        radii = None if self.radii is None else self.radii.detach()
        return PairLengths(self.lengths.detach(), self.scaled.detach(), radii)


class SpeciesTerms(RegisteredModel[O]):
    """Base of models that give atomic energies from edge vectors."""

    only_edge_vectors = True
    supports_adaptive_cutoff = True
    energy_scales: Tensor
    energy_shifts: Tensor
    feature_scale: Tensor
    inverse_cutoff: Tensor
    atomic_numbers: Tensor

    def __init__(self, options: O, species: Sequence[str], cutoff: float, adaptive_cutoff: float | None) -> None:
        super().__init__(options, species=species, cutoff=cutoff, adaptive_cutoff=adaptive_cutoff)
        self._zbl = options.zbl
        self.hold("energy_scales", self._per_species(options.energy_scales, 1.0), options.energy_scales_trainable)
        self.hold("energy_shifts", self._per_species(options.energy_shifts, 0.0), options.energy_shifts_trainable)
        neighbours = self._per_species(options.avg_num_neighbours, 1.0)
        self.register_buffer("feature_scale", neighbours.rsqrt(), persistent=False)
        cutoffs = self._inverse_cutoffs(options.per_edge_type_cutoff)
        self.register_buffer("inverse_cutoff", cutoffs, persistent=False)
        numbers = [atomic_numbers.get(symbol, 0) for symbol in self.species]
        self.register_buffer("atomic_numbers", torch.tensor(numbers, dtype=torch.float64), persistent=False)

    @classmethod
    def complete(
        cls,
        options: O,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> O:
        if adaptive_cutoff is not None and options.per_edge_type_cutoff is not None:
            raise ForgefieldError(
                "model.per_edge_type_cutoff and data.adaptive_cutoff cannot be used together; set one of them to null."
            )
        return cls.complete_options(options, species, cutoff, statistics)

    @classmethod
    def complete_options(cls, options: O, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]) -> O:
        """See `complete`; what subclasses do differently."""
        raise NotImplementedError(f"{cls.__name__} has no complete_options")

    def species_shifts(self) -> Tensor:
        return self.energy_shifts

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        """What energies depend on and features do not."""
        for name, parameter in self.named_parameters():
            if name.startswith(("readout.", "energy_scales", "energy_shifts")):
                yield parameter

    def hold(self, name: str, value: Tensor, trainable: bool) -> None:
        """Part of the model's state either way, a parameter only where it is trained."""
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

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
        """Lengths of the edge vectors (n_edges, 3), A, and how far each is from the end of its interaction."""
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        if self.adaptive_cutoff is not None:
            radii = pair_radii(lengths, graph, self.cutoff, self.adaptive_cutoff)
            return PairLengths(lengths, lengths / radii, radii)
        return PairLengths(lengths, lengths * self.inverse_cutoffs(species, graph), None)

    def inverse_cutoffs(self, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(1,), or (n_edges,) where pairs of species have cutoffs of their own, 1/A."""
        if self.inverse_cutoff.numel() == 1:
            return self.inverse_cutoff
        return self.inverse_cutoff.index_select(0, self.edge_kinds(species, graph))

    def energies(self, atomic: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph) -> Tensor:
        """(n_atoms,) eV from the network's output (n_atoms,) float64: scaled, shifted, with the repulsion if asked, for which
        alone `pairs` are needed."""
        kind = Segments(species, len(self.species))
        energies = torch.addcmul(gather(self.energy_shifts, kind), gather(self.energy_scales, kind), atomic)
        return self.repelled(energies, pairs, species, graph)

    def repelled(self, energies: Tensor, pairs: PairLengths | None, species: Tensor, graph: EdgeGraph) -> Tensor:
        """With the repulsion if asked."""
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
