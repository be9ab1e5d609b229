"""The descriptor `se_e3_tebd`: pairs of neighbours, embedded by the product of their rows and by both species.

With r_j the directional part of the row of neighbour j, the descriptor of an atom is the sum over all pairs (j, k) of its
neighbours of e g(e, j, k), where e = r_j . r_k and g is a network that reads e and the embedded species of both. Neighbours
that are not there contribute nothing, so no slots for them are needed; only the divisor of the sum is that of DeePMD-kit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.models.deeppot.attention import Slots
from forgefield.models.deeppot.descriptor import (
    Descriptor,
    TypeEmbedding,
    environment_rows,
    occupations,
    pick_rows,
    refuses_types,
)
from forgefield.models.deeppot.near import Near, fixed_width, near_slots, refuse, slots_needed
from forgefield.models.deeppot.networks import Groups, Networks
from forgefield.models.deeppot.options import EmbeddingOptions, excluded_kinds
from forgefield.models.deeppot.row_statistics import RowStatistics, embedding_statistics
from forgefield.models.deeppot.se_atten import CHUNK, MODES, check_room, room_for
from forgefield.models.deeppot.se_e2 import DTYPES, complete_rows, extended_rows
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.options import check_values
from forgefield.ops.graph import Segments, barrier, cut, is_traced, join, segment_sum

COLUMNS = 4
"""Of a row."""
ALL = Groups(1)
"""All rows belong to one network."""


@dataclass
class SeE3TebdOptions(EmbeddingOptions):
    """Descriptor from pairs of neighbours, with embedded species."""

    takes_total = True

    type: str = "se_e3_tebd"
    set_davg_zero: bool = True
    tebd_dim: int = option(8, at_least=1)
    """Numbers that represent a species."""
    tebd_input_mode: str = option("concat", choices=MODES)
    """How species enter: `concat`, next to the product, or `strip`, through a separate network that scales the other's."""
    smooth: bool = True
    """With `strip`: the contribution of species vanishes at the cutoff."""
    concat_output_tebd: bool = True
    """The numbers of the atom's species are part of its descriptor."""
    use_econf_tebd: bool = False
    """Compute them from the electronic configuration of the element."""
    use_tebd_bias: bool = False
    """With a constant."""
    max_neighbours: int | None = option(None, at_least=1)
    """Neighbours for which traced and captured steps have slots. Default: from the training data, a tenth more than needed."""


class ThreeBody(nn.Module):
    """Sum over pairs of neighbours.

    deviation: (n_species, 4), 1/A, of rows, by species of the centre. norm: the sum is divided by its square. width: of the
    type embedding. fade: whether the contribution of species vanishes at the cutoff; without effect unless they are `strip`ped.
    """

    deviation: Tensor

    def __init__(
        self,
        neuron: Sequence[int],
        width: int,
        *,
        start: float,
        cutoff: float,
        norm: float,
        deviation: Sequence[Sequence[float]],
        strip: bool,
        fade: bool,
        protection: float,
        activation: str,
        resnet_dt: bool,
        trainable: bool,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.start, self.cutoff, self.norm, self.fade, self.protection = start, cutoff, norm, fade, protection
        shape: dict[str, Any] = {"activation": activation, "resnet_dt": resnet_dt, "trainable": trainable}
        shape |= {"dtype": dtype, "generator": generator}
        self.embedding = Networks(1, [1 if strip else 1 + 2 * width, *neuron], **shape)
        self.type_network = Networks(1, [2 * width, *neuron], **shape) if strip else None
        self.register_buffer("deviation", torch.tensor(deviation, dtype=torch.float64), persistent=False)

    def forward(self, near: Near, species: Tensor, table: Tensor, edges: EdgeContext) -> Tensor:
        """(n_atoms, m). table: (n_species, width) embedded species; its precision is what is computed in."""
        rows = environment_rows(near.vectors, self.start, self.cutoff, self.protection)[:, 1:]
        rows = rows / near.per_slot(self.deviation[:, 1].index_select(0, species)).unsqueeze(1)
        rows = barrier(rows.to(table.dtype), edges.gradient).view(near.n_atoms, near.width, 3)
        fades = None
        if self.type_network is not None and self.fade:
            fades = barrier(near.fades(self.start, self.cutoff).to(table.dtype), edges.gradient)
            fades = fades.view(near.n_atoms, near.width, 1)
        kinds = species.index_select(0, near.source).view(near.n_atoms, near.width)
        if is_traced(rows) or rows.is_cuda:
            return self._all_pairs(rows, fades, kinds, table) / self.norm**2
        step = max(1, CHUNK // (near.width**2 * self.embedding.sizes[-1]))
        sizes = [min(step, near.n_atoms - first) for first in range(0, near.n_atoms, step)]
        if not sizes:
            return rows.new_zeros(0, self.embedding.sizes[-1])
        of_chunks = [cut(part, sizes, 0) for part in (rows, kinds, near.taken)]
        faded = [None] * len(sizes) if fades is None else cut(fades, sizes, 0)
        sums = [
            self._distinct_pairs(rows_, fades_, kinds_, taken, table)
            for rows_, kinds_, taken, fades_ in zip(*of_chunks, faded, strict=True)
        ]
        return join(sums, 0) / self.norm**2

    def _all_pairs(self, rows: Tensor, fades: Tensor | None, kinds: Tensor, table: Tensor) -> Tensor:
        """(n_atoms, m) of rows (n_atoms, width, 3), switches (n_atoms, width, 1) and species (n_atoms, width) of neighbours."""
        products = torch.bmm(rows, rows.transpose(1, 2))
        of_fades = None if fades is None else torch.bmm(fades, fades.transpose(1, 2)).reshape(-1, 1)
        pairs = kinds.unsqueeze(2) * table.shape[0] + kinds.unsqueeze(1)
        embedded = self._embed(products.reshape(-1, 1), of_fades, pairs.reshape(-1), table)
        embedded = embedded.view(rows.shape[0], -1, embedded.shape[1])
        return torch.bmm(products.flatten(1).unsqueeze(1), embedded).squeeze(1)

    def _distinct_pairs(
        self, rows: Tensor, fades: Tensor | None, kinds: Tensor, taken: Tensor, table: Tensor
    ) -> Tensor:
        """The same for slots that are taken, (n_atoms, width); pairs of one species are evaluated in one order only."""
        chosen = _distinct_pairs(taken, kinds, rows.dtype)
        products = chosen.collect(torch.bmm(rows, rows.transpose(1, 2)))
        of_fades = None if fades is None else chosen.collect(torch.bmm(fades, fades.transpose(1, 2)))
        pairs = kinds.unsqueeze(2) * table.shape[0] + kinds.unsqueeze(1)
        embedded = self._embed(products, of_fades, pairs.reshape(-1).index_select(0, chosen.slots.slot), table)
        return segment_sum(products * chosen.weights * embedded, chosen.by_atom)

    def _embed(self, products: Tensor, fades: Tensor | None, pairs: Tensor, table: Tensor) -> Tensor:
        """(n, m) of pairs of neighbours with these products and switches, both (n, 1), and species, (n,)."""
        n = table.shape[0]
        of_kinds = torch.cat([table.repeat_interleave(n, 0), table.repeat(n, 1)], 1)
        if self.type_network is None:
            return scalar_and_kind(self.embedding, products, pairs, of_kinds)
        factors = pick_rows(self.type_network(of_kinds, ALL), pairs)
        embedded: Tensor = self.embedding(products, ALL)
        return embedded + embedded * (factors if fades is None else factors * fades)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of neighbours on whose order the embedding depends, and of the others each only once.

    slots: their places among all pairs. weights: (n_pairs, 1), how often each of them counts.
    """

    slots: Slots
    weights: Tensor
    by_atom: Segments

    def collect(self, values: Tensor) -> Tensor:
        """(n_atoms, width, width) -> (n_pairs, 1)."""
        return self.slots.collect(values.flatten(1).unsqueeze(2))


def _distinct_pairs(taken: Tensor, kinds: Tensor, dtype: torch.dtype) -> _Pairs:
    """taken, kinds: (n_atoms, width) whether there is a neighbour, and its species. Waits for the device."""
    n, width = taken.shape
    numbers = torch.arange(width, device=kinds.device)
    same = kinds.unsqueeze(2) == kinds.unsqueeze(1)
    is_first = numbers.unsqueeze(1) <= numbers
    chosen = (is_first | ~same) & taken.unsqueeze(2) & taken.unsqueeze(1)
    place = chosen.flatten().nonzero().squeeze(1)
    twice = (same & (numbers.unsqueeze(1) < numbers)).flatten().index_select(0, place)
    atom = torch.div(place, width * width, rounding_mode="floor")
    slots = Slots(place, None, kinds.new_zeros(n), width * width)
    return _Pairs(slots, (1.0 + twice.to(dtype)).unsqueeze(1), Segments(atom, n, rows_are_sorted=True))


def scalar_and_kind(networks: Networks, scalars: Tensor, kinds: Tensor, of_kinds: Tensor) -> Tensor:
    """Outputs of a network that reads a scalar and the row of its kind: (n, 1), (n,), (n_kinds, c) -> (n, m).

    The first layer is affine in both, so the part of the kind is computed once for each kind.
    """
    first = networks.layers[0]
    if first.repeats:
        result: Tensor = networks(join([scalars, pick_rows(of_kinds, kinds)], 1), ALL)
        return result
    weight = first.w.squeeze(0)
    shifts = of_kinds @ weight[1:] + first.b
    x = first.activate(scalars * weight[:1] + pick_rows(shifts, kinds))
    for layer in networks.layers[1:]:
        x = layer(x, ALL)
    return x


class SeE3Tebd(Descriptor[SeE3TebdOptions]):
    """Three-body embedding with embedded species."""

    Options = SeE3TebdOptions
    mixed_types = True
    included_pairs: Tensor

    def __init__(
        self,
        options: SeE3TebdOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, dtype=dtype, generator=generator)
        if options.seed is not None:
            generator = torch.Generator().manual_seed(options.seed)
        make: dict[str, Any] = {"trainable": options.trainable, "dtype": DTYPES.get(options.precision, dtype)}
        make["generator"] = generator
        assert options.dstd is not None
        assert options.neighbour_norm is not None
        assert options.max_neighbours is not None
        self.room, self.max_neighbours = room_for(options.sel), options.max_neighbours
        self.dim_out = options.neuron[-1] + (options.tebd_dim if options.concat_output_tebd else 0)
        self.type_embedding = TypeEmbedding(
            self.species,
            options.tebd_dim,
            from_configuration=options.use_econf_tebd,
            bias=options.use_tebd_bias,
            **make,
        )
        self.pairs = ThreeBody(
            options.neuron,
            options.tebd_dim,
            start=options.rcut_smth,
            cutoff=self.cutoff,
            norm=options.neighbour_norm,
            deviation=options.dstd,
            strip=options.tebd_input_mode == "strip",
            fade=options.smooth,
            protection=options.env_protection,
            activation=options.activation_function,
            resnet_dt=options.resnet_dt,
            **make,
        )
        included = torch.tensor(excluded_kinds(options.exclude_types, len(self.species)), dtype=torch.bool)
        self.register_buffer("included_pairs", included, persistent=False)

    @classmethod
    def statistics(
        cls,
        options: SeE3TebdOptions,
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
        cls, options: SeE3TebdOptions, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> SeE3TebdOptions:
        """Options with davg, dstd, neighbour_norm and max_neighbours."""
        check_values(options, "model.descriptor")
        room = check_room("model.descriptor.sel", options.sel)
        if options.use_econf_tebd:
            for symbol in species:
                occupations(symbol)
        without_sel = replace(options, sel=None)
        filled = complete_rows(without_sel, COLUMNS, species=species, cutoff=cutoff, statistics=statistics)
        environment: Mapping[str, Any] = statistics.get("environment") or {}
        norm = options.neighbour_norm or (filled.neighbour_norm if room is None else float(room))
        width = slots_needed(environment, options.max_neighbours, room, "max_neighbours")
        return replace(filled, sel=None if room is None else options.sel, neighbour_norm=norm, max_neighbours=width)

    @classmethod
    def refuses_species(cls, options: SeE3TebdOptions, n_old: int, n_all: int) -> str | None:
        return refuses_types(options.tebd_dim, n_old, n_all) if not options.use_econf_tebd else None

    @classmethod
    def extended(cls, options: SeE3TebdOptions, n_old: int, measured: Mapping[str, Any]) -> SeE3TebdOptions:
        return extended_rows(options, n_old, measured)

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        table, species, width = self.type_embedding(), batch["species"], self._width(edges)
        seen = seen_edges(self.included_pairs, species, edges) if self.options.exclude_types else None
        near = near_slots(edges.vectors, edges.graph, mask, seen, self.cutoff, width=width, what="sel", room=self.room)
        result = self.pairs(near, species, table, edges)
        if self.options.concat_output_tebd:
            result = join([result, pick_rows(table, species)], 1)
        return refuse(result, near, width), None

    def _width(self, edges: EdgeContext) -> int | None:
        return fixed_width(edges.vectors, self.training, self.max_neighbours)


def seen_edges(included: Tensor, species: Tensor, edges: EdgeContext) -> Tensor:
    """(n_edges,) bool. included: (n_species^2,) bool, for each (centre, neighbour)."""
    n = round(included.shape[0] ** 0.5)
    centre, neighbour = (species.index_select(0, ends) for ends in (edges.graph.destination, edges.graph.source))
    return included.index_select(0, centre * n + neighbour)
