"""Options of Deep Potential models, descriptors and fitting networks, with DeePMD-kit's names and defaults, and their checks.

Settings of the data section are not repeated here: `rcut` is `data.cutoff`, the type map is `data.species`. Numbers that come
from the training data (`davg`, `dstd`, `out_bias`, ...) are options too: resolved options contain all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.kinds import ImportPath
from forgefield.models.deeppot.networks import check_activation
from forgefield.models.options import check_keys, check_values

if TYPE_CHECKING:
    from forgefield.models.deeppot.descriptor import Descriptor
    from forgefield.models.deeppot.fitting import Fitting
    from forgefield.models.deeppot.tensor_fitting import TensorFitting

PRECISIONS = ("default", "float32", "float64")


@dataclass
class AnyDescriptorOptions:
    """Base of the options of all descriptors."""

    type: str = ""


@dataclass
class DescriptorOptions(AnyDescriptorOptions):
    """Options of descriptors with networks."""

    exclude_types: list[list[int]] = field(default_factory=list)
    """Pairs of species, by index, that do not see each other."""
    activation_function: str = "tanh"
    """Of its networks: tanh, relu, softplus, sigmoid, gelu, gelu_tf, relu6, silu, linear, none or silut:T."""
    trainable: bool = True
    """Train its networks."""
    seed: int | None = None
    """Of its initial weights; default: the seed of the run."""
    precision: str = option("default", choices=PRECISIONS)
    """float32 or float64; default: that of the training."""
    env_protection: float = option(0.0, at_least=0, unit="A")
    """Added to distances before dividing by them, A."""


@dataclass
class RowOptions(DescriptorOptions):
    """Options of descriptors with networks that read rows of the environment."""

    takes_total: ClassVar[bool] = False
    """Whether `sel` may be one number for all species."""

    sel: int | list[int] | str | None = None
    """Neighbours of each species for which DeePMD-kit reserves slots; empty slots contribute to the result as they do there.
    Left out or `auto`: no slots are needed, sums are over the actual neighbours. Descriptors with attention use the sum of a
    list, or one number for all species."""
    rcut_smth: float = option(0.5, at_least=0, unit="A")
    """Where the switch begins that ends at the cutoff, A."""
    neuron: list[int] = field(default_factory=lambda: [10, 20, 40])
    """Widths of the embedding network."""
    resnet_dt: bool = False
    """Residual layers with trained step sizes."""
    set_davg_zero: bool = False
    """Divide by deviations without subtracting means."""
    davg: list[list[float]] | None = None
    """Mean of the rows, by species of the centre, 1/A. From the training data."""
    dstd: list[list[float]] | None = None
    """Deviation of the rows, by species of the centre, 1/A. From the training data."""
    most_neighbours: list[int] | None = None
    """Largest number of neighbours of each species of an atom in the training data; slots for them are reserved on export."""

    def __post_init__(self) -> None:
        if isinstance(self.sel, int) and not self.takes_total:
            raise ForgefieldError(
                f"model.descriptor.sel is {self.sel}; it must be a list with one number for each species, auto or null."
            )


@dataclass
class EmbeddingOptions(RowOptions):
    """Options of descriptors with an embedding of each neighbour."""

    type_one_side: bool = False
    """An embedding network for each species of the neighbour, not for each pair of species."""
    neighbour_norm: float | None = None
    """Divisor of sums over neighbours. Default: the sum of `sel`, or without it the mean number of neighbours."""


@dataclass
class AngularOptions(EmbeddingOptions):
    """Options of descriptors from distances and angles."""

    axis_neuron: int = option(4, at_least=1)
    """Columns of the embedding that the others are combined with."""


@dataclass
class SeE2ROptions(EmbeddingOptions):
    """Descriptor from distances only."""

    type: str = "se_e2_r"


@dataclass
class SeE2AOptions(AngularOptions):
    """Descriptor from distances and angles (DeepPot-SE)."""

    type: str = "se_e2_a"


class ParameterOptions(NamedTuple):
    """Parameters of frames or atoms that a fitting network reads: how many numbers, their means and deviations."""

    size: int
    mean: list[float] | None
    deviation: list[float] | None


@dataclass
class FittingOptions:
    """Options that all fitting networks have."""

    type: str = ""
    neuron: list[int] = field(default_factory=lambda: [120, 120, 120])
    """Widths of its hidden layers."""
    resnet_dt: bool = True
    """Residual layers with trained step sizes."""
    activation_function: str = "tanh"
    """As in the descriptor."""
    numb_fparam: int = option(0, at_least=0)
    """Numbers per frame that the network reads in addition to the descriptor: the field `fparam` of the data."""
    numb_aparam: int = option(0, at_least=0)
    """Numbers per atom that it reads: the field `aparam`."""
    default_fparam: list[float] | None = None
    """Used for frames without `fparam`."""
    trainable: bool | list[bool] = True
    """Train the network; or one flag for each hidden layer and one for the last."""
    seed: int | None = None
    """Of its initial weights; default: the seed of the run."""
    precision: str = option("default", choices=PRECISIONS)
    """float32 or float64; default: that of the training."""
    fparam_avg: list[float] | None = None
    """Means of `fparam`, from the training data."""
    fparam_std: list[float] | None = None
    """Deviations of `fparam`, from the training data."""
    aparam_avg: list[float] | None = None
    """Means of `aparam`, from the training data."""
    aparam_std: list[float] | None = None
    """Deviations of `aparam`, from the training data."""

    @property
    def parameters(self) -> dict[str, ParameterOptions]:
        """What is configured about the parameters of frames and of atoms, by the name of the field."""
        return {
            "fparam": ParameterOptions(self.numb_fparam, self.fparam_avg, self.fparam_std),
            "aparam": ParameterOptions(self.numb_aparam, self.aparam_avg, self.aparam_std),
        }


@dataclass
class EnergyFittingOptions(FittingOptions):
    """Fitting network of atomic energies."""

    type: str = "ener"
    rcond: float | None = None
    """Singular values below this fraction of the largest are ignored in the fit of `out_bias`."""
    dim_case_embd: int = option(0, at_least=0)
    """Numbers that tell apart branches with a common network: 1 for the branch, in the order of names, 0 for others."""
    case: int | None = option(None, at_least=0)
    """With `dim_case_embd`, in a model with one energy: the index of its branch; null: all numbers are 0."""
    atom_ener: list[float | None] = field(default_factory=list)
    """Energy of the isolated atom of each species, eV, or null. Networks of species with one are zero without neighbours."""


@dataclass
class DeepPotOptions:
    """Options of a Deep Potential."""

    descriptor: dict[str, Any] = field(default_factory=lambda: {"type": "se_e2_a"})
    """The descriptor: `type` (se_e2_a, se_e2_r, se_e3, se_e3_tebd, se_atten, se_atten_v2, dpa2, dpa3, hybrid) and its options
    by DeePMD-kit's names."""
    fitting_net: dict[str, Any] = field(default_factory=lambda: {"type": "ener"})
    """The fitting network: `type` (ener, property, dos, dipole, polar) and its options by DeePMD-kit's names."""
    pair_exclude_types: list[list[int]] = field(default_factory=list)
    """Pairs of species, by index, that are not neighbours of each other."""
    atom_exclude_types: list[int] = field(default_factory=list)
    """Species, by index, whose atoms have no energy (dipole, ...)."""
    zbl: bool | dict[str, float] = False
    """Add the ZBL repulsion of nuclei; {polynomial_cutoff_p: 6} sets its envelope."""
    use_srtab: str | None = None
    """File with a table of pair energies that replaces the network at short distances."""
    smin_alpha: float | None = option(None, above=0, unit="A")
    """With `use_srtab`: width of the smooth minimum over the distances to neighbours, A."""
    sw_rmin: float | None = None
    """With `use_srtab`: an atom whose nearest neighbour is closer has the energy of the table, A."""
    sw_rmax: float | None = None
    """With `use_srtab`: an atom whose nearest neighbour is farther away has the energy of the network, A."""
    srtab: dict[str, Any] | None = None
    """The table that was read from `use_srtab`."""
    pair_table: str | None = None
    """File with a table of pair energies that are added to the network's, such as a dispersion correction."""
    pair_table_cutoff: float | None = option(None, above=0, unit="A")
    """Distance at which the energies of `pair_table` end, A; default: `data.cutoff`."""
    added_table: dict[str, Any] | None = None
    """The table that was read from `pair_table`."""
    out_bias: list[float] | None = None
    """Energy of each species that is added to the network's, eV. From the training data."""
    type_names: list[str] | None = None
    """Names of the species in systems and models of DeePMD-kit; default: the elements."""
    networks: list[dict[str, Any]] = field(default_factory=list)
    """Further networks whose energies are added, each with `descriptor`, `fitting_net` and `weight`, a factor of its energies
    (default 1)."""
    network_weight: float = 1.0
    """Factor of the energies of the first network, that of `descriptor` and `fitting_net`."""
    spin: dict[str, Any] | None = None
    """Spins as virtual atoms: `use_spin`, the magnetic species; `virtual_scale`, the distance of a virtual atom divided by the
    length of the spin; `rcut`, the cutoff of the descriptor, A. Reads the field `spin`, predicts `force_mag`."""
    branches: dict[str, Any] = field(default_factory=dict)
    """Several energies of one descriptor, by name, each learnt from its own data: {water: {}, ice: {fitting_net: {seed: 2}}}. A
    branch has its own fitting network, unless `share` names the branch whose network it uses, and its own `out_bias`."""


def check_network(where: str, options: RowOptions | FittingOptions, *, allow_none: bool = False) -> None:
    """Raise for options of a network that are wrong. allow_none: whether it may have no hidden layers."""
    check_values(options, where)
    check_activation(f"{where}.activation_function", options.activation_function)
    if (not options.neuron and not allow_none) or any(width < 1 for width in options.neuron):
        raise ForgefieldError(f"{where}.neuron is {options.neuron}; it needs at least one width, each at least 1.")


def check_descriptor(options: RowOptions, species: Sequence[str], cutoff: float) -> None:
    """Raise for descriptor options that are wrong."""
    where = "model.descriptor"
    check_network(where, options)
    check_sel(options.sel, species)
    check_pairs(f"{where}.exclude_types", options.exclude_types, len(species))
    if not options.rcut_smth < cutoff:
        raise ForgefieldError(f"{where}.rcut_smth is {options.rcut_smth:g}; it must be below data.cutoff={cutoff:g}.")
    if isinstance(options, AngularOptions) and options.axis_neuron > options.neuron[-1]:
        raise ForgefieldError(
            f"{where}.axis_neuron is {options.axis_neuron}; it must be at most the last width, {options.neuron[-1]}."
        )


def check_sel(sel: int | list[int] | str | None, species: Sequence[str]) -> None:
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
                f"{where} contains {list(pair)}; each entry is a pair of indices of species, from 0 to {n_species - 1}."
            )


def check_fitting(options: FittingOptions, species: Sequence[str]) -> None:
    """Raise for options of the fitting network that are wrong."""
    where = "model.fitting_net"
    check_network(where, options, allow_none=True)
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


@dataclass
class DipoleOptions(FittingOptions):
    """Fitting network of atomic dipoles."""

    type: str = "dipole"
    sel_type: int | list[int] | None = None
    """Species, by index, whose atoms have a dipole. Default: all."""


@dataclass
class PolarOptions(FittingOptions):
    """Fitting network of atomic polarisabilities."""

    type: str = "polar"
    sel_type: int | list[int] | None = None
    """Species, by index, whose atoms have a polarisability. Default: all."""
    fit_diag: bool = True
    """The network computes only the diagonal of a matrix in the space of the rotation's rows."""
    scale: float | list[float] = 1.0
    """Factor of polarisabilities; one number, or one for each species."""
    shift_diag: bool = True
    """Add `out_bias` to the diagonal."""
    out_bias: list[float] | None = None
    """A third of the trace of each species' polarisability, before `scale`. From the training data."""


@dataclass
class DosOptions(FittingOptions):
    """Fitting network of atomic densities of states."""

    type: str = "dos"
    numb_dos: int = option(300, at_least=1)
    """Points of the energy grid."""
    rcond: float | None = None
    """Singular values below this fraction of the largest are ignored in the fit of `out_bias`."""
    out_bias: list[list[float]] | None = None
    """Density of each species that is added to the network's. From the training data."""


@dataclass
class PropertyOptions(FittingOptions):
    """Fitting network of an invariant property."""

    type: str = "property"
    property_name: str = "property"
    """Its name among outputs and labels."""
    task_dim: int = option(1, at_least=1)
    """Number of components."""
    intensive: bool = False
    """The property of a frame is the mean over its atoms, not the sum."""
    distinguish_types: bool = True
    """`out_bias` and `out_std` differ between species."""
    out_bias: list[list[float]] | None = None
    """Added to the network's outputs, for each species. From the training data."""
    out_std: list[list[float]] | None = None
    """Factors of the network's outputs, for each species. From the training data; losses are measured in units of those of the
    first species."""


def unseen_species(excluded: Sequence[int], fitting: FittingOptions, n_species: int) -> tuple[int, ...]:
    """Indices of the species whose atoms have no value. excluded: `atom_exclude_types`."""
    selected = fitting.sel_type if isinstance(fitting, (DipoleOptions, PolarOptions)) else None
    seen = range(n_species) if selected is None else [selected] if isinstance(selected, int) else selected
    return tuple(number for number in range(n_species) if number in excluded or number not in seen)


def rcond_of(fitting: FittingOptions) -> float | None:
    """The option `rcond` of fitting networks that have it."""
    return fitting.rcond if isinstance(fitting, (EnergyFittingOptions, DosOptions)) else None


DESCRIPTORS = {
    "se_e2_a": "se_e2.SeE2A",
    "se_e2_r": "se_e2.SeE2R",
    "se_e3": "se_e3.SeE3",
    "se_atten": "se_atten.SeAtten",
    "se_atten_v2": "se_atten.SeAttenV2",
    "se_e3_tebd": "three_body.SeE3Tebd",
    "dpa2": "dpa2.Dpa2",
    "dpa3": "repflow.Dpa3",
    "hybrid": "hybrid.Hybrid",
}
"""Where the class of each descriptor is; it has `Options` and `complete`."""
FITTINGS = {
    "ener": "fitting.EnergyFitting",
    "property": "tensor_fitting.PropertyFitting",
    "dos": "tensor_fitting.DosFitting",
    "dipole": "tensor_fitting.DipoleFitting",
    "polar": "tensor_fitting.PolarFitting",
}
"""Where the class of each fitting network is; it has `Options` and `complete`."""
ALIASES = {
    "se_a": "se_e2_a",
    "se_r": "se_e2_r",
    "se_t": "se_e3",
    "se_at": "se_e3",
    "se_a_3be": "se_e3",
    "dpa1": "se_atten",
}
_DATA_SETTINGS = {"rcut": "data.cutoff", "type_map": "data.species", "ntypes": "data.species"}
_NOT_APPLICABLE = {
    "use_aparam_as_mask": "missing atoms are left out of the data",
    "layer_name": "networks do not share layers by name",
    "spin": "spins are options of model.spin",
}


def descriptor_part(
    section: Mapping[str, Any], where: str = "model.descriptor"
) -> tuple[type[Descriptor[Any]], AnyDescriptorOptions]:
    """Class and options of the section `model.descriptor`, or of a part of it. where: its key."""
    descriptor_class: type[Descriptor[Any]] = _class(section, where, "se_e2_a", DESCRIPTORS)
    options: AnyDescriptorOptions = _options(descriptor_class.Options, section, where, "se_e2_a")
    return descriptor_class, options


def fitting_part(section: Mapping[str, Any]) -> tuple[type[Fitting] | type[TensorFitting[Any]], FittingOptions]:
    """Class and options of the section `model.fitting_net`."""
    fitting_class: type[Fitting] | type[TensorFitting[Any]] = _class(section, "model.fitting_net", "ener", FITTINGS)
    options: FittingOptions = _options(fitting_class.Options, section, "model.fitting_net", "ener")
    return fitting_class, options


def check_parts(section: Mapping[str, Any]) -> None:
    """Raise for errors in the sections of descriptor and fitting network that are found without data."""
    if "descriptor" in section:
        descriptor_part(section["descriptor"])
    if "fitting_net" in section:
        fitting_part(section["fitting_net"])


def _type_name(section: Mapping[str, Any], default: str) -> str:
    name = str(section.get("type", default))
    return ALIASES.get(name, name)


def _class(section: Mapping[str, Any], where: str, default: str, classes: Mapping[str, str]) -> Any:
    name = _type_name(section, default)
    if name not in classes:
        raise ForgefieldError(
            f"{where}.type is '{name}'; choose one of {', '.join(classes)}.{did_you_mean(name, classes)}"
        )
    return ImportPath(f"forgefield.models.deeppot.{classes[name]}").load()


def _options(options_class: type, section: Mapping[str, Any], where: str, default: str) -> Any:
    name = _type_name(section, default)
    options = {key: value for key, value in section.items() if key != "type"}
    for key in options:
        if key in _DATA_SETTINGS:
            raise ForgefieldError(f"{where}.{key} is not set here: it is {_DATA_SETTINGS[key]}.")
        if key in _NOT_APPLICABLE:
            raise ForgefieldError(f"{where}.{key} does not apply: {_NOT_APPLICABLE[key]}; remove it.")
    check_keys(options_class, options, where=where, what=name)
    return options_class(**options, type=name)
