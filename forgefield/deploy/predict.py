"""Predictions for the structures of a source, written as a file that ASE and we can read.

Predicted energy, forces and stress are the frame's calculator results, further outputs are values of the frame or its atoms
under their own names; labels the source carried are kept beside them as `REF_energy`, `REF_forces`, `REF_NAME`. The source is
only read, and the output appears whole or not at all.
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
from forgefield.deploy.evaluate import evaluating, further_answers, outputs_of_atoms
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
    result = {**result, **further_answers(potential, result)}
    arrays = {name: value.detach().cpu().numpy() for name, value in result.items()}
    ends = np.cumsum([len(frame) for frame in frames])[:-1]
    of_atoms = outputs_of_atoms(potential)
    per_atom = ("forces", "atomic_energy", *of_atoms, *(f"{name}_prob" for name in of_atoms))
    values = {name: np.split(array, ends) if name in per_atom else array for name, array in arrays.items()}
    return [
        _image(frame, {name: value[i] for name, value in values.items()}, potential) for i, frame in enumerate(frames)
    ]


def _image(frame: Frame, values: dict[str, Any], potential: Potential) -> Atoms:
    """values: outputs of the model for this frame, by name."""
    atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
    for name, output in potential.further.items():
        place: dict[str, Any] = atoms.arrays if output.per == "atom" else atoms.info
        for key in (name, f"{name}_prob"):
            if key in values:
                place[key] = values[key] if np.ndim(values[key]) else float(values[key])
        if name in frame.fields:
            place[f"REF_{name}"] = frame.fields[name] if np.ndim(frame.fields[name]) else float(frame.fields[name])
    if frame.energy is not None:
        atoms.info["REF_energy"] = float(frame.energy)
    if frame.forces is not None:
        atoms.arrays["REF_forces"] = np.array(frame.forces)
    if frame.stress is not None:
        atoms.info["REF_stress"] = np.array(frame.stress)
    if potential.has_energy or potential.forces_are_direct:
        atoms.calc = SinglePointCalculator(atoms, **_results(frame, values))
    return atoms


def _results(frame: Frame, values: dict[str, Any]) -> dict[str, Any]:
    """What ASE's calculators give."""
    if "energy" not in values:
        return {"forces": values["forces"]}
    results = {"energy": float(values["energy"]), "energies": values["atomic_energy"], "forces": values["forces"]}
    if frame.volume > 0:
        results["stress"] = full_3x3_to_voigt_6_stress(values["stress"])
    return results


def _write_extxyz(path: Path, images: Sequence[Atoms]) -> None:
    ase.io.write(path, images, format="extxyz")


def _write_traj(path: Path, images: Sequence[Atoms]) -> None:
    """ASE's trajectories keep `info` but no arrays of our own, so these go into `info`."""
    moved = []
    for atoms in images:
        image = atoms.copy()
        image.calc = atoms.calc
        for name in [name for name in image.arrays if name not in ("numbers", "positions")]:
            image.info[name] = image.arrays.pop(name)
        moved.append(image)
    ase.io.write(path, moved, format="traj")


def _write_database(path: Path, images: Sequence[Atoms]) -> None:
    """A row's `data` holds further outputs and the references."""
    kind = "json" if ".json" in path.suffixes else "db"
    with ase.db.connect(path, type=kind, append=False) as database:
        for atoms in images:
            own = {name: value for name, value in atoms.arrays.items() if name not in ("numbers", "positions")}
            database.write(atoms, data={**atoms.info, **own})


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
