"""An ASE calculator as a model that cannot be trained, for tests, predictions and as a baseline, and its importer.

The run of an imported calculator has no weights: its import path, arguments and elements are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, PropertyNotImplementedError
from ase.data import atomic_numbers
from torch import Tensor

from forgefield.config.components import user_module_folder
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.models.adapters.adapter import check_arguments
from forgefield.models.building import build_model
from forgefield.models.edges import Batch
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.models.interface import RegisteredModel
from forgefield.models.resolving import resolve_model


@dataclass
class CalculatorOptions:
    """Options of a calculator."""

    module: str | None = None
    """Import path of a class of ASE calculators, ase.calculators.emt.EMT, or of a function annotated to return one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments."""
    module_folder: str | None = None
    """Folder of its module, if it is not on Python's path."""


class CalculatorModel(RegisteredModel[CalculatorOptions]):
    """A model whose energies, forces and stress are those of the calculator; stress is NaN if it does not implement it.

    It has no weights; the buffer `placeholder` exists because files of weights must not be empty.
    """

    Options = CalculatorOptions
    adapts = BaseCalculator
    isolated_limit = False
    trainable = False
    placeholder: Tensor

    def __init__(
        self,
        options: CalculatorOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        make: Callable[..., object],
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species=species, cutoff=cutoff, make=make)
        self.calculator = self._new(make)
        self._make = make
        self.numbers = np.array([atomic_numbers[symbol] for symbol in species])
        self.register_buffer("placeholder", torch.zeros(1))

    def forget_structures(self) -> None:
        """Replace the calculator by a new one, which has no neighbour lists or results of earlier structures."""
        self.calculator = self._new(self._make)

    def _new(self, make: Callable[..., object]) -> BaseCalculator:
        calculator, options = make(**self.options.options), self.options
        if not isinstance(calculator, BaseCalculator):
            raise ForgefieldError(
                f"model.module: {options.module} returned a {type(calculator).__name__}; it must be an ASE calculator."
            )
        return calculator

    @classmethod
    def check_options(cls, section: Mapping[str, Any], *, make: Callable[..., object] | None = None) -> None:
        check_arguments(section, make)

    @classmethod
    def complete(
        cls,
        options: CalculatorOptions,
        *,
        species: tuple[str, ...],
        cutoff: float,
        statistics: Mapping[str, Any],
        adaptive_cutoff: float | None = None,
        make: Callable[..., object] | None = None,
    ) -> CalculatorOptions:
        folder = user_module_folder(str(options.module))
        return replace(options, module_folder=None if folder is None else str(folder))

    def calculated(self, batch: Batch, *, forces: bool, stress: bool) -> dict[str, Tensor]:
        names = ["energy", *(["forces"] if forces else []), *(["stress"] if stress else [])]
        results: dict[str, list[np.ndarray]] = {name: [] for name in names}
        start = 0
        for frame, n_atoms in enumerate(batch["n_atoms"].tolist()):
            atoms = self._atoms(batch, frame, start, start + n_atoms)
            for name in names:
                results[name].append(self._result(atoms, name))
            start += n_atoms
        energy = torch.from_numpy(np.stack(results["energy"])).to(batch["positions"])
        outputs = {"energy": energy, "atomic_energy": (energy / batch["n_atoms"]).index_select(0, batch["frame"])}
        if forces:
            outputs["forces"] = torch.from_numpy(np.concatenate(results["forces"])).to(batch["positions"])
        if stress:
            outputs["stress"] = torch.from_numpy(np.stack(results["stress"])).to(batch["positions"])
        return outputs

    def _atoms(self, batch: Batch, frame: int, start: int, end: int) -> Atoms:
        numbers = self.numbers[batch["species"][start:end].cpu().numpy()]
        atoms = Atoms(
            numbers,
            positions=batch["positions"][start:end].detach().cpu().numpy(),
            cell=batch["cell"][frame].detach().cpu().numpy(),
            pbc=batch["pbc"][frame].cpu().numpy(),
        )
        atoms.calc = self.calculator
        return atoms

    def _result(self, atoms: Atoms, name: str) -> np.ndarray:
        try:
            if name == "stress":
                has_volume = atoms.cell.volume > 0
                return atoms.get_stress(voigt=False) if has_volume else np.full((3, 3), np.nan)
            return np.asarray(atoms.get_potential_energy() if name == "energy" else atoms.get_forces())
        except (PropertyNotImplementedError, NotImplementedError) as error:
            if name == "stress":
                return np.full((3, 3), np.nan)
            raise ForgefieldError(f"{self.options.module} does not compute {name}.") from error


EDGES_UP_TO = 1.0
"""Cutoff, A; a calculator searches neighbours itself and does not use edges."""


def read_calculator(module: str, species: Sequence[str], options: str | None) -> ImportedModel:
    """module: import path of the calculator. options: JSON file with its arguments."""
    if not species:
        raise ForgefieldError("Name the elements of the calculator: --species Cu Au.")
    for symbol in species:
        if not atomic_numbers.get(symbol):
            raise ForgefieldError(f"--species {symbol}: there is no element of that name.")
    arguments = {} if options is None else json.loads(Path(options).read_text())
    section = {"name": "calculator", "module": module, "options": arguments}
    ordered = sorted(set(species), key=lambda symbol: atomic_numbers[symbol])
    resolved = resolve_model(section, species=ordered, cutoff=EDGES_UP_TO, trust=CONFIG)
    state = build_model(resolved, precision="float64", seed=0, trust=CONFIG).state_dict()
    return ImportedModel(resolved=resolved, state=state, precision="float64", origin=f"ASE calculator {module}")


class CalculatorImporter(Importer):
    """Imports ASE calculators."""

    accepts = ("options", "species")
    reasons = {"weights": "a calculator has none", "head": "a calculator is one model"}
    trust = CONFIG  # the user typed the import path of the calculator

    def read(self, request: ImportRequest) -> ImportedModel:
        return read_calculator(request.source, request.species or [], request.options)

    def run_name(self, request: ImportRequest) -> str:
        return request.source.split(".")[-1]


IMPORTER = CalculatorImporter()
