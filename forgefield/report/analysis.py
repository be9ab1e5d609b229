"""Errors of predictions in the units of the metrics: meV/atom, meV/A, GPa; extra outputs have their own units.

The definitions are those of `tasks.metrics`: energies per atom, every component of forces and stress counted once,
missing labels (NaN) are not counted. Pure functions on arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forgefield.physics.units import EV_PER_A3_TO_GPA
from forgefield.report.numbers import shorten
from forgefield.report.predictions import Predictions


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
    if name in QUANTITIES:
        predicted, reference = getattr(predictions, f"{name}_pred"), getattr(predictions, f"{name}_ref")
    else:
        predicted, reference = predictions.extra_outputs.get(name, (None, None))
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
