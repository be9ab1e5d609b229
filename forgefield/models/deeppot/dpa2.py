"""The descriptor of DPA-2 (Zhang et al., npj Comput. Mater. 10, 293, 2024).

Its first block, `repinit`, computes features of every atom as `se_atten` does without attention, and optionally those of
`se_e3_tebd`. The second, `repformer`, passes messages between neighbours within a shorter cutoff. One type embedding is used
throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import (
    Descriptor,
    Standardise,
    environment_rows,
    pick_rows,
    refuses_types,
)
from forgefield.models.deeppot.hybrid import HybridStatistics
from forgefield.models.deeppot.near import Near, fixed_width, near_slots, refuse, slots_needed
from forgefield.models.deeppot.networks import check_activation
from forgefield.models.deeppot.options import PRECISIONS, AnyDescriptorOptions, check_pairs, excluded_kinds
from forgefield.models.deeppot.repformer import Affine, Make, Repformer, RepformerOptions
from forgefield.models.deeppot.row_statistics import RowStatistics
from forgefield.models.deeppot.se_atten import MODES, SeAtten, SeAttenOptions, check_room, room_for
from forgefield.models.deeppot.se_e2 import DTYPES
from forgefield.models.deeppot.three_body import COLUMNS, SeE3Tebd, SeE3TebdOptions, ThreeBody, seen_edges
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.options import check_values, options_of_section
from forgefield.ops.graph import barrier, join

WHERE = "model.descriptor"


@dataclass
class RepinitOptions:
    """Options of the first block of DPA-2. Its cutoff is `data.cutoff`."""

    rcut_smth: float = option(0.5, at_least=0, unit="A")
    """Where the switch begins that ends at the cutoff, A."""
    nsel: int | str | None = None
    """Neighbours for which DeePMD-kit reserves slots; left out or `auto`: none."""
    neuron: list[int] = field(default_factory=lambda: [25, 50, 100])
    """Widths of the embedding network."""
    axis_neuron: int = option(16, at_least=1)
    """Columns of the embedding that the others are combined with."""
    tebd_dim: int = option(8, at_least=1)
    """Numbers that represent a species."""
    tebd_input_mode: str = option("concat", choices=MODES)
    """How species enter: `concat`, next to the distance, or `strip`, through a separate network that scales the other's."""
    set_davg_zero: bool = True
    """Divide by deviations without subtracting means."""
    activation_function: str = "tanh"
    """Of the networks."""
    resnet_dt: bool = False
    """Residual layers with trained step sizes."""
    type_one_side: bool = False
    """The embedding depends on the species of the neighbour only."""
    use_three_body: bool = False
    """Add the features of `se_e3_tebd`."""
    three_body_neuron: list[int] = field(default_factory=lambda: [2, 4, 8])
    """Widths of its network."""
    three_body_rcut: float = option(4.0, above=0, unit="A")
    """Its cutoff, A, at most `data.cutoff`."""
    three_body_rcut_smth: float = option(0.5, at_least=0, unit="A")
    """Where its switch begins, A."""
    three_body_sel: int | str | None = None
    """Neighbours within its cutoff by whose square DeePMD-kit divides; left out or `auto`: their mean number."""
    davg: list[list[float]] | None = None
    """Mean of the rows, by species of the centre, 1/A. From the training data."""
    dstd: list[list[float]] | None = None
    """Deviation of the rows, by species of the centre, 1/A. From the training data."""
    neighbour_norm: float | None = None
    """Divisor of sums over neighbours. Default: `nsel`, or without it the mean number of neighbours."""
    max_neighbours: int | None = option(None, at_least=1)
    """Neighbours for which traced and captured steps have slots. Default: from the training data, a tenth more than needed."""
    three_body_davg: list[list[float]] | None = None
    """Mean of the rows within the cutoff of pairs. From the training data."""
    three_body_dstd: list[list[float]] | None = None
    """Their deviation. From the training data."""
    three_body_norm: float | None = None
    """The sum over pairs is divided by its square. Default: `three_body_sel`, or without it the mean number of neighbours."""
    three_body_max_neighbours: int | None = option(None, at_least=1)
    """As `max_neighbours`, within the cutoff of pairs."""


@dataclass
class Dpa2Options(AnyDescriptorOptions):
    """Descriptor of DPA-2: features by distance and species, and layers that pass messages."""

    type: str = "dpa2"
    repinit: RepinitOptions = field(default_factory=RepinitOptions)
    """The first block."""
    repformer: RepformerOptions = field(default_factory=RepformerOptions)
    """The layers. `rcut` is required."""
    concat_output_tebd: bool = True
    """The numbers of the atom's species are part of its descriptor."""
    smooth: bool = True
    """Neighbours enter smoothly at the cutoff; with false forces are discontinuous there."""
    add_tebd_to_repinit_out: bool = False
    """Add an affine map of the numbers of the atom's species to the features of the first block."""
    use_econf_tebd: bool = False
    """Compute numbers of species from the electronic configuration of the element."""
    use_tebd_bias: bool = False
    """With a constant."""
    exclude_types: list[list[int]] = field(default_factory=list)
    """Pairs of species, by index, that do not see each other."""
    env_protection: float = option(0.0, at_least=0, unit="A")
    """Added to distances before dividing by them, A."""
    trainable: bool = True
    """Train its networks."""
    seed: int | None = None
    """Of its initial weights; default: the seed of the run."""
    precision: str = option("default", choices=PRECISIONS)
    """float32 or float64; default: that of the training."""

    def __post_init__(self) -> None:
        if isinstance(self.repinit, Mapping) and "rcut" in self.repinit:
            raise ForgefieldError(f"{WHERE}.repinit.rcut is not set here: it is data.cutoff.")
        self.repinit = options_of_section(RepinitOptions, self.repinit, where=f"{WHERE}.repinit")
        self.repformer = options_of_section(RepformerOptions, self.repformer, where=f"{WHERE}.repformer")
        if self.repformer.rcut is None:
            raise ForgefieldError(
                f"{WHERE}.repformer.rcut is missing: the cutoff of the messages, A, below data.cutoff."
            )

    @property
    def layers_cutoff(self) -> float:
        """A."""
        return float(self.repformer.rcut or 0.0)

    @property
    def two_body(self) -> SeAttenOptions:
        """The first block as a descriptor."""
        first = self.repinit
        same = (
            "neuron",
            "axis_neuron",
            "tebd_dim",
            "tebd_input_mode",
            "type_one_side",
            "davg",
            "dstd",
            "neighbour_norm",
        )
        return SeAttenOptions(
            **self._common(first),
            **{key: getattr(first, key) for key in same},
            sel=first.nsel,
            rcut_smth=first.rcut_smth,
            max_neighbours=first.max_neighbours,
            attn_layer=0,
            smooth_type_embedding=self.smooth,
        )

    @property
    def three_body(self) -> SeE3TebdOptions:
        """The features of pairs as a descriptor."""
        first = self.repinit
        return SeE3TebdOptions(
            **self._common(first),
            tebd_dim=first.tebd_dim,
            tebd_input_mode=first.tebd_input_mode,
            sel=first.three_body_sel,
            neuron=first.three_body_neuron,
            rcut_smth=first.three_body_rcut_smth,
            davg=first.three_body_davg,
            dstd=first.three_body_dstd,
            neighbour_norm=first.three_body_norm,
            max_neighbours=first.three_body_max_neighbours,
            smooth=self.smooth,
        )

    def _common(self, first: RepinitOptions) -> dict[str, Any]:
        same = ("exclude_types", "env_protection", "trainable", "precision", "use_econf_tebd", "use_tebd_bias")
        return {
            **{key: getattr(self, key) for key in same},
            **{key: getattr(first, key) for key in ("set_davg_zero", "activation_function", "resnet_dt")},
            "concat_output_tebd": False,
        }


class Dpa2(Descriptor[Dpa2Options]):
    """Two-body and three-body features, and layers that pass messages."""

    Options = Dpa2Options
    mixed_types = True
    ghost_atoms = "exchange"
    included_pairs: Tensor

    def __init__(
        self,
        options: Dpa2Options,
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
        make = Make(options.trainable, dtype, generator)
        first, self.of_layers = options.repinit, options.repformer
        self.repinit = SeAtten(
            options.two_body, species=self.species, cutoff=self.cutoff, dtype=dtype, generator=generator
        )
        self.repinit.sel_option = "repinit.nsel"
        self.pairs = _three_body(options, make) if first.use_three_body else None
        width = self.repinit.dim_out + (first.three_body_neuron[-1] if first.use_three_body else 0)
        n = self.of_layers.g1_dim
        self.g1_transform = Affine(width, n, make, bias=False) if width != n else None
        self.tebd_transform = Affine(first.tebd_dim, n, make, bias=False) if options.add_tebd_to_repinit_out else None
        self.repformer = Repformer(self.of_layers, make, smooth=options.smooth, cutoff=options.layers_cutoff)
        assert self.of_layers.davg is not None
        assert self.of_layers.dstd is not None
        self.standardise = Standardise(self.of_layers.davg, self.of_layers.dstd, shift_rows=False)
        self.dim_out = n + (first.tebd_dim if options.concat_output_tebd else 0)
        self.dim_rotation = self.of_layers.g2_dim
        included = torch.tensor(excluded_kinds(options.exclude_types, len(self.species)), dtype=torch.bool)
        self.register_buffer("included_pairs", included, persistent=False)

    @classmethod
    def statistics(
        cls,
        options: Dpa2Options,
        *,
        species: tuple[str, ...],
        cutoff: float,
        pair_exclude_types: Sequence[Sequence[int]],
    ) -> HybridStatistics:
        """Of the rows within each of the cutoffs: first block, layers, pairs."""
        known: dict[str, Any] = {"species": species, "pair_exclude_types": pair_exclude_types}
        layers, rcut = options.repformer, options.layers_cutoff
        rows = RowStatistics(
            len(species),
            rcut,
            slots=room_for(layers.nsel),
            start=layers.rcut_smth,
            env_protection=options.env_protection,
            exclude_types=options.exclude_types,
            pair_exclude_types=pair_exclude_types,
        )
        parts = [(SeAtten.statistics(options.two_body, cutoff=cutoff, **known), cutoff), (rows, rcut)]
        if options.repinit.use_three_body:
            of_pairs = options.repinit.three_body_rcut
            parts.append((SeE3Tebd.statistics(options.three_body, cutoff=of_pairs, **known), of_pairs))
        return HybridStatistics(parts, cutoff)

    @classmethod
    def complete(
        cls, options: Dpa2Options, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> Dpa2Options:
        """Options with the numbers of both blocks."""
        _check(options, species, cutoff)
        measured = (statistics.get("environment") or {}).get("parts") or [{}] * 3
        of_part = [{**statistics, "environment": part} for part in measured]
        first = options.repinit
        two_body = SeAtten.complete(options.two_body, species=species, cutoff=cutoff, statistics=of_part[0])
        filled: dict[str, Any] = {
            "nsel": two_body.sel,
            **{key: getattr(two_body, key) for key in ("davg", "dstd", "neighbour_norm", "max_neighbours")},
        }
        if first.use_three_body:
            pairs = SeE3Tebd.complete(
                options.three_body, species=species, cutoff=first.three_body_rcut, statistics=of_part[2]
            )
            filled |= {
                "three_body_sel": pairs.sel,
                "three_body_davg": pairs.davg,
                "three_body_dstd": pairs.dstd,
                "three_body_norm": pairs.neighbour_norm,
                "three_body_max_neighbours": pairs.max_neighbours,
            }
        layers = _complete_layers(options.repformer, species, of_part[1]["environment"])
        return replace(options, repinit=replace(first, **filled), repformer=layers)

    @classmethod
    def refuses_species(cls, options: Dpa2Options, n_old: int, n_all: int) -> str | None:
        return refuses_types(options.repinit.tebd_dim, n_old, n_all) if not options.use_econf_tebd else None

    @classmethod
    def extended(cls, options: Dpa2Options, n_old: int, measured: Mapping[str, Any]) -> Dpa2Options:
        first, layers, parts = asdict(options.repinit), asdict(options.repformer), measured["parts"]
        _extend(first, "", n_old, parts[0])
        _extend(layers, "", n_old, parts[1])
        if len(parts) > 2:
            _extend(first, "three_body_", n_old, parts[2])
        return replace(options, repinit=RepinitOptions(**first), repformer=RepformerOptions(**layers))

    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        options, first, species = self.options, self.options.repinit, batch["species"]
        table = self.repinit.type_embedding()
        g1, _ = self.repinit(batch, edges, mask)
        near, width = self._near(
            species,
            edges,
            mask,
            options.layers_cutoff,
            self.of_layers.max_neighbours,
            "repformer.nsel",
            self.of_layers.nsel,
        )
        if self.pairs is not None:
            of_pairs, pair_width = self._near(
                species,
                edges,
                mask,
                self.pairs.cutoff,
                first.three_body_max_neighbours,
                "repinit.three_body_sel",
                first.three_body_sel,
            )
            g1 = join([g1, refuse(self.pairs(of_pairs, species, table, edges), of_pairs, pair_width)], 1)
        if self.g1_transform is not None:
            g1 = self.g1_transform(g1)
        if self.tebd_transform is not None:
            g1 = g1 + pick_rows(self.tebd_transform(table), species)
        g1, rotation = self.repformer(g1, *self._pair_features(near, species, table.dtype, edges), near, edges)
        if options.concat_output_tebd:
            g1 = join([g1, pick_rows(table, species)], 1)
        return refuse(g1, near, width), rotation

    def _near(
        self,
        species: Tensor,
        edges: EdgeContext,
        mask: Tensor | None,
        cutoff: float,
        max_neighbours: int | None,
        what: str,
        sel: int | str | None,
    ) -> tuple[Near, int | None]:
        """Neighbours within a cutoff, and how many fit where sizes are fixed."""
        assert max_neighbours is not None
        width = fixed_width(edges.vectors, self.training, max_neighbours)
        seen = seen_edges(self.included_pairs, species, edges) if self.options.exclude_types else None
        room = room_for(sel)
        return near_slots(edges.vectors, edges.graph, mask, seen, cutoff, width=width, what=what, room=room), width

    def _pair_features(
        self, near: Near, species: Tensor, dtype: torch.dtype, edges: EdgeContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scalar, vector and switch of every slot that the layers start from."""
        layers, cutoff = self.of_layers, self.options.layers_cutoff
        if layers.direct_dist:
            scalars, vectors = near.lengths / cutoff, near.vectors / cutoff
        else:
            rows = environment_rows(near.vectors, layers.rcut_smth, cutoff, self.options.env_protection)
            rows, scalars = self.standardise(rows, near.per_slot(species))
            vectors = rows[:, 1:]
        fades = near.fades(layers.rcut_smth, cutoff)
        values = (scalars.unsqueeze(1), vectors, fades)
        scalars, vectors, fades = (barrier(value.to(dtype), edges.gradient) for value in values)
        return scalars, vectors, fades


def _three_body(options: Dpa2Options, make: Make) -> ThreeBody:
    first = options.repinit
    assert first.three_body_dstd is not None
    assert first.three_body_norm is not None
    return ThreeBody(
        first.three_body_neuron,
        first.tebd_dim,
        start=first.three_body_rcut_smth,
        cutoff=first.three_body_rcut,
        norm=first.three_body_norm,
        deviation=first.three_body_dstd,
        strip=first.tebd_input_mode == "strip",
        fade=options.smooth,
        protection=options.env_protection,
        activation=first.activation_function,
        resnet_dt=first.resnet_dt,
        trainable=make.trainable,
        dtype=make.dtype,
        generator=make.generator,
    )


def _check(options: Dpa2Options, species: tuple[str, ...], cutoff: float) -> None:
    first, layers, rcut = options.repinit, options.repformer, options.layers_cutoff
    check_values(options, WHERE)
    check_values(first, f"{WHERE}.repinit")
    check_values(layers, f"{WHERE}.repformer")
    check_activation(f"{WHERE}.repformer.activation_function", layers.activation_function)
    check_pairs(f"{WHERE}.exclude_types", options.exclude_types, len(species))
    check_room(f"{WHERE}.repinit.nsel", first.nsel)
    check_room(f"{WHERE}.repinit.three_body_sel", first.three_body_sel)
    check_room(f"{WHERE}.repformer.nsel", layers.nsel)
    if not layers.rcut_smth < rcut < cutoff:
        raise ForgefieldError(
            f"{WHERE}.repformer.rcut is {rcut:g}; it must be above its rcut_smth, {layers.rcut_smth:g}, and below "
            f"data.cutoff={cutoff:g}."
        )
    if first.use_three_body and not first.three_body_rcut_smth < first.three_body_rcut <= cutoff:
        raise ForgefieldError(
            f"{WHERE}.repinit.three_body_rcut is {first.three_body_rcut:g}; it must be above three_body_rcut_smth and at most "
            f"data.cutoff={cutoff:g}."
        )
    for axis, name, dim in _axes(layers):
        if axis > dim:
            raise ForgefieldError(f"{WHERE}.repformer.axis_neuron is {axis}; it must be at most {name}, {dim}.")
    inputs = layers.update_g1_has_drrd or layers.update_g1_has_grrg or not layers.g1_out_mlp
    if not inputs and not (layers.update_g1_has_conv and not layers.g1_out_conv):
        raise ForgefieldError(
            f"{WHERE}.repformer: the layer that updates atoms has no input; set update_g1_has_drrd or update_g1_has_grrg to "
            "true."
        )


def _axes(layers: RepformerOptions) -> list[tuple[int, str, int]]:
    used = [("g2_dim", layers.g2_dim)] * layers.update_g1_has_grrg + [
        ("g1_dim", layers.g1_dim)
    ] * layers.update_g1_has_drrd
    return [(layers.axis_neuron, name, dim) for name, dim in used]


def _complete_layers(
    layers: RepformerOptions, species: tuple[str, ...], environment: Mapping[str, Any]
) -> RepformerOptions:
    filled: dict[str, Any] = {}
    for key, value in (("davg", layers.davg), ("dstd", layers.dstd)):
        rows = environment.get(key) if value is None else value
        if rows is None:
            raise ForgefieldError(
                f"{WHERE}.repformer.{key} is not set and there is no training data to compute it from."
            )
        if [len(row) for row in rows] != [COLUMNS] * len(species):
            raise ForgefieldError(
                f"{WHERE}.repformer.{key} needs {COLUMNS} numbers for each of {len(species)} species."
            )
        filled[key] = rows
    if layers.set_davg_zero:
        filled["davg"] = [[0.0] * COLUMNS for _ in species]
    room = room_for(layers.nsel)
    mean = max(float(environment.get("mean_neighbours") or 0.0), 1.0)
    return replace(
        layers,
        **filled,
        nsel=room,
        neighbour_norm=layers.neighbour_norm or (mean if room is None else float(room)),
        max_neighbours=slots_needed(environment, layers.max_neighbours, room, "repformer.max_neighbours"),
        ln_eps=1e-5 if layers.ln_eps is None else layers.ln_eps,
    )


def _extend(section: dict[str, Any], prefix: str, n_old: int, measured: Mapping[str, Any]) -> None:
    """Append statistics of rows around species after the first `n_old`."""
    for key in ("davg", "dstd"):
        rows = [list(row) for row in measured[key][n_old:]]
        if key == "davg" and section["set_davg_zero"]:
            rows = [[0.0] * COLUMNS for _ in rows]
        section[prefix + key] = [*section[prefix + key], *rows]
