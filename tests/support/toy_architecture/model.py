"""Gaussians of the distance with learnt weights, summed over neighbours: features, and energies linear in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.models import EdgeContext, RegisteredModel
from forgefield.models.edges import Batch
from forgefield.models.interface import Tangents
from forgefield.models.options import check_values, from_statistics
from forgefield.ops.functions import polynomial_cutoff
from forgefield.ops.graph import segment_sum


@dataclass
class GaussiansOptions:
    """Options of the toy model."""

    width: int = option(4, at_least=1)
    """Gaussians, and features of an atom."""
    energy_shifts: dict[str, float] | None = None
    """Energy of the isolated atom, eV. Default: the reference energies."""


class Gaussians(RegisteredModel[GaussiansOptions]):
    """State: `weights` (n_species, width), `energy_shifts` (n_species,), float64."""

    Options = GaussiansOptions
    presets = {"S": {"width": 3}}
    only_edge_vectors = True
    energy_shifts: Tensor

    def __init__(
        self,
        options: GaussiansOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff)
        shape = (len(self.species), options.width)
        self.weights = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        shifts = options.energy_shifts or {}
        self.register_buffer("energy_shifts", torch.tensor([shifts[s] for s in self.species], dtype=torch.float64))
        self.feature_dim = options.width
        self.passes_by_hook = 0

    @classmethod
    def complete(
        cls,
        options: GaussiansOptions,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> GaussiansOptions:
        check_values(options)
        shifts = options.energy_shifts or from_statistics(statistics, "reference_energies", "energy_shifts")
        return replace(options, energy_shifts=dict(shifts))

    def forward(self, batch: Batch, edges: EdgeContext) -> Tensor:
        return self._energies(self.features(batch, edges), batch["species"])

    def encode(self, batch: Batch, edges: EdgeContext, *, energies: bool = True) -> tuple[Tensor, Tensor | None]:
        features = self.features(batch, edges)
        if edges.memory is not None:
            edges.memory.fill(edges.vectors, edges.graph, features)
        return features, self._energies(features, batch["species"]) if energies else None

    def features(self, batch: Batch, edges: EdgeContext) -> Tensor:
        """(n_atoms, width)."""
        x = edges.vectors.square().sum(1).sqrt() / self.cutoff
        centres = torch.linspace(0, 1, self.options.width, dtype=x.dtype)
        bells = torch.exp(-4 * (x.unsqueeze(1) - centres).square()) * polynomial_cutoff(x, 6.0).unsqueeze(1)
        return segment_sum(bells, edges.graph.by_destination)

    def _energies(self, features: Tensor, species: Tensor) -> Tensor:
        weights = self.weights.double().index_select(0, species)
        return self.energy_shifts.index_select(0, species) + (weights * features).sum(1)

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        yield self.weights

    def species_shifts(self) -> Tensor:
        return self.energy_shifts

    def kernel_refusal(self) -> str | None:
        return None

    def tangents(self, batch: Batch, edges: EdgeContext) -> Tangents:
        """Energies are linear in the weights, so their tangents are the weights times the tangents of the features."""
        self.passes_by_hook += 1
        features, tangent = forward_ad.unpack_dual(self.features(batch, edges))
        assert tangent is not None

        def finish() -> tuple[Tensor, Tensor, Tensor]:
            species = batch["species"]
            slope = (self.weights.double().index_select(0, species) * tangent).sum(1)
            return features, self._energies(features, species), slope

        return finish
