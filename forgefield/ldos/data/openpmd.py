"""Rows of an openPMD file (HDF5): one scalar mesh component for each value of a point, `/data/0/meshes/LDOS/0, 1, ...`.

A block of points is read as a range of each component. `unit_si` is the unit that the file states (`unitSI`).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forgefield.data.readers.hdf5_values import REMEDY, open_hdf5, reading_hdf5
from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import check_expansion

if TYPE_CHECKING:
    import h5py


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

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        OpenPmdRows.__init__(self, state["path"])


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
