"""Predictions for the structures of a source, written to a file that ASE and Forgefield read.

Predicted energy, forces and stress are the calculator results of a structure; other outputs of the model and uncertainties are
stored in `info` or `arrays` under their names. Labels of the source are kept as `REF_energy`, `REF_forces`, `REF_NAME`, in eV
and A. Everything else the source holds is kept as it is; a value whose name is needed for a prediction or a label is kept as
`input_NAME`. The entry `predicted_by` in `info` tells readers of Forgefield that the results are predictions, and that the
labels are those with `REF_`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import ase.db
import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io.extxyz import key_val_str_to_dict, per_config_properties
from ase.stress import full_3x3_to_voigt_6_stress

from forgefield.data.batch import batch_from_frames, to_device
from forgefield.data.frame import Frame, RawFrame
from forgefield.data.labels.label_reader import CALCULATOR, PREDICTED_BY, LabelReader
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import SourceFile, frames_with_values, source_files, with_type_map
from forgefield.data.reading import label_settings
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.inference.ensemble import Ensemble, write_model_devi
from forgefield.inference.evaluate import BatchEvaluator, evaluating, per_atom_outputs
from forgefield.inference.xyz_files import constraints_of, write_extxyz
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
    overwrite: bool = False,
    model_devi: str | os.PathLike[str] | None = None,
    as_labels: bool = False,
    type_map: tuple[str, ...] | None = None,
    type_names: Mapping[str, str] | None = None,
    engine: bool | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Path:
    """Predict all frames of `source` (as `data.train` names sources) and write them to `out`, whose path is returned.

    batch: frames evaluated together. labels, units: how to read `source`, which needs no labels; `out` is always in
    eV and A. labels_required: whether every label that `labels` names must be found, to be kept next to the predictions.
    device: where to compute; default: where the model is. neighbours: library of the neighbour lists.
    overwrite: replace `out` where it exists; files of `source` are never replaced. model_devi: for an ensemble, a file for the
    deviations of its members in DeePMD-kit's format. as_labels: `out` is training data: readers take the predictions as labels,
    and labels of `source` are left out. type_map, type_names: see `with_type_map`.
    engine, notify: as of `inference.evaluate.evaluate_batches`. Suffixes of `out`: .extxyz, .xyz, .traj, .json, .db.
    """
    if model_devi is not None and not isinstance(potential, Ensemble):
        raise ForgefieldError("Deviations are those of an ensemble; name more than one run (--ensemble RUN).")
    out, units = Path(out), units or UnitOptions()
    write, files = _writer(out), source_files(with_type_map(source, type_map, type_names))
    refuse_existing(out, files, overwrite=overwrite)
    reader = LabelReader(label_settings(labels), units)
    pairs = (pair for file in files for pair in frames_with_values(file, reader, units))
    predicted: list[Atoms] = []
    parts = iter(lambda: list(islice(pairs, batch)), [])
    first = list(islice(parts, 2))
    engine = False if engine is None and len(first) < 2 else engine
    with evaluating(potential, device) as place:
        evaluator = BatchEvaluator(potential, place, engine=engine, notify=notify)
        for part in chain(first, parts):
            images = _predict_frames(evaluator, place, [frame for frame, _ in part], neighbours)
            for atoms, (_, raw) in zip(images, part):
                if as_labels:
                    _leave_predictions_only(atoms)
                elif raw is not None:
                    keep_values(atoms, raw, reader)
            predicted += images
    if labels_required:
        reader.finish(str(source))
    with written_atomically(out) as partial:
        write(partial, predicted)
    if model_devi is not None:
        write_model_devi(model_devi, [atoms.info for atoms in predicted])
    return out


def refuse_existing(out: Path, files: Sequence[SourceFile], *, overwrite: bool) -> None:
    """Refuse to write over a file that exists (unless asked to) and over one that is to be read."""
    if not out.exists():
        return
    if any(file.path.exists() and file.path.samefile(out) for file in files):
        raise ForgefieldError(f"{out} is one of the files to predict; name another file for the predictions with -o.")
    if not overwrite:
        raise ForgefieldError(
            f"{out} exists already; --force (in Python: overwrite=True) overwrites it, -o FILE names another."
        )


def keep_labels(atoms: Atoms, frame: Frame) -> None:
    """Add energy, forces and stress of a frame to its predictions, in eV and A."""
    if frame.energy is not None:
        atoms.info["REF_energy"] = float(frame.energy)
    if frame.forces is not None:
        atoms.arrays["REF_forces"] = np.array(frame.forces)
    if frame.stress is not None:
        atoms.info["REF_stress"] = np.array(frame.stress)


def _leave_predictions_only(atoms: Atoms) -> None:
    """Remove labels of the source and the mark of predictions, so that readers take the predictions as labels."""
    for values in (atoms.info, atoms.arrays):
        for name in [name for name in values if name == PREDICTED_BY or name.startswith("REF_")]:
            del values[name]


def keep_values(atoms: Atoms, raw: RawFrame, reader: LabelReader) -> None:
    """Add everything that a file holds for a structure to its predictions, without replacing any of these."""
    results = set(atoms.calc.results) if atoms.calc is not None else set()
    labels = {label for label in ("energy", "forces", "stress") if _is_label(atoms, label, reader)}
    constraints, arrays = _constraints(raw)
    for place, values in ((atoms.info, _info(raw)), (atoms.arrays, arrays), (None, raw.results)):
        for name, value in values.items():
            if value is None or (name in labels and name in all_properties):
                continue  # it is there as REF_energy, REF_forces or REF_stress
            per_atom = np.ndim(value) > 0 and len(value) == len(atoms) and name not in per_config_properties
            target = (atoms.arrays if per_atom else atoms.info) if place is None else place
            taken = name in results or name in all_properties or name in atoms.info or name in atoms.arrays
            key = f"input_{name}" if taken else name
            target[key] = np.array(value) if target is atoms.arrays else value
    atoms.set_constraint(constraints)


def _is_label(atoms: Atoms, label: str, reader: LabelReader) -> bool:
    """Whether the reference of a structure was read from the value of that very name, and so keeps it."""
    there = f"REF_{label}" in (atoms.arrays if label == "forces" else atoms.info)
    return there and reader.names[label] in (None, label, CALCULATOR)


def _info(raw: RawFrame) -> dict[str, Any]:
    """Values of the frame. Those of an xyz file as ASE reads them, so that integers and logical values stay what they are."""
    if not raw.comment:
        return dict(raw.info)
    try:
        values = key_val_str_to_dict(raw.comment)
    except (ValueError, KeyError, IndexError):
        return dict(raw.info)
    return {name: value for name, value in values.items() if name in raw.info}


def _constraints(raw: RawFrame) -> tuple[list[Any], dict[str, Any]]:
    """Constraints of a structure, and its other arrays. In xyz files the column `move_mask` says which atoms may move."""
    arrays = dict(raw.arrays)
    mask = arrays.pop("move_mask", None)
    if mask is None:
        return list(raw.constraints), arrays
    return constraints_of(np.asarray(mask, dtype=bool)), arrays


def predict_frames(
    potential: Potential, frames: Sequence[Frame], *, device: str | torch.device | None = None, neighbours: str = "auto"
) -> list[Atoms]:
    """New `Atoms` with the predictions of one batch as calculator results and the frames' labels under REF_ names."""
    with evaluating(potential, device) as place:
        return _predict_frames(BatchEvaluator(potential, place, engine=False), place, frames, neighbours)


def _predict_frames(
    evaluator: BatchEvaluator, device: torch.device, frames: Sequence[Frame], neighbours: str
) -> list[Atoms]:
    potential = evaluator.potential
    species, graph = SpeciesTable(potential.species, trained=True), graph_of(potential, neighbours)
    batch = to_device(batch_from_frames(frames, species, None if evaluator.builds_edges else graph), device)
    try:
        outputs, extra = evaluator(batch, forces=True, stress=any(frame.volume > 0 for frame in frames))
    except ForgefieldError:
        if evaluator.builds_edges:
            batch_from_frames(
                frames, species, graph
            )  # names the file and the frame of a structure that has no neighbour list
        raise
    arrays = {name: value.cpu().numpy() for name, value in (outputs | extra).items()}
    ends = np.cumsum([len(frame) for frame in frames])[:-1]
    of_atoms = per_atom_outputs(potential)
    uncertain = [name for name, per in potential.uncertainty_outputs.items() if per == "atom"]
    per_atom = ("forces", "atomic_energy", *uncertain, *of_atoms, *(f"{name}_prob" for name in of_atoms))
    values = {name: np.split(array, ends) if name in per_atom else array for name, array in arrays.items()}
    return [
        _image(frame, {name: value[i] for name, value in values.items()}, potential) for i, frame in enumerate(frames)
    ]


def _image(frame: Frame, values: dict[str, Any], potential: Potential) -> Atoms:
    """values: outputs of the model for this frame, by name."""
    atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
    atoms.info[PREDICTED_BY] = f"forgefield: {' '.join(potential.extra_outputs)}".rstrip()
    for name, output in potential.extra_outputs.items():
        place: dict[str, Any] = atoms.arrays if output.per == "atom" else atoms.info
        for key in (name, f"{name}_prob"):
            if key in values:
                place[key] = values[key] if np.ndim(values[key]) else float(values[key])
        if name in frame.fields:
            place[f"REF_{name}"] = frame.fields[name] if np.ndim(frame.fields[name]) else float(frame.fields[name])
    for name, per in potential.uncertainty_outputs.items():
        if name in values and per == "atom":
            atoms.arrays[name] = values[name]
        elif name in values and (np.ndim(values[name]) == 0 or frame.volume > 0):
            atoms.info[name] = values[name] if np.ndim(values[name]) else float(values[name])
    keep_labels(atoms, frame)
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


_USUAL_ARRAYS = ("numbers", "positions", "tags", "momenta", "masses", "initial_magmoms", "initial_charges")
"""Arrays for which all formats of ASE have a place."""


def _write_traj(path: Path, images: Sequence[Atoms]) -> None:
    """ASE's trajectories keep `info` but only the usual arrays, so all others go into `info`."""
    moved = []
    for atoms in images:
        image = atoms.copy()
        image.calc = atoms.calc
        for name in [name for name in image.arrays if name not in _USUAL_ARRAYS]:
            image.info[name] = image.arrays.pop(name)
        moved.append(image)
    ase.io.write(path, moved, format="traj")


def _write_database(path: Path, images: Sequence[Atoms]) -> None:
    """The `data` of a row holds `info` and all but the usual arrays."""
    kind = "json" if ".json" in path.suffixes else "db"
    with ase.db.connect(path, type=kind, append=False) as database:
        for atoms in images:
            arrays = {name: value for name, value in atoms.arrays.items() if name not in _USUAL_ARRAYS}
            database.write(atoms, data={name: _plain(value) for name, value in {**atoms.info, **arrays}.items()})


def _plain(value: Any) -> Any:
    """Without numpy's scalars and arrays of text, which ASE's databases cannot hold."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.dtype.kind in "US"):
        return value.tolist()
    return value


_WRITERS = {
    ".extxyz": write_extxyz,
    ".xyz": write_extxyz,
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
