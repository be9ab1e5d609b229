"""Reader of Open MatSciML's LMDB sets: one pickled sample a frame, read without running anything it names.

Samples of different origin look different: plain arrays (LiPS), a pymatgen structure as a dictionary (Alexandria), site
lists (OQMD, whose `cart_coords` are fractional). Only total energies count as energy; formation energies, gaps and the
like keep their own names and can be asked for by `data.labels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import atomic_numbers, covalent_radii

from forgefield.data.frame import RawFrame, atomic_numbers_of, periodicity, real_numbers
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.data.readers.lmdb.files import open_lmdb
from forgefield.errors import ForgefieldError
from forgefield.untrusted.safe_pickle import RefusedPickle, safe_loads

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
                raise ForgefieldError(f"{where}: a sample should be a dictionary, not {type(sample).__name__}")
            try:
                yield _frame(sample, str(path), index, where)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                raise ForgefieldError(f"{where}: its sample is not one that Forgefield knows ({reason})") from error


def _frame(sample: dict[str, Any], source: str, index: int, where: str) -> RawFrame:
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


def _targets(groups: Any) -> dict[str, Any]:
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


def _fractional(values: np.ndarray, numbers: np.ndarray, sites: Any) -> bool:
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
