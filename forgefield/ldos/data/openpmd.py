"""Rows of an openPMD file (HDF5): one scalar mesh component for each value of a point, `/data/0/meshes/LDOS/0, 1, ...`.

A block of points is read as a range of each component. `unit_si` is the unit that the file states (`unitSI`). MALA's files,
and those of `grid_writer.py`, also describe the calculation (`read_openpmd_info`).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forgefield.data.readers.hdf5_values import REMEDY, open_hdf5, reading_hdf5
from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import check_expansion

if TYPE_CHECKING:
    import h5py

CELL = "cell"
"""Attribute of Forgefield's files with the nine numbers of the cell vectors, A."""
PSEUDOPOTENTIAL = "psp_"
"""Begin of the attributes that name the pseudopotentials of elements."""


class OpenPmdRows:
    """The one mesh of the first iteration of an openPMD file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file: h5py.File | None = None
        self._names: list[str] = []
        with self._lock, reading_hdf5(str(path)):
            mesh = self._mesh(self._open())
            self._names = [f"{mesh.name}/{name}" for name in _in_order(mesh)] if _is_group(mesh) else [mesh.name]
            if not self._names:
                raise ForgefieldError(f"{path}: the mesh {mesh.name} has no component")
            self._take_shape(mesh)

    def _open(self) -> h5py.File:
        if self._file is None:
            try:
                self._file = open_hdf5(self.path)
            except OSError as error:
                raise ForgefieldError(f"{self.path}: cannot be read ({error.strerror or error})") from None
        return self._file

    def _mesh(self, file: h5py.File) -> h5py.Group | h5py.Dataset:
        base = _text(file.attrs.get("basePath", "/data/%T/")).split("%T")[0].strip("/")
        iterations = file.get(base)
        if iterations is None or not len(iterations):
            raise ForgefieldError(f"{self.path} has no iteration under /{base}: it is not an openPMD file with meshes")
        first = iterations[_in_order(iterations)[0]]
        meshes = first.get(_text(file.attrs.get("meshesPath", "meshes/")).strip("/"))
        names = [] if meshes is None else list(meshes)
        if len(names) != 1:
            raise ForgefieldError(
                f"{self.path} has {len(names)} meshes in {first.name} ({', '.join(names)}); one is needed"
            )
        return meshes[names[0]]

    def _take_shape(self, mesh: h5py.Group | h5py.Dataset) -> None:
        file = self._open()
        components = [file[name] for name in self._names]
        for component in components:
            if _is_group(component) or len(component.shape or ()) != 3 or component.shape != components[0].shape:
                raise ForgefieldError(
                    f"{self.path}: the component {component.name} is not an array on the grid of {components[0].name}"
                )
        labels = [_text(label) for label in mesh.attrs.get("axisLabels", [b"x", b"y", b"z"])]
        if labels != ["x", "y", "z"] or _text(mesh.attrs.get("dataOrder", b"C")) != "C":
            raise ForgefieldError(f"{self.path}: {mesh.name} has its axes as {labels}; x, y, z in C order are needed")
        units = {float(component.attrs.get("unitSI", 1.0)) for component in components}
        if len(units) != 1:
            raise ForgefieldError(f"{self.path}: the components of {mesh.name} are in different units ({units})")
        nx, ny, nz = (int(n) for n in components[0].shape)
        self.grid_shape: tuple[int, int, int] | None = (nx, ny, nz)
        self.n_rows, self.n_columns = nx * ny * nz, len(components)
        self.dtype = np.result_type(*(component.dtype for component in components))
        if self.n_rows == 0 or self.dtype.kind != "f":
            raise ForgefieldError(
                f"{self.path}: {mesh.name} has shape {components[0].shape} and type {self.dtype}; "
                "real numbers on a grid are needed"
            )
        if any(component.external or component.is_virtual for component in components):
            raise ForgefieldError(f"{self.path}: its values are in other files; copy them into this one")
        declared, stored = self.n_rows * self.n_columns * self.dtype.itemsize, os.stat(self.path).st_size
        check_expansion(declared, stored, str(self.path), REMEDY)
        self.unit_si: float | None = units.pop()

    def read(self, start: int, stop: int) -> np.ndarray:
        assert self.grid_shape is not None
        _, ny, nz = self.grid_shape
        first, last = start // nz, -(-stop // nz)  # lines along z
        out = np.empty((stop - start, self.n_columns), dtype=self.dtype)
        with self._lock, reading_hdf5(str(self.path)):
            file = self._open()
            for column, name in enumerate(self._names):
                lines = _lines(file[name], first, last, ny)
                out[:, column] = lines.reshape(-1)[start - first * nz : stop - first * nz]
        return out

    def read_into(self, start: int, out: np.ndarray) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        """The calculation, in the keys of an `.info.json`."""
        file = self._open()
        mesh = self._mesh(file)
        iteration = mesh.parent.parent
        assert self.grid_shape is not None
        attributes = {key: _plain(value) for key, value in iteration.attrs.items() if key != CELL}
        document = {key: value for key, value in attributes.items() if not key.startswith(PSEUDOPOTENTIAL)}
        if "coordinates_in_inputs" in document:
            document["coordinates_in_inputs"] = bool(document["coordinates_in_inputs"])
        document["grid_dimensions"] = list(self.grid_shape)
        document["pseudopotentials"] = {
            key.removeprefix(PSEUDOPOTENTIAL): str(value)
            for key, value in attributes.items()
            if key.startswith(PSEUDOPOTENTIAL)
        }
        cell = _cell(iteration, mesh, self.grid_shape)
        if cell is not None:
            document["voxel"] = (cell / np.array(self.grid_shape)[:, None]).tolist()
            particles = _text(file.attrs.get("particlesPath", "particles/")).strip("/")
            document["atoms"] = _atoms_of(iteration, particles, cell)
        return document

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        OpenPmdRows.__init__(self, state["path"])


def read_openpmd_info(path: Path) -> dict[str, Any]:
    """The calculation that an openPMD file describes, in the keys of an `.info.json`."""
    rows = OpenPmdRows(path)
    with reading_hdf5(str(path)):
        return rows.describe()


def _atoms_of(iteration: h5py.Group, particles: str, cell: np.ndarray) -> dict[str, Any] | None:
    """Numbers, positions and cell, as ASE's dictionaries; None if the file has no atoms."""
    atoms = iteration.get(f"{particles}/atoms")
    if atoms is None or "position" not in atoms or "number" not in atoms:
        return None
    values: dict[str, list[Any]] = {}
    for name, n in (("position", 3), ("number", 1)):
        values[name] = []
        for atom in _in_order(atoms[name]):
            item = atoms[name][atom]
            if _is_group(item) or item.shape != (n,):
                raise ValueError(f"{name} of atom {atom} is not {n} values")
            if item.external or item.is_virtual:
                raise ValueError(f"{name} of atom {atom} is in another file")
            values[name].append(item[...].tolist())
    return {"numbers": [n[0] for n in values["number"]], "positions": values["position"], "cell": cell.tolist()}


def _cell(iteration: h5py.Group, mesh: h5py.Group | h5py.Dataset, shape: tuple[int, int, int]) -> np.ndarray | None:
    """(3, 3), A: as stated, else from lengths and angles of the mesh, with a along x and b in the xy plane as in ASE."""
    from ase.geometry import cellpar_to_cell

    if CELL in iteration.attrs:
        return np.asarray(iteration.attrs[CELL], dtype=np.float64).reshape(3, 3)
    if "angles" not in mesh.attrs:
        return None
    lengths = (
        np.asarray(mesh.attrs["gridSpacing"], dtype=np.float64) * float(mesh.attrs.get("gridUnitSI", 1e-10)) * 1e10
    )
    return cellpar_to_cell([*lengths, *np.asarray(mesh.attrs["angles"])]) * np.array(shape)[:, None]


def _plain(value: object) -> object:
    """An attribute as a value of JSON."""
    if isinstance(value, (bytes, np.generic)):
        return _text(value) if isinstance(value, bytes) else value.item()
    return value.tolist() if isinstance(value, np.ndarray) else value


def _lines(component: h5py.Dataset, first: int, last: int, ny: int) -> np.ndarray:
    """Lines along z, counted over x and y, as (n, nz) or a range of planes."""
    plane, end = first // ny, (last - 1) // ny
    if plane == end:
        return component[plane, first - plane * ny : last - plane * ny]
    planes = component[plane : end + 1]
    return planes.reshape(-1, planes.shape[-1])[first - plane * ny : last - plane * ny]


def _in_order(group: h5py.Group) -> list[str]:
    """Names in the order of their numbers."""
    return sorted(group, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


def _is_group(item: h5py.Group | h5py.Dataset) -> bool:
    return not hasattr(item, "shape")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
