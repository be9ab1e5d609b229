"""Predictions of a run on one split, as stored in `predictions/SPLIT.npz`, read with all shapes checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import npz_arrays


@dataclass(frozen=True)
class Predictions:
    """Predictions and references of one split; an array is None where the file does not have it, NaN where a label is missing.

    energy_*: (n_frames,), eV. forces_*: (n_atoms, 3), eV/A. stress_*: (n_frames, 3, 3), eV/A^3.
    species: (n_atoms,), index into `symbols`. n_atoms: (n_frames,).
    """

    n_atoms: np.ndarray
    species: np.ndarray | None
    symbols: tuple[str, ...]
    energy_pred: np.ndarray | None
    energy_ref: np.ndarray | None
    forces_pred: np.ndarray | None
    forces_ref: np.ndarray | None
    stress_pred: np.ndarray | None
    stress_ref: np.ndarray | None
    extra_outputs: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Prediction and reference of extra outputs, by name."""
    files: tuple[str, ...] = ()
    frame_file: np.ndarray | None = None
    frame_index: np.ndarray | None = None
    """(n_frames,) each: the file of a frame, an index into `files`, and its index in that file."""

    def origin(self, frame: int) -> tuple[str, int]:
        """File of a frame and its index there; where that was not stored, "" and its index among the predictions."""
        if self.frame_file is None or self.frame_index is None:
            return "", frame
        return self.files[self.frame_file[frame]], int(self.frame_index[frame])

    def frame_of_atom(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.n_atoms)), self.n_atoms)


def predictions_from_npz(file: str | os.PathLike[str]) -> Predictions:
    """Read and check one predictions file; raises a ForgefieldError that names the array with a wrong shape or type."""
    file = Path(file)
    try:
        arrays = npz_arrays(file)
    except (OSError, ForgefieldError) as error:
        reason = type(error).__name__
        raise ForgefieldError(f"{file.name} cannot be read ({reason}); it is truncated or damaged") from error
    if "n_atoms" not in arrays:
        raise ForgefieldError(f"{file.name} has no array `n_atoms`")
    n_atoms = arrays["n_atoms"]
    if n_atoms.ndim != 1 or n_atoms.dtype.kind not in "iu" or (n_atoms < 0).any():
        raise ForgefieldError(f"{file.name}: `n_atoms` is not a list of whole numbers")
    frames, atoms = len(n_atoms), int(n_atoms.sum())
    shapes = {"energy": (frames,), "forces": (atoms, 3), "stress": (frames, 3, 3)}
    labels: dict[str, Any] = {}
    for quantity, shape in shapes.items():
        for kind in ("pred", "ref"):
            key = f"{quantity}_{kind}"
            array = arrays.get(key)
            # A quantity that was not predicted may be stored as an empty array.
            labels[key] = None if array is None or array.size == 0 else _checked(file, key, array, shape)
    species = arrays.get("species")
    symbols = tuple(str(symbol) for symbol in np.atleast_1d(arrays.get("species_symbols", [])))
    if species is not None:
        _checked(file, "species", species, (atoms,))
        if atoms and (species.dtype.kind not in "iu" or species.min() < 0 or species.max() >= len(symbols)):
            raise ForgefieldError(f"{file.name}: `species` does not index the {len(symbols)} `species_symbols`")
    extra_outputs = _extra_outputs(file, arrays, builtin=tuple(shapes), rows=(frames, atoms))
    return Predictions(
        n_atoms=n_atoms.astype(np.int64),
        species=species,
        symbols=symbols,
        extra_outputs=extra_outputs,
        **labels,
        **_origins(arrays, frames),
    )


def _origins(arrays: dict[str, np.ndarray], frames: int) -> dict[str, Any]:
    """File and index of each frame; empty where they were not stored or are inconsistent."""
    file, index, names = (arrays.get(key) for key in ("frame_file", "frame_index", "files"))
    if file is None or index is None or names is None or {file.shape, index.shape} != {(frames,)}:
        return {}
    consistent = file.dtype.kind in "iu" and index.dtype.kind in "iu" and names.ndim == 1 and names.dtype.kind == "U"
    if not consistent or (frames and not 0 <= file.min() <= file.max() < len(names)):
        return {}
    return {"files": tuple(map(str, names)), "frame_file": file, "frame_index": index}


def _extra_outputs(
    file: Path, arrays: dict[str, np.ndarray], *, builtin: tuple[str, ...], rows: tuple[int, int]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of arrays `NAME_pred` and `NAME_ref` other than `builtin`. rows: numbers of frames and atoms."""
    found = {}
    for key in sorted(arrays):
        name = key.removesuffix("_pred")
        if name == key or name in builtin or f"{name}_ref" not in arrays:
            continue
        predicted = arrays[key]
        if predicted.ndim == 0 or len(predicted) not in rows:
            raise ForgefieldError(
                f"{file.name}: `{key}` has shape {predicted.shape}, expected a row for each frame or atom"
            )
        shape = predicted.shape
        found[name] = (
            _checked(file, key, predicted, shape),
            _checked(file, f"{name}_ref", arrays[f"{name}_ref"], shape),
        )
    return found


def _checked(file: Path, key: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape or array.dtype.kind not in "fiu":
        raise ForgefieldError(f"{file.name}: `{key}` has shape {array.shape}, expected numbers of shape {shape}")
    return array
