"""The descriptor `se_e3`: an embedding of the angle between every two neighbours of an atom, by the species of both.

With x the directions of neighbours times a switch, standardised, the descriptor of an atom is a sum over pairs of its
neighbours of (x_j . x_k) g(x_j . x_k), divided by numbers of slots for their species; g is the network of the two species. A
neighbour at the cutoff contributes nothing, nor does an empty slot, so that sums are over actual neighbours and slots
enter as divisors only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.attention import count_edges, lay_out
from forgefield.models.deeppot.descriptor import Descriptor, environment_rows
from forgefield.models.deeppot.networks import Networks
from forgefield.models.deeppot.options import RowOptions, check_descriptor, excluded_kinds
from forgefield.models.deeppot.row_statistics import RowStatistics, embedding_statistics
from forgefield.models.deeppot.se_e2 import DTYPES, measured_rows, require_slots
from forgefield.models.edges import Batch, EdgeContext
from forgefield.ops.graph import EdgeGraph, barrier

COLUMNS = 4
SPARE = 1.1
"""Slots for neighbours, relative to the largest number in the training data: what `sel: auto` means in DeePMD-kit."""


@dataclass
class SeE3Options(RowOptions):
    """Descriptor from the angles between two neighbours."""

    type: str = "se_e3"
    slots: list[int] | None = None
    """Sums over neighbours of a species are divided by this, and traced and captured steps have room for as many. Default:
    `sel`, or a tenth more than the largest number in the training data, rounded up to a multiple of four."""


def check_slots(slots: Sequence[int], n_species: int) -> None:
    if len(slots) != n_species or min(slots) < 1:
        raise ForgefieldError(f"model.descriptor.slots is {list(slots)}; it needs a number above 0 for each species.")


class SeE3(Descriptor[SeE3Options]):
    """Embedding of angles."""

    Options = SeE3Options
    deviation: Tensor
    seen: Tensor

    def __init__(
        self,
        options: SeE3Options,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, dtype=dtype, generator=generator)
        n = len(self.species)
        assert options.slots is not None
        assert options.dstd is not None
        self.dim_out, self.slots = options.neuron[-1], list(options.slots)
        self.pairs = [(a, b) for a in range(n) for b in range(a, n)]
        self.networks = Networks(
            len(self.pairs),
            [1, *options.neuron],
            activation=options.activation_function,
            resnet_dt=options.resnet_dt,
            trainable=options.trainable,
            dtype=DTYPES.get(options.precision, dtype),
            generator=generator if options.seed is None else torch.Generator().manual_seed(options.seed),
        )
        deviation = torch.tensor(options.dstd, dtype=torch.float64)[:, 1:]
        self.register_buffer("deviation", deviation, persistent=False)
        self.excludes = bool(options.exclude_types)
        seen = torch.tensor(excluded_kinds(options.exclude_types, n), dtype=torch.float64)
        self.register_buffer("seen", seen, persistent=False)

    @classmethod
    def statistics(
        cls,
        options: SeE3Options,
        *,
        species: tuple[str, ...],
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> RowStatistics:
        return embedding_statistics(
            options, species=species, cutoff=cutoff, pair_exclude_types=pair_exclude_types, columns=COLUMNS
        )

    @classmethod
    def complete(
        cls, options: SeE3Options, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> SeE3Options:
        """Options with davg, dstd and slots."""
        check_descriptor(options, species, cutoff)
        filled = measured_rows(options, COLUMNS, species=species, statistics=statistics)
        if any(value != 0 for row in filled["davg"] for value in row[1:]):
            raise ForgefieldError("model.descriptor.davg must be 0 for directions, the last three numbers of a row.")
        most, slots = filled["most_neighbours"], options.slots or filled["sel"]
        if slots is None:
            if most is None:
                raise ForgefieldError(
                    "model.descriptor.slots is not set and there is no training data to compute it from."
                )
            slots = [max(1, math.ceil(SPARE * number / 4)) * 4 for number in most]
        slots = [max(1, number) for number in slots]
        check_slots(slots, len(species))
        return dataclasses.replace(options, **filled, slots=slots)

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        dtype, graph = self.networks.dtype, edges.graph
        within = torch.linalg.vector_norm(edges.vectors.detach(), dim=1) < self.cutoff
        if mask is not None:
            within = within & (mask > 0)
        neighbour = batch["species"].index_select(0, graph.source)
        chosen = [within & (neighbour == kind) for kind in range(len(self.species))]
        counts = [count_edges(of_kind, graph.by_destination.pointers) for of_kind in chosen]
        waits = self.may_wait_for(edges.vectors)
        widths = [max(1, int(count.max())) if len(count) else 1 for count in counts] if waits else self.slots
        if waits and isinstance(self.options.sel, list):
            require_slots(self.options.sel, widths, self.species)
        rows = barrier(self._rows(batch, edges, neighbour).to(dtype), edges.gradient)
        laid_out = [
            lay_out(of_kind, graph.destination, graph.by_destination.pointers, width, dtype).spread(rows)[:, :-1]
            for of_kind, width in zip(chosen, widths)
        ]
        result = self._sum(laid_out, graph)
        if not waits:  # no error can be raised here
            too_many = torch.stack([count > width for count, width in zip(counts, widths)]).any(0)
            result = result + torch.where(too_many, torch.nan, 0.0).to(dtype).unsqueeze(1)
        return result, None

    def _rows(self, batch: Batch, edges: EdgeContext, neighbour: Tensor) -> Tensor:
        """(n_edges, 3): standardised directions times switch, zero for pairs that do not see each other."""
        options, centre = self.options, batch["species"].index_select(0, edges.graph.destination)
        rows = environment_rows(edges.vectors, options.rcut_smth, self.cutoff, options.env_protection)[:, 1:]
        rows = rows / self.deviation.index_select(0, centre)
        if not self.excludes:
            return rows
        return rows * self.seen.index_select(0, centre * len(self.species) + neighbour).unsqueeze(1)

    def _sum(self, rows: Sequence[Tensor], graph: EdgeGraph) -> Tensor:
        """(n_atoms, m), from rows (n_atoms, width, 3) of the neighbours of each species."""
        total = rows[0].new_zeros(graph.n_atoms, self.dim_out)
        for number, (a, b) in enumerate(self.pairs):
            products = torch.bmm(rows[a], rows[b].transpose(1, 2)).flatten(1)
            weighted = products
            if a == b:  # every two neighbours once, with weight two
                width = rows[a].shape[1]
                upper = torch.triu_indices(width, width, device=products.device)
                products = products.index_select(1, upper[0] * width + upper[1])
                weighted = products * (2 - (upper[0] == upper[1]).to(products.dtype))
            embedded = self.networks.single(number, products.flatten().unsqueeze(1))
            embedded = embedded.unflatten(0, (graph.n_atoms, products.shape[1]))
            total = total + torch.bmm(weighted.unsqueeze(1), embedded).squeeze(1) / (self.slots[a] * self.slots[b])
        return total
