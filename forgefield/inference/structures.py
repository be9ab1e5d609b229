"""Structures in memory (`ase.Atoms`) as data: written to a file whose name is a digest of its content, or evaluated directly.

A training that is given structures can be resumed by another process, because it reads them from that file; the same structures
are always the same file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from ase import Atoms
from ase.stress import full_3x3_to_voigt_6_stress

from forgefield.data.batch import batch_from_frames, to_device
from forgefield.data.frame import check_frame
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference.ase import frame_of_atoms, parameters_of
from forgefield.inference.evaluate import evaluate_batch, evaluating
from forgefield.inference.xyz_files import write_extxyz
from forgefield.models.potential import Potential
from forgefield.physics.units import EV_PER_A3_TO_GPA


def has_structures(value: object) -> bool:
    """Whether `value` is a structure, or a list or mapping that holds one at any depth."""
    if isinstance(value, Atoms):
        return True
    if isinstance(value, Mapping):
        return any(map(has_structures, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_structures, value))


def as_files(value: object, folder: Path, *, write: bool = True) -> Any:
    """`value` with the names of files instead of structures; each list of structures is one file in `folder`.

    write: whether this process writes the files; with several processes one of them does.
    """
    if isinstance(value, Atoms):
        return _store([value], folder, write=write)
    if isinstance(value, Mapping):
        return {key: as_files(item, folder, write=write) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    images = [item for item in value if isinstance(item, Atoms)]
    if not images:
        return [as_files(item, folder, write=write) for item in value]
    if len(images) < len(value):
        raise ForgefieldError(
            "A list of structures has other entries as well; give files and structures as separate lists."
        )
    return _store(images, folder, write=write)


def _store(images: list[Atoms], folder: Path, *, write: bool) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{uuid4().hex}.partial"
    try:
        write_extxyz(partial, images)
        digest = hashlib.blake2b(partial.read_bytes(), digest_size=8).hexdigest()
        path = folder / f"structures-{digest}.extxyz"
        if write:
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return str(path.absolute())


@dataclass(frozen=True)
class Evaluation:
    """Outputs of a potential for one structure, as `potential(atoms)` returns them."""

    formula: str
    energy: float | None = None
    """eV"""
    forces: np.ndarray | None = None
    """(n_atoms, 3), eV/A"""
    stress: np.ndarray | None = None
    """(6,), eV/A^3, in ASE's order xx yy zz yz xz xy; None for a structure without a volume"""
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    """Extra outputs and uncertainties of the model, by name"""

    def __repr__(self) -> str:
        parts = [self.formula]
        if self.energy is not None:
            parts.append(f"energy={self.energy:.6f} eV")
        if self.forces is not None:
            largest = np.linalg.norm(self.forces, axis=1).max(initial=0.0)
            parts.append(f"forces {self.forces.shape}, largest {largest:.3f} eV/A")
        if self.stress is not None:
            parts.append(f"pressure={-self.stress[:3].mean() * EV_PER_A3_TO_GPA:.3f} GPa")
        return f"Evaluation({', '.join([*parts, *self.outputs])})"


def evaluate_atoms(potential: Potential, atoms: object) -> Evaluation:
    """Energy, forces and stress of one structure. For dynamics, `Calculator` reuses neighbour lists and is faster."""
    if not isinstance(atoms, Atoms):
        raise ForgefieldError(
            f"A potential takes ase.Atoms or a batch of tensors, not {type(atoms).__name__}: potential(atoms); for files and "
            "lists of structures use forgefield.predict(run, structures), for dynamics atoms.calc = forgefield.Calculator(run)."
        )
    frame = check_frame(frame_of_atoms(atoms, potential))
    batch = batch_from_frames([frame], SpeciesTable(potential.species, trained=True), graph_of(potential))
    inputs = parameters_of(atoms, potential)
    with evaluating(potential, None) as place:
        tensors = to_device(batch, place) | {
            name: torch.from_numpy(values).to(place) for name, values in inputs.items()
        }
        outputs, extra = evaluate_batch(potential, tensors, forces=True, stress=frame.volume > 0)
    arrays = {name: value.cpu().numpy() for name, value in (outputs | extra).items()}
    known = {"energy", "atomic_energy", "forces", "stress"}
    return Evaluation(
        atoms.get_chemical_formula(),
        energy=float(arrays["energy"][0]) if "energy" in arrays else None,
        forces=arrays.get("forces"),
        stress=full_3x3_to_voigt_6_stress(arrays["stress"][0]) if "stress" in arrays and frame.volume > 0 else None,
        outputs={name: array for name, array in arrays.items() if name not in known},
    )
