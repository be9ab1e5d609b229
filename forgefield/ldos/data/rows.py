"""Files of rows: one row of values for each grid point, read by position.

A numpy file is read with `pread` directly into the target array: several threads may read at the same time, nothing is mapped,
and a truncated file is an error and not a crash. A grid is flattened with its last axis fastest.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol

import numpy as np

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import read_npy_header

HDF5_SUFFIXES = (".h5", ".hdf5")


class _Scratch(threading.local):
    """A buffer for each thread."""

    buffer: np.ndarray | None = None


_scratch = _Scratch()


class RowFile(Protocol):
    """Values of grid points in a file. grid_shape: None if rows have no grid."""

    path: Path
    grid_shape: tuple[int, int, int] | None
    n_rows: int
    n_columns: int
    dtype: np.dtype

    @property
    def unit_si(self) -> float | None:
        """Unit of the values in SI, if the file states it."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop in the stored type, (stop - start, n_columns). Valid until this thread reads again."""

    def read_into(self, start: int, out: np.ndarray) -> bool:
        """Fill `out`, (n, n_columns), with the rows from `start` on. False if only `read` is supported."""


def open_rows(path: Path) -> RowFile:
    """The rows of a .npy file or of an openPMD file (.h5)."""
    require_file(path)
    if path.suffix == ".npy":
        return NumpyRows(path)
    if path.suffix in HDF5_SUFFIXES:
        from forgefield.ldos.data.openpmd import OpenPmdRows

        return OpenPmdRows(path)
    if path.suffix in (".bp", ".bp4", ".bp5"):
        raise ForgefieldError(f"{path}: openPMD files are read as HDF5; convert it with `openpmd-pipe` to a .h5 file")
    raise ForgefieldError(f"{path}: values on a grid are read from .npy and .h5 (openPMD) files")


def require_file(path: Path) -> None:
    """Raise an error that suggests the nearest name if there is no such file."""
    if path.is_file():
        return
    if path.is_dir():
        raise ForgefieldError(f"{path} is a folder; a file is needed here")
    folder = path.parent
    if not folder.is_dir():
        raise ForgefieldError(f"{path}: there is no such file; the folder {folder} does not exist")
    names = [entry.name for entry in folder.iterdir()]
    raise ForgefieldError(f"{path}: there is no such file (looked from {Path.cwd()}).{did_you_mean(path.name, names)}")


def require_new_array(path: Path) -> None:
    """Raise unless an array can be written to the new file `path`."""
    if path.suffix not in (".npy", *HDF5_SUFFIXES):
        raise ForgefieldError(
            f"{path}: the array is written as .npy, or as .h5 (openPMD); choose a name with this ending"
        )
    if path.exists():
        raise ForgefieldError(f"{path} exists already; delete it or choose another name")


class NumpyRows:
    """A .npy file of shape (nx, ny, nz, columns), (nx, ny, nz) or (rows, columns), in C order."""

    unit_si: float | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        shape, self.dtype, self._offset = _header(path)
        self.grid_shape: tuple[int, int, int] | None = None
        if len(shape) in (3, 4):
            self.grid_shape = (shape[0], shape[1], shape[2])
        elif len(shape) != 2:
            raise ForgefieldError(
                f"{path} has shape {shape}; values on a grid have (nx, ny, nz, values) or, without a grid, (points, values)"
            )
        self.n_columns = shape[-1] if len(shape) != 3 else 1
        self.n_rows = int(np.prod(shape, dtype=np.int64)) // max(self.n_columns, 1)
        if self.n_rows == 0 or self.n_columns == 0:
            raise ForgefieldError(f"{path} has shape {shape}: it is empty")
        self._row_bytes = self.n_columns * self.dtype.itemsize
        self._file: int | None = None
        self._opening = threading.Lock()

    def read(self, start: int, stop: int) -> np.ndarray:
        out = _scratch_rows(stop - start, self.n_columns, self.dtype)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: np.ndarray) -> bool:
        if out.dtype != self.dtype or not out.flags.c_contiguous or out.shape[1] != self.n_columns:
            return False
        buffer = out.reshape(-1).view(np.uint8).data
        offset, n_read = self._offset + start * self._row_bytes, 0
        while n_read < len(buffer):
            count = os.preadv(self._opened(), [buffer[n_read:]], offset + n_read)
            if count == 0:
                raise ForgefieldError(f"{self.path} became shorter while it was read")
            n_read += count
        return True

    def _opened(self) -> int:
        if self._file is None:
            with self._opening:
                if self._file is None:
                    self._file = os.open(self.path, os.O_RDONLY)
        return self._file

    def __del__(self) -> None:
        file = self.__dict__.get("_file")  # missing where the constructor failed
        if isinstance(file, int):
            os.close(file)

    def __getstate__(self) -> dict[str, Path]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Path]) -> None:
        NumpyRows.__init__(self, state["path"])


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, type and offset of the first value of a .npy file, whose size is checked against them."""
    try:
        with path.open("rb") as file:
            header = read_npy_header(file, path.stat().st_size, str(path))
    except OSError as error:
        raise ForgefieldError(f"{path}: cannot be read ({error.strerror})") from None
    if header.dtype.kind != "f":
        raise ForgefieldError(
            f"{path} contains values of type {header.dtype}; real numbers are needed (float32 or float64)"
        )
    if header.order == "F" and len(header.shape) > 1:
        raise ForgefieldError(
            f"{path} is stored in Fortran order, in which the values of a point are far apart; write it again with "
            "np.save(path, np.ascontiguousarray(array))"
        )
    return header.shape, header.dtype, header.offset


def _scratch_rows(n: int, columns: int, dtype: np.dtype) -> np.ndarray:
    """A buffer for raw rows that this thread reuses."""
    size = n * columns * dtype.itemsize
    buffer = _scratch.buffer
    if buffer is None or len(buffer) < size:
        buffer = _scratch.buffer = np.empty(size, dtype=np.uint8)
    return buffer[:size].view(dtype).reshape(n, columns)
