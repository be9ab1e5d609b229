"""Reader of DeePMD-kit systems: frames of one formula as arrays in `set.*`, the elements in `type.raw`, `type_map.raw`.

Arrays are memory-mapped (or read in slices, from HDF5 and from `*.raw` text), so a system never has to fit into memory.
Units are those of the format, eV and A, unless `data.units` names others; its virial is -V * stress, as in extxyz.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ase.data import atomic_numbers

from forgefield.data.frame import LazyColumns, RawBlock, block_ranges, matrices, within
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile, TypeMap
from forgefield.data.readers.hdf5_values import Hdf5Array, is_dataset
from forgefield.data.readers.text import is_plain, read_text, text_rows, whole_numbers
from forgefield.errors import ForgefieldError, SourceUnreadable
from forgefield.untrusted.archives import map_npy

if TYPE_CHECKING:
    import h5py

PADDING = -1
"""In `real_atom_types`: there is no atom here."""
STRUCTURE = ("coord", "box", "real_atom_types")
"""Arrays that are not values."""


class DeepmdReader(Reader):
    name = "deepmd"
    folder_marker = "type.raw"
    has_atom_types = True

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawBlock]:
        return read_system(open_folder(source.path, source.type_map), start, stop)

    def names_types(self, source: SourceFile) -> bool:
        return (source.path / "type_map.raw").is_file()

    def count(self, source: SourceFile) -> int:
        return sum(open_folder(source.path, source.type_map).lengths())


@dataclass(frozen=True)
class System:
    """One system, opened: small things in memory, the arrays of a set opened when it is read."""

    name: str
    types: np.ndarray
    """(n_atoms,) index into `elements`."""
    elements: np.ndarray
    """Atomic number of each type; 0 where the name is not an element."""
    element_names: tuple[str, ...]
    periodic: bool
    sets: tuple[Path | h5py.Group, ...]
    """Folders, or groups of an HDF5 file."""

    def arrays(self, data_set: Path | h5py.Group) -> dict[str, Any]:
        """Arrays of one set by name, (n_frames, width) each, their shapes checked."""
        arrays = _folder_arrays(data_set) if isinstance(data_set, Path) else _group_arrays(data_set)
        arrays = _one_row_each(arrays)
        _check_shapes(arrays, self, _name_of(data_set))
        return arrays

    def lengths(self) -> list[int]:
        """Frames in each set."""
        return [len(self.arrays(data_set)["coord"]) for data_set in self.sets]


def open_folder(path: Path, type_map: TypeMap | None = None) -> System:
    """The system in a folder with `type.raw`."""
    sets = tuple(item for item in sorted(path.iterdir()) if item.name.startswith("set.") and item.is_dir())
    if not sets and not (path / "coord.raw").is_file():
        raise ForgefieldError(f"{path}: a DeePMD system needs folders set.* with coord.npy, or a coord.raw")
    names = read_text(path / "type_map.raw").split() if (path / "type_map.raw").is_file() else None
    types = read_text(path / "type.raw").split()
    return _system(str(path), types, names, type_map, not (path / "nopbc").exists(), sets or (path,))


def open_group(group: h5py.Group, name: str, type_map: TypeMap | None = None) -> System:
    """The system in an HDF5 group with `type.raw`."""
    sets = tuple(group[key] for key in sorted(group) if key.startswith("set."))
    names = None
    if "type_map.raw" in group:
        stored = np.ravel(Hdf5Array(group["type_map.raw"])[()])
        names = [item.decode() if isinstance(item, bytes) else str(item) for item in stored]
    types = [str(item) for item in np.ravel(Hdf5Array(group["type.raw"])[()])]
    if not sets:
        raise ForgefieldError(f"{name}: a DeePMD system needs groups set.* with coord.npy")
    return _system(name, types, names, type_map, "nopbc" not in group and "nopbc" not in group.attrs, sets)


def read_system(
    system: System, start: int = 0, stop: int | None = None, *, source: str = "", first: int = 0
) -> Iterator[RawBlock]:
    """Frames start to stop of a system. `source`, `first`: how frames are named and from where they are counted."""
    offset = 0
    for data_set in system.sets:
        if stop is not None and offset >= stop:
            return
        arrays = system.arrays(data_set)
        low, high = within(start, stop, offset, len(arrays["coord"]))
        for a, b in block_ranges(low, high, len(system.types)):
            for c, d, types in _runs(system, arrays, a, b, _name_of(data_set)):
                block = _block(system, arrays, c, d, types, _name_of(data_set))
                block.source, block.start = source or system.name, first + offset + c
                yield block
        offset += len(arrays["coord"])


def _runs(
    system: System, arrays: Mapping[str, Any], start: int, stop: int, where: str
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Frames start to stop in runs with the same padding: their range, and types (n_atoms,) or one row each."""
    if "real_atom_types" not in arrays:
        yield start, stop, system.types
        return
    stored = np.asarray(arrays["real_atom_types"][start:stop]).reshape(stop - start, -1)
    types = stored.astype(np.int64)
    if not (types == stored).all():
        raise ForgefieldError(f"{where}: real_atom_types should hold whole numbers")
    padding = types == PADDING
    changes = np.flatnonzero((padding[1:] != padding[:-1]).any(axis=1)) + 1
    for a, b in pairwise([0, *changes.tolist(), stop - start]):
        yield start + a, start + b, types[a:b]


def _block(system: System, arrays: Mapping[str, Any], start: int, stop: int, types: np.ndarray, where: str) -> RawBlock:
    n_frames, n_atoms = stop - start, len(system.types)
    there: slice | np.ndarray = slice(None) if types.ndim == 1 else np.flatnonzero(types[0] != PADDING)

    def of_frames(name: str) -> np.ndarray:
        return np.asarray(arrays[name][start:stop])

    def of_atoms(name: str) -> np.ndarray:
        return of_frames(name).reshape(n_frames, n_atoms, -1)[:, there]

    # Whether an array is per frame or per atom is decided by the setting that requests it.
    values = {name: name for name in arrays if name not in STRUCTURE and _width(arrays[name]) > 0}
    values = _other_names(values) | values
    per_atom = {name: file for name, file in values.items() if _width(arrays[file]) % n_atoms == 0}
    return RawBlock(
        positions=of_atoms("coord"),
        numbers=_numbers(system, types[..., there], where),
        cell=matrices(of_frames("box")) if "box" in arrays else np.zeros((n_frames, 3, 3)),
        pbc=np.full(3, system.periodic),
        source=system.name,
        start=start,
        info=LazyColumns({name: partial(of_frames, file) for name, file in values.items()}),
        arrays=LazyColumns({name: partial(of_atoms, file) for name, file in per_atom.items()}),
    )


def _other_names(names: Iterable[str]) -> dict[str, str]:
    """Values of atoms are called `atom_dos` or `atomic_dos`, and asked for by either name: the other one -> the one."""
    short, long = "atom_", "atomic_"
    return {long + name.removeprefix(short): name for name in names if name.startswith(short)} | {
        short + name.removeprefix(long): name for name in names if name.startswith(long)
    }


def _width(values: np.ndarray | Hdf5Array) -> int:
    """Numbers a frame."""
    return math.prod(values.shape[1:])


def _numbers(system: System, types: np.ndarray, where: str) -> np.ndarray:
    """Atomic numbers of atom types, each of which must be in the map and stand for an element."""
    low, high = int(types.min(initial=0)), int(types.max(initial=0))
    if low < 0 or high >= len(system.elements):
        raise ForgefieldError(
            f"{where}: it has atoms of type {low if low < 0 else high}, but the type map "
            f"({' '.join(system.element_names)}) has types 0 to {len(system.elements) - 1}"
        )
    numbers = system.elements[types]
    if not numbers.all():
        name = system.element_names[int(types.reshape(-1)[np.flatnonzero(numbers.reshape(-1) == 0)[0]])]
        raise ForgefieldError(
            f"{where}: {name!r} in its type map is not a chemical element; name the elements of its types in the source, "
            f"as in {{path: {system.name}, type_map: {{{name}: O}}}}"
        )
    return numbers


def _system(
    name: str,
    types: list[str],
    stored_names: list[str] | None,
    type_map: TypeMap | None,
    periodic: bool,
    sets: tuple[Any, ...],
) -> System:
    names = _type_names(name, stored_names, type_map)
    try:
        indices = np.array(whole_numbers(types), dtype=np.int64)
    except (ValueError, OverflowError):
        wrong = next(
            (word for word in types if not word.lstrip("+-").isdecimal() or not is_plain(word)), "a huge number"
        )
        raise ForgefieldError(
            f"{name}: its type.raw should hold one integer for each atom, not {wrong!r:.40}"
        ) from None
    if not len(indices):
        raise ForgefieldError(f"{name}: its type.raw is empty, so it has no atoms")
    elements = np.array([atomic_numbers.get(item, 0) for item in names], dtype=np.int64)
    return System(name, indices, elements, names, periodic, sets)


def _type_names(name: str, stored: list[str] | None, type_map: TypeMap | None) -> tuple[str, ...]:
    """The name of each type, that of an element where there is one. stored: names in the system."""
    by_name = dict(entry for entry in type_map or () if isinstance(entry, tuple))
    in_order = tuple(entry for entry in type_map or () if isinstance(entry, str))
    if stored is None and not in_order:
        raise ForgefieldError(
            f"{name}: it has no type_map.raw, so its atom types have no elements; name them in the source, "
            f"as in {{path: {name}, type_map: [O, H]}}"
        )
    if stored is not None and in_order:
        clash = any(mine in atomic_numbers and mine != other for mine, other in zip(stored, in_order))
        if clash or len(stored) != len(in_order):
            raise ForgefieldError(
                f"{name}: its type_map.raw says {' '.join(stored)}, the source's type_map {' '.join(in_order)}; leave it out"
            )
    return in_order or tuple(by_name.get(item, item) for item in stored or ())


def _folder_arrays(folder: Path) -> dict[str, Any]:
    try:
        files = sorted(folder.iterdir())  # glob would pass over a folder that may not be read
    except PermissionError:
        raise SourceUnreadable(f"{folder}: no permission to look into this folder") from None
    if folder.name.startswith("set."):
        return {file.stem: _memory_mapped(file) for file in files if file.suffix == ".npy"}
    texts = [file for file in files if file.suffix == ".raw" and file.name not in ("type.raw", "type_map.raw")]
    return {file.stem: text_rows(file) for file in texts}


def _group_arrays(group: h5py.Group) -> dict[str, Any]:
    return {key.removesuffix(".npy"): Hdf5Array(value) for key, value in group.items() if is_dataset(value)}


def _memory_mapped(file: Path) -> np.ndarray:
    try:
        return map_npy(file)
    except PermissionError:
        raise SourceUnreadable(f"{file}: no permission to read this file") from None


def _one_row_each(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays with the numbers of all frames in one row, such as an `aparam` of shape (1, n), with a row for each frame."""
    coord = arrays.get("coord")
    n_frames = coord.shape[0] if coord is not None and coord.ndim else 0
    rows = dict(arrays)
    for name, values in arrays.items():
        is_one_row = n_frames > 1 and values.ndim == 2 and values.shape[0] == 1
        if is_one_row and values.shape[1] % n_frames == 0 and values.shape[1] > 0:
            rows[name] = np.asarray(values[:]).reshape(n_frames, -1)
    return rows


def _name_of(data_set: Path | h5py.Group) -> str:
    return str(data_set) if isinstance(data_set, Path) else f"{data_set.file.filename}#{data_set.name}"


def _check_shapes(arrays: Mapping[str, Any], system: System, where: str) -> None:
    n_atoms = len(system.types)
    if "coord" not in arrays:
        raise ForgefieldError(f"{where}: there is no coord here, so there are no positions")
    if system.periodic and "box" not in arrays:
        raise ForgefieldError(
            f"{where}: there is no box here; add it, or a file named nopbc next to type.raw if this is not periodic"
        )
    n_frames = arrays["coord"].shape[0] if arrays["coord"].ndim else 0
    widths = {
        "coord": 3 * n_atoms,
        "force": 3 * n_atoms,
        "box": 9,
        "virial": 9,
        "energy": 1,
        "real_atom_types": n_atoms,
    }
    for key, values in arrays.items():
        if np.dtype(values.dtype).kind not in "fiub":
            raise ForgefieldError(f"{where}: {key} holds {values.dtype}, not numbers")
        if not values.ndim or len(values) != n_frames:
            raise ForgefieldError(f"{where}: {key} has shape {tuple(values.shape)}, but coord has {n_frames} frames")
        width = _width(values)
        if key in widths and width != widths[key]:
            raise ForgefieldError(
                f"{where}: {key} has {width} numbers a frame; with the {n_atoms} atoms of type.raw it must be "
                f"{widths[key]}"
            )
