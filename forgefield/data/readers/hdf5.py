"""Reader of HDF5 files: every group with positions and atomic numbers is a system of one frame or of many.

Finds the layouts of ANI, SPICE and other quantum-chemistry sets, MACE's prepared files, Open MatSciML's samples and
DeePMD-kit's systems, at any depth. Groups come in the order of the numbers in their names (config_2 before config_10).
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ase.data import atomic_numbers

from forgefield.data.frame import (
    LazyColumns,
    RawBlock,
    atomic_numbers_of,
    block_ranges,
    is_logical,
    real_numbers,
    within,
)
from forgefield.data.options import UnitOptions
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile, TypeMap
from forgefield.data.readers.deepmd import open_group, read_system
from forgefield.data.readers.hdf5_values import (
    EXTRA_NAMES,
    REMEDY,
    Hdf5Array,
    is_dataset,
    is_group,
    label_datasets,
    open_hdf5,
    reading_hdf5,
    stated_factor,
)
from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import FRAME_BYTES, check_expansion

if TYPE_CHECKING:
    import h5py


NUMBER_NAMES = ("atomic_numbers", "numbers", "species", "nuclear_charges", "z", "Z", "elements", "symbols")
POSITION_NAMES = ("positions", "coordinates", "conformations", "coords", "pos", "cart_coords", "xyz", "R")
CELL_NAMES = ("cell", "lattice_matrix", "lattice", "box", "cells", "box_vectors")


@dataclass(frozen=True)
class Entry:
    """One system of a file."""

    group: str
    deepmd: bool
    n_frames: int
    n_atoms: int

    @property
    def n_bytes(self) -> int:
        """What its frames take in memory with their positions alone, about."""
        return self.n_frames * (FRAME_BYTES + 24 * self.n_atoms)


class Hdf5Reader(Reader):
    name = "hdf5"
    suffixes = (".h5", ".hdf5", ".hdf")
    has_groups = True
    has_atom_types = True

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawBlock]:
        return read_hdf5(
            source.path,
            options.units,
            start,
            stop,
            group=source.group,
            type_map=source.type_map,
            fields=options.field_keys,
        )

    def count(self, source: SourceFile) -> int:
        return count_hdf5(source.path, group=source.group, type_map=source.type_map)


def read_hdf5(
    path: Path,
    units: UnitOptions,
    start: int = 0,
    stop: int | None = None,
    *,
    group: str | None = None,
    type_map: TypeMap | None = None,
    fields: frozenset[str] = frozenset(),
) -> Iterator[RawBlock]:
    """Frames start to stop of a file, or of all systems in one of its groups. fields: keys whose values stay as they are."""
    source = str(path) if group is None else f"{path}#{group}"
    entries = _entries(path, group, type_map)
    ends = list(accumulate(entry.n_frames for entry in entries))
    with open_hdf5(path) as file, reading_hdf5(source):
        for at in range(bisect.bisect_right(ends, start), len(entries)):
            entry, first = entries[at], ends[at] - entries[at].n_frames
            if stop is not None and first >= stop:
                return
            low, high = within(start, stop, first, entry.n_frames)
            where = f"{path}#{entry.group}"
            if entry.deepmd:
                system = open_group(file[entry.group], where, type_map)
                yield from read_system(system, low, high, source=source, first=first)
            else:
                yield from _read_group(file[entry.group], where, units, fields, low, high, source, first)


def count_hdf5(path: Path, *, group: str | None = None, type_map: TypeMap | None = None) -> int:
    """Number of frames."""
    return sum(entry.n_frames for entry in _entries(path, group, type_map))


def _entries(path: Path, group: str | None, type_map: TypeMap | None) -> tuple[Entry, ...]:
    status = os.stat(path)
    return _catalogue(path.resolve(), group, type_map, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _catalogue(path: Path, group: str | None, type_map: TypeMap | None, size: int, mtime_ns: int) -> tuple[Entry, ...]:
    """All systems of a file, remembered while the file stays as it is."""
    with open_hdf5(path) as file, reading_hdf5(str(path)):
        if group is not None and group not in file:
            inside = ", ".join(list(file)[:8]) or "nothing"
            raise ForgefieldError(f"{path}#{group}: there is no such group in the file; it holds {inside}")
        top = file[group or "/"]
        if not is_group(top):
            raise ForgefieldError(f"{path}#{group}: this is a dataset, not a group")
        entries = tuple(_search(top, path, type_map))
    check_expansion(sum(entry.n_bytes for entry in entries), size, str(path), REMEDY)
    if not entries:
        raise ForgefieldError(
            f"{path}{'#' + group if group else ''}: no group holds positions ({', '.join(POSITION_NAMES)}) and atomic "
            f"numbers ({', '.join(NUMBER_NAMES)})"
        )
    return entries


def _search(top: h5py.Group, path: Path, type_map: TypeMap | None) -> Iterator[Entry]:
    """Systems in `top`, at any depth. A group that has several names, or contains itself, is visited once."""
    seen: set[tuple[Any, Any]] = set()
    waiting = [iter([top])]
    while waiting:
        group = next(waiting[-1], None)
        if group is None:
            waiting.pop()
            continue
        address = _address(group)
        if address in seen:
            continue
        seen.add(address)
        entry = _entry(group, f"{path}#{group.name}", type_map)
        if entry is None:
            waiting.append(_groups_in(group))
        else:
            yield entry


def _address(group: h5py.Group) -> tuple[Any, Any]:
    """Where a group stands: the same under all of its names."""
    import h5py

    about = h5py.h5g.get_objinfo(
        group.id
    )  # h5o.get_info measures all that belongs to it, and never ends where that is damaged
    return about.fileno, about.objno


def _groups_in(group: h5py.Group) -> Iterator[Any]:
    for key in sorted(group, key=_natural):
        if type(group.get(key, getlink=True)).__name__ == "HardLink":
            inner = group[key]
            if is_group(inner):
                yield inner


def _entry(group: h5py.Group, where: str, type_map: TypeMap | None) -> Entry | None:
    """The system this group is; None where it is none."""
    if "type.raw" in group:
        system = open_group(group, where, type_map)
        return Entry(group.name, True, sum(system.lengths()), len(system.types))
    positions = _dataset(group, POSITION_NAMES)
    if positions is None or _dataset(group, NUMBER_NAMES) is None:
        return None
    if type_map is not None:
        raise ForgefieldError(f"{where}: a type_map was given, but this group is not a DeePMD system")
    if positions.ndim not in (2, 3) or positions.shape[-1] != 3:
        raise ForgefieldError(
            f"{where}: {_leaf(positions)} has shape {positions.shape}; it must be (atoms, 3) or (frames, atoms, 3)"
        )
    if positions.shape[-2] == 0:
        raise ForgefieldError(f"{where}: {_leaf(positions)} has shape {positions.shape}, so there are no atoms")
    return Entry(group.name, False, 1 if positions.ndim == 2 else positions.shape[0], positions.shape[-2])


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _leaf(dataset: Hdf5Array) -> str:
    return dataset.name.rpartition("/")[2]


def _dataset(group: h5py.Group, names: tuple[str, ...]) -> Hdf5Array | None:
    """The dataset of the group under the first of these names that it has."""
    return next(iter(_datasets(group, names)), None)


def _datasets(group: h5py.Group, names: tuple[str, ...]) -> Iterator[Hdf5Array]:
    for name in names:
        if name in group and is_dataset(group[name]):
            yield Hdf5Array(group[name])


def _read_group(
    group: h5py.Group,
    where: str,
    units: UnitOptions,
    fields: frozenset[str],
    start: int,
    stop: int,
    source: str,
    first: int,
) -> Iterator[RawBlock]:
    positions = _dataset(group, POSITION_NAMES)
    assert positions is not None  # else it would not be an entry
    _refuse_second(group, POSITION_NAMES, where, "positions")
    many = positions.ndim == 3
    n_frames, n_atoms = positions.shape[:2] if many else (1, positions.shape[0])
    numbers = _numbers(group, where, n_frames, n_atoms)
    cells, periodic = _cells(group, where, units, n_frames)
    factor = stated_factor(positions, units, "length")
    datasets = label_datasets(group, where, units, n_frames if many else None, n_atoms, fields)
    for a, b in block_ranges(start, stop, n_atoms):
        coordinates = np.asarray(positions[a:b] if many else positions[()][None])
        coordinates = coordinates if factor == 1.0 else coordinates * np.float64(factor)
        columns = LazyColumns({name: partial(column.values, a, b) for name, column in datasets.items()})
        yield RawBlock(
            positions=coordinates,
            numbers=numbers if numbers.ndim == 1 else numbers[a:b],
            cell=cells[a:b],
            pbc=periodic[a:b],
            source=source,
            start=first + a,
            info=columns,
            arrays=columns,
            extra_names=EXTRA_NAMES,
        )


def _refuse_second(group: h5py.Group, names: tuple[str, ...], where: str, what: str) -> None:
    present = list(_datasets(group, names))
    for other in present[1:]:
        if other.shape != present[0].shape or not np.array_equal(other[()], present[0][()]):
            raise ForgefieldError(
                f"{where}: {_leaf(present[0])} and {_leaf(other)} both could be the {what} and disagree; remove one"
            )


def _numbers(group: h5py.Group, where: str, n_frames: int, n_atoms: int) -> np.ndarray:
    dataset = _dataset(group, NUMBER_NAMES)
    assert dataset is not None
    values = np.asarray(dataset[()])
    if values.dtype.kind in "OSU":
        words = [word.decode() if isinstance(word, bytes) else str(word) for word in values.reshape(-1)]
        unknown = [word for word in words if word not in atomic_numbers]
        if unknown:
            raise ForgefieldError(f"{where}: {unknown[0]!r} in {_leaf(dataset)} is not a chemical element")
        values = np.array([atomic_numbers[word] for word in words], dtype=np.int64).reshape(values.shape)
    if values.shape not in ((n_atoms,), (n_frames, n_atoms)) or values.dtype.kind not in "iuf":
        raise ForgefieldError(
            f"{where}: {_leaf(dataset)} has shape {values.shape}, but there are positions of {n_atoms} atoms in "
            f"{n_frames} frames"
        )
    return atomic_numbers_of(values.reshape(-1), f"{where}, {_leaf(dataset)}").reshape(values.shape)


def _cells(group: h5py.Group, where: str, units: UnitOptions, n_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """(n_frames, 3, 3) and (n_frames, 3). One cell for all frames may be (3, 3), (9,), or the three edges of a box."""
    dataset = _dataset(group, CELL_NAMES)
    if dataset is not None and dataset.dtype.kind in "SUO":
        dataset = None  # the text None is written for none
    if dataset is None and "lattice_parameters" in group:
        raise ForgefieldError(f"{where}: its lattice is given by lattice_parameters only; add a lattice_matrix, in A")
    cell: np.ndarray = np.zeros((3, 3))
    if dataset is not None:
        cell = real_numbers(dataset[()], where, _leaf(dataset)) * stated_factor(dataset, units, "length")
        if cell.shape == (3,):
            cell = np.diag(cell)
        if cell.size not in (9, 9 * n_frames) or (cell.shape[-1] not in (3, 9)):
            raise ForgefieldError(
                f"{where}: {_leaf(dataset)} has shape {cell.shape}; it must be (3, 3), or ({n_frames}, 3, 3)"
            )
    pbc = _periodic(group, where, dataset is not None)
    if pbc.size not in (1, 3, 3 * n_frames):
        raise ForgefieldError(f"{where}: pbc has shape {pbc.shape}; it must be (3,), or ({n_frames}, 3)")
    rows = pbc.reshape(-1, 3) if pbc.size > 1 else np.full((1, 3), bool(pbc.reshape(-1)[0]))
    return np.broadcast_to(cell.reshape(-1, 3, 3), (n_frames, 3, 3)), np.broadcast_to(rows, (n_frames, 3))


def _periodic(group: h5py.Group, where: str, has_cell: bool) -> np.ndarray:
    pbc = group.get("pbc")
    if pbc is not None and is_group(pbc):
        values = np.array([Hdf5Array(pbc[axis])[()] for axis in "xyz"])
    elif pbc is None or Hdf5Array(pbc).dtype.kind in "SUO":  # the text None is written for none
        return np.array(has_cell)
    else:
        values = np.asarray(Hdf5Array(pbc)[()])
    if not is_logical(values):
        raise ForgefieldError(f"{where}: pbc should hold truth values (or 0 and 1), not {values.reshape(-1)[:3]}")
    return values.astype(bool)
