"""An ASE calculator as a model that cannot be trained: for tests, predictions and as a baseline for trained models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import BaseCalculator, PropertyNotImplementedError
from ase.data import atomic_numbers
from torch import Tensor

from forgefield.config.components import user_module_folder
from forgefield.errors import ForgefieldError
from forgefield.models.adapters.foreign import check_arguments
from forgefield.models.edges import Batch
from forgefield.models.interface import RegisteredModel


@dataclass
class CalculatorOptions:
    """What makes a calculator."""

    module: str | None = None
    """Import path of a class of ASE calculators, ase.calculators.emt.EMT, or of a function annotated to return one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments."""
    module_folder: str | None = None
    """Where it was found, if Python would not find it by itself."""


class CalculatorModel(RegisteredModel[CalculatorOptions]):
    """Holds the calculator. It has no weights; `placeholder` exists because files of weights are never empty.

    Energies, forces and stress are those of the calculator; stress is NaN where it has none.
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
        calculator = make(**options.options)
        if not isinstance(calculator, BaseCalculator):
            raise ForgefieldError(
                f"model.module: {options.module} made a {type(calculator).__name__}; it should be an ASE calculator."
            )
        self.calculator = calculator
        self.numbers = np.array([atomic_numbers[symbol] for symbol in species])
        self.register_buffer("placeholder", torch.zeros(1))

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
            raise ForgefieldError(f"{self.options.module} gives no {name}.") from error
