"""What `se_e2_a` and `se_e2_r` share: embedding networks by species, standardised rows, neighbours and empty places counted.

DeePMD-kit gives every atom room for `sel` neighbours of each species and lets the empty places enter like neighbours at the
cutoff. Here sums are over the neighbours there are, and what the empty places add is a product of their number with the
embedding of an empty row. Without `sel` there are none: the model then does not depend on a guess of how many neighbours
there may be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import Descriptor
from forgefield.models.deeppot.environment import Standardise
from forgefield.models.deeppot.grouping import Groups
from forgefield.models.deeppot.networks import Networks
from forgefield.models.deeppot.options import SeE2ROptions, check_descriptor, excluded_kinds
from forgefield.ops.graph import EdgeGraph

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class TwoBodyDescriptor(Descriptor):
    """Base of the descriptors whose embedding reads the distance to one neighbour."""

    columns: int
    """Of a row: 4 with directions, 1 without."""
    sel: Tensor | None
    seen: Tensor

    def __init__(
        self,
        options: Any,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, dtype=dtype, generator=generator)
        n = len(self.species)
        if options.seed is not None:
            generator = torch.Generator().manual_seed(options.seed)
        self.networks = Networks(
            n if options.type_one_side else n * n,
            [1, *options.neuron],
            activation=options.activation_function,
            resnet_dt=options.resnet_dt,
            trainable=options.trainable,
            dtype=DTYPES.get(options.precision, dtype),
            generator=generator,
        )
        has_room = isinstance(options.sel, list)
        self.standardise = Standardise(options.davg, options.dstd, shift_rows=has_room)
        sel = torch.tensor(options.sel, dtype=torch.float64) if has_room else None
        self.register_buffer("sel", sel, persistent=False)
        self.excludes = bool(options.exclude_types)
        seen = torch.tensor(excluded_kinds(options.exclude_types, n), dtype=torch.float64)
        self.register_buffer("seen", seen, persistent=False)

    @classmethod
    def complete(
        cls, options: SeE2ROptions, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> Any:
        """Options with davg, dstd and neighbour_norm given."""
        check_descriptor(options, species, cutoff)
        sel = options.sel if isinstance(options.sel, list) else None
        found: Mapping[str, Any] = statistics.get("environment") or {}
        filled: dict[str, Any] = {"sel": sel, "most_neighbours": options.most_neighbours or found.get("max_neighbours")}
        for key in ("davg", "dstd"):
            value = getattr(options, key)
            if value is None:
                value = found.get(key)
            if value is None:
                raise ForgefieldError(
                    f"model.descriptor.{key} is not given and there is no training data to take it from."
                )
            shape = [len(row) for row in value]
            if shape != [cls.columns] * len(species):
                raise ForgefieldError(
                    f"model.descriptor.{key} needs {cls.columns} numbers for each of {len(species)} species."
                )
            filled[key] = value
        if options.set_davg_zero:
            filled["davg"] = [[0.0] * cls.columns for _ in species]
        if sel is not None:
            require_room(sel, found.get("max_neighbours"), species)
        if options.neighbour_norm is None:
            mean = found.get("mean_neighbours", statistics.get("mean_neighbours"))
            filled["neighbour_norm"] = float(sum(sel)) if sel is not None else max(float(mean or 0.0), 1.0)
        return dataclasses.replace(options, **filled)

    def edge_kinds(self, species: Tensor, graph: EdgeGraph) -> tuple[Tensor, Tensor, Tensor]:
        """Of every edge: species of centre and neighbour, and both as one number, centre first; each (n_edges,) int64."""
        centre, neighbour = species.index_select(0, graph.destination), species.index_select(0, graph.source)
        return centre, neighbour, centre * len(self.species) + neighbour

    def empty_embedding(self) -> Tensor:
        """(n_species^2, m): what the network of each (centre, neighbour) says of an empty place."""
        n, one_side = len(self.species), self.options.type_one_side
        scalars = self.standardise.empty[:, 0].to(self.networks.dtype)
        places = scalars.expand(n, n) if one_side else scalars.unsqueeze(1).expand(n, n)  # in the order of networks
        groups = Groups.in_order([n] * n if one_side else [1] * (n * n))
        found = self.networks(places.reshape(n * n, 1), groups)
        return found.unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1) if one_side else found

    def empty_places(self, species: Tensor, neighbour: Tensor, graph: EdgeGraph, mask: Tensor | None) -> Tensor:
        """(n_atoms, n_species): how many of the places for each species are empty. mask: (n_edges,) of real neighbours."""
        assert self.sel is not None
        n = len(self.species)
        ones = torch.ones_like(neighbour, dtype=torch.float64) if mask is None else mask
        counts = ones.new_zeros(species.shape[0] * n).index_add_(0, graph.destination * n + neighbour, ones)
        empty = self.sel - counts.view(species.shape[0], n)
        if self.may_wait_for(species) and bool((empty < 0).any()):
            require_room([int(s) for s in self.sel], (self.sel - empty.amin(0)).int().tolist(), self.species)
        return empty

    def empty_sum(self, species: Tensor, neighbour: Tensor, graph: EdgeGraph, mask: Tensor | None) -> Tensor:
        """(n_atoms, m): sum of the embeddings of an atom's empty places."""
        n = len(self.species)
        empty = self.empty_places(species, neighbour, graph, mask)
        own = torch.nn.functional.one_hot(species, n).to(empty.dtype)
        weights = (own.unsqueeze(2) * empty.unsqueeze(1)).flatten(1).to(self.networks.dtype)
        return weights @ self.empty_embedding()


def require_room(sel: Sequence[int], needed: Sequence[int] | None, species: Sequence[str]) -> None:
    """Stop where an atom has more neighbours than there is room for. needed: largest number of each species."""
    for symbol, room, number in zip(species, sel, needed or ()):
        if number > room:
            raise ForgefieldError(
                f"model.descriptor.sel has room for {room} {symbol} neighbours, but an atom has {number} within the cutoff; "
                f"it needs at least {list(map(int, needed or ()))} for {', '.join(species)}, or leave sel out."
            )
