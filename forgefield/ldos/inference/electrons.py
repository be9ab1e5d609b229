"""The electronic structure of a structure from an LDOS network: descriptors on a grid, LDOS, and derived quantities.

`ElectronModel` loads a run for predictions; `ElectronicStructure` is its prediction for one structure at a temperature.
Energies are exact integrals of the predicted LDOS; the free energy needs the pseudopotentials of the calculations that the
network was trained on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.snapshot import PSEUDOPOTENTIALS
from forgefield.ldos.descriptors import DescriptorOptions, GridDescriptors, make_descriptors
from forgefield.ldos.descriptors.grid import grid_points
from forgefield.ldos.descriptors.neighbourhoods import default_sigma
from forgefield.ldos.electronic.density_energies import DensityEnergies, DensityTerms
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.fermi import band_energy, density, dos_of_ldos, entropy_energy, fermi_energy
from forgefield.ldos.electronic.upf import Pseudopotential, read_pseudopotentials
from forgefield.ldos.model import LDOSNetwork, load_network, negative_values
from forgefield.runs import Run

SLAB = 1 << 16
"""Points whose descriptors are in memory at the same time."""


@dataclass(frozen=True)
class ElectronicStructure:
    """Prediction for one structure. grid_shape: nx, ny, nz. ldos: (nx, ny, nz, levels), 1/(eV A^3). density: (nx, ny, nz),
    1/A^3. dos: (levels,), 1/eV. fermi_energy, band_energy, entropy (-TS), terms of the density and free_energy, their sum with
    band energy and entropy: eV. electrons: number for which the Fermi energy is determined.

    A model for densities predicts only density and terms. missing: reason why there is no free energy, if there is none.
    """

    atoms: Atoms
    temperature: float | None
    grid_shape: tuple[int, int, int]
    energies: EnergyGrid | None
    electrons: float
    ldos: Tensor | None
    density: Tensor
    dos: Tensor | None = None
    fermi_energy: float | None = None
    band_energy: float | None = None
    entropy: float | None = None
    terms: Mapping[str, float] | None = None
    free_energy: float | None = None
    missing: str | None = None

    def numbers(self) -> dict[str, Any]:
        """All scalars, JSON-compatible."""
        return {
            "formula": self.atoms.get_chemical_formula(),
            "n_atoms": len(self.atoms),
            "grid": list(self.grid_shape),
            "temperature": self.temperature,
            "electrons": self.electrons,
            "electrons_of_density": float(self.density.sum()) * self.atoms.cell.volume / self.density.numel(),
            "fermi_energy": self.fermi_energy,
            "band_energy": self.band_energy,
            "entropy": self.entropy,
            **(self.terms or {}),
            "free_energy": self.free_energy,
        }


class ElectronModel:
    """An LDOS run for predictions of structures.

    Arguments:
        run: name of a run, path of its folder, or a `Run`
        which: weights, `best` or `last`
        device: where descriptors, network and integrals are computed
        grid: points along each cell vector; default: the spacing of the training snapshots (`spacing`, A, is another)
        pseudopotentials: folder of UPF files; default: those stored in the run, or the folder named in its config
        electrons: in the cell; default: of the pseudopotentials, or as many per atom as the training snapshots had
        trust_code: whether code that the run names may be imported
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Run,
        *,
        which: str = "best",
        device: str | torch.device = "cpu",
        grid: Sequence[int] | None = None,
        spacing: float | None = None,
        pseudopotentials: str | os.PathLike[str] | None = None,
        electrons: float | None = None,
        trust_code: bool = False,
    ) -> None:
        self.run = Run.open(run, trust_code=trust_code)
        self.network: LDOSNetwork = load_network(self.run, which, device).requires_grad_(False)
        self.device = torch.device(device)
        self.grid = None if grid is None else _checked_grid(grid)
        if grid is not None and spacing is not None:
            raise ForgefieldError("grid and spacing both set the resolution of the grid; give only one of them.")
        if spacing is not None and not spacing > 0:
            raise ForgefieldError(
                f"spacing, the distance between grid points, must be a positive length in A, not {spacing}."
            )
        self.spacing, self.electrons = spacing, electrons
        info = self.run.info
        self.calculation: dict[str, Any] = info.get("calculation", {})
        self.negative = negative_values(info)
        self.options = self._descriptor_options()
        self._folder = None if pseudopotentials is None else Path(pseudopotentials)
        self._folder_is_explicit = pseudopotentials is not None

    def _descriptor_options(self) -> DescriptorOptions:
        settings = self.network.facts.descriptors
        if settings is None:
            raise ForgefieldError(
                f"Run {self.run.name} does not state how its descriptors were computed, so they cannot be computed for a "
                "structure; "
                "train with data.points.descriptors, as {type: bispectrum, twojmax: 10, cutoff: 4.67637}, or add it to "
                f"'points' of 'model' in {self.run.path / 'run.json'}."
            )
        return DescriptorOptions.from_mapping(settings, "data.points.descriptors")

    # ---- one structure

    @torch.no_grad()
    def __call__(self, atoms: Atoms, temperature: float | None = None) -> ElectronicStructure:
        """Predict one structure. temperature: of the electrons, K; not needed for a model of densities."""
        grid = self.network.energies
        temperature = None if grid is None else _checked_temperature(temperature, self.calculation)
        _require_cell(atoms)
        shape = self.grid_of(atoms)
        descriptors = self._descriptors(atoms, shape)
        energies, missing = self._density_energies(atoms, shape)
        electrons = self._electrons(atoms, energies)
        values = self._values(descriptors, atoms, shape)
        if grid is None:
            prediction = _from_density(values, atoms, shape, electrons, missing)
        else:
            assert temperature is not None
            prediction = _from_ldos(values, grid, atoms, shape, temperature, electrons, missing)
        return prediction if energies is None else _with_terms(prediction, energies.terms(prediction.density))

    def _values(self, descriptors: GridDescriptors, atoms: Atoms, shape: tuple[int, int, int]) -> Tensor:
        """Predictions of the network at every point, (n_points, columns), in the type of its weights."""
        cell = torch.as_tensor(np.array(atoms.cell), device=self.device)
        structure = (np.array(atoms.cell), atoms.positions, atoms.numbers, atoms.pbc, self.device)
        columns = len(self.network.output_shift)
        values = torch.empty(math.prod(shape), columns, dtype=self.network.dtype, device=self.device)
        for points, chunk in zip(grid_points(cell, shape).split(SLAB), values.split(SLAB)):
            chunk.copy_(self.negative(self.network(descriptors.at_points(points, *structure))))
        return values

    # ---- grid, descriptors, pseudopotentials

    def grid_of(self, atoms: Atoms) -> tuple[int, int, int]:
        """Points along each cell vector: as requested, or with `spacing` or the spacing of the training snapshots, rounded up
        to numbers that suit the fast Fourier transform."""
        if self.grid is not None:
            return self.grid
        spacing = [self.spacing] * 3 if self.spacing is not None else self.calculation.get("spacing")
        if spacing is None:
            raise ForgefieldError(
                f"Run {self.run.name} does not state the grid of its training snapshots; give the number of points along "
                "each cell vector "
                "(--grid 18 18 27, grid=(18, 18, 27)) or their distance (--spacing 0.13, A)."
            )
        lengths = atoms.cell.lengths()
        nx, ny, nz = (smooth_number(length / step) for length, step in zip(lengths, spacing))
        return nx, ny, nz

    def _descriptors(self, atoms: Atoms, shape: tuple[int, int, int]) -> GridDescriptors:
        species = list(self.run.species) or sorted(set(atoms.get_chemical_symbols()))
        for symbol in sorted(set(atoms.get_chemical_symbols())):
            if symbol not in species:
                raise ForgefieldError(
                    f"{atoms.get_chemical_formula()} contains {symbol}, on which run {self.run.name} was not trained; it "
                    "supports "
                    f"{', '.join(species)}."
                )
        options = self.options
        if options.type == "gaussian" and options.species is None and len(species) > 1:
            raise ForgefieldError(
                f"Run {self.run.name} does not state the order of the elements {', '.join(species)} in its descriptors; "
                "train with data.points.descriptors.species=[...]."
            )
        if options.type == "gaussian" and options.sigma is None:
            options = replace(options, sigma=default_sigma(torch.as_tensor(np.array(atoms.cell)), shape))
        descriptors = make_descriptors(options, species)
        if descriptors.size != len(self.network.input_shift):
            raise ForgefieldError(
                f"data.points.descriptors of run {self.run.name} produces {descriptors.size} columns, but its network expects "
                f"{len(self.network.input_shift)}; they are not those of its training data."
            )
        return descriptors

    def _pseudopotentials(self, atoms: Atoms) -> dict[str, Pseudopotential]:
        symbols, names = set(atoms.get_chemical_symbols()), self.calculation.get("pseudopotentials")
        if self._folder is not None:
            return read_pseudopotentials(self._folder, symbols, names)
        stored, configured = self.run.path / PSEUDOPOTENTIALS, self._named_folder()
        source_folder = stored if stored.is_dir() or configured is None else configured
        if not source_folder.is_dir():
            raise ForgefieldError(f"run {self.run.name} contains no pseudopotentials, and no folder was named")
        return read_pseudopotentials(source_folder, symbols, names)

    def _named_folder(self) -> Path | None:
        points = self.run.config.data.points
        folder = None if points is None else points.pseudopotentials
        return None if folder is None else Path(folder)

    def _density_energies(self, atoms: Atoms, shape: tuple[int, int, int]) -> tuple[DensityEnergies | None, str | None]:
        """Hartree, exchange-correlation and Ewald energies of a density; or None and the reason why they are not available."""
        try:
            pseudopotentials = self._pseudopotentials(atoms)
        except ForgefieldError as error:
            if self._folder_is_explicit:
                raise
            return None, str(error).rstrip(".")
        cell = torch.as_tensor(np.array(atoms.cell), device=self.device)
        positions, numbers = torch.as_tensor(atoms.positions, device=self.device), atoms.numbers.tolist()
        cutoff = self.calculation.get("ecutrho")
        charge = 0.0
        if self.electrons is not None:
            valences = [pseudopotentials[symbol].valence for symbol in atoms.get_chemical_symbols()]
            charge = sum(valences) - self.electrons
        return DensityEnergies(cell, positions, numbers, pseudopotentials, shape, cutoff, charge=charge), None

    def _electrons(self, atoms: Atoms, energies: DensityEnergies | None) -> float:
        if self.electrons is not None:
            return float(self.electrons)
        if energies is not None:
            return energies.electrons
        per_atom = self.calculation.get("electrons_per_atom")
        if per_atom is None or len(self.run.species) > 1:
            raise ForgefieldError(
                f"the number of electrons of {atoms.get_chemical_formula()} is unknown without its pseudopotentials; name "
                "their "
                "folder (--pseudopotentials FOLDER), or give the number (--electrons)."
            )
        return per_atom * len(atoms)


def _from_density(
    values: Tensor, atoms: Atoms, shape: tuple[int, int, int], electrons: float, missing: str | None
) -> ElectronicStructure:
    return ElectronicStructure(
        atoms=atoms.copy(),
        temperature=None,
        grid_shape=shape,
        energies=None,
        electrons=electrons,
        ldos=None,
        density=values.reshape(shape).to(torch.float64),
        missing=missing,
    )


def _from_ldos(
    ldos: Tensor,
    grid: EnergyGrid,
    atoms: Atoms,
    shape: tuple[int, int, int],
    temperature: float,
    electrons: float,
    missing: str | None,
) -> ElectronicStructure:
    dos = dos_of_ldos(ldos, atoms.cell.volume / math.prod(shape))
    fermi = fermi_energy(dos, grid, temperature, electrons)
    return ElectronicStructure(
        atoms=atoms.copy(),
        temperature=temperature,
        grid_shape=shape,
        energies=grid,
        electrons=electrons,
        ldos=ldos.reshape(*shape, -1),
        density=density(ldos, grid, temperature, fermi).reshape(shape),
        dos=dos,
        fermi_energy=float(fermi),
        band_energy=float(band_energy(dos, grid, temperature, fermi)),
        entropy=float(entropy_energy(dos, grid, temperature, fermi)),
        missing=missing,
    )


def _with_terms(prediction: ElectronicStructure, energies: DensityTerms) -> ElectronicStructure:
    terms = {name: float(term) for name, term in energies._asdict().items()}
    if prediction.band_energy is None or prediction.entropy is None:
        return replace(prediction, terms=terms, missing="the model predicts a density, not a band energy")
    return replace(
        prediction, terms=terms, free_energy=prediction.band_energy + prediction.entropy + sum(terms.values())
    )


def smooth_number(minimum: float) -> int:
    """The smallest whole number without prime factors above 7 that is at least `minimum` - 0.01."""
    number = max(2, math.ceil(minimum - 0.01))
    while True:
        remainder = number
        for factor in (2, 3, 5, 7):
            while remainder % factor == 0:
                remainder //= factor
        if remainder == 1:
            return number
        number += 1


def _checked_grid(grid: Sequence[int]) -> tuple[int, int, int]:
    if len(grid) != 3 or any(int(n) != n or n < 2 for n in grid):
        raise ForgefieldError(
            f"grid={tuple(grid)}: give three whole numbers, two points or more along each cell vector."
        )
    nx, ny, nz = (int(n) for n in grid)
    return nx, ny, nz


def _checked_temperature(temperature: float | None, calculation: Mapping[str, Any]) -> float:
    trained = ", ".join(f"{value:.4g}" for value in calculation.get("temperatures", []))
    hint = f" The training snapshots had {trained} K." if trained else ""
    if temperature is None:
        raise ForgefieldError(
            f"The temperature of the electrons is missing: give it in K (--temperature 300, temperature=300).{hint}"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ForgefieldError(
            f"temperature={temperature} is not valid; give the temperature of the electrons in K.{hint}"
        )
    return float(temperature)


def _require_cell(atoms: Atoms) -> None:
    if not len(atoms):
        raise ForgefieldError("this structure has no atoms.")
    if atoms.cell.rank < 3 or not atoms.pbc.all():
        raise ForgefieldError(
            f"{atoms.get_chemical_formula()} is not periodic in three directions; an LDOS is predicted on the grid of a "
            "periodic cell."
        )
