"""Structures with their results as extended xyz, every number with all its digits.

`ase.io.write` rounds columns to eight decimals, which turns small values into zero; files written here give back the same
numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.constraints import FixAtoms, FixCartesian
from ase.io.extxyz import output_column_format, save_calc_results
from ase.stress import voigt_6_to_full_3x3_stress

from forgefield.errors import ForgefieldError


def write_extxyz(path: Path, images: Iterable[Atoms]) -> None:
    """Write structures with `info`, arrays, calculator results and constraints."""
    with path.open("w", encoding="utf-8") as stream:
        for atoms in images:
            stream.writelines(_lines(atoms))


def append_extxyz(path: Path, images: Iterable[Atoms]) -> None:
    """Append structures to a file, and have the disk keep them."""
    with path.open("a", encoding="utf-8") as stream:
        for atoms in images:
            stream.write("".join(_lines(atoms)))
        stream.flush()
        os.fsync(stream.fileno())


def _lines(atoms: Atoms) -> Iterator[str]:
    image = atoms.copy()
    save_calc_results(image, atoms.calc, calc_prefix="", force=True)
    stress = image.info.get("stress")
    if stress is not None and np.shape(stress) == (6,):
        image.info["stress"] = voigt_6_to_full_3x3_stress(stress)
    columns: dict[str, np.ndarray] = {"symbols": np.array(list(image.symbols)), "positions": image.positions}
    mask = _move_mask(image)
    if not mask.all():
        columns["move_mask"] = mask
    for name, array in image.arrays.items():
        if name in ("numbers", "positions"):
            continue
        if _fits_a_column(array):
            array = array.astype(np.int64) if array.dtype.kind == "u" else array
            columns[name] = array if array.ndim == 1 else array.reshape(len(image), -1)
        else:
            image.info[name] = array.tolist()
    comment = output_column_format(image, list(columns), columns)[0]
    if "\n" in comment:
        raise ForgefieldError("a value of a frame holds a line break, which an xyz file cannot; write .traj or .db")
    yield f"{len(image)}\n{comment}\n"
    words = [map(_word, column.tolist()) for array in columns.values() for column in np.atleast_2d(array.T)]
    for row in zip(*words):
        yield " ".join(row) + "\n"


def _move_mask(atoms: Atoms) -> np.ndarray:
    """Which atoms, (n_atoms,), or which of their coordinates, (n_atoms, 3), are free to move."""
    fixed = [constraint for constraint in atoms.constraints if isinstance(constraint, (FixAtoms, FixCartesian))]
    single = any(isinstance(constraint, FixCartesian) for constraint in fixed)
    mask = np.ones((len(atoms), 3) if single else len(atoms), dtype=bool)
    for constraint in fixed:
        if isinstance(constraint, FixAtoms):
            mask[constraint.index] = False
        else:
            mask[constraint.index] &= ~np.asarray(constraint.mask, dtype=bool)
    return mask


def constraints_of(mask: np.ndarray) -> list[FixAtoms | FixCartesian]:
    """The constraints that a column `move_mask` of an xyz file stands for."""
    if mask.ndim == 1:
        return [FixAtoms(mask=~mask)]
    return [FixCartesian(i, ~row) for i, row in enumerate(mask) if not row.all()]


def _fits_a_column(array: np.ndarray) -> bool:
    """Numbers and logical values do, and words without blanks."""
    if array.dtype.kind in "US":
        return all(len(str(word).split()) == 1 for word in array.ravel())
    return array.dtype.kind in "fiub" and array.size > 0


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "T" if value else "F"
    return value if isinstance(value, str) else repr(value)
