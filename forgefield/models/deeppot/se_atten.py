"""The descriptor of DPA-1: embeddings of neighbours that know both species and look at each other through attention.

Sums are over the neighbours there are. The empty slots that DeePMD-kit fills each atom's list up with enter its results in
two ways, and both are added in closed form: in the denominator of a smooth attention, and, where means are subtracted from
the rows, as rows that hold nothing but the mean. Without `sel` the latter do not exist, and the former are as many as keep the
attention smooth where neighbours leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.attention import (
    AttentionLayer,
    Slots,
    count_edges,
    lay_out,
    neighbourhood,
)
from forgefield.models.deeppot.descriptor import Descriptor, Standardise, environment_rows, switch
from forgefield.models.deeppot.networks import Groups, Networks
from forgefield.models.deeppot.options import SeE2AOptions, excluded_kinds
from forgefield.models.deeppot.se_e2 import DTYPES, SeE2A
from forgefield.models.deeppot.type_embedding import TypeEmbedding, occupations, pick_rows
from forgefield.models.edges import Batch, EdgeContext
from forgefield.ops.graph import EdgeGraph, barrier, cut, is_traced, join

MODES = ("concat", "strip")
MARGIN = 1.1
"""Compiled layouts of neighbours have room for so much more than the fullest atom of the training data."""


@dataclass
class SeAttenV2Options(SeE2AOptions):
    """Attention descriptor whose species go through a network of their own."""

    type: str = "se_atten_v2"
    sel: int | list[int] | str | None = None  # type: ignore[assignment]
    """Neighbours that DeePMD-kit makes room for; of a list the sum counts. Empty places enter the result as they do there. Left
    out or `auto`: no room is needed."""
    tebd_dim: int = 8
    """Numbers that stand for a species."""
    attn: int = 128
    """Length of queries, keys and values."""
    attn_layer: int = 2
    """Attention layers; 0 for none."""
    attn_dotr: bool = True
    """Multiply attention with the cosine of the angle between neighbours."""
    attn_mask: bool = False
    """A neighbour does not look at itself."""
    scaling_factor: float = 1.0
    """Products of queries and keys are divided by the root of `attn` times this."""
    normalize: bool = True
    """Queries, keys and values have length one."""
    temperature: float | None = None
    """What products of queries and keys are multiplied with; default: see `scaling_factor`."""
    trainable_ln: bool = True
    """Train scale and shift of the layer normalisations."""
    ln_eps: float | None = None
    """Added to their variances; default 1e-5."""
    concat_output_tebd: bool = True
    """The numbers of the atom's species are part of its descriptor."""
    use_econf_tebd: bool = False
    """Make them from the electronic configuration of the element."""
    use_tebd_bias: bool = False
    """With a constant."""
    max_neighbours: int | None = None
    """Neighbours that traced and captured steps have room for. Default: from the training data, a tenth more than needed."""
    tebd_input_mode: ClassVar[str] = "strip"
    smooth_type_embedding: ClassVar[bool] = True


@dataclass
class SeAttenOptions(SeAttenV2Options):
    """Attention descriptor of DPA-1."""

    type: str = "se_atten"
    set_davg_zero: bool = True
    tebd_input_mode: str = "concat"  # type: ignore[misc]
    """How species enter: `concat`, beside the distance, or `strip`, through a network of their own that scales the other's."""
    smooth_type_embedding: bool = False  # type: ignore[misc]
    """Neighbours enter attention smoothly at the cutoff; with false they enter at once, and forces jump."""


def complete_options(options: Any, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]) -> Any:
    """Options checked, with every number explicit."""
    _check(options, species)
    room = room_for(options.sel)
    filled = SeE2A.complete(replace(options, sel=None), species=species, cutoff=cutoff, statistics=statistics)
    found: Mapping[str, Any] = statistics.get("environment") or {}
    most = found.get("max_neighbours")
    needed = None if most is None else sum(most)
    width = options.max_neighbours or (None if needed is None else max(1, math.ceil(MARGIN * needed)))
    if room is not None:
        width = room if width is None else min(width, room)
    if width is None:
        raise ForgefieldError(
            "model.descriptor.max_neighbours is not given and there is no training data to take it from."
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


def _check(options: Any, species: tuple[str, ...]) -> None:
    where = "model.descriptor"
    sel = options.sel
    if isinstance(sel, str) and not sel.startswith("auto"):
        raise ForgefieldError(f"{where}.sel is '{sel}'; give a number, or auto.")
    room = room_for(sel)
    if room is not None and (room < 1 or (isinstance(sel, list) and min(sel) < 0)):
        raise ForgefieldError(f"{where}.sel is {sel}; there must be room for at least one neighbour.")
    if options.tebd_input_mode not in MODES:
        raise ForgefieldError(
            f"{where}.tebd_input_mode is '{options.tebd_input_mode}'; choose one of {', '.join(MODES)}."
        )
    for key, least in (("tebd_dim", 1), ("attn", 1), ("attn_layer", 0), ("max_neighbours", 1)):
        value = getattr(options, key)
        if value is not None and value < least:
            raise ForgefieldError(f"{where}.{key} is {value}; it must be at least {least}.")
    for key in ("scaling_factor", "ln_eps"):
        value = getattr(options, key)
        if value is not None and not value > 0:
            raise ForgefieldError(f"{where}.{key} is {value:g}; it must be above 0.")
    if options.use_econf_tebd:
        for symbol in species:
            occupations(symbol)


ALL = Groups(1)
"""All rows belong to one network."""
CHUNK = 1 << 20
"""Numbers that what is computed of some atoms at a time fills on a CPU: larger arrays would be new memory each time."""


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


class SeAtten(Descriptor):
    """Embedding of distance and species of each neighbour, attention among neighbours, products of moments."""

    Options = SeAttenOptions
    mixed_types = True
    attention: list[AttentionLayer]
    kept: Tensor

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
        if options.seed is not None:
            generator = torch.Generator().manual_seed(options.seed)
        dtype = DTYPES.get(options.precision, dtype)
        make: dict[str, Any] = {"trainable": options.trainable, "dtype": dtype, "generator": generator}
        self.strip, self.smooth = options.tebd_input_mode == "strip", options.smooth_type_embedding
        self.dim_rotation = options.neuron[-1]
        self.dim_out = options.neuron[-1] * options.axis_neuron
        self.dim_out += options.tebd_dim if options.concat_output_tebd else 0
        self.room = room_for(options.sel)
        self.n_slots = options.neighbour_norm if self.room is None else float(self.room)
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
        self.attention = layers  # type: ignore[assignment]
        self.standardise = Standardise(options.davg, options.dstd, shift_rows=self.room is not None)
        kept = torch.tensor(excluded_kinds(options.exclude_types, len(self.species)), dtype=torch.bool)
        self.register_buffer("kept", kept, persistent=False)

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
            norm_eps=options.ln_eps,
            **make,
        )

    @classmethod
    def complete(cls, options: Any, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]) -> Any:
        """Options with davg, dstd, neighbour_norm and max_neighbours given."""
        return complete_options(options, species, cutoff, statistics)

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        options, table, graph = self.options, self.type_embedding(), edges.graph
        rows = self._rows(batch, edges, mask, table.dtype)
        features = self._embed(rows.scalars, rows.switch, table, rows.centre, rows.neighbour)
        moments = self._moments(features, rows, graph)
        if self.room is not None and self.standardise.has_shift:
            moments = moments + self._empty_slots(batch, table, rows.room)
        moments = moments / options.neighbour_norm
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
            seen = within & self.kept.index_select(0, centre * len(self.species) + neighbour)
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
        """(n_atoms, m, 4): the sum over each atom's neighbours of what attention makes of their features (x) their rows."""
        parts = (features, edges.rows, edges.switch, edges.directions)
        if self._is_fixed(edges.room) or graph.n_atoms == 0:
            where = graph.destination, graph.by_destination.pointers
            slots = lay_out(edges.seen, *where, self.options.max_neighbours, features.dtype)
            return self._attend(*parts, slots)
        self._check_room(int(edges.room.max()))
        slots_of_chunks = self._chunks(edges, graph, features.dtype)
        sizes = [slots.place.shape[0] for slots in slots_of_chunks]
        chunks = zip(*(cut(part, sizes, 0) for part in parts), slots_of_chunks)
        return join([self._attend(*chunk) for chunk in chunks], 0)

    def _chunks(self, edges: _Rows, graph: EdgeGraph, dtype: torch.dtype) -> list[Slots]:
        """Places of the neighbours of some atoms after the other, as many as the fullest of them needs."""
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
                f"model.descriptor.sel has room for {self.room} neighbours, but an atom has {most} within the cutoff; "
                f"set it to at least {most}, or leave it out."
            )

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Whether sizes may not depend on values: an engine traces or captures, or a training on a GPU would wait."""
        if is_traced(tensor):
            return True
        return tensor.is_cuda and (self.training or torch.cuda.is_current_stream_capturing())

    def _refuse(self, result: Tensor, room: Tensor) -> Tensor:
        """The result, without a number for atoms with more neighbours than places where nothing could be said of them."""
        if not self._is_fixed(room):
            return result
        too_many = room > self.options.max_neighbours
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
    """`se_atten_v2`: species through a network of their own, smooth."""

    Options = SeAttenV2Options  # type: ignore[assignment]
