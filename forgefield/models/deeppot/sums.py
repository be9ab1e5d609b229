"""Sums of several networks in one model (`linear_ener` of DeePMD-kit), each with a descriptor and a fitting network.

The first network is that of the model itself; the others are the entries of `model.networks`. Their energies are multiplied by
weights and added; the energies of species are fitted to the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import Descriptor, DescriptorStatistics
from forgefield.models.deeppot.fitting import EnergyFitting, Fitting
from forgefield.models.deeppot.options import DeepPotOptions, descriptor_part, fitting_part
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.options import options_of_section


@dataclass
class NetworkOptions:
    """An entry of `model.networks`."""

    descriptor: dict[str, Any] = field(default_factory=lambda: {"type": "se_e2_a"})
    """As `model.descriptor`."""
    fitting_net: dict[str, Any] = field(default_factory=lambda: {"type": "ener"})
    """As `model.fitting_net`."""
    weight: float = 1.0
    """Factor of its energies."""


def networks_of(options: DeepPotOptions) -> list[NetworkOptions]:
    """The entries of `model.networks`, their keys checked."""
    sections = [
        options_of_section(NetworkOptions, section, where=f"model.networks[{number}]")
        for number, section in enumerate(options.networks)
    ]
    kinds = {fitting_part(section.fitting_net)[1].type for section in sections}
    if kinds - {"ener"}:
        raise ForgefieldError(
            f"model.networks: the fitting network of one is of type {min(kinds - {'ener'})}; only energies are added."
        )
    return sections


def complete_networks(
    options: DeepPotOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The option `networks` with every number explicit."""
    environment: Mapping[str, Any] = statistics.get("environment") or {}
    sections = networks_of(options)
    measured = environment.get("networks") or [{}] * len(sections)
    completed = []
    for section, of_network in zip(sections, measured, strict=True):
        known = {**statistics, "environment": {**environment, **of_network}}
        descriptor_class, of_descriptor = descriptor_part(section.descriptor)
        fitting_class, of_fitting = fitting_part(section.fitting_net)
        descriptor = descriptor_class.complete(of_descriptor, species=species, cutoff=cutoff, statistics=known)
        fitting = fitting_class.complete(of_fitting, species=species, statistics=known)
        parts = {"descriptor": dataclasses.asdict(descriptor), "fitting_net": dataclasses.asdict(fitting)}
        completed.append({**parts, "weight": float(section.weight)})
    return completed


def network_statistics(options: DeepPotOptions, species: Sequence[str], cutoff: float) -> list[DescriptorStatistics]:
    """Statistics of the training data for each entry of `model.networks`."""
    return [
        descriptor_class.statistics(
            of_descriptor, species=tuple(species), cutoff=cutoff, pair_exclude_types=options.pair_exclude_types
        )
        for descriptor_class, of_descriptor in (descriptor_part(section.descriptor) for section in networks_of(options))
    ]


class Summand(nn.Module):
    """One of the added networks. options: completed."""

    descriptor: Descriptor[Any]
    fitting: Fitting

    def __init__(
        self,
        options: NetworkOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        descriptor_class, of_descriptor = descriptor_part(options.descriptor)
        _, of_fitting = fitting_part(options.fitting_net)
        self.weight = float(options.weight)
        self.descriptor = descriptor_class(
            of_descriptor, species=species, cutoff=cutoff, dtype=dtype, generator=generator
        )
        self.descriptor.rotates = False
        self.fitting = EnergyFitting(
            of_fitting,
            species=species,
            dim_descriptor=self.descriptor.dim_out,
            mixed_types=self.descriptor.mixed_types,
            dtype=dtype,
            generator=generator,
        )

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None) -> Tensor:
        """(n_atoms,) energies times the weight, eV, float64."""
        energies: Tensor = self.fitting(self.descriptor(batch, edges, mask)[0], batch)
        return self.weight * energies.squeeze(1).double()

    def last_layer(self, batch: Batch, edges: EdgeContext, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features (n_atoms, n_weights), times the weight, and weights (n_weights,) of the last layer, float64."""
        features, weights = self.fitting.last_layer(self.descriptor(batch, edges, mask)[0], batch)
        return self.weight * features, weights


def inputs_of(summands: Sequence[Summand]) -> dict[str, tuple[str, int]]:
    """Additional keys of a batch that the networks read, in addition to those of the first one."""
    inputs: dict[str, tuple[str, int]] = {}
    for summand in summands:
        sizes = {name: parameter.size for name, parameter in summand.fitting.options.parameters.items()}
        inputs |= {name: ("frame" if name == "fparam" else "atom", n) for name, n in sizes.items() if n}
        inputs |= dict(summand.descriptor.inputs)
    return inputs
