"""What all adapters share: the module of another library, made from its import path and options, and the energies around it.

`model.module` names a class of modules, or a function whose return annotation says that it makes one; `model.options` are its
arguments. The registry imports it, where that is allowed, and passes it as `make`. The energy of a frame is
the sum of its species' shifts plus a scale times what the module says; forces and stress are derivatives, as of any model here.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from ase.data import atomic_numbers
from torch import Tensor, nn

from forgefield.config.components import user_module_folder
from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.building import seeded
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import RegisteredModel
from forgefield.models.options import check_per_species, default_scale, from_statistics
from forgefield.ops.graph import Segments, gather


@dataclass
class ForeignOptions:
    """Options of an adapter. Numbers left `None` are filled in from the statistics of the training data."""

    module: str | None = None
    """Import path of a class derived from torch.nn.Module, or of a function annotated to return one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments. Those that the data knows (cutoff, elements, number of neighbours) are filled in where it has them."""
    features: str | None = None
    """Where features of atoms are found, for targets beside energies."""
    energy_scales: float | None = None
    """What the module's energy is multiplied by, eV. Default: root mean square of the forces, times A."""
    energy_shifts: float | dict[str, float] | None = None
    """Energy of an atom that is added to the module's, eV, one or per species. Default: the reference energies."""
    energy_scales_trainable: bool = False
    """Train the scale."""
    energy_shifts_trainable: bool = False
    """Train the shifts."""
    module_folder: str | None = None
    """Where the module was found, if Python would not find it by itself."""


class Foreign(RegisteredModel[ForeignOptions], ABC):
    """Base of the adapters. State: `module`, `energy_scales` (), `energy_shifts` (n_species,), float64.

    Features are an input of a submodule or a part of the output, so one pass gives them and the energies.
    """

    Options = ForeignOptions
    adapts = nn.Module
    isolated_limit = False
    """An isolated atom has the energy that the module gives it, in addition to its shift."""
    energy_scales: Tensor
    energy_shifts: Tensor
    numbers: Tensor
    make: Callable[..., object]

    def __init__(
        self,
        options: ForeignOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        make: Callable[..., object],
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, make=make)
        given = options.energy_shifts
        shifts = [given[s] for s in species] if isinstance(given, Mapping) else [given or 0.0] * len(species)
        self._hold("energy_shifts", torch.tensor(shifts, dtype=torch.float64), options.energy_shifts_trainable)
        scale = torch.tensor(1.0 if options.energy_scales is None else options.energy_scales, dtype=torch.float64)
        self._hold("energy_scales", scale, options.energy_scales_trainable)
        self.register_buffer("numbers", torch.tensor([atomic_numbers[s] for s in self.species]), persistent=False)
        self.dtype = dtype
        with seeded(generator.initial_seed(), dtype):
            made = make(**options.options)
        self.module = self.prepared(_module(made, str(options.module)))
        if options.features is not None:
            self.feature_dim = self._width_of_features()

    @classmethod
    def check_options(cls, section: Mapping[str, Any], *, make: Callable[..., object] | None = None) -> None:
        check_arguments(section, make)

    @classmethod
    def complete(
        cls,
        options: ForeignOptions,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> ForeignOptions:
        check_per_species("model.energy_shifts", options.energy_shifts, species, positive=False)
        check_per_species("model.energy_scales", options.energy_scales, species, positive=True)
        for symbol in species:
            if not atomic_numbers.get(symbol):
                raise ForgefieldError(f"model.name: adapters need chemical elements; {symbol} is not one.")
        named, _ = _arguments(make)
        known = cls.known_arguments(species, cutoff, statistics)
        given = {key: value for key, value in known.items() if key in named} | dict(options.options)
        for key in ("cutoff", "r_max"):
            if key in named and float(given[key]) != cutoff:
                raise ForgefieldError(
                    f"model.options.{key} is {given[key]} and data.cutoff is {cutoff:g}; the edges of the data are those "
                    f"that the model sees, so leave model.options.{key} out."
                )
        folder = user_module_folder(str(options.module))
        filled: dict[str, Any] = {"options": given, "module_folder": None if folder is None else str(folder)}
        if options.energy_scales is None:
            filled["energy_scales"] = default_scale(statistics)
        if options.energy_shifts is None:
            filled["energy_shifts"] = from_statistics(statistics, "reference_energies", "energy_shifts")
        return dataclasses.replace(options, **filled)

    @classmethod
    def known_arguments(cls, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by their usual names that follow from the data."""
        neighbours = statistics.get("mean_neighbours")
        return {
            "cutoff": cutoff,
            "r_max": cutoff,
            "atomic_numbers": [atomic_numbers[symbol] for symbol in species],
            "num_elements": len(species),
            "avg_num_neighbors": 1.0 if not neighbours else float(neighbours),
            "atomic_energies": [0.0] * len(species),
        }

    def prepared(self, module: nn.Module) -> nn.Module:
        """The module as it is called."""
        return module

    @abstractmethod
    def evaluate(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        """Energies of frames (n_frames,) or atoms (n_atoms,), in units of the scale; and features of atoms with
        `model.features`."""

    def forward(self, batch: Batch, edges: EdgeContext | None = None) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64; energies of frames are divided equally among their atoms."""
        return self._atomic(self.evaluate(batch, edges or EdgeContext.of(batch))[0], batch)

    def encode(
        self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Features (n_atoms, feature_dim) and atomic energies."""
        made, features = self.evaluate(batch, edges or EdgeContext.of(batch))
        assert features is not None
        return features, self._atomic(made, batch) if energies else None

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        """Scale and shifts. Parameters of the module that features do not depend on get no gradient in any case."""
        for name, parameter in self.named_parameters():
            if name.startswith("energy_"):
                yield parameter

    def species_shifts(self) -> Tensor:
        return self.energy_shifts

    def _atomic(self, made: Tensor, batch: Batch) -> Tensor:
        species, made = batch["species"], made.reshape(-1).double()
        if made.shape[0] != species.shape[0] or self.of_frames:
            n_atoms = batch["n_atoms"]
            if made.shape[0] != n_atoms.shape[0]:
                raise ForgefieldError(
                    f"{self.options.module} gave {made.shape[0]} numbers for {n_atoms.shape[0]} frames; the energy of each "
                    "frame is wanted (an option that sets its output to one number?)."
                )
            share = made / n_atoms.to(made.dtype)
            made = gather(share, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
        return gather(self.energy_shifts, Segments(species, len(self.species))) + self.energy_scales * made

    of_frames = True
    """Whether `evaluate` gives energies of frames."""

    def _hold(self, name: str, value: Tensor, trainable: bool) -> None:
        if trainable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def _width_of_features(self) -> int:
        """Found by asking: two atoms of the first species."""
        with torch.no_grad():
            batch = two_atoms(self.cutoff)
            _, features = self.evaluate(batch, EdgeContext.of(batch))
        if features is None or features.dim() != 2 or features.shape[0] != 2:
            found = "nothing" if features is None else f"the shape {list(features.shape)} for two atoms"
            raise ForgefieldError(f"model.features={self.options.features} of {self.options.module} gives {found}; "
                                  "features of atoms are (n_atoms, n).")  # fmt: skip
        return int(features.shape[1])


def check_arguments(options: Mapping[str, Any], make: Callable[..., object] | None) -> None:
    """Raise for an argument in `model.options` that `make`, which `model.module` names, does not have."""
    named, takes_any = _arguments(make)
    for key in options.get("options") or {}:
        if key not in named and not takes_any:
            raise ForgefieldError(
                f"model.options.{key} is not an argument of {options['module']}.{did_you_mean(key, named)}"
            )


def two_atoms(cutoff: float) -> dict[str, Tensor]:
    """A batch of one frame: two atoms of species 0 in the open, half the cutoff apart."""
    vector = torch.tensor([0.5 * cutoff, 0.0, 0.0], dtype=torch.float64)
    return {
        "positions": torch.stack([torch.zeros_like(vector), vector]),
        "species": torch.zeros(2, dtype=torch.int64),
        "frame": torch.zeros(2, dtype=torch.int64),
        "n_atoms": torch.tensor([2]),
        "cell": torch.zeros(1, 3, 3, dtype=torch.float64),
        "pbc": torch.zeros(1, 3, dtype=torch.bool),
        "edge_index": torch.tensor([[1, 0], [0, 1]]),
        "edge_shift": torch.zeros(2, 3, dtype=torch.float64),
        "edge_vectors": torch.stack([vector, -vector]),
    }


@contextmanager
def caught_input(module: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """What the submodule of that name is called with inside; filled in once it has been."""
    found: list[Tensor] = []
    try:
        part = module.get_submodule(name)
    except AttributeError:
        names = [known for known, _ in module.named_modules() if known]
        raise ForgefieldError(
            f"model.features: there is no part '{name}' in the model.{did_you_mean(name, names)}"
        ) from None
    handle = part.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    try:
        yield found
    finally:
        handle.remove()


def _arguments(make: Callable[..., object] | None) -> tuple[list[str], bool]:
    """Names of a function's or a class's arguments, and whether it takes any others."""
    assert make is not None
    parameters: Iterable[inspect.Parameter] = inspect.signature(make).parameters.values()
    parameters = list(parameters)
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)], any(
        p.kind is p.VAR_KEYWORD for p in parameters
    )


def _module(made: object, path: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ForgefieldError(f"model.module: {path} made a {type(made).__name__}; it should be a torch.nn.Module.")
    return made
