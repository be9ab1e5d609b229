"""Options of Deep Potential models and their parts, with DeePMD-kit's names and defaults, and checks that need no data.

What DeePMD-kit keeps elsewhere is not repeated here: `rcut` is `data.cutoff`, the type map is `data.species`. Numbers that
come from the training data (`davg`, `dstd`, `out_bias`, ...) are options too: resolved options hold all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.networks import check_activation
from forgefield.models.options import check_keys

PRECISIONS = ("default", "float32", "float64")


@dataclass
class SeE2ROptions:
    """Descriptor from distances alone."""

    type: str = "se_e2_r"
    sel: list[int] | str | None = None
    """Neighbours of each species that DeePMD-kit makes room for; empty places enter the result as they do there. Left out or
    `auto`: no room is needed, sums are over the neighbours there are."""
    rcut_smth: float = 0.5
    """Where the switch begins that ends at the cutoff, A."""
    neuron: list[int] = field(default_factory=lambda: [10, 20, 40])
    """Widths of the embedding network."""
    resnet_dt: bool = False
    """Residual layers with trained step sizes."""
    type_one_side: bool = False
    """An embedding network for each species of the neighbour, not for each pair of species."""
    exclude_types: list[list[int]] = field(default_factory=list)
    """Pairs of species, by number, that do not see each other."""
    set_davg_zero: bool = False
    """Divide by deviations without subtracting means."""
    activation_function: str = "tanh"
    """Of the embedding network: tanh, relu, softplus, sigmoid, gelu, gelu_tf, relu6, silu, linear, none or silut:T."""
    trainable: bool = True
    """Train the embedding network."""
    seed: int | None = None
    """Of its first weights; default: the seed of the run."""
    precision: str = "default"
    """float32 or float64; default: that of the training."""
    env_protection: float = 0.0
    """Added to distances before they are divided by, A."""
    davg: list[list[float]] | None = None
    """Mean of the rows, by species of the centre, 1/A. From the training data."""
    dstd: list[list[float]] | None = None
    """Deviation of the rows, by species of the centre, 1/A. From the training data."""
    neighbour_norm: float | None = None
    """What sums over neighbours are divided by. Default: the sum of `sel`, or without it the mean number of neighbours."""
    most_neighbours: list[int] | None = None
    """Most neighbours of each species that an atom of the training data has; room for them is made on export."""


@dataclass
class SeE2AOptions(SeE2ROptions):
    """Descriptor from distances and angles (DeepPot-SE)."""

    type: str = "se_e2_a"
    axis_neuron: int = 4
    """Columns of the embedding that the others are combined with."""


@dataclass
class FittingOptions:
    """What all fitting networks have."""

    type: str = ""
    neuron: list[int] = field(default_factory=lambda: [120, 120, 120])
    """Widths of its hidden layers."""
    resnet_dt: bool = True
    """Residual layers with trained step sizes."""
    activation_function: str = "tanh"
    """As in the descriptor."""
    numb_fparam: int = 0
    """Numbers per frame that the network reads beside the descriptor: the field `fparam` of the data."""
    numb_aparam: int = 0
    """Numbers per atom that it reads: the field `aparam`."""
    default_fparam: list[float] | None = None
    """Taken for frames that carry no `fparam`."""
    trainable: bool | list[bool] = True
    """Train the network; or one flag for each hidden layer and one for the last."""
    seed: int | None = None
    """Of its first weights; default: the seed of the run."""
    precision: str = "default"
    """float32 or float64; default: that of the training."""
    fparam_avg: list[float] | None = None
    """Means of `fparam`, from the training data."""
    fparam_std: list[float] | None = None
    """Deviations of `fparam`, from the training data."""
    aparam_avg: list[float] | None = None
    """Means of `aparam`, from the training data."""
    aparam_std: list[float] | None = None
    """Deviations of `aparam`, from the training data."""


@dataclass
class EnergyFittingOptions(FittingOptions):
    """Fitting network of atomic energies."""

    type: str = "ener"
    rcond: float | None = None
    """Singular values below this share of the largest are left out of the fit of `out_bias`."""
    atom_ener: list[float | None] = field(default_factory=list)
    """Energy of the isolated atom of each species, eV, null for species without: their network is made zero there."""


@dataclass
class DeepPotOptions:
    """Options of a Deep Potential."""

    descriptor: dict[str, Any] = field(default_factory=lambda: {"type": "se_e2_a"})
    """The descriptor: `type` (se_e2_a, se_e2_r, se_atten) and its options by DeePMD-kit's names."""
    fitting_net: dict[str, Any] = field(default_factory=lambda: {"type": "ener"})
    """The fitting network: `type` (ener, property, dos, dipole, polar) and its options by DeePMD-kit's names."""
    pair_exclude_types: list[list[int]] = field(default_factory=list)
    """Pairs of species, by number, that are no neighbours of each other."""
    atom_exclude_types: list[int] = field(default_factory=list)
    """Species, by number, whose atoms have no energy (dipole, ...) of their own."""
    zbl: bool | dict[str, float] = False
    """Add the ZBL repulsion of nuclei; {polynomial_cutoff_p: 6} sets its envelope."""
    use_srtab: str | None = None
    """File with a table of pair energies that takes over from the network at short distances."""
    smin_alpha: float | None = None
    """With `use_srtab`: how sharply the smallest distance to a neighbour is picked out, A."""
    sw_rmin: float | None = None
    """With `use_srtab`: an atom whose nearest neighbour is closer has the energy of the table, A."""
    sw_rmax: float | None = None
    """With `use_srtab`: an atom whose nearest neighbour is farther has the energy of the network, A."""
    srtab: dict[str, Any] | None = None
    """The table that was read from `use_srtab`."""
    out_bias: list[float] | None = None
    """Energy of each species that is added to the network's, eV. From the training data."""
    branches: dict[str, Any] = field(default_factory=dict)
    """Several energies of one descriptor, by name, each learnt from its own data: {water: {}, ice: {fitting_net: {seed: 2}}}. A
    branch has its own fitting network, unless `share` names the branch whose network it uses, and its own `out_bias`."""


def check_widths(where: str, neuron: Sequence[int], *, allow_none: bool = False) -> None:
    if (not neuron and not allow_none) or any(width < 1 for width in neuron):
        raise ForgefieldError(f"{where}.neuron is {list(neuron)}; it needs at least one width, each at least 1.")


def check_common(where: str, options: Any) -> None:
    """What descriptors and fitting networks have in common."""
    check_activation(f"{where}.activation_function", options.activation_function)
    if options.precision not in PRECISIONS:
        raise ForgefieldError(f"{where}.precision is '{options.precision}'; choose one of {', '.join(PRECISIONS)}.")


def check_descriptor(options: SeE2ROptions, species: Sequence[str], cutoff: float) -> None:
    """Raise for descriptor options that have no meaning."""
    where = "model.descriptor"
    check_common(where, options)
    check_widths(where, options.neuron)
    check_sel(options.sel, species)
    check_pairs(f"{where}.exclude_types", options.exclude_types, len(species))
    if not 0 <= options.rcut_smth < cutoff:
        raise ForgefieldError(
            f"{where}.rcut_smth is {options.rcut_smth:g}; it must be at least 0 and below data.cutoff={cutoff:g}."
        )
    if options.env_protection < 0:
        raise ForgefieldError(f"{where}.env_protection is {options.env_protection:g}; it must not be negative.")
    axis = getattr(options, "axis_neuron", 1)
    if not 1 <= axis <= options.neuron[-1]:
        raise ForgefieldError(
            f"{where}.axis_neuron is {axis}; it must be at least 1 and at most the last width, {options.neuron[-1]}."
        )


def check_sel(sel: list[int] | str | None, species: Sequence[str]) -> None:
    where = "model.descriptor.sel"
    if isinstance(sel, str) and not sel.startswith("auto"):
        raise ForgefieldError(f"{where} is '{sel}'; give one number for each species, or auto.")
    if isinstance(sel, list):
        if len(sel) != len(species):
            raise ForgefieldError(f"{where} has {len(sel)} numbers for {len(species)} species ({', '.join(species)}).")
        if min(sel) < 0 or sum(sel) == 0:
            raise ForgefieldError(f"{where} is {sel}; numbers must not be negative, and not all zero.")


def check_pairs(where: str, pairs: Sequence[Sequence[int]], n_species: int) -> None:
    for pair in pairs:
        if len(pair) != 2 or not all(0 <= number < n_species for number in pair):
            raise ForgefieldError(
                f"{where} holds {list(pair)}; each entry is two numbers of species, from 0 to {n_species - 1}."
            )


def check_fitting(options: FittingOptions, species: Sequence[str]) -> None:
    """Raise for options of the fitting network that have no meaning."""
    where = "model.fitting_net"
    check_common(where, options)
    check_widths(where, options.neuron, allow_none=True)
    if isinstance(options.trainable, list) and len(options.trainable) != len(options.neuron) + 1:
        raise ForgefieldError(
            f"{where}.trainable has {len(options.trainable)} flags; with {len(options.neuron)} hidden layers it needs "
            f"{len(options.neuron) + 1}."
        )
    energies = options.atom_ener if isinstance(options, EnergyFittingOptions) else []
    if energies and len(energies) != len(species):
        raise ForgefieldError(
            f"{where}.atom_ener has {len(energies)} energies for {len(species)} species ({', '.join(species)})."
        )
    for key in ("numb_fparam", "numb_aparam"):
        if getattr(options, key) < 0:
            raise ForgefieldError(f"{where}.{key} is {getattr(options, key)}; it must not be negative.")
    if options.default_fparam is not None and len(options.default_fparam) != options.numb_fparam:
        raise ForgefieldError(
            f"{where}.default_fparam has {len(options.default_fparam)} numbers; numb_fparam is {options.numb_fparam}."
        )


def excluded_kinds(pairs: Sequence[Sequence[int]], n_species: int) -> list[float]:
    """0 for each excluded (centre, neighbour), 1 for the others: n_species^2 numbers."""
    excluded = {(a, b) for pair in pairs for a, b in (pair, pair[::-1])}
    return [0.0 if (a, b) in excluded else 1.0 for a in range(n_species) for b in range(n_species)]


def per_species(values: Mapping[str, float] | Sequence[float], species: Sequence[str]) -> list[float]:
    """One number for each species, in their order."""
    return [float(values[symbol]) for symbol in species] if isinstance(values, Mapping) else [float(v) for v in values]


def unseen_species(excluded: Sequence[int], fitting: Any, n_species: int) -> tuple[int, ...]:
    """Numbers of the species whose atoms have no value. excluded: `atom_exclude_types`. fitting: options of the network."""
    selected = getattr(fitting, "sel_type", None)
    selected = range(n_species) if selected is None else [selected] if isinstance(selected, int) else selected
    return tuple(number for number in range(n_species) if number in excluded or number not in selected)


@dataclass
class DipoleOptions(FittingOptions):
    """Fitting network of atomic dipoles."""

    type: str = "dipole"
    sel_type: int | list[int] | None = None
    """Species, by number, whose atoms have a dipole. Default: all."""


@dataclass
class PolarOptions(FittingOptions):
    """Fitting network of atomic polarisabilities."""

    type: str = "polar"
    sel_type: int | list[int] | None = None
    """Species, by number, whose atoms have a polarisability. Default: all."""
    fit_diag: bool = True
    """The network gives the diagonal of a matrix in the space of the rotation's rows, not all of it."""
    scale: float | list[float] = 1.0
    """What polarisabilities are multiplied with; one number, or one for each species."""
    shift_diag: bool = True
    """Add `out_bias` to the diagonal."""
    out_bias: list[float] | None = None
    """A third of the trace of each species' polarisability, before `scale`. From the training data."""


@dataclass
class DosOptions(FittingOptions):
    """Fitting network of atomic densities of states."""

    type: str = "dos"
    numb_dos: int = 300
    """Points of the energy grid."""
    rcond: float | None = None
    """Singular values below this share of the largest are left out of the fit of `out_bias`."""
    out_bias: list[list[float]] | None = None
    """Density of each species that is added to the network's. From the training data."""


@dataclass
class PropertyOptions(FittingOptions):
    """Fitting network of a property that does not turn with the frame."""

    type: str = "property"
    property_name: str = "property"
    """Its name among outputs and labels."""
    task_dim: int = 1
    """How many numbers it has."""
    intensive: bool = False
    """The property of a frame is the mean over its atoms, not the sum."""
    distinguish_types: bool = True
    """`out_bias` and `out_std` differ between species."""
    out_bias: list[list[float]] | None = None
    """Added to the network's numbers, for each species. From the training data."""
    out_std: list[list[float]] | None = None
    """What the network's numbers are multiplied with, for each species. From the training data; losses are measured in
    those of the first."""


DESCRIPTORS = {
    "se_e2_a": "se_e2.SeE2A",
    "se_e2_r": "se_e2.SeE2R",
    "se_atten": "se_atten.SeAtten",
    "se_atten_v2": "se_atten.SeAttenV2",
}
"""Where the class of each descriptor is; it has `Options` and `complete`."""
FITTINGS = {
    "ener": "fitting.EnergyFitting",
    "property": "tensor_fitting.PropertyFitting",
    "dos": "tensor_fitting.DosFitting",
    "dipole": "tensor_fitting.DipoleFitting",
    "polar": "tensor_fitting.PolarFitting",
}
"""Where the class of each fitting network is; likewise."""
ALIASES = {"se_a": "se_e2_a", "se_r": "se_e2_r", "dpa1": "se_atten"}
_ELSEWHERE = {"rcut": "data.cutoff", "type_map": "data.species", "ntypes": "data.species"}
_WITHOUT_MEANING = {
    "dim_case_embd": "a model has one fitting network",
    "use_aparam_as_mask": "atoms that are not there are left out of the data",
    "layer_name": "networks do not share layers by name",
    "spin": "spins are not part of this model",
}


def descriptor_part(section: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and options of the section `model.descriptor`."""
    return _part(section, "model.descriptor", "se_e2_a", DESCRIPTORS)


def fitting_part(section: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and options of the section `model.fitting_net`."""
    return _part(section, "model.fitting_net", "ener", FITTINGS)


def check_parts(given: Mapping[str, Any]) -> None:
    """Raise for what can be seen to be wrong in the sections of a model's parts."""
    if "descriptor" in given:
        descriptor_part(given["descriptor"])
    if "fitting_net" in given:
        fitting_part(given["fitting_net"])


def _part(section: Mapping[str, Any], where: str, default: str, known: Mapping[str, str]) -> tuple[Any, Any]:
    name = section.get("type", default)
    name = ALIASES.get(name, name)
    if name not in known:
        raise ForgefieldError(
            f"{where}.type is '{name}'; choose one of {', '.join(known)}.{did_you_mean(str(name), known)}"
        )
    module, _, class_name = known[name].rpartition(".")
    found = getattr(import_module(f"forgefield.models.deeppot.{module}"), class_name)
    options = {key: value for key, value in section.items() if key != "type"}
    for key in options:
        if key in _ELSEWHERE:
            raise ForgefieldError(f"{where}.{key} is not set here: it is {_ELSEWHERE[key]}.")
        if key in _WITHOUT_MEANING:
            raise ForgefieldError(f"{where}.{key} has no meaning here: {_WITHOUT_MEANING[key]}; remove it.")
    check_keys(found.Options, options, where=where, what=name)
    return found, found.Options(**options, type=name)
