"""Predictions as stored in `predictions/SPLIT.npz`, and their errors in meV/atom, meV/A and GPa; extra outputs have their own
units.

The definitions are those of `tasks.metrics`: energies per atom, every component of forces and stress counted once,
missing labels (NaN) are not counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.physics.units import EV_PER_A3_TO_GPA
from forgefield.report.markup import shorten
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
    energy_uncertainty: np.ndarray | None = None
    forces_uncertainty: np.ndarray | None = None
    """Standard deviations of `energy_pred` and `forces_pred`."""
    frame_index: np.ndarray | None = None
    """(n_frames,) each: the file of a frame, an index into `files`, and its index in that file."""

    def origin(self, frame: int) -> tuple[str, int]:
        """File of a frame and its index there; where that was not stored, "" and its index among the predictions."""
        if self.frame_file is None or self.frame_index is None:
            return "", frame
        return self.files[self.frame_file[frame]], int(self.frame_index[frame])

    def pair(self, name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Prediction and reference of `energy`, `forces`, `stress` or an extra output."""
        arrays = {
            "energy": (self.energy_pred, self.energy_ref),
            "forces": (self.forces_pred, self.forces_ref),
            "stress": (self.stress_pred, self.stress_ref),
        }
        return arrays[name] if name in arrays else self.extra_outputs.get(name, (None, None))

    def frame_of_atom(self) -> np.ndarray:
        """(n_atoms,), index of the frame of each atom."""
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
    for key in ("energy_uncertainty", "forces_uncertainty"):
        if key in arrays:
            labels[key] = _checked(file, key, arrays[key], shapes[key.removesuffix("_uncertainty")])
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
    outputs = {}
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
        outputs[name] = (
            _checked(file, key, predicted, shape),
            _checked(file, f"{name}_ref", arrays[f"{name}_ref"], shape),
        )
    return outputs


def _checked(file: Path, key: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape or array.dtype.kind not in "fiu":
        raise ForgefieldError(f"{file.name}: `{key}` has shape {array.shape}, expected numbers of shape {shape}")
    return array


@dataclass(frozen=True)
class Quantity:
    """How a quantity is shown: `unit` for its values, `error_unit` for its errors, `scale` from one to the other."""

    name: str
    title: str
    symbol: str
    unit: str
    error_unit: str
    scale: float


QUANTITIES = {
    "energy": Quantity("energy", "Energy", "E", "eV/atom", "meV/atom", 1000.0),
    "forces": Quantity("forces", "Forces", "F", "eV/Å", "meV/Å", 1000.0),
    "stress": Quantity("stress", "Stress", "σ", "GPa", "GPa", 1.0),
}


def quantities(units: Mapping[str, str]) -> dict[str, Quantity]:
    """How each quantity of a run is shown. units: units of the model's extra outputs."""
    extra_outputs = {
        name: Quantity(name, shorten(name, 40), shorten(name, 20), shorten(unit, 20), shorten(unit, 20), 1.0)
        for name, unit in units.items()
    }
    return QUANTITIES | extra_outputs


@dataclass(frozen=True)
class Pairs:
    """Labelled values of one quantity, flat, in its unit: prediction and reference."""

    quantity: Quantity
    predicted: np.ndarray
    reference: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """Prediction minus reference, in the error unit."""
        return (self.predicted - self.reference) * self.quantity.scale

    @property
    def mae(self) -> float:
        return float(np.abs(self.error).mean())

    @property
    def rmse(self) -> float:
        return float(np.sqrt(np.square(self.error).mean()))


@dataclass(frozen=True)
class GroupError:
    """Force errors of one group of atoms (a species, a bin of force magnitude).

    mae, rmse: of components, meV/A. relative: mean |error vector| over mean |reference vector|.
    """

    label: str
    n_atoms: int
    mae: float
    rmse: float
    relative: float


def pairs(predictions: Predictions, name: str, unit: str = "") -> Pairs | None:
    """The labelled values of `energy`, `forces`, `stress` or an extra output (with its unit); None without labelled values."""
    predicted, reference = predictions.pair(name)
    if predicted is None or reference is None:
        return None
    predicted, reference = np.asarray(predicted, np.float64), np.asarray(reference, np.float64)
    if name == "energy":
        atoms = np.maximum(predictions.n_atoms, 1)
        predicted, reference = predicted / atoms, reference / atoms
    elif name == "stress":
        predicted, reference = predicted * EV_PER_A3_TO_GPA, reference * EV_PER_A3_TO_GPA
    labelled = np.isfinite(predicted) & np.isfinite(reference)
    if not labelled.any():
        return None
    return Pairs(
        quantities({name: unit} if name not in QUANTITIES else {})[name], predicted[labelled], reference[labelled]
    )


def errors(predictions: Predictions) -> dict[str, float]:
    """`{energy_mae: ..., energy_rmse: ..., forces_mae: ...}`, as the training reports them."""
    by_name: dict[str, float] = {}
    for name in (*QUANTITIES, *predictions.extra_outputs):
        values = pairs(predictions, name)
        if values is not None:
            by_name[f"{name}_mae"], by_name[f"{name}_rmse"] = values.mae, values.rmse
    return by_name


def errors_by_species(predictions: Predictions) -> list[GroupError]:
    """Force errors of each species that has labelled atoms, in the order of the species table."""
    forces = _labelled_forces(predictions)
    if forces is None or predictions.species is None:
        return []
    error, reference, labelled = forces
    species = predictions.species[labelled]
    groups = [(symbol, species == index) for index, symbol in enumerate(predictions.symbols)]
    return [_group(symbol, error[rows], reference[rows]) for symbol, rows in groups if rows.any()]


MAGNITUDE_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0)


def errors_by_magnitude(predictions: Predictions) -> list[GroupError]:
    """Force errors by magnitude of the reference force, in bins of fixed shares of the atoms; labels in eV/A."""
    forces = _labelled_forces(predictions)
    if forces is None:
        return []
    error, reference, _ = forces
    size = np.linalg.norm(reference, axis=1)
    edges = np.unique(np.quantile(size, MAGNITUDE_QUANTILES))
    if len(edges) < 2:
        return [_group(f"{edges[0]:.2g}", error, reference)]
    which = np.clip(np.searchsorted(edges, size, side="right") - 1, 0, len(edges) - 2)
    groups = [(f"{edges[i]:.2g}–{edges[i + 1]:.2g}", which == i) for i in range(len(edges) - 1)]
    return [_group(label, error[rows], reference[rows]) for label, rows in groups if rows.any()]


@dataclass(frozen=True)
class FrameError:
    """One frame and its errors: energy in meV/atom (signed), forces as RMSE in meV/A; None without a label."""

    index: int
    n_atoms: int
    energy: float | None
    forces: float | None


def worst_frames(predictions: Predictions, number: int = 5) -> list[FrameError]:
    """The frames with the largest force RMSE, or the largest energy error where there are no forces."""
    n_frames = len(predictions.n_atoms)
    energy, forces = np.full(n_frames, np.nan), np.full(n_frames, np.nan)
    if predictions.energy_pred is not None and predictions.energy_ref is not None:
        energy = 1000 * (predictions.energy_pred - predictions.energy_ref) / np.maximum(predictions.n_atoms, 1)
    if predictions.forces_pred is not None and predictions.forces_ref is not None:
        square = np.square(predictions.forces_pred - predictions.forces_ref)
        labelled = np.isfinite(square)
        frame = np.repeat(predictions.frame_of_atom(), 3)
        sums = np.bincount(frame, np.where(labelled, square, 0).ravel(), n_frames)
        counts = np.bincount(frame, labelled.ravel(), n_frames)
        forces = 1000 * np.sqrt(np.divide(sums, counts, out=np.full(n_frames, np.nan), where=counts > 0))
    ranking = forces if np.isfinite(forces).any() else np.abs(energy)
    order = np.argsort(-np.nan_to_num(ranking, nan=-1.0), kind="stable")[:number]
    chosen = [int(i) for i in order if np.isfinite(ranking[i])]
    return [FrameError(i, int(predictions.n_atoms[i]), _finite(energy[i]), _finite(forces[i])) for i in chosen]


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _labelled_forces(predictions: Predictions) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Errors and references of the atoms whose force is labelled, (n, 3) in eV/A, and which atoms these are."""
    if predictions.forces_pred is None or predictions.forces_ref is None:
        return None
    error = np.asarray(predictions.forces_pred, np.float64) - predictions.forces_ref
    labelled = np.isfinite(error).all(axis=1)
    if not labelled.any():
        return None
    return error[labelled], np.asarray(predictions.forces_ref, np.float64)[labelled], labelled


def _group(label: str, error: np.ndarray, reference: np.ndarray) -> GroupError:
    size = np.linalg.norm(reference, axis=1).mean()
    return GroupError(
        label=label,
        n_atoms=len(error),
        mae=1000 * float(np.abs(error).mean()),
        rmse=1000 * float(np.sqrt(np.square(error).mean())),
        relative=float(np.linalg.norm(error, axis=1).mean() / size) if size > 0 else float("nan"),
    )
