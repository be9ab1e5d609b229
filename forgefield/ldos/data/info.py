"""Metadata of a snapshot: Fermi energy, electrons, temperature, cell, atoms, energies.

Read from an `.info.json` (MALA's or Forgefield's), the output of Quantum ESPRESSO's pw.x, or an openPMD file. Values that a
file does not state are None; `require` reports the missing ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.data.frame import atomic_numbers_of, real_numbers
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.rows import HDF5_SUFFIXES
from forgefield.untrusted.documents import load_json

ENERGIES = {
    "total": "total_energy_dft_calculation",
    "band": "band_energy_dft_calculation",
    "entropy": "entropy_contribution_dft_calculation",
    "one_electron": "one_electron_contribution",
    "hartree": "hartree_contribution",
    "xc": "xc_contribution",
    "ewald": "ewald_contribution",
}
"""Key of each energy in an `.info.json`, eV. `entropy` is -TS."""


@dataclass
class SnapshotInfo:
    """Values in eV, A and K unless stated otherwise; None if unknown."""

    source: str = ""
    """File it was read from."""
    fermi_energy: float | None = None
    """eV."""
    electrons: float | None = None
    """In the cell."""
    temperature: float | None = None
    """Of the electrons, K."""
    cell: np.ndarray | None = None
    """(3, 3), rows are the cell vectors, A."""
    grid_shape: tuple[int, int, int] | None = None
    positions: np.ndarray | None = None
    """(n_atoms, 3), A."""
    numbers: np.ndarray | None = None
    """(n_atoms,), atomic numbers."""
    energies: dict[str, float] = field(default_factory=dict)
    """By the names in `ENERGIES`, eV."""
    ecutrho: float | None = None
    """Cutoff of the density, Ry."""
    pseudopotentials: dict[str, str] = field(default_factory=dict)
    """File name by element."""
    coordinates: bool | None = None
    """Whether inputs begin with three columns of coordinates; None: not stated."""
    units: str | None = None
    """Unit of the targets; None: not stated."""

    @property
    def voxel(self) -> np.ndarray | None:
        """(3, 3), rows are the steps of the grid, A."""
        if self.cell is None or self.grid_shape is None:
            return None
        return self.cell / np.array(self.grid_shape, dtype=np.float64)[:, None]

    @property
    def voxel_volume(self) -> float | None:
        """A^3."""
        voxel = self.voxel
        return None if voxel is None else abs(float(np.linalg.det(voxel)))

    def coordinates_of_points(self, planes: slice = slice(None)) -> np.ndarray:
        """x, y, z of the points of the grid, (nx, ny, nz, 3), A, or of those whose first index is in `planes`."""
        self.require("cell", "grid_shape", why="the coordinates of grid points")
        assert self.grid_shape is not None
        assert self.cell is not None
        fractions = [np.arange(n) / n for n in self.grid_shape]
        fractions[0] = fractions[0][planes]
        return np.stack(np.meshgrid(*fractions, indexing="ij"), axis=-1) @ self.cell

    @property
    def n_atoms(self) -> int | None:
        return None if self.numbers is None else len(self.numbers)

    def require(self, *names: str, why: str = "") -> SnapshotInfo:
        """Return self if all these attributes are known; otherwise raise an error that names the first missing one."""
        for name in names:
            if getattr(self, name) is None:
                quantity = name.replace("_", " ")
                raise ForgefieldError(
                    f"{self.source or 'a snapshot'} does not state the {quantity}{f', which {why} needs' if why else ''}; "
                    "provide an "
                    ".info.json or an output of Quantum ESPRESSO that does"
                )
        return self

    def atoms(self) -> Any:
        """The structure as `ase.Atoms`."""
        from ase import Atoms

        self.require("numbers", "positions", "cell", why="a structure")
        return Atoms(numbers=self.numbers, positions=self.positions, cell=self.cell, pbc=True)

    def to_json(self) -> dict[str, Any]:
        """The content of an `.info.json` that `read_info` reads back, in the keys of MALA's."""
        document: dict[str, Any] = {
            "fermi_energy_dft": self.fermi_energy,
            "temperature": self.temperature,
            "number_of_electrons_exact": self.electrons,
            "grid_dimensions": None if self.grid_shape is None else list(self.grid_shape),
            "ecutrho": self.ecutrho,
            "pseudopotentials": self.pseudopotentials or None,
            "coordinates_in_inputs": self.coordinates,
            "target_units": self.units,
        }
        document |= {ENERGIES[name]: value for name, value in self.energies.items()}
        if self.voxel is not None:
            document["voxel"] = {"array": self.voxel.tolist()}
        if self.numbers is not None and self.positions is not None and self.cell is not None:
            document["atoms"] = {
                "numbers": self.numbers.tolist(),
                "positions": self.positions.tolist(),
                "cell": self.cell.tolist(),
                "pbc": [True] * 3,
            }
        return {key: value for key, value in document.items() if value is not None}


def read_info(path: Path) -> SnapshotInfo:
    """Metadata from an `.info.json`, an output of pw.x or an openPMD file."""
    if path.suffix in HDF5_SUFFIXES:
        from forgefield.ldos.data.openpmd import read_openpmd_info

        return parse_info(read_openpmd_info(path), str(path))
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()[:1]
    except OSError as error:
        raise ForgefieldError(f"{path}: cannot be read ({error.strerror})") from None
    if start == b"{":
        return _from_json(path)
    from forgefield.ldos.data.espresso import read_espresso

    return read_espresso(path)


def _from_json(path: Path) -> SnapshotInfo:
    try:
        document = load_json(path.read_text())
    except ValueError as error:
        raise ForgefieldError(f"{path} is not the .info.json of a snapshot: {error}") from None
    return parse_info(document, str(path))


def parse_info(document: dict[str, Any], source: str) -> SnapshotInfo:
    """Metadata from the content of an `.info.json`. source: its name in messages."""
    try:
        info = SnapshotInfo(
            source=source,
            fermi_energy=_number(document, "fermi_energy_dft"),
            temperature=_number(document, "temperature"),
            electrons=_number(document, "number_of_electrons_exact"),
            ecutrho=_number(document, "ecutrho"),
            energies={name: value for name, key in ENERGIES.items() if (value := _number(document, key)) is not None},
            pseudopotentials={
                str(key): Path(name).name for key, name in (document.get("pseudopotentials") or {}).items()
            },
            coordinates=document.get("coordinates_in_inputs"),
            units=document.get("target_units"),
        )
        _add_geometry(info, document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ForgefieldError(f"{source} is not the .info.json of a snapshot: {error}") from None
    return info


def _number(document: dict[str, Any], key: str) -> float | None:
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, (bool, str)) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r:.40}; it must be a number")
    return float(value)


def _add_geometry(info: SnapshotInfo, document: dict[str, Any]) -> None:
    grid, atoms, voxel = document.get("grid_dimensions"), document.get("atoms"), document.get("voxel")
    if grid is not None:
        if not isinstance(grid, list) or len(grid) != 3 or any(type(n) is not int or n < 1 for n in grid):
            raise ValueError(f"grid_dimensions is {grid!r:.60}; it must be a list of three numbers of points")
        info.grid_shape = (grid[0], grid[1], grid[2])
    if atoms is not None:
        info.numbers = atomic_numbers_of(_plain(atoms["numbers"]), info.source)
        info.positions = _finite(atoms["positions"], "positions", (len(info.numbers), 3), info.source)
        info.cell = _finite(atoms["cell"], "cell", (3, 3), info.source)
    elif voxel is not None and info.grid_shape is not None:
        info.cell = _finite(voxel, "voxel", (3, 3), info.source) * np.array(info.grid_shape)[:, None]


def _finite(value: object, name: str, shape: tuple[int, ...], source: str) -> np.ndarray:
    values = real_numbers(_plain(value), source, name)
    if values.size != math.prod(shape) or not np.isfinite(values).all():
        raise ValueError(f"{name} must be finite numbers of shape {shape}")
    return values.reshape(shape)


def _plain(value: object) -> object:
    """An array as nested lists; ASE's dictionaries store it directly or under `array`."""
    return value["array"] if isinstance(value, dict) and "array" in value else value
