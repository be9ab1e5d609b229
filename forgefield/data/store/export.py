"""Frames written to files: extended xyz, ASE trajectories and databases.

Numbers are written so that reading the file gives the same frames to the last bit, in eV and A, under the usual names of the
labels and the names of the fields. The file is complete or does not exist.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically

WEIGHT = "config_weight"
"""Name of the weight of a frame, written where it is not 1."""
VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))

Writer = Callable[[Frame], None]


def is_writable(path: Path) -> bool:
    """Whether frames can be written to a file of this name."""
    return path.suffix.lower() in _WRITERS


def writable_suffixes() -> str:
    return ", ".join(_WRITERS)


def write_frames(frames: Iterable[Frame], path: Path, progress: Callable[[int], None] | None = None) -> tuple[int, int]:
    """Write all frames to `path`. Returns how many they were, and how many atoms. progress: called with frames done."""
    path = Path(path)
    if not is_writable(path):
        raise ForgefieldError(f"{path}: frames are written to files that end in {writable_suffixes()}")
    n_frames = n_atoms = 0
    with written_atomically(path) as partial:
        with _WRITERS[path.suffix.lower()](partial) as write:
            for frame in frames:
                write(frame)
                n_frames, n_atoms = n_frames + 1, n_atoms + len(frame)
                if progress is not None and n_frames % 64 == 0:
                    progress(n_frames)
        if n_frames == 0:
            raise ForgefieldError(f"{path}: there is no frame to write")
    if progress is not None:
        progress(n_frames)
    return n_frames, n_atoms


@contextmanager
def _extxyz(path: Path) -> Iterator[Writer]:
    with path.open("w", encoding="ascii") as stream:
        yield lambda frame: extxyz_text(frame, stream)


def extxyz_text(frame: Frame, stream: io.TextIOBase) -> None:
    """One frame as extended xyz. `repr` of a float is the shortest text that reads back as the same float."""
    words = []
    if frame.cell.any():
        words.append(f'Lattice="{_row(frame.cell)}"')
    columns = {"pos": frame.positions} | ({} if frame.forces is None else {"forces": frame.forces})
    columns |= {name: frame.fields[name].reshape(len(frame), -1) for name in sorted(frame.per_atom)}
    words.append("Properties=species:S:1:" + ":".join(f"{name}:R:{part.shape[1]}" for name, part in columns.items()))
    if frame.energy is not None:
        words.append(f"energy={float(frame.energy)!r}")
    if frame.stress is not None:
        words.append(f'stress="{_row(frame.stress)}"')
    if frame.weight != 1.0:
        words.append(f"{WEIGHT}={float(frame.weight)!r}")
    words += [f"{name}={_field(value)}" for name, value in frame.fields.items() if name not in frame.per_atom]
    words.append('pbc="{}"'.format(" ".join("T" if periodic else "F" for periodic in frame.pbc)))
    table = np.hstack(list(columns.values())).astype(np.float64, copy=False)
    atoms = [
        f"{chemical_symbols[number]} {' '.join(map(repr, row))}\n"
        for number, row in zip(frame.numbers.tolist(), table.tolist())
    ]
    stream.write(f"{len(frame)}\n{' '.join(words)}\n{''.join(atoms)}")


def _field(value: np.ndarray) -> str:
    """A number, a row of numbers, or a nested list as ASE writes it."""
    if value.ndim == 0:
        return repr(float(value))
    return f'"{_row(value)}"' if value.ndim == 1 else f'"_JSON {json.dumps(value.tolist())}"'


def _row(matrix: np.ndarray) -> str:
    return " ".join(map(repr, np.asarray(matrix, dtype=np.float64).reshape(-1).tolist()))


def _ase_atoms(frame: Frame) -> tuple[Any, dict[str, Any]]:
    """The structure with its labels as results of a calculator, and what a calculator does not hold."""
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator

    atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
    results: dict[str, Any] = {}
    more: dict[str, Any] = {} if frame.weight == 1.0 else {WEIGHT: float(frame.weight)}
    more |= {name: value.tolist() for name, value in frame.fields.items()}
    if frame.energy is not None:
        results["energy"] = float(frame.energy)
    if frame.forces is not None:
        results["forces"] = frame.forces
    if frame.stress is not None:
        if np.array_equal(frame.stress, frame.stress.T):
            results["stress"] = np.array([frame.stress[component] for component in VOIGT])
        else:
            more["stress"] = frame.stress.reshape(-1).tolist()
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms, more


@contextmanager
def _trajectory(path: Path) -> Iterator[Writer]:
    from ase.io.trajectory import TrajectoryWriter

    def write(frame: Frame) -> None:
        atoms, atoms_info = _ase_atoms(frame)
        atoms.info.update(atoms_info)
        writer.write(atoms)

    with TrajectoryWriter(str(path)) as writer:
        yield write


@contextmanager
def _database(path: Path) -> Iterator[Writer]:
    from ase.db import connect

    def write(frame: Frame) -> None:
        atoms, data = _ase_atoms(frame)
        database.write(atoms, data=data)

    with connect(path, type="db", append=False) as database:
        yield write


_WRITERS: dict[str, Any] = {
    ".extxyz": _extxyz,
    ".xyz": _extxyz,
    ".traj": _trajectory,
    ".db": _database,
}
