"""Reader of LMDB files: those of DeePMD-kit (`deepmd_lmdb.py`), and the data sets of Open MatSciML, with one pickled sample per
frame, read without executing anything.

How a sample stores its structure depends on the data set (`matsciml_structures.py`). Only total energies are energies:
formation energies, gaps and others keep their names and can be selected in `data.labels`. Values within a group, such as the
symmetry of a crystal, are called `symmetry.number`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.data.frame import RawFrame
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.data.readers.deepmd_lmdb import has_type_names, is_deepmd_lmdb, read_deepmd_lmdb
from forgefield.data.readers.lmdb_files import open_lmdb
from forgefield.data.readers.matsciml_structures import structure_of
from forgefield.errors import ForgefieldError
from forgefield.untrusted.safe_pickle import RefusedPickle
from forgefield.untrusted.sample_objects import load_sample

TOTAL_ENERGIES = ("energy_total", "total_energy")
"""Targets that are total energies of the frame; a target called just `energy` may be a formation energy."""
EXTRA_NAMES = {"energy": ("energy_total",)}


class MatscimlReader(Reader):
    name = "lmdb"
    suffixes = (".lmdb",)
    folder_marker = "data.mdb"

    has_atom_types = True

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame]:
        if is_deepmd_lmdb(source.path):
            return read_deepmd_lmdb(source.path, source.type_map, start, stop)
        if source.type_map is not None:
            raise ForgefieldError(f"{source.name}: a type_map was given, but this is not an LMDB file of DeePMD-kit")
        return read_matsciml(source.path, start, stop)

    def names_types(self, source: SourceFile) -> bool:
        return not is_deepmd_lmdb(source.path) or has_type_names(source.path)

    def count(self, source: SourceFile) -> int:
        with open_lmdb(source.path) as file:
            return len(file.keys)


def read_matsciml(path: Path, start: int = 0, stop: int | None = None) -> Iterator[RawFrame]:
    """Frames start to stop of an LMDB file, by ascending key."""
    with open_lmdb(path) as file:
        for index, key in enumerate(file.keys[start:stop].tolist(), start):
            where = f"{path}, frame {index} (key {key.decode()})"
            try:
                sample = load_sample(file.value(index))
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
    structure = structure_of(sample, where)
    n = len(structure.numbers)
    if "natoms" in sample and (np.size(sample["natoms"]) != 1 or np.asarray(sample["natoms"]).item() != n):
        raise ForgefieldError(f"{where}: natoms is {sample['natoms']}, but there are {n} atoms")
    values = {key: value for key, value in structure.values.items() if value is not None}
    targets = values.pop("targets", {})
    values = _flat(values) | (_targets(targets) if isinstance(targets, Mapping) else {})
    if "stress" in values:
        values["stress"] = _full_stress(values["stress"])
    per_atom = {key for key, value in values.items() if isinstance(value, np.ndarray) and len(value.shape or ()) > 0
                and len(value) == n and value.shape != (3, 3)}  # fmt: skip
    per_atom |= {"force", "forces"} & values.keys()
    return RawFrame(
        positions=structure.positions,
        numbers=structure.numbers,
        cell=structure.cell,
        pbc=structure.pbc,
        source=source,
        index=index,
        info=values,
        arrays={key: values[key] for key in per_atom},
        extra_names=EXTRA_NAMES,
    )


def _full_stress(stress: Any) -> Any:
    """A stress of which only the upper triangle is stored (ColabFit), with its lower triangle."""
    values = np.asarray(stress)
    if values.shape != (3, 3) or values.dtype.kind != "f" or np.tril(values, -1).any():
        return stress
    return values + np.triu(values, 1).T


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and those of groups as `group.name`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": item for name, item in value.items() if item is not None})
        else:
            flat[key] = value
    return flat


def _targets(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Targets under their own names; one that is called like a label, but need not be it, as targets.X.

    groups: targets by kind (`regression`), or targets themselves.
    """
    values = {}
    for name, group in groups.items():
        for key, value in group.items() if isinstance(group, Mapping) else ((name, group),):
            if value is not None:
                values[key if key in TOTAL_ENERGIES or "energy" not in key.lower() else f"targets.{key}"] = value
    return values
