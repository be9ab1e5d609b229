"""The descriptor of DPA-1: embeddings of neighbours that depend on both species, with attention between neighbours.

Sums are over actual neighbours. The empty slots with which DeePMD-kit pads the list of each atom enter its results in two ways,
and both are added in closed form: in the denominator of a smooth attention, and, if means are subtracted from the rows, as rows
that contain only the mean. Without `sel` the latter do not exist, and the number of the former keeps the attention smooth when
neighbours leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.attention import (
    AttentionLayer,
    Slots,
    count_edges,
    lay_out,
    neighbourhood,
)
from forgefield.models.deeppot.descriptor import (
    Descriptor,
    Standardise,
    TypeEmbedding,
    environment_rows,
    occupations,
    pick_rows,
    refuses_types,
    switch,
)
from forgefield.models.deeppot.networks import Groups, Networks
from forgefield.models.deeppot.options import AngularOptions, excluded_kinds
from forgefield.models.deeppot.row_statistics import RowStatistics, embedding_statistics
from forgefield.models.deeppot.se_e2 import DTYPES, SeE2A, complete_rows, extended_rows
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.options import check_values
from forgefield.ops.graph import EdgeGraph, barrier, cut, is_traced, join

MODES = ("concat", "strip")
MARGIN = 1.1
"""Factor by which compiled layouts have more slots than the largest number of neighbours in the training data."""


@dataclass
class AttentionOptions(AngularOptions):
    """Options of descriptors with attention."""

    takes_total = True

    tebd_dim: int = option(8, at_least=1)
    """Numbers that represent a species."""
    attn: int = option(128, at_least=1)
    """Length of queries, keys and values."""
    attn_layer: int = option(2, at_least=0)
    """Attention layers; 0 for none."""
    attn_dotr: bool = True
    """Multiply attention with the cosine of the angle between neighbours."""
    attn_mask: bool = False
    """A neighbour does not attend to itself."""
    scaling_factor: float = option(1.0, above=0)
    """Products of queries and keys are divided by the root of `attn` times this."""
    normalize: bool = True
    """Queries, keys and values have length one."""
    temperature: float | None = None
    """Factor of products of queries and keys; default: see `scaling_factor`."""
    trainable_ln: bool = True
    """Train scale and shift of the layer normalisations."""
    ln_eps: float | None = option(None, above=0)
    """Added to their variances; default 1e-5."""
    concat_output_tebd: bool = True
    """The numbers of the atom's species are part of its descriptor."""
    use_econf_tebd: bool = False
    """Compute them from the electronic configuration of the element."""
    use_tebd_bias: bool = False
    """With a constant."""
    max_neighbours: int | None = option(None, at_least=1)
    """Neighbours for which traced and captured steps have slots. Default: from the training data, a tenth more than needed."""


@dataclass
class SeAttenV2Options(AttentionOptions):
    """Attention descriptor with a separate network for species."""

    type: str = "se_atten_v2"
    tebd_input_mode: ClassVar[str] = "strip"
    smooth_type_embedding: ClassVar[bool] = True


@dataclass
class SeAttenOptions(AttentionOptions):
    """Attention descriptor of DPA-1."""

    type: str = "se_atten"
    set_davg_zero: bool = True
    """Divide by deviations without subtracting means. With false and a number `sel`, the energy depends on which atom of a
    frame is the first, as in DeePMD-kit; leave `sel` out to avoid this."""
    tebd_input_mode: str = option("concat", choices=MODES)
    """How species enter: `concat`, next to the distance, or `strip`, through a separate network that scales the other's."""
    smooth_type_embedding: bool = False
    """Neighbours enter attention smoothly at the cutoff; with false forces are discontinuous there."""


OptionsT = TypeVar("OptionsT", bound=AttentionOptions)


def complete_options(
    options: OptionsT, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> OptionsT:
    """Options checked, with every number explicit."""
    _check(options, species)
    room = room_for(options.sel)
    without_sel = replace(options, sel=None)
    filled = complete_rows(without_sel, SeE2A.columns, species=species, cutoff=cutoff, statistics=statistics)
    environment: Mapping[str, Any] = statistics.get("environment") or {}
    most = environment.get("max_neighbours")
    needed = None if most is None else sum(most)
    width = options.max_neighbours or (None if needed is None else max(1, math.ceil(MARGIN * needed)))
    if room is not None:
        width = room if width is None else min(width, room)
    if width is None:
        raise ForgefieldError(
            "model.descriptor.max_neighbours is not set and there is no training data to compute it from."
        )
    norm = options.neighbour_norm or (filled.neighbour_norm if room is None else float(room))
    return replace(
        filled,
        sel=None if room is None else options.sel,
        neighbour_norm=norm,
        max_neighbours=width,
        ln_eps=1e-5 if options.ln_eps is None else options.ln_eps,
    )


def room_for(sel: int | list[int] | str | None) -> int | None:
    """Slots of each atom; None where there is no such number."""
    if isinstance(sel, list):
        return sum(sel)
    return None if sel is None or isinstance(sel, str) else sel


def check_room(key: str, sel: int | list[int] | str | None) -> int | None:
    """`room_for`, raising for a number that is wrong."""
    if isinstance(sel, str) and not sel.startswith("auto"):
        raise ForgefieldError(f"{key} is '{sel}'; give a number, or auto.")
    room = room_for(sel)
    if room is not None and (room < 1 or (isinstance(sel, list) and min(sel) < 0)):
        raise ForgefieldError(f"{key} is {sel}; there must be room for at least one neighbour.")
    return room


def _check(options: AttentionOptions, species: tuple[str, ...]) -> None:
    where = "model.descriptor"
    check_values(options, where)
    check_room(f"{where}.sel", options.sel)
    if options.use_econf_tebd:
        for symbol in species:
            occupations(symbol)


ALL = Groups(1)
"""All rows belong to one network."""
CHUNK = 1 << 20
"""Size of the arrays of one chunk of atoms on a CPU: larger arrays would be allocated again each time."""


class _Rows(NamedTuple):
    """Of every edge: standardised row (n_edges, 4); what networks read (n_edges, 1); switch (n_edges, 1); direction
    (n_edges, 3); species of centre and neighbour, each (n_edges,). Floating numbers in the weights' precision.

    seen: (n_edges,) bool, neighbours within the cutoff that are not excluded. room: (n_atoms,) int64, slots that the
    neighbours within the cutoff take, excluded or not.
    """

    rows: Tensor
    scalars: Tensor
    switch: Tensor
    directions: Tensor
    centre: Tensor
    neighbour: Tensor
    seen: Tensor
    room: Tensor


class SeAtten(Descriptor[SeAttenOptions | SeAttenV2Options]):
    """Embedding of distance and species of each neighbour, attention among neighbours, products of moments."""

    Options: ClassVar[type[SeAttenOptions] | type[SeAttenV2Options]] = SeAttenOptions
    mixed_types = True
    attention: list[AttentionLayer]
    included_pairs: Tensor
    sel_option: str = "sel"
    """The option that sets the number of slots, for messages."""

    def __init__(
        self,
        options: SeAttenOptions | SeAttenV2Options,
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
        self.strip, self.smooth = options.tebd_input_mode == "strip", options.smooth_type_embedding
        self.dim_rotation = options.neuron[-1]
        self.dim_out = options.neuron[-1] * options.axis_neuron
        self.dim_out += options.tebd_dim if options.concat_output_tebd else 0
        self.room = room_for(options.sel)
        assert options.neighbour_norm is not None
        assert options.max_neighbours is not None
        self.neighbour_norm, self.max_neighbours = options.neighbour_norm, options.max_neighbours
        self.n_slots = self.neighbour_norm if self.room is None else float(self.room)
        self.type_embedding = TypeEmbedding(
            self.species,
            options.tebd_dim,
            from_configuration=options.use_econf_tebd,
            bias=options.use_tebd_bias,
            **make,
        )
        kinds = options.tebd_dim * (1 if options.type_one_side else 2)
        shape: dict[str, Any] = {"activation": options.activation_function, "resnet_dt": options.resnet_dt, **make}
        self.embedding = Networks(1, [1 if self.strip else 1 + kinds, *options.neuron], **shape)
        self.type_network = Networks(1, [kinds, *options.neuron], **shape) if self.strip else None
        layers = nn.ModuleList(self._attention_layer(make) for _ in range(options.attn_layer))
        self.attention = cast(list[AttentionLayer], layers)
        assert options.davg is not None
        assert options.dstd is not None
        self.standardise = Standardise(options.davg, options.dstd, shift_rows=self.room is not None)
        included = torch.tensor(excluded_kinds(options.exclude_types, len(self.species)), dtype=torch.bool)
        self.register_buffer("included_pairs", included, persistent=False)

    def _attention_layer(self, make: dict[str, Any]) -> AttentionLayer:
        options = self.options
        scaling = options.temperature
        return AttentionLayer(
            options.neuron[-1],
            options.attn,
            scaling=1 / math.sqrt(options.attn * options.scaling_factor) if scaling is None else scaling,
            normalise=options.normalize,
            dot_directions=options.attn_dotr,
            trainable_norm=options.trainable_ln,
            norm_eps=1e-5 if options.ln_eps is None else options.ln_eps,
            **make,
        )

    @classmethod
    def statistics(
        cls,
        options: SeAttenOptions | SeAttenV2Options,
        *,
        species: tuple[str, ...],
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> RowStatistics:
        return embedding_statistics(
            options, species=species, cutoff=cutoff, pair_exclude_types=pair_exclude_types, columns=SeE2A.columns
        )

    @classmethod
    def complete(
        cls,
        options: SeAttenOptions | SeAttenV2Options,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
    ) -> SeAttenOptions | SeAttenV2Options:
        """Options with davg, dstd, neighbour_norm and max_neighbours."""
        return complete_options(options, species, cutoff, statistics)

    @classmethod
    def refuses_species(cls, options: SeAttenOptions | SeAttenV2Options, n_old: int, n_all: int) -> str | None:
        return refuses_types(options.tebd_dim, n_old, n_all) if not options.use_econf_tebd else None

    @classmethod
    def extended(
        cls, options: SeAttenOptions | SeAttenV2Options, n_old: int, measured: Mapping[str, Any]
    ) -> SeAttenOptions | SeAttenV2Options:
        return extended_rows(options, n_old, measured)

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        options, table, graph = self.options, self.type_embedding(), edges.graph
        rows = self._rows(batch, edges, mask, table.dtype)
        features = self._embed(rows.scalars, rows.switch, table, rows.centre, rows.neighbour)
        moments = self._moments(features, rows, graph)
        if self.room is not None and self.standardise.has_shift:
            moments = moments + self._empty_slots(batch, table, rows.room)
        moments = moments / self.neighbour_norm
        result = torch.bmm(moments, moments[:, : options.axis_neuron].transpose(1, 2)).flatten(1)
        if options.concat_output_tebd:
            result = join([result, pick_rows(table, batch["species"])], 1)
        return self._refuse(result, rows.room), moments[:, :, 1:]

    def _rows(self, batch: Batch, edges: EdgeContext, mask: Tensor | None, dtype: torch.dtype) -> _Rows:
        options, vectors, graph = self.options, edges.vectors, edges.graph
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        within = lengths.detach() < self.cutoff
        if mask is not None:
            within = within & (mask > 0)
        species = batch["species"]
        centre, neighbour = species.index_select(0, graph.destination), species.index_select(0, graph.source)
        seen = within
        if options.exclude_types:
            seen = within & self.included_pairs.index_select(0, centre * len(self.species) + neighbour)
        rows = environment_rows(vectors, options.rcut_smth, self.cutoff, options.env_protection)
        rows, scalars = self.standardise(rows, centre)
        directions = rows[:, 1:] * rows[:, 1:].square().sum(1, keepdim=True).clamp(min=1e-24).rsqrt()
        fades = switch(lengths, options.rcut_smth, self.cutoff).unsqueeze(1)
        alone = edges.gradient
        rows, scalars, fades, directions = (
            barrier(value.to(dtype), alone) for value in (rows, scalars.unsqueeze(1), fades, directions)
        )
        room = count_edges(within, graph.by_destination.pointers)
        return _Rows(rows, scalars, fades, directions, centre, neighbour, seen, room)

    def _moments(self, features: Tensor, edges: _Rows, graph: EdgeGraph) -> Tensor:
        """(n_atoms, m, 4): sum over each atom's neighbours of their features after attention (x) their rows."""
        parts = (features, edges.rows, edges.switch, edges.directions)
        if self._is_fixed(edges.room) or graph.n_atoms == 0:
            where = graph.destination, graph.by_destination.pointers
            slots = lay_out(edges.seen, *where, self.max_neighbours, features.dtype)
            return self._attend(*parts, slots)
        self._check_room(int(edges.room.max()))
        slots_of_chunks = self._chunks(edges, graph, features.dtype)
        sizes = [slots.slot.shape[0] for slots in slots_of_chunks]
        chunks = zip(*(cut(part, sizes, 0) for part in parts), slots_of_chunks)
        return join([self._attend(*chunk) for chunk in chunks], 0)

    def _chunks(self, edges: _Rows, graph: EdgeGraph, dtype: torch.dtype) -> list[Slots]:
        """Slots of the neighbours of consecutive chunks of atoms, as many as the largest number of neighbours in each."""
        options, n_atoms, pointers = self.options, graph.n_atoms, graph.by_destination.pointers
        columns = max(options.neuron[-1], 3 * options.attn if options.attn_layer else 0)
        numbers = max(1, graph.n_edges // n_atoms) * columns
        step = n_atoms if pointers.is_cuda else max(1, CHUNK // numbers)
        all_seen = bool(edges.seen.all())
        result = []
        for first in range(0, n_atoms, step):
            starts = pointers[first : first + step + 1]
            begin, end = int(starts[0]), int(starts[-1])
            needed = int(edges.room[first : first + step].max())
            where = graph.destination[begin:end] - first, starts - begin
            result.append(lay_out(edges.seen[begin:end], *where, needed, dtype, all_chosen=all_seen))
        return result

    def _check_room(self, most: int) -> None:
        if self.room is not None and most > self.room:
            raise ForgefieldError(
                f"model.descriptor.{self.sel_option} has room for {self.room} neighbours, but an atom has {most} within the "
                f"cutoff; set it to at least {most}, or leave it out."
            )

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Whether sizes must not depend on values: in a trace or a capture, or in training on a GPU, which must not wait."""
        if is_traced(tensor):
            return True
        return tensor.is_cuda and (self.training or torch.cuda.is_current_stream_capturing())

    def _refuse(self, result: Tensor, room: Tensor) -> Tensor:
        """The result, NaN for atoms with more neighbours than slots where no error could be raised."""
        if not self._is_fixed(room):
            return result
        too_many = room > self.max_neighbours
        return result + torch.where(too_many, torch.nan, 0.0).to(result.dtype).unsqueeze(1)

    def _embed(self, scalars: Tensor, fades: Tensor, table: Tensor, centre: Tensor, neighbour: Tensor) -> Tensor:
        """(n, m) of rows with these scalars and switches, both (n, 1), and species, both (n,)."""
        one_side = self.options.type_one_side
        if self.type_network is None:
            kinds = [neighbour] if one_side else [neighbour, centre]
            result: Tensor = self.embedding(join([scalars, *(pick_rows(table, kind) for kind in kinds)], 1), ALL)
            return result
        n = table.shape[0]
        pairs = table
        if not one_side:
            pairs = torch.cat([table.repeat(n, 1), table.repeat_interleave(n, 0)], 1)
        factors = pick_rows(self.type_network(pairs, ALL), neighbour if one_side else centre * n + neighbour)
        radial = self.embedding(scalars, ALL)
        embedded: Tensor = radial + radial * (factors * fades if self.smooth else factors)
        return embedded

    def _attend(self, features: Tensor, rows: Tensor, fades: Tensor, directions: Tensor, slots: Slots) -> Tensor:
        """(n_atoms, m, 4): moments of the atoms whose neighbours are in these slots."""
        options = self.options
        if options.attn_layer:
            around = neighbourhood(
                slots,
                directions,
                fades,
                smooth=self.smooth,
                dot_directions=options.attn_dotr,
                mask_diagonal=options.attn_mask,
                n_slots=self.n_slots,
            )
            for layer in self.attention:
                features = layer(features, around)
        return torch.bmm(slots.spread(features).transpose(1, 2), slots.spread(rows))

    def _empty_slots(self, batch: Batch, table: Tensor, room: Tensor) -> Tensor:
        """(n_atoms, m, 4): what the empty slots of each atom add to its moments.

        DeePMD-kit takes the species of a frame's first atom for that of a neighbour that is not there.
        """
        n, species, frame = len(self.species), batch["species"], batch["frame"]
        numbers = torch.arange(n, device=species.device)
        centre, neighbour = numbers.repeat_interleave(n), numbers.repeat(n)
        rows = self.standardise.empty.to(table.dtype).index_select(0, centre)
        features = self._embed(rows[:, :1], torch.zeros_like(rows[:, :1]), table, centre, neighbour)
        for layer in self.attention:
            features = layer.alone(features)
        moments = (features.unsqueeze(2) * rows.unsqueeze(1)).flatten(1)
        first = species.index_select(0, torch.searchsorted(frame, frame))
        number = (self.n_slots - room).to(table.dtype).unsqueeze(1)
        result: Tensor = (number * pick_rows(moments, species * n + first)).unflatten(1, (-1, 4))
        return result


class SeAttenV2(SeAtten):
    """`se_atten_v2`: a separate network for species, smooth."""

    Options = SeAttenV2Options
