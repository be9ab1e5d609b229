"""Structures that simulations and relaxations start from, and the files that they write."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ase.io
import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io.trajectory import Trajectory
from ase.stress import full_3x3_to_voigt_6_stress

from forgefield.data.frame import Frame, RawFrame
from forgefield.data.labels.label_reader import PREDICTED_BY, LabelReader
from forgefield.data.options import DataOptions, UnitOptions
from forgefield.data.readers import frames_with_values, source_files
from forgefield.data.reading import label_settings, unit_settings
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference.xyz_files import append_extxyz, constraints_of

TRAJECTORY_SUFFIXES = (".extxyz", ".xyz", ".traj")


def read_structures(source: Any, limit: int | None = None) -> list[Atoms]:
    """All structures of a source with their momenta, constraints and texts in `info`, and without labels.

    Parameters
    ----------
    source
        A file, folder, glob or list of them; or `Atoms`, or a list of these.
    limit
        Largest number of structures to read; the rest is left out.
    """
    if isinstance(source, Atoms):
        source = [source]
    if isinstance(source, Sequence) and source and all(isinstance(item, Atoms) for item in source):
        return [_without_labels(atoms) for atoms in source]
    reader, structures = LabelReader(label_settings(None), UnitOptions()), []
    for file in source_files(source):
        for frame, raw in frames_with_values(file, reader, UnitOptions()):
            atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
            if raw is not None:
                _add_motion(atoms, raw)
            structures.append(atoms)
            if len(structures) == limit:
                return structures
    return structures


def read_labelled(source: Any, options: DataOptions) -> list[Atoms]:
    """All structures of a source with their labels, in eV and A, as results of a calculator. options: labels and units."""
    units = unit_settings(options.units)
    reader = LabelReader(label_settings(options.labels), units)
    return [
        labelled_atoms(frame, raw)
        for file in source_files(source)
        for frame, raw in frames_with_values(file, reader, units)
    ]


def _add_motion(atoms: Atoms, raw: Any) -> None:
    """Momenta, constraints and texts of a frame as its file has them."""
    arrays = dict(raw.arrays)
    mask = arrays.get("move_mask")
    atoms.set_constraint(constraints_of(np.asarray(mask, dtype=bool)) if mask is not None else list(raw.constraints))
    if "momenta" in arrays:
        atoms.set_momenta(np.asarray(arrays["momenta"], dtype=float), apply_constraint=False)
    atoms.info = {key: value for key, value in raw.info.items() if isinstance(value, str) and key != PREDICTED_BY}


def _without_labels(atoms: Atoms) -> Atoms:
    copied = Atoms(atoms.numbers, positions=atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
    copied.set_constraint(atoms.constraints)
    if atoms.has("momenta"):
        copied.set_momenta(atoms.get_momenta(), apply_constraint=False)
    copied.info = {key: value for key, value in atoms.info.items() if isinstance(value, str)}
    return copied


def labelled_atoms(frame: Frame, raw: RawFrame | None) -> Atoms:
    """A structure with the labels of its frame, in eV and A, and the other values of its file."""
    atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
    labels = {"energy": frame.energy, "forces": frame.forces, "stress": frame.stress}
    results = {name: value for name, value in labels.items() if value is not None}
    if raw is not None:
        taken = {"energy", "forces", "stress", "virial", "numbers", "positions"}
        atoms.info.update({name: value for name, value in raw.info.items() if name not in taken})
        for name, value in raw.arrays.items():
            if name not in taken:
                atoms.arrays[name] = np.array(value)
        atoms.set_constraint(list(raw.constraints))
    if "stress" in results:
        results["stress"] = full_3x3_to_voigt_6_stress(results["stress"])
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def require_species(species: SpeciesTable, structures: Sequence[Atoms], source: object) -> None:
    """Refuse structures with elements that the model does not have, before anything is computed."""
    for index, atoms in enumerate(structures):
        species.index(
            atoms.numbers, where=f"{source}, frame {index}" if not isinstance(source, list) else f"structure {index}"
        )


def digest(structures: Sequence[Atoms]) -> str:
    """A number that is different for different structures or momenta."""
    total = hashlib.sha256()
    for atoms in structures:
        for array in (atoms.numbers, atoms.positions, np.array(atoms.cell), atoms.pbc, atoms.get_momenta()):
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def snapshot(atoms: Atoms, **info: Any) -> Atoms:
    """A copy with the energy, forces and stress that the calculator has computed for it, marked as predictions."""
    image = atoms.copy()
    image.info = {**atoms.info, **info, PREDICTED_BY: "forgefield:"}
    results = getattr(atoms.calc, "results", {})
    image.calc = SinglePointCalculator(
        image, **{name: results[name] for name in ("energy", "forces", "stress") if name in results}
    )
    return image


# ---- files that grow


class FrameFile(Protocol):
    """A file to which frames are appended and that can be cut back to an earlier size."""

    def append(self, images: Sequence[Atoms]) -> None:
        """Append frames and have the disk keep them."""

    def size(self) -> int:
        """The present size, as `cut` takes it."""

    def cut(self, size: int) -> None:
        """Return to an earlier size."""


def frame_file(path: Path) -> FrameFile:
    """The file for frames of this name, which may exist already."""
    if path.suffix.lower() not in TRAJECTORY_SUFFIXES:
        raise ForgefieldError(f"{path}: frames are written to files ending in {', '.join(TRAJECTORY_SUFFIXES)}.")
    if not path.absolute().parent.is_dir():
        raise ForgefieldError(f"{path}: the folder {path.absolute().parent} does not exist.")
    return TrajFile(path) if path.suffix.lower() == ".traj" else ExtxyzFile(path)


class ExtxyzFile:
    """Extended xyz; sizes are in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, images: Sequence[Atoms]) -> None:
        append_extxyz(self.path, images)

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int) -> None:
        if size > self.size():
            raise _shortened(self.path)
        if self.path.exists():
            os.truncate(self.path, size)


class TrajFile:
    """ASE's trajectory format; sizes are numbers of frames."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, images: Sequence[Atoms]) -> None:
        with Trajectory(self.path, "a") as trajectory:
            for image in images:
                trajectory.write(image)
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())

    def size(self) -> int:
        if not self.path.exists():
            return 0
        with Trajectory(self.path) as trajectory:
            return len(trajectory)

    def cut(self, size: int) -> None:
        images = ase.io.read(self.path, index=f":{size}") if size else []
        if len(images) < size:
            raise _shortened(self.path)
        self.path.unlink(missing_ok=True)
        for image in images:
            self.append([image])


def _shortened(path: Path) -> ForgefieldError:
    return ForgefieldError(f"{path} is shorter than when the computation was interrupted; start over with --force.")
