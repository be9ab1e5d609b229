"""The descriptors `se_e2_a` and `se_e2_r`: a two-body embedding of each neighbour, by species.

`se_e2_a` (DeepPot-SE, Zhang et al., NeurIPS 2018) has distances and angles. With T the sum over neighbours of embedding (x)
row, the descriptor of an atom is T T_<^T, where T_< holds the first `axis_neuron` rows of T: it is invariant, because
rows enter through their scalar products only. `se_e2_r` has distances only: a fifth of the mean embedding over neighbours.

DeePMD-kit reserves slots for `sel` neighbours of each species and treats empty slots like neighbours at the cutoff. Here sums
are over actual neighbours, and the contribution of the empty slots is their number times the embedding of an empty row.
Without `sel` there are none: the model then does not depend on a guess of the largest number of neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import Descriptor, Standardise, environment_rows, radial_rows
from forgefield.models.deeppot.moments import expand, sum_by_moments
from forgefield.models.deeppot.networks import EDGE_BLOCK, Groups, Networks, group_rows
from forgefield.models.deeppot.options import (
    EmbeddingOptions,
    RowOptions,
    SeE2AOptions,
    SeE2ROptions,
    check_descriptor,
    excluded_kinds,
)
from forgefield.models.deeppot.row_statistics import RowStatistics, embedding_statistics
from forgefield.models.edges import Batch, EdgeContext
from forgefield.ops import products
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, is_traced, segment_sum

OptionsT = TypeVar("OptionsT", bound=EmbeddingOptions)


def neighbour_sum(
    scalars: Tensor,
    rows: Tensor,
    kinds: Tensor,
    networks: Networks,
    graph: EdgeGraph,
    *,
    vectors: Tensor,
    switch: GradientSwitch | None,
) -> Tensor:
    """(n_atoms, c, m): the sum over the edges of each atom of row (x) g(scalar), g the network of the edge's kind.

    scalars: (n_edges,); rows: (n_edges, c), both float64; kinds: (n_edges,) int64. vectors: edge vectors they were
    computed from. The result has the networks' precision.
    """
    rows = rows.to(networks.dtype)
    if can_use_moments(networks, vectors, switch):
        expansion = expand(networks, scalars)
        if expansion is not None:
            sums, cells = sum_by_moments(expansion, scalars, rows, kinds, graph, switch)
            return segment_sum(sums, Segments(cells.atom, graph.n_atoms))
    return direct_neighbour_sum(scalars.to(networks.dtype), rows, kinds, networks, graph)


def can_use_moments(networks: Networks, vectors: Tensor, switch: GradientSwitch | None) -> bool:
    """Whether sizes are known to the host, and no derivative is needed that moments do not have."""
    return (
        not vectors.is_cuda
        and not is_traced(vectors)
        and not products.is_lowered(networks.layers[0].w)
        and (not vectors.requires_grad or (switch is not None and vectors.is_leaf))
    )


def direct_neighbour_sum(scalars: Tensor, rows: Tensor, kinds: Tensor, networks: Networks, graph: EdgeGraph) -> Tensor:
    """As `neighbour_sum`, edge by edge; scalars and rows in the networks' precision."""
    groups = group_rows(kinds, networks.count, EDGE_BLOCK)
    embedded = groups.collect(networks(groups.spread(scalars.unsqueeze(1)), groups))
    return segment_sum(rows.unsqueeze(2) * embedded.unsqueeze(1), graph.by_destination)


def _norm(options: EmbeddingOptions) -> float:
    assert options.neighbour_norm is not None
    return options.neighbour_norm


DTYPES = {"float32": torch.float32, "float64": torch.float64}


class TwoBodyDescriptor(Descriptor[OptionsT]):
    """Base of the descriptors whose embedding reads the distance to one neighbour."""

    columns: int
    """Of a row: 4 with directions, 1 without."""
    sel: Tensor | None
    seen: Tensor

    def __init__(
        self,
        options: OptionsT,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, dtype=dtype, generator=generator)
        self.dim_out = options.neuron[-1]
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
        has_slots = isinstance(options.sel, list)
        assert options.davg is not None
        assert options.dstd is not None
        self.standardise = Standardise(options.davg, options.dstd, shift_rows=has_slots)
        sel = torch.tensor(options.sel, dtype=torch.float64) if has_slots else None
        self.register_buffer("sel", sel, persistent=False)
        self.excludes = bool(options.exclude_types)
        seen = torch.tensor(excluded_kinds(options.exclude_types, n), dtype=torch.float64)
        self.register_buffer("seen", seen, persistent=False)

    @classmethod
    def statistics(
        cls,
        options: OptionsT,
        *,
        species: tuple[str, ...],
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> RowStatistics:
        return embedding_statistics(
            options, species=species, cutoff=cutoff, pair_exclude_types=pair_exclude_types, columns=cls.columns
        )

    @classmethod
    def complete(
        cls, options: OptionsT, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> OptionsT:
        """Options with davg, dstd and neighbour_norm."""
        return complete_rows(options, cls.columns, species=species, cutoff=cutoff, statistics=statistics)

    @classmethod
    def refuses_species(cls, options: OptionsT, n_old: int, n_all: int) -> str | None:
        if not isinstance(options.sel, list):
            return None
        return (
            f"its descriptor {options.type} has slots for neighbours of its species only (sel); train a new model, without sel "
            "or with se_atten."
        )

    @classmethod
    def extended(cls, options: OptionsT, n_old: int, measured: Mapping[str, Any]) -> OptionsT:
        return extended_rows(options, n_old, measured)

    def edge_kinds(self, species: Tensor, graph: EdgeGraph) -> tuple[Tensor, Tensor, Tensor]:
        """Of every edge: species of centre and neighbour, and both as one number, centre first; each (n_edges,) int64."""
        centre, neighbour = species.index_select(0, graph.destination), species.index_select(0, graph.source)
        return centre, neighbour, centre * len(self.species) + neighbour

    def empty_embedding(self) -> Tensor:
        """(n_species^2, m): output of the network of each (centre, neighbour) for an empty slot."""
        n, one_side = len(self.species), self.options.type_one_side
        scalars = self.standardise.empty[:, 0].to(self.networks.dtype)
        inputs = scalars.expand(n, n) if one_side else scalars.unsqueeze(1).expand(n, n)  # in the order of networks
        groups = Groups.in_order([n] * n if one_side else [1] * (n * n))
        outputs = self.networks(inputs.reshape(n * n, 1), groups)
        result: Tensor = outputs.unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1) if one_side else outputs
        return result

    def empty_slots(self, species: Tensor, neighbour: Tensor, graph: EdgeGraph, mask: Tensor | None) -> Tensor:
        """(n_atoms, n_species): number of empty slots for each species. mask: (n_edges,) of real neighbours."""
        assert self.sel is not None
        n = len(self.species)
        ones = torch.ones_like(neighbour, dtype=torch.float64) if mask is None else mask
        counts = ones.new_zeros(species.shape[0] * n).index_add_(0, graph.destination * n + neighbour, ones)
        empty = self.sel - counts.view(species.shape[0], n)
        if self.may_wait_for(species) and bool((empty < 0).any()):
            require_slots([int(s) for s in self.sel], (self.sel - empty.amin(0)).int().tolist(), self.species)
        return empty

    def empty_sum(self, species: Tensor, neighbour: Tensor, graph: EdgeGraph, mask: Tensor | None) -> Tensor:
        """(n_atoms, m): sum of the embeddings of an atom's empty slots."""
        n = len(self.species)
        empty = self.empty_slots(species, neighbour, graph, mask)
        centre_one_hot = torch.nn.functional.one_hot(species, n).to(empty.dtype)
        weights = (centre_one_hot.unsqueeze(2) * empty.unsqueeze(1)).flatten(1).to(self.networks.dtype)
        return weights @ self.empty_embedding()


def require_slots(sel: Sequence[int], needed: Sequence[int] | None, species: Sequence[str]) -> None:
    """Raise if an atom has more neighbours than there are slots. needed: largest number of each species."""
    for symbol, slots, number in zip(species, sel, needed or ()):
        if number > slots:
            raise ForgefieldError(
                f"model.descriptor.sel has room for {slots} {symbol} neighbours, but an atom has {number} within the cutoff; "
                f"it needs at least {list(map(int, needed or ()))} for {', '.join(species)}, or leave sel out."
            )


def complete_rows(
    options: OptionsT, columns: int, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> OptionsT:
    """Options checked, with statistics of rows of `columns` numbers: davg, dstd, neighbour_norm and most_neighbours."""
    check_descriptor(options, species, cutoff)
    filled = measured_rows(options, columns, species=species, statistics=statistics)
    if options.neighbour_norm is None:
        sel, environment = filled["sel"], statistics.get("environment") or {}
        mean = environment.get("mean_neighbours", statistics.get("mean_neighbours"))
        filled["neighbour_norm"] = float(sum(sel)) if sel is not None else max(float(mean or 0.0), 1.0)
    return dataclasses.replace(options, **filled)


def measured_rows(
    options: RowOptions, columns: int, *, species: tuple[str, ...], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    """The options sel, davg, dstd and most_neighbours, as set or from statistics of rows of `columns` numbers."""
    sel = options.sel if isinstance(options.sel, list) else None
    environment: Mapping[str, Any] = statistics.get("environment") or {}
    filled: dict[str, Any] = {
        "sel": sel,
        "most_neighbours": options.most_neighbours or environment.get("max_neighbours"),
    }
    for key, value in (("davg", options.davg), ("dstd", options.dstd)):
        if value is None:
            value = environment.get(key)
        if value is None:
            raise ForgefieldError(
                f"model.descriptor.{key} is not set and there is no training data to compute it from."
            )
        shape = [len(row) for row in value]
        if shape != [columns] * len(species):
            raise ForgefieldError(f"model.descriptor.{key} needs {columns} numbers for each of {len(species)} species.")
        filled[key] = value
    if options.set_davg_zero:
        filled["davg"] = [[0.0] * columns for _ in species]
    if sel is not None:
        require_slots(sel, environment.get("max_neighbours"), species)
    return filled


def extended_rows(options: OptionsT, n_old: int, measured: Mapping[str, Any]) -> OptionsT:
    """Options with statistics of rows around species after the first `n_old`. measured: statistics of all species."""
    assert options.davg is not None
    assert options.dstd is not None
    davg, dstd = ([list(row) for row in measured[key][n_old:]] for key in ("davg", "dstd"))
    if options.set_davg_zero:
        davg = [[0.0] * len(row) for row in davg]
    most = options.most_neighbours
    return dataclasses.replace(
        options,
        davg=[*options.davg, *davg],
        dstd=[*options.dstd, *dstd],
        most_neighbours=[*most, *measured["max_neighbours"][n_old:]] if most else most,
    )


class SeE2A(TwoBodyDescriptor[SeE2AOptions]):
    """Two-body embedding, full rows."""

    Options = SeE2AOptions
    columns = 4

    def __init__(
        self,
        options: SeE2AOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, dtype=dtype, generator=generator)
        self.dim_rotation = options.neuron[-1]
        self.dim_out = options.neuron[-1] * options.axis_neuron

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        options, species, graph = self.options, batch["species"], edges.graph
        centre, neighbour, pair = self.edge_kinds(species, graph)
        rows = environment_rows(edges.vectors, options.rcut_smth, self.cutoff, options.env_protection)
        rows, scalars = self.standardise(rows, centre)
        if self.excludes:
            rows = rows * self.seen.index_select(0, pair).unsqueeze(1)
        if mask is not None:
            rows = rows * mask.unsqueeze(1)
        dtype = self.networks.dtype
        kinds = neighbour if options.type_one_side else pair
        total = neighbour_sum(
            scalars,
            rows,
            kinds,
            self.networks,
            graph,
            vectors=edges.vectors,
            switch=edges.gradient,
        )
        if self.sel is not None and self.standardise.has_shift:
            empty = self.standardise.empty.to(dtype).index_select(0, species)
            total = total + empty.unsqueeze(2) * self.empty_sum(species, neighbour, graph, mask).unsqueeze(1)
        elif self.sel is not None:
            self.empty_slots(species, neighbour, graph, mask)
        total = total / _norm(options)
        transposed = total.transpose(1, 2)
        descriptor = torch.bmm(transposed, total[:, :, : options.axis_neuron])
        return descriptor.flatten(1), transposed[:, :, 1:]


RADIAL_SCALE = 0.2


class SeE2R(TwoBodyDescriptor[SeE2ROptions]):
    """Two-body embedding, radial rows."""

    Options = SeE2ROptions
    columns = 1

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        options, species, graph = self.options, batch["species"], edges.graph
        centre, neighbour, pair = self.edge_kinds(species, graph)
        rows = radial_rows(edges.vectors, options.rcut_smth, self.cutoff, options.env_protection)
        _, scalars = self.standardise(rows, centre)
        weights = torch.ones_like(scalars) if mask is None else mask
        seen = self.seen.index_select(0, pair) if self.excludes else None
        if seen is not None:
            scalars, weights = (scalars * seen, weights) if self.sel is not None else (scalars, weights * seen)
        kinds = neighbour if options.type_one_side else pair
        total = neighbour_sum(
            scalars,
            weights.unsqueeze(1),
            kinds,
            self.networks,
            graph,
            vectors=edges.vectors,
            switch=edges.gradient,
        ).squeeze(1)
        ends = self._ends(species, neighbour, pair, graph, mask if seen is None else weights)
        return (total + ends) * (RADIAL_SCALE / _norm(options)), None

    def _ends(
        self, species: Tensor, neighbour: Tensor, pair: Tensor, graph: EdgeGraph, weights: Tensor | None
    ) -> Tensor:
        """(n_atoms, m): the term that makes the sum smooth at the cutoff: empty slots, or minus the embedding at the cutoff."""
        if self.sel is not None:
            return self.empty_sum(species, neighbour, graph, weights)
        n = len(self.species)
        ones = torch.ones_like(pair, dtype=torch.float64) if weights is None else weights
        counts = ones.new_zeros(species.shape[0] * n * n).index_add_(0, graph.destination * (n * n) + pair, ones)
        return -(counts.view(species.shape[0], n * n).to(self.networks.dtype) @ self.empty_embedding())
