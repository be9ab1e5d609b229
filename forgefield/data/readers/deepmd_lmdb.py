"""Reader of DeePMD-kit's LMDB files: one MessagePack record per frame, and one named `__metadata__` with the names of types.

Frames may have any numbers of atoms. Values have the names of DeePMD-kit's arrays: energy, force, virial, fparam, atom_dos and
so on. A frame without a cell, or with a cell of zeros, is not periodic. Types below zero mark places without an atom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import atomic_numbers

from forgefield.data.frame import RawFrame
from forgefield.data.readers.base import TypeMap
from forgefield.data.readers.lmdb_files import LmdbFile, open_lmdb
from forgefield.errors import ForgefieldError
from forgefield.untrusted.msgpack import unpack

METADATA = b"__metadata__"
NAMES = {
    "coords": "coord",
    "cells": "box",
    "energies": "energy",
    "forces": "force",
    "atom_types": "atype",
    "virials": "virial",
}
"""Names of values in these files, and those of the arrays of a system."""
NOT_VALUES = ("coord", "box", "atype", "atom_numbs", "atom_names", "orig", "natoms", "real_natoms_vec", "fid", "sid")


@dataclass(frozen=True)
class _Types:
    """Atomic number of each type, 0 where its name is not an element, and the names."""

    numbers: np.ndarray
    names: tuple[str, ...]


def is_deepmd_lmdb(path: Path) -> bool:
    """Whether an LMDB file is one of DeePMD-kit."""
    with open_lmdb(path) as file:
        return file.other(METADATA) is not None


def has_type_names(path: Path) -> bool:
    """Whether the file names its atom types."""
    with open_lmdb(path) as file:
        return _metadata(path, *file.state).get("type_map") is not None


def read_deepmd_lmdb(
    path: Path, type_map: TypeMap | None, start: int = 0, stop: int | None = None
) -> Iterator[RawFrame]:
    """Frames start to stop. type_map: elements of types 0, 1, ... where the file does not name them, or of names."""
    with open_lmdb(path) as file:
        metadata = _metadata(path, *file.state)
        if metadata.get("nframes") != len(file.keys):
            raise ForgefieldError(
                f"{path}: it should have {metadata.get('nframes')!r:.20} frames and has {len(file.keys)}; the file is damaged"
            )
        types = _types(path, metadata.get("type_map"), type_map)
        for index in range(len(file.keys))[start:stop]:
            yield _frame(file, path, index, types)


@lru_cache(maxsize=4)
def _metadata(path: Path, *_: str | int) -> Mapping[str, Any]:
    """The record of the file's properties, remembered while the file stays as it is."""
    with open_lmdb(path) as file:
        values = _unpacked(file.other(METADATA) or b"", f"{path}, {METADATA.decode()}")
    # Lists with an entry for each frame are not needed.
    return {key: value for key, value in values.items() if key in ("nframes", "type_map")}


def _unpacked(data: bytes, where: str) -> dict[str, Any]:
    try:
        values = unpack(data)
    except ValueError as error:
        raise ForgefieldError(f"{where}: it is not a MessagePack record ({error})") from error
    if not isinstance(values, dict):
        raise ForgefieldError(f"{where}: a record must be a mapping, not {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _types(path: Path, stored: object, type_map: TypeMap | None) -> _Types:
    if stored is not None and not (isinstance(stored, list) and all(isinstance(name, str) for name in stored)):
        raise ForgefieldError(f"{path}: its type_map should be a list of names, not {stored!r:.60}")
    by_name = dict(entry for entry in type_map or () if isinstance(entry, tuple))
    in_order = tuple(entry for entry in type_map or () if isinstance(entry, str))
    if stored is None and not in_order:
        raise ForgefieldError(
            f"{path}: it does not name its atom types, so they have no elements; name them in the source, as in "
            f"{{path: {path}, type_map: [O, H]}}"
        )
    written: list[str] = stored or []
    names = in_order if stored is None else tuple(by_name.get(name, name) for name in written)
    return _Types(np.array([atomic_numbers.get(name, 0) for name in names], dtype=np.int64), names)


def _frame(file: LmdbFile, path: Path, index: int, types: _Types) -> RawFrame:
    where = f"{path}, frame {index}"
    record = _unpacked(file.value(index), where)
    values = {NAMES.get(key, key): _array(value, where, key) for key, value in record.items()}
    atype, coord = values.get("atype"), values.get("coord")
    if atype is None or coord is None or coord.size != 3 * atype.size or atype.dtype.kind not in "iu":
        raise ForgefieldError(
            f"{where}: it needs atom_types, one integer for each atom, and coords, three numbers for each"
        )
    kinds = atype.reshape(-1).astype(np.int64)
    there, n = kinds >= 0, len(kinds)
    box = values.get("box")
    if box is not None and box.size != 9:
        raise ForgefieldError(f"{where}: its cell has {box.size} numbers, not 9")
    cell = np.zeros((3, 3)) if box is None else box.reshape(3, 3)
    labels = {key: value for key, value in values.items() if key not in NOT_VALUES and value is not None and value.size}
    per_atom = {key: value.reshape(n, -1)[there] for key, value in labels.items() if n and value.size % n == 0}
    return RawFrame(
        positions=coord.reshape(n, 3)[there],
        numbers=_numbers(types, kinds[there], where),
        cell=cell,
        pbc=np.full(3, bool(cell.any())),
        source=str(path),
        index=index,
        info={key: value.reshape(-1) for key, value in labels.items()},
        arrays=per_atom,
    )


def _numbers(types: _Types, kinds: np.ndarray, where: str) -> np.ndarray:
    if kinds.size and kinds.max() >= len(types.names):
        raise ForgefieldError(
            f"{where}: it has atoms of type {kinds.max()}, but the type map ({' '.join(types.names)}) has types 0 to "
            f"{len(types.names) - 1}"
        )
    numbers = types.numbers[kinds]
    if not numbers.all():
        name = types.names[int(kinds[numbers == 0][0])]
        raise ForgefieldError(
            f"{where}: {name!r} in its type map is not a chemical element; name the elements of its types in the source, as in "
            f"{{path: ..., type_map: {{{name}: O}}}}"
        )
    return numbers


def _array(value: object, where: str, key: str) -> np.ndarray | None:
    """A number or an encoded array; None for what is neither."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return np.array([value])
    if not isinstance(value, dict) or not {"type", "data"} <= set(value):
        return None
    try:
        dtype = np.dtype(str(value["type"]))
        if dtype.kind not in "fiub":
            raise ValueError(f"it holds {dtype}, not numbers")
        array = np.frombuffer(value["data"], dtype=dtype)
        return array.reshape(value["shape"]) if "shape" in value else array
    except (ValueError, TypeError, OverflowError) as error:
        raise ForgefieldError(f"{where}: {key} cannot be read ({error})") from error
