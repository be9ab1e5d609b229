"""The descriptor of DPA-3: features of atoms, edges and angles that update each other (Zhang et al., arXiv:2506.01686).

Sums are over actual neighbours. With `use_dynamic_sel` the model does not depend on a largest number of neighbours. Without, an
atom with more than `e_sel` neighbours is an error, and only the nearest `a_sel` neighbours of an atom have angles, as in
DeePMD-kit: the energy changes by a step when two of them change places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.attention import Slots, count_edges, lay_out
from forgefield.models.deeppot.descriptor import (
    Descriptor,
    TypeEmbedding,
    pick_rows,
    refuses_types,
    switch,
)
from forgefield.models.deeppot.networks import activation_function
from forgefield.models.deeppot.options import excluded_kinds
from forgefield.models.deeppot.repflow_angles import Angles, exact_angles, nearest, no_angles, padded_angles
from forgefield.models.deeppot.repflow_layer import Affine, Around, Features, RepFlowLayer, neighbour_moments
from forgefield.models.deeppot.repflow_options import Dpa3Options, complete_options, require_slots
from forgefield.models.deeppot.row_statistics import RowStatistics
from forgefield.models.deeppot.se_e2 import DTYPES
from forgefield.models.deeppot.silut import fast_activation
from forgefield.models.edges import Batch, EdgeContext, edge_vectors
from forgefield.ops.graph import EdgeGraph, barrier, cut, join

STEEPNESS = 20.0
"""Of the exponential switch."""
INSIDE = 1 - 1e-6
"""Factor of cosines."""
LEAST = 1e-6
"""Added to distances in directions, A."""


def exponential_switch(lengths: Tensor, start: float, end: float) -> Tensor:
    """exp(-exp(20 (r - start) / start)) up to `end`, and constant from there on. All in A."""
    return torch.exp(-torch.exp((start - lengths.clamp(max=end)) * (-STEEPNESS / start)))


class Dpa3Statistics:
    """Statistics that complete the options: largest numbers of neighbours, and deviations of rows.

    pair_exclude_types: pairs that are no neighbours.
    """

    def __init__(
        self,
        options: Dpa3Options,
        n_species: int,
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> None:
        self.options, self.n = options, n_species
        if not options.fix_stat_std and not isinstance(options.e_sel, int):
            raise ForgefieldError(
                "model.descriptor.fix_stat_std is 0, which needs a number as e_sel: deviations are those of e_sel rows."
            )
        self.rows = RowStatistics(
            n_species,
            cutoff,
            slots=options.e_sel if isinstance(options.e_sel, int) else None,
            start=options.e_rcut_smth,
            env_protection=options.env_protection,
            exclude_types=options.exclude_types,
            pair_exclude_types=pair_exclude_types,
        )
        self.present = torch.tensor(excluded_kinds(pair_exclude_types, n_species), dtype=torch.bool)
        self.most, self.near = 0, 0

    def add(self, batch: Mapping[str, Tensor]) -> None:
        self.rows.add(batch)
        species, (source, centre) = batch["species"], batch["edge_index"]
        present = self.present[species[centre] * self.n + species[source]]
        near = present & (torch.linalg.vector_norm(edge_vectors(dict(batch)), dim=1) < self.options.a_rcut)
        counts = [int(torch.bincount(centre[chosen], minlength=1).max()) for chosen in (present, near)]
        self.most, self.near = max(self.most, counts[0]), max(self.near, counts[1])

    def result(self) -> dict[str, Any]:
        return {**self.rows.result(), "most_neighbours": self.most, "most_near_neighbours": self.near}


class Dpa3(Descriptor[Dpa3Options]):
    """Features of atoms after several layers of updates."""

    Options = Dpa3Options
    mixed_types = True
    ghost_atoms = "exchange"
    layers: list[RepFlowLayer]
    included_pairs: Tensor
    radial_deviation: Tensor
    deviation: Tensor

    def __init__(
        self,
        options: Dpa3Options,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, dtype=dtype, generator=generator)
        if options.seed is not None:
            generator = torch.Generator().manual_seed(options.seed)
        dtype = DTYPES.get(options.precision, dtype)
        make: dict[str, Any] = {"trainable": options.trainable, "dtype": dtype, "generator": generator}
        self.dim_rotation = options.e_dim
        self.dim_out = options.n_dim * (2 if options.concat_output_tebd else 1)
        self.type_embedding = TypeEmbedding(
            self.species,
            options.n_dim,
            from_configuration=options.use_econf_tebd,
            bias=options.use_tebd_bias,
            **make,
        )
        self.activate = fast_activation(options.activation_function)
        self.edge_embedding = Affine(1, options.e_dim, **make)
        self.angle_embedding = Affine(1, options.a_dim, bias=False, **make)
        layers = nn.ModuleList(RepFlowLayer(options, dtype=dtype, generator=generator) for _ in range(options.nlayers))
        self.layers = cast("list[RepFlowLayer]", layers)
        included = torch.tensor(excluded_kinds(options.exclude_types, len(self.species)), dtype=torch.bool)
        self.register_buffer("included_pairs", included, persistent=False)
        assert options.dstd is not None
        deviations = torch.tensor(options.dstd, dtype=torch.float64)
        self.register_buffer("radial_deviation", deviations[:, 0].contiguous(), persistent=False)
        self.register_buffer("deviation", deviations[:, 1:].contiguous(), persistent=False)

    @classmethod
    def statistics(
        cls,
        options: Dpa3Options,
        *,
        species: tuple[str, ...],
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> Dpa3Statistics:
        return Dpa3Statistics(options, len(species), cutoff, pair_exclude_types)

    @classmethod
    def complete(
        cls, options: Dpa3Options, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> Dpa3Options:
        """Options with e_sel, a_sel, dstd and max_angle_neighbours."""
        return complete_options(options, species, cutoff, statistics)

    @classmethod
    def refuses_species(cls, options: Dpa3Options, n_old: int, n_all: int) -> str | None:
        return refuses_types(options.n_dim, n_old, n_all) if not options.use_econf_tebd else None

    @classmethod
    def extended(cls, options: Dpa3Options, n_old: int, measured: Mapping[str, Any]) -> Dpa3Options:
        assert options.dstd is not None
        new = [[options.fix_stat_std] * 4 if options.fix_stat_std else list(row) for row in measured["dstd"][n_old:]]
        return replace(options, dstd=[*options.dstd, *new])

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        species, table = batch["species"], self.type_embedding()
        features, around, room = self._start(batch, edges, mask, table)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            if number:
                features = replace(features, nodes=edges.fill_ghosts(features.nodes))
            wants = [self.rotates or number + ahead < last for ahead in (0, 1)]
            features = layer(features, around, edges=wants[0], angles=wants[1])
        result = features.nodes
        if self.options.concat_output_tebd:
            result = join([result, pick_rows(table, species)], 1)
        rotation = None
        if self.rotates:
            rotation = neighbour_moments(around.steps, features.edges, edges.graph, around.slots).transpose(1, 2)
        return self._refuse(result, room), rotation

    def _start(
        self, batch: Batch, edges: EdgeContext, mask: Tensor | None, table: Tensor
    ) -> tuple[Features, Around, list[Tensor]]:
        """Features before the first layer, what all layers read, and numbers of neighbours (n_atoms,): within the cutoff, and
        with angles."""
        options, graph, vectors, dtype = self.options, edges.graph, edges.vectors, table.dtype
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        within = lengths.detach() < self.cutoff
        if mask is not None:
            within = within & (mask > 0)
        near = within & (lengths.detach() < options.a_rcut)
        pointers = graph.by_destination.pointers
        room = [count_edges(within, pointers), count_edges(near, pointers)]
        if self._limits_angles(room[1]):
            assert isinstance(options.a_sel, int)
            near = nearest(near, lengths.detach(), graph, options.a_sel)
            room[1] = count_edges(near, pointers)
        species = batch["species"]
        centre, seen = species.index_select(0, graph.destination), within
        if options.exclude_types:
            kinds = centre * len(self.species) + species.index_select(0, graph.source)
            seen = within & self.included_pairs.index_select(0, kinds)
            near = near & seen
        fades = self._switch(lengths, options.e_rcut_smth, self.cutoff) * seen.to(lengths.dtype)
        near_fades = self._switch(lengths, options.a_rcut_smth, options.a_rcut) * near.to(lengths.dtype)
        e_norm, a_norm = options.norms()
        inverse = torch.reciprocal(_sum(lengths, options.env_protection))
        radial = fades * inverse
        steps = vectors * (radial * inverse * fades / math.sqrt(e_norm)).unsqueeze(1)
        steps = steps / self.deviation.index_select(0, centre)
        scalars = lengths if options.edge_init_use_dist else radial / self.radial_deviation.index_select(0, centre)
        columns = join([scalars.unsqueeze(1), steps, torch.stack([fades / e_norm, near_fades * a_norm**-0.25], 1)], 1)
        scalars, steps, fades, near_fades = cut(barrier(columns.to(dtype), edges.gradient), [1, 3, 1, 1], 1)
        angles = self._angles(near, graph, room, dtype)
        blocks, slots = angles.blocks(angles.rows(near_fades)), self._slots(graph, dtype)
        around = Around(edges, steps, fades, near.to(dtype).unsqueeze(1), blocks, angles, slots)
        of_edges = self.edge_embedding(scalars)
        if not options.edge_init_use_dist:
            of_edges = self.activate(of_edges)
        directions = barrier(vectors / _sum(lengths, LEAST).unsqueeze(1), edges.gradient)
        cosines = [_cosines(block).to(dtype).unsqueeze(3) for block in angles.blocks(angles.rows(directions))]
        of_angles = [cosine * self.angle_embedding.w.squeeze(0) for cosine in cosines]
        nodes = pick_rows(activation_function(options.activation_function)(table), species)
        return Features(nodes, of_edges, of_angles), around, room

    def _switch(self, lengths: Tensor, start: float, end: float) -> Tensor:
        return (exponential_switch if self.options.use_exp_switch else switch)(lengths, start, end)

    def _slots(self, graph: EdgeGraph, dtype: torch.dtype) -> Slots | None:
        """Places of the edges of every atom, where their largest number is known and all edges are in use."""
        if (
            not self.may_wait_for(graph.source)
            or graph.source.is_cuda
            or graph.n_edges == 0
            or graph.pointers is not None
        ):
            return None
        pointers = graph.by_destination.pointers
        most = int((pointers[1:] - pointers[:-1]).max())
        everything = torch.ones_like(graph.source, dtype=torch.bool)
        return lay_out(everything, graph.destination, pointers, most, dtype, all_chosen=True)

    def _limits_angles(self, room: Tensor) -> bool:
        """Whether some atom may have more near neighbours (n_atoms,) than `a_sel`."""
        options = self.options
        assert isinstance(options.a_sel, int)
        if options.use_dynamic_sel or not options.update_angle or room.shape[0] == 0:
            return False
        return not self.may_wait_for(room) or int(room.max()) > options.a_sel

    def _angles(self, near: Tensor, graph: EdgeGraph, room: list[Tensor], dtype: torch.dtype) -> Angles:
        options = self.options
        waits = self.may_wait_for(near)
        if waits and not options.use_dynamic_sel and graph.n_atoms:
            assert isinstance(options.e_sel, int)
            require_slots(options.e_sel, int(room[0].max()))
        if not options.update_angle:
            return no_angles(graph)
        if waits and not near.is_cuda:
            return exact_angles(near, graph, options.a_dim + options.e_dim)
        assert options.max_angle_neighbours is not None
        places = options.max_angle_neighbours
        if waits and graph.n_atoms:
            places = max(1, int(room[1].max()))
        return padded_angles(near, graph, places, dtype)

    def _refuse(self, result: Tensor, room: list[Tensor]) -> Tensor:
        """The result, NaN for atoms with more neighbours than slots where no error could be raised."""
        options = self.options
        limits: list[tuple[Tensor, int]] = []
        if self.may_wait_for(result):
            return result
        if not options.use_dynamic_sel:
            assert isinstance(options.e_sel, int)
            limits.append((room[0], options.e_sel))
        if options.update_angle:
            assert options.max_angle_neighbours is not None
            limits.append((room[1], options.max_angle_neighbours))
        for number, limit in limits:
            result = result + torch.where(number > limit, torch.nan, 0.0).to(result.dtype).unsqueeze(1)
        return result


def _sum(tensor: Tensor, number: float) -> Tensor:
    """Their sum, written as a difference: a sum of tensor and number has no tangent in a trace."""
    return tensor if number == 0 else -(-number - tensor)


def _cosines(directions: Tensor) -> Tensor:
    """(m, n, n) of directions (m, n, 3)."""
    return torch.bmm(directions, directions.transpose(1, 2)) * (INSIDE / math.sqrt(math.pi))
