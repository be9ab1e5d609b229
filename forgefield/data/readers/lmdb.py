"""Readers of LMDB files: ASE-LMDB databases and the sets of Open MatSciML.

ASE-LMDB (`*.aselmdb`, used by fairchem): rows of compressed JSON, by ascending id, without deleted ids. The JSON becomes
numbers, text and containers only, whatever classes it names.

Open MatSciML: one pickled sample per frame, read without executing anything. Samples differ by origin: plain arrays (LiPS), a
pymatgen structure as a dictionary (Alexandria), lists of sites (OQMD, whose `cart_coords` are fractional). Only total energies
are energies; formation energies, gaps and others keep their names and can be selected in `data.labels`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from ase.calculators.calculator import all_properties
from ase.data import atomic_numbers, covalent_radii

from forgefield.data.frame import RawFrame, atomic_numbers_of, periodicity, real_numbers
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.data.readers.lmdb_files import LmdbFile, open_lmdb
from forgefield.errors import ForgefieldError
from forgefield.untrusted.safe_pickle import RefusedPickle, safe_loads

LARGEST_VALUE = 256 * 2**20
"""Bytes of JSON that one row may have."""
_NUMBER_TYPE = re.compile(r"(bool|u?int\d+|float\d+|complex\d+|[<>|=]?[biufc]\d+)")


class AseLmdbReader(Reader):
    name = "aselmdb"
    suffixes = (".aselmdb",)

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame]:
        return read_aselmdb(source.path, start, stop)

    def count(self, source: SourceFile) -> int:
        return count_aselmdb(source.path)


def read_aselmdb(path: Path, start: int = 0, stop: int | None = None) -> Iterator[RawFrame]:
    """Frames start to stop; key-value pairs and data of a row count as its info, calculator results as results."""
    with open_lmdb(path) as file:
        for index, position in enumerate(_record_positions(file)[start:stop].tolist(), start):
            where = f"{path}, frame {index} (id {file.keys[position].decode()})"
            row = _decode(file.value(position), where)
            try:
                yield _frame_from_row(row, str(path), index)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                raise ForgefieldError(f"{where}: it is not a row of an ASE database ({reason})") from error


def count_aselmdb(path: Path) -> int:
    """Number of rows that are not deleted."""
    with open_lmdb(path) as file:
        return len(_record_positions(file))


def _record_positions(file: LmdbFile) -> np.ndarray:
    return _listed(file.path, *file.state)


@lru_cache(maxsize=4)
def _listed(path: Path, *_: str | int) -> np.ndarray:
    """(n_frames,) positions in the keys of the file, by ascending id, remembered while the file stays as it is."""
    with open_lmdb(path) as file:
        keys, deleted, following = file.keys, file.other(b"deleted_ids"), file.other(b"nextid")
    gone = set(
        _whole_numbers([] if deleted is None else _decode(deleted, f"{path}, deleted_ids"), f"{path}, deleted_ids")
    )
    ids = [int(key) for key in keys.tolist()]
    present = set(ids)
    if len(present) < len(ids):
        raise ForgefieldError(f"{path}: two rows have the same id; the file is damaged")
    if following is not None:
        (end,) = _whole_numbers([_decode(following, f"{path}, nextid")], f"{path}, nextid")
        _refuse_missing(path, present | gone, end)
        present = {i for i in present if 1 <= i < end}
    if ids and ids[-1] >= 2**63:
        raise ForgefieldError(f"{path}: the id of a row must be below 2**63; the file is damaged")
    return np.array([position for position, i in enumerate(ids) if i in present and i not in gone], dtype=np.int64)


def _refuse_missing(path: Path, ids: set[int], end: int) -> None:
    """Every id from 1 to end - 1 should be in `ids`. `end` may be huge, so no loop runs up to it."""
    ids = {i for i in ids if 1 <= i < end}
    if len(ids) < end - 1:
        missing = next(i for i in range(1, len(ids) + 2) if i not in ids)
        raise ForgefieldError(f"{path}: row {missing} is neither there nor marked as deleted; the file is damaged")


def _whole_numbers(values: object, where: str) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ForgefieldError(f"{where}: it should hold whole numbers; the file is damaged")
    return values


def _decode(data: bytes, where: str) -> Any:
    try:
        return json.loads(_unpacked(data, where).decode("utf-8"), object_hook=_plain)
    except (zlib.error, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ForgefieldError(f"{where}: it is not compressed JSON as ASE-LMDB holds it ({error})") from error


def _unpacked(data: bytes, where: str) -> bytes:
    """A few kB can unpack to many GB; nothing is unpacked beyond `LARGEST_VALUE`."""
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(data, LARGEST_VALUE + 1)
    if len(text) > LARGEST_VALUE:
        raise ForgefieldError(f"{where}: it unpacks to more than {LARGEST_VALUE} bytes, more than a row is allowed to")
    if not unpacker.eof:
        raise zlib.error("it ends too early")
    return text


def _plain(item: dict[str, Any]) -> Any:
    """Arrays and complex numbers out of what ASE writes for them; objects of its classes stay dictionaries."""
    if "__ndarray__" in item:
        shape, dtype, values = item["__ndarray__"]
        if not _NUMBER_TYPE.fullmatch(str(dtype)):
            raise ValueError(f"an array of {dtype!r}")
        return np.array(values, dtype=dtype).reshape(shape)
    if "__complex__" in item:
        return complex(*item["__complex__"])
    if "__ase_objtype__" in item and "array" in item:
        return item["array"]
    return item


def _frame_from_row(row: dict[str, Any], source: str, index: int) -> RawFrame:
    cell = np.asarray(row.get("cell", np.zeros((3, 3))))
    return RawFrame(
        positions=np.asarray(row["positions"]),
        numbers=np.asarray(row["numbers"]),
        cell=np.diag(cell) if cell.shape == (3,) else cell.reshape(3, 3),
        pbc=np.asarray(row.get("pbc", np.zeros(3))),
        source=source,
        index=index,
        info={**(row.get("data") or {}), **(row.get("key_value_pairs") or {})},
        results={key: row[key] for key in all_properties if row.get(key) is not None},
    )


POSITION_KEYS = ("pos", "positions", "cart_coords")
NUMBER_KEYS = ("atomic_numbers", "numbers", "z")
CELL_KEYS = ("cell", "lattice_matrix")
TOTAL_ENERGIES = ("energy_total", "total_energy")
"""Targets that are total energies of the frame; a target called just `energy` may be a formation energy."""
EXTRA_NAMES = {"energy": ("energy_total",)}


class MatscimlReader(Reader):
    name = "lmdb"
    suffixes = (".lmdb",)
    folder_marker = "data.mdb"

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame]:
        return read_matsciml(source.path, start, stop)

    def count(self, source: SourceFile) -> int:
        with open_lmdb(source.path) as file:
            return len(file.keys)


def read_matsciml(path: Path, start: int = 0, stop: int | None = None) -> Iterator[RawFrame]:
    """Frames start to stop of an LMDB file, by ascending key."""
    with open_lmdb(path) as file:
        for index, key in enumerate(file.keys[start:stop].tolist(), start):
            where = f"{path}, frame {index} (key {key.decode()})"
            try:
                sample = safe_loads(file.value(index))
            except RefusedPickle as error:
                raise ForgefieldError(f"{where}: its value is refused: {error}") from None
            if not isinstance(sample, dict):
                raise ForgefieldError(f"{where}: a sample must be a dictionary, not {type(sample).__name__}")
            try:
                yield _frame_from_sample(sample, str(path), index, where)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                raise ForgefieldError(f"{where}: its sample is not one that Forgefield knows ({reason})") from error


def _frame_from_sample(sample: dict[str, Any], source: str, index: int, where: str) -> RawFrame:
    if isinstance(sample.get("structure"), Mapping):
        positions, numbers, cell, pbc = _pymatgen(sample["structure"], where)
        used: tuple[str, ...] = ("structure",)
    else:
        positions, numbers, cell, pbc = _arrays(sample, where)
        used = (*POSITION_KEYS, *NUMBER_KEYS, *CELL_KEYS, "pbc")
    if "natoms" in sample and (np.size(sample["natoms"]) != 1 or np.asarray(sample["natoms"]).item() != len(numbers)):
        raise ForgefieldError(f"{where}: natoms is {sample['natoms']}, but there are {len(numbers)} atoms")
    if "volume" in sample:
        _check_volume(cell, float(sample["volume"]), where)
    values = {key: value for key, value in sample.items() if key not in used and value is not None}
    values.update(_targets(values.pop("targets", {})))
    per_atom = {key for key, value in values.items() if isinstance(value, np.ndarray) and len(value.shape or ()) > 0
                and len(value) == len(numbers) and value.shape != (3, 3)}  # fmt: skip
    per_atom |= {"force", "forces"} & values.keys()
    return RawFrame(
        positions=positions,
        numbers=numbers,
        cell=cell,
        pbc=pbc,
        source=source,
        index=index,
        info=values,
        arrays={key: values[key] for key in per_atom},
        extra_names=EXTRA_NAMES,
    )


def _targets(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Targets of all kinds under their own names; one that is called like a label, but need not be it, as targets.X."""
    values = {}
    for group in groups.values():
        for key, value in group.items() if isinstance(group, Mapping) else ():
            if value is not None:
                values[key if key in TOTAL_ENERGIES or "energy" not in key.lower() else f"targets.{key}"] = value
    return values


def _pymatgen(structure: Mapping[str, Any], where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, numbers, cell and pbc of a structure as pymatgen writes it into dictionaries."""
    lattice, sites = structure["lattice"], structure["sites"]
    cell = real_numbers(lattice["matrix"], where, "the lattice").reshape(3, 3)
    _check_volume(cell, float(lattice.get("volume", abs(np.linalg.det(cell)))), where)
    numbers = np.zeros(len(sites), dtype=np.int64)
    for i, site in enumerate(sites):
        species = site["species"]
        if len(species) != 1 or abs(float(species[0].get("occu", 1)) - 1) > 1e-6:
            raise ForgefieldError(f"{where}: site {i} is not one whole atom; disordered structures cannot be read")
        numbers[i] = atomic_numbers[species[0]["element"]]
    positions = real_numbers([site["abc"] for site in sites], where, "the sites").reshape(-1, 3) @ cell
    if sites and "xyz" in sites[0]:
        stored = np.array([site["xyz"] for site in sites], dtype=np.float64)
        if not np.allclose(stored, positions, atol=1e-3):
            raise ForgefieldError(f"{where}: the fractional and the Cartesian coordinates of its sites disagree")
        positions = stored
    return positions, numbers, cell, periodicity(lattice.get("pbc", (True, True, True)), where)


def _arrays(sample: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, numbers, cell and pbc of a sample of plain arrays."""
    name = next((key for key in POSITION_KEYS if sample.get(key) is not None), None)
    charges = next((sample[key] for key in NUMBER_KEYS if sample.get(key) is not None), None)
    if name is None or charges is None:
        raise ForgefieldError(
            f"{where}: no positions and atomic numbers (looked for {', '.join((*POSITION_KEYS, *NUMBER_KEYS))}); "
            f"the sample has {', '.join(map(str, sample))}"
        )
    positions = real_numbers(sample[name], where, name)
    numbers = atomic_numbers_of(charges, where)
    if positions.shape != (len(numbers), 3):
        raise ForgefieldError(f"{where}: {name} has shape {positions.shape}, but there are {len(numbers)} atoms")
    stored = next((sample[key] for key in CELL_KEYS if sample.get(key) is not None), None)
    cell = np.zeros((3, 3)) if stored is None else real_numbers(stored, where, "the cell").reshape(3, 3)
    pbc = periodicity(np.broadcast_to(np.asarray(sample.get("pbc", stored is not None)), 3), where)
    if name == "cart_coords" and _fractional(positions, numbers, sample.get("sites")):
        if stored is None:
            raise ForgefieldError(f"{where}: its {name} are fractional, but there is no cell to go with them")
        positions = positions @ cell
    return positions, numbers, cell, pbc


def _fractional(values: np.ndarray, numbers: np.ndarray, sites: object) -> bool:
    """Whether values called Cartesian are fractional: the list of sites says so, or as lengths they are impossible.

    `sites`: texts such as 'Mn @ 0.75 0.25 0.5', always fractional. Impossible: all within 0 and 1, and atoms closer than
    half the sum of their covalent radii.
    """
    if isinstance(sites, list) and len(sites) == len(values) and all("@" in str(site) for site in sites):
        listed = np.array([str(site).split("@")[1].split() for site in sites], dtype=np.float64)
        return bool(np.allclose(listed, values, atol=1e-6))
    if len(values) < 2 or values.min() < -1e-6 or values.max() > 1 + 1e-6:
        return False
    first, second = np.triu_indices(len(values), 1)
    distances = np.linalg.norm(values[first] - values[second], axis=1)
    radii = covalent_radii[numbers]
    return bool((distances < 0.5 * (radii[first] + radii[second])).any())


def _check_volume(cell: np.ndarray, stated: float, where: str) -> None:
    volume = abs(np.linalg.det(cell))
    if abs(volume - stated) > 1e-2 * abs(stated):
        raise ForgefieldError(f"{where}: its cell has {volume:.6g} A^3, but it says its volume is {stated:.6g}")
