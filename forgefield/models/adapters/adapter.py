"""Modules of other libraries as models: the base class of adapters, and adapters for two calling conventions.

`model.module` names a class of modules, or a function annotated to return one; `model.options` are its arguments. The registry
imports it, if that is allowed, and passes it as `make`. The energy of a frame is the sum of its species' shifts plus a scale
times the module's output; forces and stress are derivatives, as for any other model.
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
from forgefield.models.edges import Batch, EdgeContext, rows_times
from forgefield.models.interface import RegisteredModel
from forgefield.models.options import check_per_species, default_scale, from_statistics
from forgefield.ops.graph import Segments, gather


@dataclass
class AdapterOptions:
    """Options of an adapter. Numbers that are `None` come from statistics of the training data."""

    module: str | None = None
    """Import path of a class derived from torch.nn.Module, or of a function annotated to return one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments. Those that follow from the data (cutoff, elements, number of neighbours) are added if it has them."""
    features: str | None = None
    """Name of the features of atoms, for targets other than energies."""
    energy_scales: float | None = None
    """Factor of the module's energy, eV. Default: root mean square of the forces, times A."""
    energy_shifts: float | dict[str, float] | None = None
    """Energy of an atom that is added to the module's, eV, one or per species. Default: the reference energies."""
    energy_scales_trainable: bool = False
    """Train the scale."""
    energy_shifts_trainable: bool = False
    """Train the shifts."""
    module_folder: str | None = None
    """Folder of the module, if it is not on Python's path."""


class Adapter(RegisteredModel[AdapterOptions], ABC):
    """Base of the adapters. State: `module`, `energy_scales` (), `energy_shifts` (n_species,), float64.

    Features are the input of a submodule or part of the output, so that one pass computes them and the energies.
    """

    Options = AdapterOptions
    adapts = nn.Module
    isolated_limit = False
    """The module may add to the shift of an isolated atom."""
    energy_scales: Tensor
    energy_shifts: Tensor
    numbers: Tensor
    of_frames = True
    """Whether `evaluate` returns energies of frames."""
    make: Callable[..., object]

    def __init__(
        self,
        options: AdapterOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        make: Callable[..., object],
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, make=make)
        per_species = options.energy_shifts
        if isinstance(per_species, Mapping):
            shifts = [per_species[symbol] for symbol in species]
        else:
            shifts = [per_species or 0.0] * len(species)
        self.register_trainable(
            "energy_shifts", torch.tensor(shifts, dtype=torch.float64), options.energy_shifts_trainable
        )
        scale = torch.tensor(1.0 if options.energy_scales is None else options.energy_scales, dtype=torch.float64)
        self.register_trainable("energy_scales", scale, options.energy_scales_trainable)
        self.register_buffer("numbers", torch.tensor([atomic_numbers[s] for s in self.species]), persistent=False)
        self.dtype = dtype
        with seeded(generator.initial_seed(), dtype):
            module = make(**options.options)
        self.module = self.prepare(_require_module(module, str(options.module)))
        if options.features is not None:
            self.feature_dim = self._measure_features()

    @classmethod
    def check_options(cls, section: Mapping[str, Any], *, make: Callable[..., object] | None = None) -> None:
        check_arguments(section, make)

    @classmethod
    def complete(
        cls,
        options: AdapterOptions,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> AdapterOptions:
        check_per_species("model.energy_shifts", options.energy_shifts, species, positive=False)
        check_per_species("model.energy_scales", options.energy_scales, species, positive=True)
        for symbol in species:
            if not atomic_numbers.get(symbol):
                raise ForgefieldError(f"model.name: adapters need chemical elements; {symbol} is not one.")
        named, _ = _arguments(make)
        from_data = cls.arguments_from_data(species, cutoff, statistics)
        arguments = {key: value for key, value in from_data.items() if key in named} | dict(options.options)
        for key in ("cutoff", "r_max"):
            if key in named and float(arguments[key]) != cutoff:
                raise ForgefieldError(
                    f"model.options.{key} is {arguments[key]} and data.cutoff is {cutoff:g}; the model sees the edges of the "
                    f"data, so leave model.options.{key} out."
                )
        folder = user_module_folder(str(options.module))
        filled: dict[str, Any] = {"options": arguments, "module_folder": None if folder is None else str(folder)}
        if options.energy_scales is None:
            filled["energy_scales"] = default_scale(statistics)
        if options.energy_shifts is None:
            filled["energy_shifts"] = from_statistics(statistics, "reference_energies", "energy_shifts")
        return dataclasses.replace(options, **filled)

    @classmethod
    def arguments_from_data(
        cls, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> dict[str, Any]:
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

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module with the changes that the adapter needs."""
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
        values, features = self.evaluate(batch, edges or EdgeContext.of(batch))
        assert features is not None
        return features, self._atomic(values, batch) if energies else None

    def energy_parameters(self) -> Iterator[nn.Parameter]:
        """Scale and shifts. Parameters of the module that features do not depend on have no gradient anyway."""
        for name, parameter in self.named_parameters():
            if name.startswith("energy_"):
                yield parameter

    def species_shifts(self) -> Tensor:
        return self.energy_shifts

    def _atomic(self, values: Tensor, batch: Batch) -> Tensor:
        """Atomic energies (n_atoms,), eV, from the result of `evaluate`."""
        species, values = batch["species"], values.reshape(-1).double()
        if values.shape[0] != species.shape[0] or self.of_frames:
            n_atoms = batch["n_atoms"]
            if values.shape[0] != n_atoms.shape[0]:
                raise ForgefieldError(
                    f"{self.options.module} returned {values.shape[0]} numbers for {n_atoms.shape[0]} frames; it should return "
                    "the energy of each frame (is there an option that sets its output to one number?)."
                )
            share = values / n_atoms.to(values.dtype)
            values = gather(share, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
        return gather(self.energy_shifts, Segments(species, len(self.species))) + self.energy_scales * values

    def _measure_features(self) -> int:
        """Number of features of an atom, from an evaluation of two atoms of the first species."""
        with torch.no_grad():
            batch = two_atoms(self.cutoff)
            _, features = self.evaluate(batch, EdgeContext.of(batch))
        if features is None or features.dim() != 2 or features.shape[0] != 2:
            shape = "nothing" if features is None else f"the shape {list(features.shape)} for two atoms"
            raise ForgefieldError(
                f"model.features={self.options.features} of {self.options.module} returned {shape}; features of atoms are "
                "(n_atoms, n)."
            )
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
    """A batch of one frame: two atoms of species 0, not periodic, half the cutoff apart."""
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
def record_input(module: nn.Module, name: str) -> Iterator[list[Tensor]]:
    """A list to which the input of the submodule of that name is appended whenever it is called in the `with` block."""
    inputs: list[Tensor] = []
    try:
        submodule = module.get_submodule(name)
    except AttributeError:
        names = [other for other, _ in module.named_modules() if other]
        raise ForgefieldError(
            f"model.features: the model has no submodule '{name}'.{did_you_mean(name, names)}"
        ) from None
    handle = submodule.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        yield inputs
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


def _require_module(module: object, path: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ForgefieldError(f"model.module: {path} returned a {type(module).__name__}; it must be a torch.nn.Module.")
    return module


class AseLike(Adapter):
    """Adapter for models of one structure with ASE's names: `forward(atomic_numbers=, positions=, cell=, pbc=)`.

    They are called frame by frame with torch tensors, so that forces and stress are derivatives; neighbours, periodic images
    and smoothness are up to the model. The result is a tensor with one number, or a dict with `energy`. `model.features`: key
    of a dict result with features of atoms (n_atoms, n).
    """

    def evaluate(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        numbers = self.numbers.index_select(0, batch["species"])
        energies, features, start = [], [], 0
        for frame, n_atoms in enumerate(batch["n_atoms"].tolist()):
            end = start + n_atoms
            result = self.module(
                atomic_numbers=numbers[start:end],
                positions=batch["positions"][start:end].to(self.dtype),
                cell=batch["cell"][frame].to(self.dtype),
                pbc=batch["pbc"][frame],
            )
            energies.append(self._energy(result))
            if self.options.features is not None:
                features.append(result[self.options.features])
            start = end
        return torch.stack(energies), torch.cat(features) if features else None

    def _energy(self, result: object) -> Tensor:
        energy = result.get("energy") if isinstance(result, Mapping) else result
        if not isinstance(energy, Tensor) or energy.numel() != 1:
            raise ForgefieldError(
                f"{self.options.module} should return the energy of a structure: one number, or a dict with the key 'energy'."
            )
        return energy.reshape(())


class MaceLike(Adapter):
    """Adapter for models that are called like MACE: with a dict of tensors, returning a dict with `energy` or `node_energy`.

    Keys: positions (n_atoms, 3), node_attrs (n_atoms, n_species) one-hot, edge_index (2, n_edges) sender and receiver, shifts
    (n_edges, 3) A and unit_shifts (n_edges, 3) with vector = positions[receiver] - positions[sender] + shifts, cell
    (3 n_frames, 3), batch (n_atoms,), ptr (n_frames + 1,), head (n_frames,). `model.features`: key of the output with features
    of atoms (`node_feats`), which have to be invariant.
    """

    of_frames = False

    def evaluate(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        accepted = inspect.signature(self.module.forward).parameters
        requests = {"training": self.training, "compute_force": False}
        result = self.module(self._data(batch), **{key: value for key, value in requests.items() if key in accepted})
        energies = result.get("node_energy")
        if energies is None:
            energies = result.get("energy")
            if energies is None:
                raise ForgefieldError(
                    f"{self.options.module} returned {', '.join(result)}; it should return 'node_energy' (n_atoms,) or "
                    "'energy' (n_frames,)."
                )
            share = energies.reshape(-1) / batch["n_atoms"].to(energies.dtype)
            energies = share.index_select(0, batch["frame"])
        features = None if self.options.features is None else result.get(self.options.features)
        return energies, features

    def _data(self, batch: Batch) -> dict[str, Tensor]:
        (source, destination), n_atoms = batch["edge_index"], batch["n_atoms"]
        cells = batch["cell"].index_select(0, batch["frame"].index_select(0, destination))
        # Forgefield's vectors go from the receiver to the sender, so both change sign.
        shifts = -rows_times(batch["edge_shift"], cells)
        identity = torch.eye(len(self.species), dtype=self.dtype, device=source.device)
        return {
            "positions": batch["positions"].to(self.dtype),
            "node_attrs": identity.index_select(0, batch["species"]),
            "edge_index": batch["edge_index"],
            "shifts": shifts.to(self.dtype),
            "unit_shifts": (-batch["edge_shift"]).to(self.dtype),
            "cell": batch["cell"].flatten(0, 1).to(self.dtype),
            "batch": batch["frame"],
            "ptr": torch.nn.functional.pad(torch.cumsum(n_atoms, 0), (1, 0)),
            "head": torch.zeros_like(n_atoms),
        }
