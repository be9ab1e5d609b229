"""The interface between a model and the rest of Forgefield: every capability and hook, with its default.

Generic code (potential, engines, checks, registry) reads what is declared here and nothing else. A model overrides what it does
differently. A complete one, with springs between neighbours whose stiffness is learnt:

    import torch
    from torch import nn
    from forgefield.models import AtomisticModel

    class Springs(AtomisticModel):
        only_edge_vectors = True                        # forces are then derivatives in the edge vectors, which is faster

        def __init__(self, species, cutoff, power: int = 3):
            super().__init__()
            self.species, self.cutoff, self.power = tuple(species), cutoff, power
            self.stiffness = nn.Parameter(torch.ones(len(species), dtype=torch.float64))

        def forward(self, batch, edges):
            centre = batch["edge_index"][1]
            stretch = self.cutoff - edges.vectors.norm(dim=1)
            energy = self.stiffness[batch["species"][centre]] * stretch**self.power
            return energy.new_zeros(len(batch["species"])).index_add(0, centre, energy)

Saved as my_package.py it is trained with `model: {name: my_package.Springs, power: 4}`. Any other `torch.nn.Module` whose
`forward(batch)` returns atomic energies works too: `declared` wraps it once in `PlainModule`, which declares the defaults.

Models that a config selects by a short name (`model: {name: nequip}`) derive from `RegisteredModel`, which adds what is needed
between a config and a model: options, presets, statistics of the training data, branches, new species.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.edges import Batch, EdgeContext

Inputs = Mapping[str, tuple[str, int]]
"""Additional keys of a batch that a model reads: name -> (`frame` or `atom`, how many numbers each has)."""
Tangents = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Returns features (n_atoms, feature_dim), atomic energies (n_atoms,), eV, and the tangents of these energies (n_atoms,)."""
Section = Mapping[str, Any]
"""The `model` section of a config without its name, or resolved options, as plain values."""


class LastLayer(NamedTuple):
    """Atomic energies as a linear function of the weights of the last layer: features @ weights + offsets, all float64.

    features: (n_atoms, n_weights), functions of the structure.
    weights: (n_weights,).
    offsets: (n_atoms,), eV, what does not depend on these weights: energy shifts, pair repulsion.
    """

    features: Tensor
    weights: Tensor
    offsets: Tensor

    def energies(self) -> Tensor:
        """(n_atoms,) atomic energies, eV."""
        return self.features @ self.weights + self.offsets


class ExtraOutput(Protocol):
    """Description of an output other than energy, forces and stress.

    per: `frame` or `atom`, what has a value.
    shape: of one value.
    unit: of the values, as text.
    reduce: how the value of a frame follows from those of its atoms: `sum` (extensive), `mean`, `max` or `attention`
        (intensive).
    kind: how values transform under rotations: `values` (invariant), `vector`, `symmetric` or `tensor` (equivariant).
    scale: typical deviation from what composition or species predict, one number or one for each component; losses are
        measured in units of it.
    classes: labels of the classes of a classifier, whose outputs are logits; None for a regression.
    per_atom_errors: whether errors of frames are also measured per atom.
    uncounted: indices of the species whose atoms have no value: errors per atom are divided by the number of the other atoms.
    """

    per: str
    shape: list[int]
    unit: str
    reduce: str
    kind: str
    classes: list[float] | None

    @property
    def scale(self) -> float | list[float]: ...

    @property
    def per_atom_errors(self) -> bool: ...

    @property
    def uncounted(self) -> Sequence[int]: ...


@dataclass
class DirectOutput:
    """An output that a model has instead of energies; see `ExtraOutput`."""

    per: str
    shape: list[int]
    reduce: str
    kind: str = "values"
    scale: float | list[float] = 1.0
    unit: str = ""
    classes: list[float] | None = None
    cumulative: bool = False
    """Whether values are running sums over the last axis."""
    always: bool = True
    """Whether it is an output also where it is not trained."""
    per_atom_errors: bool = False
    uncounted: list[int] = field(default_factory=list)


@dataclass
class DerivativeOutput(DirectOutput):
    """An output that is minus the derivative of the energy in an input of atoms, such as a magnetic force."""

    variable: str = ""
    """The input, (n_atoms, 3), whose values are vectors."""


class AtomisticModel(nn.Module):
    """Base of models of atoms. `species` and `cutoff` are set by `__init__`; everything else has a default."""

    species: tuple[str, ...]
    """Chemical symbols; `batch["species"]` holds indices into them."""
    cutoff: float
    """Radius of the neighbour lists, A."""
    adaptive_cutoff: float | None = None
    """Radius up to which isolated atoms look for neighbours, A; None where the cutoff is the same for all atoms."""

    grows_to_nearest: bool = False
    """Whether the adaptive cutoff of an isolated atom ends near its nearest neighbours instead of at the limit."""

    only_edge_vectors: bool = False
    """Whether energies depend on positions and cells through the edge vectors alone. Forces and stress are then derivatives in
    the edge vectors, which is faster; otherwise in positions and strain."""
    ghost_atoms: str | None = None
    """How energies are computed where some neighbours are ghost atoms, owned by other processes of a simulation. `local` means
    that the energy of an atom depends on positions and species of its neighbours alone, `exchange` that layers pass what they
    gather along edges through `EdgeContext.fill_ghosts`, and None that it is not supported. Needs `only_edge_vectors`."""
    isolated_limit: bool = True
    """Whether an atom without neighbours has exactly the energy shift of its species."""
    trainable: ClassVar[bool] = True
    """Whether the model can have weights to train."""
    inputs: Inputs = {}
    """Additional keys of a batch that the model reads, by default none."""
    optional_inputs: tuple[str, ...] = ()
    """Those of `inputs` that have a default, so that frames need not have them."""
    type_names: tuple[str, ...] | None = None
    """Other names of `species`, which LAMMPS, systems of DeePMD-kit and structures of ASE may use; None: the symbols."""
    derivative_outputs: Mapping[str, DerivativeOutput] = {}
    """Outputs that are derivatives of the energy in one of `inputs`, by name."""
    branches: tuple[str, ...] = ()
    """Names of several energies of one model, in the order of `batch["branch"]`; empty for a model with one energy."""

    feature_dim: int | None = None
    """Invariant features of an atom that heads can read (see `encode`); None for a model without any."""
    has_energies: bool = True
    """Whether `encode` can return energies; without, the model is an encoder for heads alone."""

    sums_over_edges: bool = False
    """Whether `forward` sums over edges with `WeightedHarmonics`, which can use kernels in every engine."""
    convolves: bool = False
    """Whether `forward` convolves with `EdgeHarmonics`, which uses compiled C code on a CPU."""

    # ---- what a model computes

    def forward(self, batch: Batch, edges: EdgeContext) -> Tensor:
        """Atomic energies (n_atoms,), eV.

        batch: see `forgefield.data.batch`.
        edges: vectors and index lists.
        """
        raise self._lacks("atomic energies", "forward(batch, edges)")

    def encode(self, batch: Batch, edges: EdgeContext, *, energies: bool = True) -> tuple[Tensor, Tensor | None]:
        """Features (n_atoms, feature_dim), invariant and dependent on the atom's species, and atomic energies (n_atoms,), eV,
        or None without `energies`. For models with `feature_dim`."""
        raise self._lacks("features of atoms", "encode(batch, edges, energies=...)")

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        """The last layer of the network, in which atomic energies are linear. It is what uncertainties of a trained model are
        computed from (`forgefield.trust.uncertainty`)."""
        raise no_last_layer(type(self))

    def energy_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that energies depend on and features do not; they are frozen where no energy is trained."""
        return ()

    def values(self, batch: Batch, edges: EdgeContext, names: Sequence[str]) -> dict[str, Tensor]:
        """Outputs of these names, `(n_frames, *shape)` or `(n_atoms, *shape)`, float64; for models with such outputs instead of
        energies (`RegisteredModel.direct_outputs`)."""
        raise self._lacks(f"outputs other than energies ({', '.join(names)})", "values(batch, edges, names)")

    def _lacks(self, what: str, method: str) -> ForgefieldError:
        return ForgefieldError(f"{type(self).__name__} does not compute {what}: it has no method {method}.")

    def calculated(self, batch: Batch, *, forces: bool, stress: bool) -> dict[str, Tensor] | None:
        """Energy, forces and stress of a model that does not leave derivatives to autograd; None for all others."""
        return None

    def forget_structures(self) -> None:
        """Drop everything that depends on earlier structures, such as neighbour lists of a wrapped calculator."""

    # ---- kernels

    def kernel_refusal(self) -> str | None:
        """Why generated kernels cannot compute this model; None where they can."""
        return "this model has none; use double or tangent."

    def tangents(self, batch: Batch, edges: EdgeContext) -> Tangents | None:
        """The second pass of a training step through kernels, for edge vectors that carry forward-mode tangents.

        Called while the tangents exist; what it returns is called afterwards. None (the default): there is no such pass, or the
        first one left nothing in `edges.memory`; `forward` is then differentiated in forward mode.
        """
        return None

    def weight_dtype(self) -> torch.dtype | None:
        """Precision of the weights; None for a model without parameters."""
        return next((parameter.dtype for parameter in self.parameters()), None)

    def radial_table_line(self, knots: int) -> str | None:
        """A sentence on the accuracy of tables with `knots` intervals, from which kernels read radial weights; None for models
        without tables."""
        return None

    # ---- energy shifts

    def species_shifts(self) -> Tensor | None:
        """Energy shift of each species (n_species,), eV, a parameter or buffer; None where there is not exactly one each."""
        return None

    def branch_shifts(self) -> Tensor | None:
        """Energy shift of each species in each branch (n_branches * n_species,), eV, branch by branch; None where there is not
        exactly one each."""
        return None

    def counted_species(self) -> Tensor | None:
        """(n_species,) 1 where atoms of a species contribute to the energy, 0 where they do not; None where all do."""
        return None

    def in_float64(self) -> nn.Module:
        """An independent copy that computes in float64."""
        return copy.deepcopy(self).to(torch.float64)


class StackedNetworks(nn.Module):
    """Base of layers whose parameters hold several networks, the first axis being that of networks."""

    matrices: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that are stacks of matrices; the others are stacks of vectors."""


OptionsT = TypeVar("OptionsT")


class RegisteredModel(AtomisticModel, Generic[OptionsT]):
    """Base of models with an entry in `forgefield.models.registry`, for a dataclass of options `OptionsT`.

    From config to model: `check_options` (needs no data), `measure` (statistics of the training data), `complete` (options with
    every number explicit), then `__init__` with these options; a run stores them and never needs its data again.
    """

    Options: ClassVar[type]
    """The dataclass of options: type and default of each field, and a docstring after it."""
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Options of `model.preset`, by name in capitals."""
    adapts: ClassVar[type | None] = None
    """For adapters: the class that `model.module` must derive from. It is imported and passed on as `make`."""
    supports_adaptive_cutoff: ClassVar[bool] = False
    """Whether `data.adaptive_cutoff` can be used."""
    adds_branches: ClassVar[bool] = False
    """Whether branches can be added to a trained model (`add_branches`)."""
    shift_option: ClassVar[str] = "energy_shifts"
    """Name of the option that holds the energy shifts of `species_shifts`."""
    fits_shifts_to_new_energies: ClassVar[bool] = False
    """Whether shifts are fitted to the data when a trained model without an energy gets one."""
    species_options: ClassVar[Mapping[str, str]] = {}
    """Options that name species by their indices, by dotted name: `pairs`, `indices`, or `rows` (one entry for each)."""
    seed_options: ClassVar[tuple[str, ...]] = ()
    """Options that matter only while weights are drawn, by dotted name."""
    training_options: ClassVar[tuple[str, ...]] = ()
    """Options that decide what is trained and may change when training starts from another run, by dotted name."""

    options: OptionsT
    make: Callable[..., object] | None

    def __init__(
        self,
        options: OptionsT,
        *,
        species: Sequence[str],
        cutoff: float,
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> None:
        """Subclasses also take `dtype`, the precision of the weights, and `generator`, which draws them.

        options: completed. make: for adapters, what `model.module` names.
        """
        super().__init__()
        self.options, self.species, self.cutoff = options, tuple(species), float(cutoff)
        self.adaptive_cutoff = None if adaptive_cutoff is None else float(adaptive_cutoff)
        self.make = make

    def register_trainable(self, name: str, value: Tensor, trainable: bool) -> None:
        """Register a tensor that is part of the state: as a parameter if it is trained, otherwise as a buffer."""
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    @classmethod
    def preset_options(cls, name: str, section: Section) -> dict[str, object]:
        """Options of a preset. section: the other options of the config, which these may follow."""
        return dict(cls.presets[name])

    @classmethod
    def check_options(cls, section: Section, *, make: Callable[..., object] | None = None) -> None:
        """Raise for options that are wrong whatever the data; names and types have been checked."""

    @classmethod
    def measure(
        cls, section: Section, batches: Callable[[], Iterable[Batch]], *, species: tuple[str, ...], cutoff: float
    ) -> dict[str, object]:
        """Statistics of the training data that `complete` needs in addition to `data.statistics.Statistics`.

        batches: training data with edges up to `cutoff`, A; called only if it is needed.
        """
        return {}

    @classmethod
    def complete(
        cls,
        options: OptionsT,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> OptionsT:
        """Options, checked and with every default explicit; what the config leaves open comes from the statistics."""
        return options

    @classmethod
    def direct_outputs(cls, section: Section) -> Mapping[str, DirectOutput]:
        """Outputs that the model with these options has instead of energies, by name. Default: none."""
        return {}

    @classmethod
    def derivatives(cls, section: Section) -> Mapping[str, DerivativeOutput]:
        """`derivative_outputs` of a model with these options. Default: none."""
        return {}

    @classmethod
    def excluded_species(cls, section: Section) -> tuple[int, ...]:
        """Indices of species whose atoms have no energy and do not count in losses and errors. Default: none."""
        return ()

    @classmethod
    def branch_names(cls, section: Section) -> list[str]:
        """Names of the branches (`AtomisticModel.branches`) of a model with these options. Default: none."""
        return []

    @classmethod
    def branch(
        cls, resolved: Section, state: Mapping[str, Tensor] | None, name: str | None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One branch as a model with one energy: its resolved options and its state (empty without `state`)."""
        raise ForgefieldError(f"there is no branch '{name}': the model has one energy; leave the head out.")

    @classmethod
    def add_branches(
        cls, resolved: Section, state: Mapping[str, Tensor], names: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Resolved options and state of the model with the branches `names`. Those that are new start as copies: of the only
        energy that the model has had, or of its first branch."""
        raise ForgefieldError(f"branches cannot be added to a trained {cls.__name__}.")

    @classmethod
    def check_new_species(cls, resolved: Section, new: Sequence[str], source: str) -> None:
        """Raise unless a trained model can be extended by species. resolved: its options. source: where it is from."""
        raise ForgefieldError(
            f"{unknown_species(resolved, new, source)} species cannot be added to a {resolved['name']}; train a new model."
        )

    @classmethod
    def add_species(cls, resolved: Section, new: Sequence[str], measured: Mapping[str, Any]) -> dict[str, Any]:
        """Resolved options with new species after the others. measured: result of `measure` on data with all of them."""
        raise ForgefieldError(f"species cannot be added to a trained {cls.__name__}.")

    @classmethod
    def add_species_to_state(
        cls, fresh: Mapping[str, Tensor], trained: Mapping[str, Tensor], n_old: int, n_new: int
    ) -> dict[str, Tensor]:
        """State of the model for n_old + n_new species. fresh: initial state for all. trained: for the first n_old."""
        raise ForgefieldError(f"species cannot be added to a trained {cls.__name__}.")

    @classmethod
    def set_shifts(cls, resolved: dict[str, Any], values: Sequence[float]) -> None:
        """Change the energy shifts in resolved options. values: one for each species, eV."""
        if cls.shift_option in resolved:
            resolved[cls.shift_option] = dict(zip(resolved["species"], values))

    @classmethod
    def equivalent(cls, name: str, one: object, other: object, section: Section) -> bool:
        """Whether two different values of an option mean the same. name: dotted. section: options next to the second one."""
        return False

    @classmethod
    def isolated_energies(cls, resolved: Section) -> dict[str, float] | None:
        """Energies of isolated atoms that the options fix, by species, eV; None where they are trained or unknown."""
        shifts: float | Mapping[str, float] | None = resolved.get("energy_shifts")
        if shifts is None or resolved.get("energy_shifts_trainable"):
            return None
        return dict(shifts) if isinstance(shifts, Mapping) else dict.fromkeys(resolved["species"], shifts)

    def in_float64(self) -> nn.Module:
        """The model built again in float64, with the same weights: constants of a float32 model are rounded."""
        device = next(self.parameters(), torch.empty(0)).device
        arguments: dict[str, object] = {"species": self.species, "cutoff": self.cutoff}
        if self.supports_adaptive_cutoff:
            arguments["adaptive_cutoff"] = self.adaptive_cutoff
        if self.make is not None:
            arguments["make"] = self.make
        build: Callable[..., nn.Module] = type(self)
        rebuilt = build(self.options, **arguments, dtype=torch.float64, generator=torch.Generator())
        rebuilt.load_state_dict(self.state_dict())
        return rebuilt.to(device)


def unknown_species(resolved: Section, new: Sequence[str], source: str) -> str:
    """The beginning of a message about species that the model of `source` was not trained for."""
    return (
        f"data.species names {', '.join(new)}, which the model of {source} was not trained for (its species are "
        f"{', '.join(resolved['species'])}), and"
    )


class PlainModule(AtomisticModel):
    """A `torch.nn.Module` that does not derive from `AtomisticModel`, with the defaults declared.

    Its `forward(batch)` gets the batch with the additional key `edge_vectors`, (n_edges, 3), A, float64. Attributes of the same
    names as here are honoured: adaptive_cutoff, only_edge_vectors, inputs, optional_inputs, isolated_limit, energy_shifts,
    feature_dim, energy_parameters and `encode(batch, energies=...)`; with `feature_dim` and without `encode`, `forward` returns
    the features.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        declared: dict[str, Any] = {
            "species": (), "cutoff": 0.0, "adaptive_cutoff": None, "only_edge_vectors": False, "inputs": {},
            "optional_inputs": (), "isolated_limit": True, "feature_dim": None, "encode": None,
        }  # fmt: skip
        declared = {name: getattr(module, name, default) for name, default in declared.items()}
        self.species, self.cutoff = tuple(declared["species"]), float(declared["cutoff"])
        adaptive, features = declared["adaptive_cutoff"], declared["feature_dim"]
        self.adaptive_cutoff = None if adaptive is None else float(adaptive)
        self.feature_dim = None if features is None else int(features)
        self.only_edge_vectors, self.isolated_limit = declared["only_edge_vectors"], declared["isolated_limit"]
        self.inputs, self.optional_inputs = dict(declared["inputs"]), tuple(declared["optional_inputs"])
        self._encode: Callable[..., tuple[Tensor, Tensor | None]] | None = declared["encode"]
        self.has_energies = self._encode is not None

    def forward(self, batch: Batch, edges: EdgeContext) -> Tensor:
        energies: Tensor = self.module(batch | {"edge_vectors": edges.vectors})
        return energies

    def encode(self, batch: Batch, edges: EdgeContext, *, energies: bool = True) -> tuple[Tensor, Tensor | None]:
        if self._encode is None:
            return self.forward(batch, edges), None
        return self._encode(batch | {"edge_vectors": edges.vectors}, energies=energies)

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        parameters: Callable[[], Iterable[nn.Parameter]] = getattr(self.module, "energy_parameters", tuple)
        yield from parameters()

    def species_shifts(self) -> Tensor | None:
        shifts = getattr(self.module, "energy_shifts", None)
        return shifts if isinstance(shifts, Tensor) and shifts.shape == (len(self.species),) else None

    def in_float64(self) -> nn.Module:
        return copy.deepcopy(self.module).to(torch.float64)


def no_last_layer(model: type[nn.Module]) -> ForgefieldError:
    """The error of models without `AtomisticModel.last_layer`."""
    return ForgefieldError(
        f"{model.__name__} does not define its last layer (it has no method last_layer(batch, edges)), from which "
        "uncertainties of a single model are computed; train several models and combine them with forgefield.Ensemble."
    )


def declared(model: nn.Module) -> AtomisticModel:
    """The model itself if it declares what it can do, else the same model in a `PlainModule`."""
    return model if isinstance(model, AtomisticModel) else PlainModule(model)
