"""Arrays on a grid, written as .npy or as openPMD (HDF5), by columns or by planes of points.

openPMD files follow MALA's layout and conventions: one scalar mesh component for each value of a point, in eV and A, the
calculation as attributes of the iteration, and the atoms as particles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from forgefield._version import __version__
from forgefield.files import written_atomically
from forgefield.ldos.data.info import SnapshotInfo
from forgefield.ldos.data.openpmd import CELL, PSEUDOPOTENTIAL
from forgefield.ldos.data.rows import HDF5_SUFFIXES, require_new_array
from forgefield.ldos.data.units import STANDARD, unit_in_si

if TYPE_CHECKING:
    import h5py

MESHES = {
    "ldos": "LDOS",
    "dos": "DOS",
    "density": "Density",
    "bispectrum": "Bispectrum",
    "gaussian": "AtomicDensity",
}
"""Name of the mesh of each quantity: targets, and types of descriptors."""
_DIMENSIONS = {"ldos": (-5, -1, 2), "dos": (-2, -1, 2)}
"""Powers of length, mass and time in the unit; those of a density and, in MALA's files, of descriptors are (-3, 0, 0)."""
_SKIPPED = ("grid_dimensions", "pseudopotentials", "target_units", "voxel", "atoms")
"""Keys of an `.info.json` that are not attributes of the iteration."""


class GridWriter(Protocol):
    """An array (nx, ny, nz, columns) that is being written."""

    def write_columns(self, first: int, values: np.ndarray) -> None:
        """Columns from `first` on, (nx, ny, nz, n)."""

    def write_planes(self, first: int, values: np.ndarray) -> None:
        """Planes of points from x = `first` on, (n, ny, nz, columns)."""


@contextmanager
def writing_grid(
    path: Path,
    shape: Sequence[int],
    dtype: np.dtype | type,
    *,
    quantity: str = "ldos",
    info: SnapshotInfo | None = None,
) -> Iterator[GridWriter]:
    """Write a new file of `shape` (nx, ny, nz, columns), which appears under its name when everything is written.

    path: ends in .npy, or in .h5 for openPMD. quantity: one of `MESHES`. info: the calculation, stored in openPMD files.
    """
    require_new_array(path)
    with written_atomically(path) as partial:
        if path.suffix not in HDF5_SUFFIXES:
            array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.dtype(dtype), shape=tuple(shape))
            yield _NumpyWriter(array)
            array.flush()
            del array
            return
        import h5py

        with h5py.File(partial, "w") as file:
            yield _OpenPmdWriter(_write_layout(file, tuple(shape), np.dtype(dtype), quantity, info or SnapshotInfo()))


class _NumpyWriter:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def write_columns(self, first: int, values: np.ndarray) -> None:
        self.array[..., first : first + values.shape[-1]] = values

    def write_planes(self, first: int, values: np.ndarray) -> None:
        self.array[first : first + len(values)] = values


class _OpenPmdWriter:
    def __init__(self, components: list[h5py.Dataset]) -> None:
        self.components = components

    def write_columns(self, first: int, values: np.ndarray) -> None:
        for column in range(values.shape[-1]):
            self.components[first + column][...] = values[..., column]

    def write_planes(self, first: int, values: np.ndarray) -> None:
        for column, component in enumerate(self.components):
            component[first : first + len(values)] = values[..., column]


def _write_layout(
    file: h5py.File, shape: tuple[int, ...], dtype: np.dtype, quantity: str, info: SnapshotInfo
) -> list[h5py.Dataset]:
    """Everything but the values; returns the dataset of each column."""
    _set(
        file,
        openPMD="1.1.0",
        openPMDextension=np.uint32(0),
        basePath="/data/%T/",
        meshesPath="meshes/",
        particlesPath="particles/",
        iterationEncoding="groupBased",
        iterationFormat="/data/%T/",
        software="Forgefield",
        softwareVersion=__version__,
        is_mala_data=np.uint8(1),  # MALA reads no other files
    )
    iteration = file.create_group("data/0")
    _set(iteration, time=0.0, dt=1.0, timeUnitSI=1.0)
    mesh = iteration.create_group(f"meshes/{MESHES[quantity]}")
    length, mass, time = _DIMENSIONS.get(quantity, (-3, 0, 0))
    _set(
        mesh,
        geometry="cartesian",
        dataOrder="C",
        axisLabels=np.array([b"x", b"y", b"z"]),
        gridSpacing=np.ones(3),
        gridGlobalOffset=np.zeros(3),
        gridUnitSI=1e-10,
        timeOffset=np.float32(0),
        unitDimension=np.array([length, mass, time, 0, 0, 0, 0], dtype=np.float64),
    )
    _write_info(iteration, mesh, info)
    unit, components = unit_in_si(quantity if quantity in STANDARD else "density"), []
    for column in range(shape[3]):
        component = mesh.create_dataset(str(column), shape[:3], dtype)
        _set(component, unitSI=unit, position=np.full(3, 0.5))
        components.append(component)
    return components


def _write_info(iteration: h5py.Group, mesh: h5py.Group, info: SnapshotInfo) -> None:
    document = info.to_json()
    _set(iteration, **{key: value for key, value in document.items() if key not in _SKIPPED})
    _set(iteration, **{f"{PSEUDOPOTENTIAL}{element}": name for element, name in info.pseudopotentials.items()})
    if info.voxel is not None and info.cell is not None:
        from ase.geometry import cell_to_cellpar

        lengths_and_angles = cell_to_cellpar(info.voxel)
        _set(mesh, gridSpacing=lengths_and_angles[:3], angles=lengths_and_angles[3:])
        # Lengths and angles do not give the orientation of the cell.
        _set(iteration, **{CELL: info.cell.reshape(-1)})
    if info.numbers is None or info.positions is None:
        return
    _set(iteration, **{f"periodic_boundary_conditions_{axis}": True for axis in "xyz"})
    atoms = iteration.create_group("particles/atoms")
    for name, power in (("position", 1), ("positionOffset", 1), ("number", 0)):
        record = atoms.create_group(name)
        _set(record, timeOffset=np.float32(0), unitDimension=np.array([power, 0, 0, 0, 0, 0, 0], dtype=np.float64))
    for index, (number, position) in enumerate(zip(info.numbers, info.positions)):
        _set(atoms["position"].create_dataset(str(index), data=position), unitSI=1e-10)
        _set(atoms["number"].create_dataset(str(index), data=np.array([number], dtype=np.int64)), unitSI=1.0)
        offset = atoms["positionOffset"].create_group(str(index))  # a constant of openPMD
        _set(offset, value=np.int64(0), shape=np.array([3], dtype=np.uint64), unitSI=1e-10)


def _set(item: h5py.File | h5py.Group | h5py.Dataset, **attributes: object) -> None:
    for name, value in attributes.items():
        if isinstance(value, str):
            value = np.bytes_(value.encode())
        elif isinstance(value, bool):
            value = np.uint8(value)  # openPMD-api does not read the truth values of h5py
        item.attrs[name] = value
