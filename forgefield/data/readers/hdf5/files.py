"""HDF5 files from strangers: damage is an error that names the place, and a small file cannot ask for endless memory.

Datasets are looked at through `Hdf5Array`, which compares what a read would take with the size of the file before it happens
and never leaves the file: datasets whose values are in other files are refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError, SourceUnreadable
from forgefield.untrusted.archives import is_system_error
from forgefield.untrusted.expansion import check_expansion

REMEDY = "write it with less compression, or divide it into several files"


def open_hdf5(path: Path) -> Any:
    """The file, opened for reading."""
    try:
        import h5py
    except ImportError:
        raise ForgefieldError(f"{path}: HDF5 files need the package h5py: pip install h5py") from None
    if not os.access(path, os.R_OK):
        raise PermissionError(str(path))
    try:
        return h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        if is_system_error(error):
            raise
        raise ForgefieldError(
            f"{path}: it could not be opened as HDF5; it is damaged or truncated ({error})"
        ) from error


@contextmanager
def reading_hdf5(place: str) -> Iterator[None]:
    """Errors of the HDF5 library, which come in all types, as one that names the place."""
    try:
        yield
    except ForgefieldError:
        raise
    except Exception as error:
        if is_system_error(error):
            raise SourceUnreadable(f"{place}: it could not be read ({error})") from error
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise ForgefieldError(f"{place}: it could not be read; the HDF5 file is damaged ({reason})") from error


class Hdf5Array:
    """A dataset, whose description is read once and whose values are read with care.

    dataset: of h5py.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.name: str = dataset.name
        self.place = f"{dataset.file.filename}#{dataset.name}"
        with reading_hdf5(self.place):
            self.shape: tuple[int, ...] = tuple(int(n) for n in dataset.shape or ())
            self.dtype: np.dtype = dataset.dtype
            self.attrs = dataset.attrs
            if dataset.shape is None:
                raise ForgefieldError(f"{self.place}: it is empty (a dataset without values)")
            if dataset.external or dataset.is_virtual:
                raise ForgefieldError(f"{self.place}: its values are in other files; copy them into this one")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        """`rows`: a slice of the first axis, or () for everything."""
        shape = self.shape
        if isinstance(rows, slice):
            shape = (len(range(*rows.indices(self.shape[0]))), *self.shape[1:])
        with reading_hdf5(self.place):
            stored = os.stat(self._dataset.file.filename).st_size
            check_expansion(math.prod(shape) * self.dtype.itemsize, stored, self.place, REMEDY)
            return self._dataset[rows]


def is_dataset(item: object) -> bool:
    return hasattr(item, "shape")
