"""Options of the descriptor `dpa3`, with the names and defaults of DeePMD-kit's section `repflow`, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.descriptor import occupations
from forgefield.models.deeppot.networks import check_activation
from forgefield.models.deeppot.options import DescriptorOptions, check_pairs
from forgefield.models.options import check_values

WHERE = "model.descriptor"
MARGIN = 1.1
"""Factor by which `auto` and compiled layouts have more slots than the largest number of neighbours in the training data."""
UNMEASURED = 1.5
"""Without training data: slots of compiled layouts over the norm of sums."""
MULTIPLE = 4
"""Numbers of slots that follow from the data are multiples of this."""


@dataclass
class Dpa3Options(DescriptorOptions):
    """Descriptor of DPA-3: features of atoms, edges and angles that update each other in several layers."""

    type: str = "dpa3"
    activation_function: str = "silu"
    """As in the other descriptors."""
    n_dim: int = option(128, at_least=1)
    """Features of an atom."""
    e_dim: int = option(64, at_least=1)
    """Features of an edge."""
    a_dim: int = option(64, at_least=1)
    """Features of an angle."""
    nlayers: int = option(6, at_least=1)
    """Layers."""
    e_rcut_smth: float = option(5.0, at_least=0, unit="A")
    """Where the switch of edges begins, A; it ends at `data.cutoff`, which is DeePMD-kit's e_rcut."""
    e_sel: int | str | None = None
    """Largest number of neighbours, by which sums are divided; an error with more, except with `use_dynamic_sel`. Left out or
    `auto`: a tenth more than the largest number in the training data; `auto:1.5`: 1.5 times as many."""
    a_rcut: float = option(4.0, above=0, unit="A")
    """Neighbours within this distance have angles, A."""
    a_rcut_smth: float = option(3.5, at_least=0, unit="A")
    """Where the switch of angles begins, A."""
    a_sel: int | str | None = None
    """As `e_sel` for neighbours within `a_rcut`; with more, only the nearest have angles, as in DeePMD-kit, and the energy is
    discontinuous."""
    axis_neuron: int = option(4, at_least=1)
    """Columns of the moments that the others are combined with."""
    a_compress_rate: int = option(0, at_least=0)
    """Angles read a_dim / this of an atom's features, and half as many of an edge's; 0: they read all of them."""
    a_compress_e_rate: int = option(1, at_least=1)
    """With `a_compress_rate`: factor of the number of an edge's features that angles read."""
    a_compress_use_split: bool = False
    """With `a_compress_rate`: read the first features, not a linear map of all."""
    n_multi_edge_message: int = option(1, at_least=1)
    """Messages of an edge to its atom, each with a weight of its own."""
    update_angle: bool = True
    """Use angles."""
    update_style: str = option("res_residual", choices=("res_residual", "res_incr", "res_avg"))
    """How terms are added: with trained factors (res_residual), over the root of their number (res_incr), or as a mean with the
    old features times the root of their number (res_avg)."""
    update_residual: float = option(0.1, at_least=0)
    """Initial factors, or with `update_residual_init: norm` their deviation."""
    update_residual_init: str = option("const", choices=("const", "norm"))
    """All factors equal at first, or normally distributed."""
    sequential_update: bool = False
    """In each layer edges, angles and atoms are updated one after the other; by default all from the old features."""
    smooth_edge_update: bool = False
    """Edges without angles get nothing from them. With false they get their own features, and energies are discontinuous at
    `a_rcut`."""
    edge_init_use_dist: bool = False
    """The first features of edges are linear in the distance, not a function of its inverse."""
    use_exp_switch: bool = False
    """An exponential switch, which is nearly zero at the cutoff, in place of a polynomial."""
    use_dynamic_sel: bool = False
    """Atoms may have any number of neighbours; sums are divided by `e_sel` and `a_sel` over `sel_reduce_factor`."""
    sel_reduce_factor: float = option(10.0, above=0)
    """See `use_dynamic_sel`."""
    fix_stat_std: float = option(0.3, at_least=0)
    """Rows of the environment are divided by this; 0: by their deviations in the training data."""
    concat_output_tebd: bool = False
    """The numbers of the atom's species are part of its descriptor."""
    use_econf_tebd: bool = False
    """Compute them from the electronic configuration of the element."""
    use_tebd_bias: bool = False
    """With a constant."""
    dstd: list[list[float]] | None = None
    """Deviation of the rows, by species of the centre, 1/A. From `fix_stat_std` or the training data."""
    max_angle_neighbours: int | None = option(None, at_least=1)
    """Neighbours with angles for which traced and captured steps have slots. Default: from the training data, a tenth more than
    needed."""

    @property
    def compresses_by_maps(self) -> bool:
        return self.a_compress_rate > 0 and not self.a_compress_use_split

    def angle_widths(self) -> tuple[int, int]:
        """Features of an atom and of an edge that angles read."""
        if self.a_compress_rate == 0:
            return self.n_dim, self.e_dim
        return self.a_dim // self.a_compress_rate, self.a_dim * self.a_compress_e_rate // (2 * self.a_compress_rate)

    def norms(self) -> tuple[float, float]:
        """What sums over neighbours, and over neighbours with angles, are divided by."""
        assert isinstance(self.e_sel, int)
        assert isinstance(self.a_sel, int)
        factor = self.sel_reduce_factor if self.use_dynamic_sel else 1.0
        return self.e_sel / factor, self.a_sel / factor


def complete_options(
    options: Dpa3Options, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> Dpa3Options:
    """Options checked, with every number explicit."""
    _check(options, species, cutoff)
    environment: Mapping[str, Any] = statistics.get("environment") or {}
    most, near = environment.get("most_neighbours"), environment.get("most_near_neighbours")
    e_sel, a_sel = _slots("e_sel", options.e_sel, most), _slots("a_sel", options.a_sel, near)
    if a_sel > e_sel:
        raise ForgefieldError(f"{WHERE}.a_sel is {a_sel}; it must be at most e_sel={e_sel}.")
    if not options.use_dynamic_sel:
        require_slots(e_sel, most or 0)
    expected = math.ceil(UNMEASURED * replace(options, e_sel=e_sel, a_sel=a_sel).norms()[1])
    places = options.max_angle_neighbours or (expected if near is None else max(1, math.ceil(MARGIN * near)))
    dstd = options.dstd
    if options.fix_stat_std:
        dstd = [[options.fix_stat_std] * 4 for _ in species] if dstd is None else dstd
    dstd = environment.get("dstd") if dstd is None else dstd
    if dstd is None:
        raise ForgefieldError(f"{WHERE}.dstd is not set and there is no training data to compute it from.")
    if [len(row) for row in dstd] != [4] * len(species):
        raise ForgefieldError(f"{WHERE}.dstd needs 4 numbers for each of {len(species)} species.")
    return replace(
        options,
        e_sel=e_sel,
        a_sel=a_sel,
        dstd=[[float(value) for value in row] for row in dstd],
        max_angle_neighbours=places if options.use_dynamic_sel else min(places, a_sel),
    )


def require_slots(slots: int, needed: int) -> None:
    """Raise if an atom has more neighbours than there are slots."""
    if needed > slots:
        raise ForgefieldError(
            f"{WHERE}.e_sel has room for {slots} neighbours, but an atom has {needed} within the cutoff; set it to at least "
            f"{needed}, or set use_dynamic_sel and smooth_edge_update to true."
        )


def _slots(name: str, value: int | str | None, most: int | None) -> int:
    if isinstance(value, int):
        return value
    factor = factor_of(name, value)
    if most is None:
        raise ForgefieldError(f"{WHERE}.{name} is not set and there is no training data to compute it from.")
    return max(MULTIPLE, math.ceil(factor * most / MULTIPLE) * MULTIPLE)


def factor_of(name: str, value: str | None) -> float:
    """The factor in `auto:FACTOR`."""
    word, colon, factor = (value or "auto").partition(":")
    try:
        result = float(factor) if colon else MARGIN
    except ValueError:
        result = math.nan
    if word != "auto" or not result >= 1:
        raise ForgefieldError(
            f"{WHERE}.{name} is '{value}'; give a number, auto, or auto:FACTOR with a factor of at least 1."
        )
    return result


def _check(options: Dpa3Options, species: Sequence[str], cutoff: float) -> None:
    check_values(options, WHERE)
    check_activation(f"{WHERE}.activation_function", options.activation_function)
    check_pairs(f"{WHERE}.exclude_types", options.exclude_types, len(species))
    if not 0 < options.e_rcut_smth < cutoff:
        raise ForgefieldError(
            f"{WHERE}.e_rcut_smth is {options.e_rcut_smth:g}; it must be positive and below data.cutoff={cutoff:g}."
        )
    if options.a_rcut > cutoff:
        raise ForgefieldError(f"{WHERE}.a_rcut is {options.a_rcut:g}; it must be at most data.cutoff={cutoff:g}.")
    if not 0 < options.a_rcut_smth < options.a_rcut:
        raise ForgefieldError(
            f"{WHERE}.a_rcut_smth is {options.a_rcut_smth:g}; it must be positive and below a_rcut={options.a_rcut:g}."
        )
    for name, sel in (("e_sel", options.e_sel), ("a_sel", options.a_sel)):
        if isinstance(sel, int) and sel < 1:
            raise ForgefieldError(f"{WHERE}.{name} is {sel}; there must be room for at least one neighbour.")
        if not isinstance(sel, int):
            factor_of(name, sel)
    if options.axis_neuron > min(options.n_dim, options.e_dim):
        raise ForgefieldError(
            f"{WHERE}.axis_neuron is {options.axis_neuron}; it must be at most n_dim={options.n_dim} and e_dim={options.e_dim}."
        )
    if options.use_dynamic_sel and not options.smooth_edge_update:
        raise ForgefieldError(f"{WHERE}.use_dynamic_sel needs smooth_edge_update: true.")
    if options.sequential_update and not (options.update_angle and options.update_style == "res_residual"):
        raise ForgefieldError(f"{WHERE}.sequential_update needs update_angle: true and update_style: res_residual.")
    _check_compression(options)
    if options.use_econf_tebd:
        for symbol in species:
            occupations(symbol)


def _check_compression(options: Dpa3Options) -> None:
    rate, width = options.a_compress_rate, options.a_dim
    if rate == 0:
        return
    if width % rate or (width * options.a_compress_e_rate) % (2 * rate):
        raise ForgefieldError(
            f"{WHERE}.a_compress_rate is {rate}; a_dim={width} must be a multiple of it, a_dim * a_compress_e_rate of twice it."
        )
    nodes, edges = options.angle_widths()
    if options.a_compress_use_split and (nodes > options.n_dim or edges > options.e_dim):
        raise ForgefieldError(
            f"{WHERE}.a_compress_use_split: angles would read {nodes} features of an atom and {edges} of an edge, more than "
            f"n_dim={options.n_dim} and e_dim={options.e_dim}."
        )
