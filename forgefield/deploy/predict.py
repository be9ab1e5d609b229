"""Predictions for the structures of a source, written as a file that ASE and we can read.

Predicted energy, forces and stress are the frame's calculator results; labels the source carried are kept beside them
as `REF_energy`, `REF_forces`, `REF_stress`. The source is only read, and the output appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ase.db
import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress

from forgefield.config.schema import LabelOptions, UnitOptions
from forgefield.data.batch import batch_from_frames, to_device
from forgefield.data.frame import Frame
from forgefield.data.graphs.graph import graph_of
from forgefield.data.reading import read_table
from forgefield.data.species import SpeciesTable
from forgefield.deploy.evaluate import evaluating
from forgefield.errors import ForgefieldError
from forgefield.files import written_whole
from forgefield.models.potential import Potential


def predict_file(
    potential: Potential,
    source: Any,
    out: str | os.PathLike[str],
    batch: int = 16,
    *,
    labels: LabelOptions | None = None,
    units: UnitOptions | None = None,
    labels_required: bool = False,
    device: str | torch.device | None = None,
    neighbours: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Predict all frames of `source` (as `data.train` names sources) and write them to `out`, whose path is returned.

    batch: frames evaluated together. labels, units: how to read `source`, which needs no labels; `out` is always in
    eV and A. labels_required: whether every label that `labels` names must be found, to be kept beside the predictions.
    device: where to compute; default: where the model is. neighbours: library of the neighbour lists.
    progress: called with (frames done, frames in all). Suffixes of `out`: .extxyz, .xyz, .traj, .json, .db.
    """
    write = _writer(Path(out))
    frames = read_table(source, labels or LabelOptions(), units or UnitOptions(), required=labels_required)
    predicted: list[Atoms] = []
    for start in range(0, len(frames), batch):
        part = frames[start : start + batch]
        predicted += predict_frames(potential, part, device=device, neighbours=neighbours)
        if progress is not None:
            progress(len(predicted), len(frames))
    with written_whole(Path(out)) as partial:
        write(partial, predicted)
    return Path(out)


def predict_frames(
    potential: Potential, frames: Sequence[Frame], *, device: str | torch.device | None = None, neighbours: str = "auto"
) -> list[Atoms]:
    """New `Atoms` with the predictions of one batch as calculator results and the frames' labels under REF_ names."""
    batch = batch_from_frames(list(frames), SpeciesTable(potential.species), graph_of(potential, neighbours))
    any_volume = any(frame.volume > 0 for frame in frames)
    with evaluating(potential, device) as place:
        result = potential(to_device(batch, place), forces=True, stress=any_volume)
    arrays = {name: value.detach().cpu().numpy() for name, value in result.items()}
    ends = np.cumsum([len(frame) for frame in frames])[:-1]
    forces, energies = np.split(arrays["forces"], ends), np.split(arrays["atomic_energy"], ends)
    images = []
    for i, frame in enumerate(frames):
        results = {"energy": float(arrays["energy"][i]), "energies": energies[i], "forces": forces[i]}
        if frame.volume > 0:
            results["stress"] = full_3x3_to_voigt_6_stress(arrays["stress"][i])
        images.append(_image(frame, results))
    return images


def _image(frame: Frame, results: dict[str, Any]) -> Atoms:
    atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
    if frame.energy is not None:
        atoms.info["REF_energy"] = float(frame.energy)
    if frame.forces is not None:
        atoms.arrays["REF_forces"] = np.array(frame.forces)
    if frame.stress is not None:
        atoms.info["REF_stress"] = np.array(frame.stress)
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def _write_extxyz(path: Path, images: Sequence[Atoms]) -> None:
    ase.io.write(path, images, format="extxyz")


def _write_traj(path: Path, images: Sequence[Atoms]) -> None:
    """ASE's trajectories keep `info` but no arrays of our own, so the reference forces go into `info`."""
    moved = []
    for atoms in images:
        image = atoms.copy()
        image.calc = atoms.calc
        if "REF_forces" in image.arrays:
            image.info["REF_forces"] = image.arrays.pop("REF_forces")
        moved.append(image)
    ase.io.write(path, moved, format="traj")


def _write_database(path: Path, images: Sequence[Atoms]) -> None:
    """A row's `data` holds the references."""
    kind = "json" if ".json" in path.suffixes else "db"
    with ase.db.connect(path, type=kind, append=False) as database:
        for atoms in images:
            references = {**atoms.info, **{k: v for k, v in atoms.arrays.items() if k.startswith("REF_")}}
            database.write(atoms, data=references)


_WRITERS = {
    ".extxyz": _write_extxyz,
    ".xyz": _write_extxyz,
    ".traj": _write_traj,
    ".json": _write_database,
    ".db": _write_database,
}


def _writer(out: Path) -> Callable[[Path, Sequence[Atoms]], None]:
    if out.suffix.lower() not in _WRITERS:
        raise ForgefieldError(
            f"Cannot write predictions to {out}: a file ending in '{out.suffix}' cannot hold energies and forces with "
            f"their references; use one of {', '.join(_WRITERS)}."
        )
    return _WRITERS[out.suffix.lower()]
