"""Cube and xsf files of Quantum ESPRESSO's pp.x, one file per level, as the targets of a snapshot.

The files become an array (nx, ny, nz, levels) in the standard unit, sorted by the numbers in their names, padded or not.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.grid_writer import writing_grid
from forgefield.ldos.data.info import SnapshotInfo, read_info
from forgefield.ldos.data.rows import require_file, require_new_array
from forgefield.ldos.data.snapshot_files import base_name
from forgefield.ldos.data.units import target_factor
from forgefield.physics.units import BOHR

SUFFIXES = (".cube", ".xsf")
PP_UNITS = {"ldos": "1/(Ry*Bohr^3)", "density": "1/Bohr^3"}
"""Units in which pp.x writes."""
GROUP_BYTES = 1 << 30
"""Size of the levels that are collected in memory before they are written."""


@dataclass(frozen=True)
class GridFile:
    """values: (nx, ny, nz). cell: (3, 3), rows are the cell vectors, A. numbers: (n_atoms,), positions: (n_atoms, 3), A."""

    values: np.ndarray
    cell: np.ndarray
    numbers: np.ndarray
    positions: np.ndarray


def read_grid_file(path: Path) -> GridFile:
    """A cube or an xsf file."""
    try:
        with path.open("rb") as file:
            return _read_xsf(file, path) if path.suffix == ".xsf" else _read_cube(file, path)
    except OSError as error:
        raise ForgefieldError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError):
        raise ForgefieldError(f"{path} is not a {path.suffix[1:] or 'cube'} file, or it is truncated") from None


def _read_cube(file: IO[bytes], path: Path) -> GridFile:
    file.readline(), file.readline()
    n_atoms = int(file.readline().split()[0])
    axes = [file.readline().split() for _ in range(3)]
    shape = tuple(abs(int(axis[0])) for axis in axes)
    length = BOHR if int(axes[0][0]) > 0 else 1.0  # a negative number of points means that lengths are in A
    cell = np.array([[float(x) for x in axis[1:4]] for axis in axes]) * np.array(shape)[:, None] * length
    atoms = _lines(file, abs(n_atoms), path)
    if n_atoms < 0:
        file.readline()  # indices of orbitals; the array has room for one
    numbers = np.array([int(atom[0]) for atom in atoms], dtype=np.int64)
    positions = np.array([[float(x) for x in atom[2:5]] for atom in atoms]).reshape(-1, 3) * length
    return _grid(_numbers(file, math.prod(shape), path).reshape(shape), cell, numbers, positions)


def _read_xsf(file: IO[bytes], path: Path) -> GridFile:
    """The first grid of an xsf file; x is fastest. The first plane of each axis is repeated at the end, and cut here."""
    from ase.data import atomic_numbers

    numbers, positions, cell = [], [], np.zeros((3, 3))
    line = file.readline()
    while line and not line.strip().upper().startswith((b"BEGIN_DATAGRID_3D", b"DATAGRID_3D")):
        word = line.strip().upper()
        if word == b"PRIMVEC":
            cell = np.array([file.readline().split() for _ in range(3)], dtype=np.float64)
        elif word == b"PRIMCOORD":
            atoms = [file.readline().decode().split() for _ in range(int(file.readline().split()[0]))]
            numbers = [int(a[0]) if a[0].isdecimal() else atomic_numbers[a[0]] for a in atoms]
            positions = [[float(x) for x in atom[1:4]] for atom in atoms]
        line = file.readline()
    n = tuple(int(word) for word in file.readline().split())
    for _ in range(4):  # origin and vectors of the grid
        file.readline()
    if len(n) != 3 or min(n) < 1:
        raise ValueError("the size of the grid is not three numbers")
    values = _numbers(file, math.prod(n), path).reshape(n[::-1]).transpose(2, 1, 0)
    for axis in range(3):
        if n[axis] > 1 and np.array_equal(values.take(0, axis), values.take(-1, axis)):
            values = np.delete(values, -1, axis)
    return _grid(
        np.ascontiguousarray(values), cell, np.array(numbers, dtype=np.int64), np.array(positions).reshape(-1, 3)
    )


def _grid(values: np.ndarray, cell: np.ndarray, numbers: np.ndarray, positions: np.ndarray) -> GridFile:
    if values.size == 0 or len(positions) != len(numbers):
        raise ValueError("the grid is empty, or atoms lack coordinates")
    if not (np.isfinite(cell).all() and np.isfinite(positions).all()):
        raise ValueError("lengths are not finite")
    return GridFile(values, cell, numbers, positions)


def _lines(file: IO[bytes], n: int, path: Path) -> list[list[bytes]]:
    """The words of the next n lines, all of which must exist."""
    if n < 0 or n > os.fstat(file.fileno()).st_size:
        raise ForgefieldError(f"{path} declares {n} atoms, more than fit into the file; it is damaged")
    lines = [file.readline().split() for _ in range(n)]
    if n and not lines[-1]:
        raise ForgefieldError(f"{path} is truncated: it declares {n} atoms")
    return lines


def _numbers(file: IO[bytes], n: int, path: Path) -> np.ndarray:
    """The next n numbers of a text, (n,) float64."""
    text = file.read().partition(b"END_")[0]  # of an xsf file
    values = np.fromstring(text, dtype=np.float64, sep=" ", count=-1) if _plain(text) else np.empty(0)
    if len(values) < n:  # Fortran drops the E of an exponent with three digits; what follows the grid is not a number
        repaired = re.sub(rb"(\d)([-+]\d{3})", rb"\1E\2", text)
        values = np.array([_number(word, path) for word in repaired.split()[:n]])
    if len(values) < n:
        raise ForgefieldError(f"{path} is truncated: it has {len(values)} of {n} values")
    return values[:n]


def _plain(text: bytes) -> bool:
    """Whether the text contains only numbers that numpy can read."""
    return re.search(rb"[A-DF-Za-df-z_]|\d[-+]\d{3}", text) is None


def _number(word: bytes, path: Path) -> float:
    try:
        return float(word)
    except ValueError:
        raise ForgefieldError(f"{path}: {word.decode(errors='replace')!r} is not a number") from None


def level_files(pattern: str | Sequence[str]) -> list[Path]:
    """The files of all levels, sorted by the numbers in their names. Missing and duplicate levels are errors."""
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    paths = [Path(match) for name in patterns for match in (glob.glob(name) if glob.has_magic(name) else [name])]
    if not paths:
        near = [str(path) for path in Path(patterns[0]).parent.glob("*") if path.suffix in SUFFIXES]
        raise ForgefieldError(f"{' '.join(patterns)}: no file matches.{did_you_mean(patterns[0], near)}")
    if len(paths) == 1:
        return paths
    numbered: dict[int, Path] = {}
    for path in paths:
        number = _level(path, paths)
        if number in numbered:
            raise ForgefieldError(
                f"{numbered[number]} and {path} are both level {number}; pass the files of one snapshot"
            )
        numbered[number] = path
    order = sorted(numbered)
    missing = sorted(set(range(order[0], order[-1] + 1)) - set(order))
    if missing:
        shown = ", ".join(map(str, missing[:8]))
        raise ForgefieldError(
            f"{' '.join(patterns)}: level {shown} is missing between {numbered[order[0]].name} and "
            f"{numbered[order[-1]].name}; {len(order)} files match"
        )
    return [numbered[number] for number in order]


def joined_level_files(windows: Sequence[Sequence[str]], *, disjoint: bool = False) -> list[Path]:
    """The files of all levels of several windows of energies, in rising order.

    A window begins at the last energy of the one below it: that level is taken from the upper one, and counted once. disjoint:
    they share no energy, and all files are used.
    """
    levels: list[Path] = []
    for index, patterns in enumerate(windows):
        files = level_files(patterns)
        shares = index < len(windows) - 1 and not disjoint
        if shares and len(files) < 2:
            raise ForgefieldError(
                f"{files[0]} is the only level of its window, and its energy belongs to the next window; join windows of "
                "several levels, or windows that share no energy with --disjoint"
            )
        levels += files[:-1] if shares else files
    twice = next((path for path in levels if levels.count(path) > 1), None)
    if twice is not None:
        raise ForgefieldError(f"{twice} is in two windows; each needs its own files")
    return levels


def _level(path: Path, paths: list[Path]) -> int:
    """The number in a file name that differs between the files."""
    all_numbers = [re.findall(r"\d+", other.name) for other in paths]
    numbers_of_path = re.findall(r"\d+", path.name)
    if not numbers_of_path or len({len(numbers) for numbers in all_numbers}) != 1:
        raise ForgefieldError(f"{path}: its name contains no number of the level")
    varying = [
        index for index in range(len(numbers_of_path)) if len({int(numbers[index]) for numbers in all_numbers}) > 1
    ]
    if len(varying) != 1:
        raise ForgefieldError(
            f"{path}: {len(varying)} numbers differ between the file names; only that of the level should"
        )
    return int(numbers_of_path[varying[0]])


def cubes_to_array(
    files: Sequence[Path],
    out: Path,
    *,
    target: str = "ldos",
    units: str = "1/(Ry*Bohr^3)",
    dtype: np.dtype | type = np.float32,
    info: SnapshotInfo | None = None,
    progress: Callable[[int, int], None] | None = None,
    group_bytes: int = GROUP_BYTES,
) -> tuple[int, ...]:
    """Write the levels in `files`, in `units`, as an array (nx, ny, nz, levels) in the standard unit. Returns that shape.

    As many levels as fit into `group_bytes` are collected and written together. info: the calculation, for openPMD files;
    default: cell and atoms of the first file.
    """
    factor = target_factor(target, units, "--units")
    first = read_grid_file(files[0])
    shape = (*first.values.shape, len(files))
    if info is None:
        info = SnapshotInfo(cell=first.cell, numbers=first.numbers, positions=first.positions)
        info.grid_shape = (shape[0], shape[1], shape[2])
    group = max(1, group_bytes // (first.values.size * np.dtype(dtype).itemsize))
    with writing_grid(out, shape, dtype, quantity=target, info=info) as array:
        for start in range(0, len(files), group):
            levels = np.empty((*shape[:3], min(group, len(files) - start)), dtype=dtype)
            for level in range(levels.shape[3]):
                path = files[start + level]
                levels[..., level] = _values(path, first, files[0]) * factor
                if progress is not None:
                    progress(start + level + 1, len(files))
            array.write_columns(start, levels)
    return shape


def convert_cubes(
    paths: Sequence[str],
    out: Path,
    *,
    join: Sequence[Sequence[str]] = (),
    disjoint: bool = False,
    target: str = "ldos",
    units: str | None = None,
    info: Path | None = None,
    dtype: np.dtype | type = np.float32,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[int, ...], Path | None]:
    """Convert cube or xsf files to the targets of a snapshot; returns the shape of the array, and the path of the .info.json.

    Parameters
    ----------
    paths
        Files or globs, one file for each level.
    out
        The array to write, .npy or .h5 (openPMD).
    join
        Files or globs of the next windows of energies, in rising order, see `joined_level_files`.
    disjoint
        Whether these windows share no energy.
    target
        Quantity in the files: `ldos` or `density`.
    units
        Unit in the files; default: that in which pp.x writes.
    info
        Output of pw.x, to store as .info.json next to the array.
    dtype
        Type of the numbers in the array.
    progress
        Called with the number of levels done and of all levels.
    """
    require_new_array(out)
    files, info_path, text, facts = joined_level_files([paths, *join], disjoint=disjoint), None, "", None
    if info is not None:
        require_file(info)
        info_path = out.with_name(f"{base_name(out)}.info.json")
        if info_path.exists():
            raise ForgefieldError(f"{info_path} exists already; delete it or leave --info out")
        facts = read_info(info)
        text = json.dumps(facts.to_json(), indent=1)
    unit = units or PP_UNITS[target]
    shape = cubes_to_array(files, out, target=target, units=unit, dtype=dtype, info=facts, progress=progress)
    if info_path is not None:
        info_path.write_text(text)
    return shape, info_path


def _values(path: Path, first: GridFile, first_path: Path) -> np.ndarray:
    """Values of a level, finite, on the grid of the first."""
    values = read_grid_file(path).values
    if values.shape != first.values.shape:
        raise ForgefieldError(
            f"{path} has a grid of {' x '.join(map(str, values.shape))} points, {first_path} of "
            f"{' x '.join(map(str, first.values.shape))}; all levels must be from one calculation"
        )
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ForgefieldError(f"{path}: {bad} values are NaN or infinite; run pp.x again for this level")
    return values
