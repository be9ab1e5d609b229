"""Values in HDF5 files: datasets of untrusted files, and the labels among them with their units.

Datasets are read through `Hdf5Array`, which compares the size of a read with the size of the file before it happens and never
leaves the file: datasets whose values are in other files are refused. Damage is an error that names the dataset.

A dataset may state its unit in the attribute `units`: its numbers are then converted to `data.units`, unless these were set
to another unit than the stated one, which is an error. A gradient becomes a force by changing its sign. Values of fields are
not converted: the settings define their meaning and unit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from forgefield.data.labels.label_reader import FALLBACK_NAMES, USUAL_NAMES
from forgefield.data.options import UnitOptions
from forgefield.errors import ForgefieldError, SourceUnreadable
from forgefield.physics.units import force_factor, label_energy_factor, length_factor, split_per_atom, stress_factor
from forgefield.untrusted.archives import check_expansion, is_system_error

if TYPE_CHECKING:
    import h5py


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
def reading_hdf5(where: str) -> Iterator[None]:
    """Turns errors of the HDF5 library, which are of many types, into one that names the file and group."""
    try:
        yield
    except ForgefieldError:
        raise
    except Exception as error:
        if is_system_error(error):
            raise SourceUnreadable(f"{where}: it could not be read ({error})") from error
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        raise ForgefieldError(f"{where}: it could not be read; the HDF5 file is damaged ({reason})") from error


class Hdf5Array:
    """A dataset, whose description is read once and whose values are read with care.

    dataset: of h5py.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self.name: str = dataset.name
        self.where = f"{dataset.file.filename}#{dataset.name}"
        with reading_hdf5(self.where):
            self.shape: tuple[int, ...] = tuple(int(n) for n in dataset.shape or ())
            self.dtype: np.dtype = dataset.dtype
            self.attrs = dataset.attrs
            if dataset.shape is None:
                raise ForgefieldError(f"{self.where}: it is empty (a dataset without values)")
            if dataset.external or dataset.is_virtual:
                raise ForgefieldError(f"{self.where}: its values are in other files; copy them into this one")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: object) -> Any:
        """`rows`: a slice of the first axis, or () for everything."""
        shape = self.shape
        if isinstance(rows, slice):
            shape = (len(range(*rows.indices(self.shape[0]))), *self.shape[1:])
        with reading_hdf5(self.where):
            stored = os.stat(self._dataset.file.filename).st_size
            check_expansion(math.prod(shape) * self.dtype.itemsize, stored, self.where, REMEDY)
            return self._dataset[rows]


def is_dataset(item: object) -> bool:
    import h5py

    return isinstance(item, h5py.Dataset)


def is_group(item: object) -> TypeGuard[h5py.Group]:
    import h5py

    return isinstance(item, h5py.Group)


GRADIENTS = ("dft_total_gradient", "gradient", "gradients")
"""dE/dx: minus the forces."""
EXTRA_NAMES = {"energy": ("energies", "E", "dft_total_energy"), "forces": ("F", *GRADIENTS)}
_KINDS = {"energy": "energy", "forces": "forces", "stress": "stress", "virial": "energy"}
"""Label -> the unit it is in."""
_WORDS = {
    "electronvolt": "eV",
    "electron_volt": "eV",
    "hartrees": "Ha",
    "kilojoule/mole": "kJ/mol",
    "kilojoules/mole": "kJ/mol",
    "kilocalorie/mole": "kcal/mol",
    "kilocalories/mole": "kcal/mol",
    "angstroms": "A",
    "bohrs": "Bohr",
    "nanometer": "nm",
    "nanometers": "nm",
}


@dataclass(frozen=True)
class Column:
    dataset: Hdf5Array
    factor: float
    many: bool
    """Whether its first axis runs over frames; else it belongs to the one frame there is."""

    def values(self, start: int, stop: int) -> np.ndarray:
        """(stop - start, ...)."""
        values = self.dataset[start:stop] if self.many else np.asarray(self.dataset[()])[None]
        return values if self.factor == 1.0 else values * np.float64(self.factor)


def label_datasets(
    group: h5py.Group,
    where: str,
    units: UnitOptions,
    n_frames: int | None,
    n_atoms: int,
    fields: frozenset[str] = frozenset(),
) -> dict[str, Column]:
    """All datasets of numbers that belong to frames. `n_frames` None: the group is one frame. fields: keys of fields.

    MACE writes its labels into a group `properties`, and a weight of zero for a label that is not there.
    """
    columns: dict[str, Column] = {}
    for home in (group, group.get("properties")):
        if home is None or not is_group(home):
            continue
        for name, item in home.items():
            if not is_dataset(item):
                continue
            dataset = Hdf5Array(item)
            kinds = "fiucb" if name in fields else "fiuc"
            if dataset.dtype.kind not in kinds or _weightless(group, name):
                continue
            label = _label_of(name)
            if label is not None:
                _check_shape(dataset, name, where, label, n_frames, n_atoms)
            elif n_frames is not None and (not dataset.ndim or len(dataset) != n_frames):
                continue
            factor = 1.0 if label is None and name in fields else _factor(dataset, name, units, label)
            if label in ("energy", "virial") and factor is not None:
                factor *= _atoms_factor(dataset, units, label, n_atoms)
            if factor is not None:
                columns[name] = Column(dataset, factor, n_frames is not None)
    return columns


def stated_factor(dataset: Hdf5Array, units: UnitOptions, kind: str) -> float:
    """What turns the numbers of `dataset` into the unit of the settings: 1 where it states none."""
    text = _stated_unit(dataset)
    if text is None:
        return 1.0
    try:
        factors = {"energy": _energy_factor, "length": length_factor, "forces": force_factor, "stress": stress_factor}[
            kind
        ](text)
    except ForgefieldError as error:
        raise ForgefieldError(f"{dataset.where}: its attribute units: {error}") from None
    requested = _requested_factor(units, kind)
    if (
        abs(requested - _requested_factor(UnitOptions(), kind)) > 1e-9 * requested
        and abs(factors / requested - 1) > 1e-6
    ):
        raise ForgefieldError(
            f"{dataset.where}: it says its unit is {text}, which contradicts data.units; set "
            f"data.units.{kind}={text}, or leave data.units out and the file decides"
        )
    return factors / requested


def _energy_factor(unit: str) -> float:
    """Of an energy or an energy per atom, between which `_atoms_factor` distinguishes."""
    return label_energy_factor(unit)[0]


def _atoms_factor(dataset: Hdf5Array, units: UnitOptions, label: str, n_atoms: int) -> int:
    """Factor for values that are per atom according to the file and not according to the settings."""
    stated, requested = _is_per_atom(dataset), label == "energy" and split_per_atom(units.energy)[1]
    if stated is None or stated == requested:
        return 1
    if label == "energy" and units.energy != UnitOptions().energy:
        raise ForgefieldError(
            f"{dataset.where}: it says its unit is {_stated_unit(dataset)}, which contradicts "
            f"data.units.energy={units.energy}; leave data.units out and the file decides"
        )
    return n_atoms


def _is_per_atom(dataset: Hdf5Array) -> bool | None:
    """Whether the unit that a dataset states is per atom; None where it states none."""
    return None if _stated_unit(dataset) is None else split_per_atom(_stated_unit(dataset) or "")[1]


def _stated_unit(dataset: Hdf5Array) -> str | None:
    """The attribute `units` in our spelling; None where there is none."""
    stated = dataset.attrs.get("units", dataset.attrs.get("unit"))
    return None if stated is None else _spelled(stated.decode() if isinstance(stated, bytes) else str(stated))


def _requested_factor(units: UnitOptions, kind: str) -> float:
    energy, length = _energy_factor(units.energy), length_factor(units.length)
    if kind == "forces":
        return energy / length if units.forces is None else force_factor(units.forces)
    if kind == "stress":
        return energy / length**3 if units.stress is None else stress_factor(units.stress)
    return energy if kind == "energy" else length


def _spelled(text: str) -> str:
    """A unit in our spelling: 'hartree / bohr' as hartree/bohr, 'kilojoule/mole/angstrom' as kJ/mol/angstrom."""
    text = "/".join(part.strip() for part in text.split("/")).replace(" * ", "*")
    for word, unit in sorted(_WORDS.items(), key=lambda item: -len(item[0])):
        lowered = text.lower()
        if lowered == word or lowered.startswith(word + "/"):
            text = unit + text[len(word) :]
        if lowered.endswith("/" + word):
            text = text[: -len(word)] + unit
    return text


def _label_of(name: str) -> str | None:
    for label, usual in USUAL_NAMES.items():
        if name in usual or name in EXTRA_NAMES.get(label, ()) or name in FALLBACK_NAMES.get(label, ()):
            return label
    return None


def _factor(dataset: Hdf5Array, name: str, units: UnitOptions, label: str | None) -> float | None:
    """None for a quantity of another kind in a unit of its own: it is left out rather than misread."""
    sign = -1.0 if name in GRADIENTS else 1.0
    if label is not None:
        return sign * stated_factor(dataset, units, _KINDS[label]) if label in _KINDS else sign
    if _stated_unit(dataset) is None:
        return sign
    if _is_per_atom(dataset) != split_per_atom(units.energy)[1] and _is_energy(dataset):
        return None
    for kind in ("energy", "forces", "stress", "length"):
        try:
            return stated_factor(dataset, UnitOptions(), kind) / _requested_factor(units, kind)
        except ForgefieldError:
            continue
    return None


def _is_energy(dataset: Hdf5Array) -> bool:
    """Whether the unit that a dataset states is one of energy, per atom or not."""
    try:
        _energy_factor(_stated_unit(dataset) or "")
    except ForgefieldError:
        return False
    return True


def _weightless(group: h5py.Group, name: str) -> bool:
    for home, key in ((group, f"{name}_weight"), (group.get("property_weights"), name)):
        if home is not None and is_group(home) and key in home:
            weight = Hdf5Array(home[key])[()] if is_dataset(home[key]) else None
            if isinstance(weight, (int, float, np.number)) and weight == 0:
                return True
    return False


def _check_shape(dataset: Hdf5Array, name: str, where: str, label: str, n_frames: int | None, n_atoms: int) -> None:
    shape = dataset.shape if n_frames is None else dataset.shape[1:]
    if n_frames is not None and (not dataset.ndim or len(dataset) != n_frames):
        raise ForgefieldError(f"{where}: {name} has shape {dataset.shape}, but there are {n_frames} frames")
    if label == "forces" and shape != (n_atoms, 3):
        raise ForgefieldError(f"{where}: {name} has shape {dataset.shape}, but there are {n_atoms} atoms")
