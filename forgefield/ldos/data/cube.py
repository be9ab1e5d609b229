"""Values on a grid as other programs write them, one file for each level: cube and xsf files of Quantum ESPRESSO's pp.x.

Reads such files into an array (nx, ny, nz, levels) as a snapshot's targets, in the standard unit. Files are put in the order
of the numbers in their names, however these are padded.
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
from forgefield.files import written_whole
from forgefield.ldos.data.finding import base_name
from forgefield.ldos.data.info import read_info
from forgefield.ldos.data.rows import require_file, require_new_array
from forgefield.ldos.data.units import target_factor
from forgefield.physics.units import BOHR

SUFFIXES = (".cube", ".xsf")
PP_UNITS = {"ldos": "1/(Ry*Bohr^3)", "density": "1/Bohr^3"}
"""Units in which pp.x writes."""
GROUP_BYTES = 1 << 30
"""Values that are held while they are brought into the order of the array."""


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
        raise ForgefieldError(f"{path} is not a {path.suffix[1:] or 'cube'} file, or it is cut off") from None


def _read_cube(file: IO[bytes], path: Path) -> GridFile:
    file.readline(), file.readline()
    n_atoms = int(file.readline().split()[0])
    axes = [file.readline().split() for _ in range(3)]
    shape = tuple(abs(int(axis[0])) for axis in axes)
    length = BOHR if int(axes[0][0]) > 0 else 1.0  # a negative number of points says that lengths are in A
    cell = np.array([[float(x) for x in axis[1:4]] for axis in axes]) * np.array(shape)[:, None] * length
    atoms = _lines(file, abs(n_atoms), path)
    if n_atoms < 0:
        file.readline()  # numbers of orbitals; one is all that fits the array
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
    """The words of the next n lines, all of which must be there."""
    if n < 0 or n > os.fstat(file.fileno()).st_size:
        raise ForgefieldError(f"{path} says that it has {n} atoms, more than fit into the file; it is damaged")
    lines = [file.readline().split() for _ in range(n)]
    if n and not lines[-1]:
        raise ForgefieldError(f"{path} is cut off: it says that it has {n} atoms")
    return lines


def _numbers(file: IO[bytes], n: int, path: Path) -> np.ndarray:
    """The next n numbers of a text, (n,) float64."""
    text = file.read().partition(b"END_")[0]  # of an xsf file
    values = np.fromstring(text, dtype=np.float64, sep=" ", count=-1) if _plain(text) else np.empty(0)
    if len(values) < n:  # Fortran drops the E of an exponent with three digits; what follows the grid is no number
        repaired = re.sub(rb"(\d)([-+]\d{3})", rb"\1E\2", text)
        values = np.array([_number(word, path) for word in repaired.split()[:n]])
    if len(values) < n:
        raise ForgefieldError(f"{path} is cut off: it has {len(values)} of {n} values")
    return values[:n]


def _plain(text: bytes) -> bool:
    """Whether there are only numbers that numpy reads."""
    return re.search(rb"[A-DF-Za-df-z_]|\d[-+]\d{3}", text) is None


def _number(word: bytes, path: Path) -> float:
    try:
        return float(word)
    except ValueError:
        raise ForgefieldError(f"{path}: {word.decode(errors='replace')!r} stands where a value should be") from None


def level_files(pattern: str | Sequence[str]) -> list[Path]:
    """The files of all levels, in the order of the numbers in their names, none missing and none twice."""
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    found = [Path(match) for one in patterns for match in (glob.glob(one) if glob.has_magic(one) else [one])]
    if not found:
        near = [str(path) for path in Path(patterns[0]).parent.glob("*") if path.suffix in SUFFIXES]
        raise ForgefieldError(f"{' '.join(patterns)}: no file matches.{did_you_mean(patterns[0], near)}")
    if len(found) == 1:
        return found
    numbered: dict[int, Path] = {}
    for path in found:
        number = _level(path, found)
        if number in numbered:
            raise ForgefieldError(
                f"{numbered[number]} and {path} are both level {number}; give the files of one snapshot"
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


def _level(path: Path, paths: list[Path]) -> int:
    """The number in a name that is not the same in all names."""
    every = [re.findall(r"\d+", other.name) for other in paths]
    own = re.findall(r"\d+", path.name)
    if not own or len({len(numbers) for numbers in every}) != 1:
        raise ForgefieldError(f"{path}: its name has no number that says which level it is")
    varying = [place for place in range(len(own)) if len({int(numbers[place]) for numbers in every}) > 1]
    if len(varying) != 1:
        raise ForgefieldError(f"{path}: {len(varying)} numbers differ between the names; one should, that of the level")
    return int(own[varying[0]])


def cubes_to_array(
    files: Sequence[Path],
    out: Path,
    *,
    target: str = "ldos",
    units: str = "1/(Ry*Bohr^3)",
    dtype: np.dtype | type = np.float32,
    progress: Callable[[int, int], None] | None = None,
    group_bytes: int = GROUP_BYTES,
) -> tuple[int, ...]:
    """Write the levels in `files`, in `units`, as an array (nx, ny, nz, levels) in the standard unit. Returns that shape.

    Some levels at a time are held and written together.
    """
    factor = target_factor(target, units, "--units")
    first = read_grid_file(files[0])
    shape = (*first.values.shape, len(files))
    group = max(1, group_bytes // (first.values.size * np.dtype(dtype).itemsize))
    with written_whole(out) as partial:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.dtype(dtype), shape=shape)
        for start in range(0, len(files), group):
            held = np.empty((*shape[:3], min(group, len(files) - start)), dtype=dtype)
            for level in range(held.shape[3]):
                path = files[start + level]
                held[..., level] = _values(path, first, files[0]) * factor
                if progress is not None:
                    progress(start + level + 1, len(files))
            array[..., start : start + held.shape[3]] = held
        array.flush()
        del array
    return shape


def convert_cubes(
    paths: Sequence[str],
    out: Path,
    *,
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
        The array to write, .npy.
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
    files, info_path, text = level_files(paths), None, ""
    if info is not None:
        require_file(info)
        info_path = out.with_name(f"{base_name(out)}.info.json")
        if info_path.exists():
            raise ForgefieldError(f"{info_path} exists already; delete it or leave --info out")
        text = json.dumps(read_info(info).to_json(), indent=1)
    shape = cubes_to_array(files, out, target=target, units=units or PP_UNITS[target], dtype=dtype, progress=progress)
    if info_path is not None:
        info_path.write_text(text)
    return shape, info_path


def _values(path: Path, first: GridFile, first_path: Path) -> np.ndarray:
    """Values of a level, finite, on the grid of the first."""
    values = read_grid_file(path).values
    if values.shape != first.values.shape:
        raise ForgefieldError(
            f"{path} has a grid of {' x '.join(map(str, values.shape))} points, {first_path} of "
            f"{' x '.join(map(str, first.values.shape))}; all levels should be of one calculation"
        )
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise ForgefieldError(f"{path}: {bad} values are NaN or infinite; run pp.x again for this level")
    return values
