"""From the fields that a task trains to what the model has to know of them: shape, unit, sum or mean of atoms, mean and scale.

The numbers become part of the model's options and so of the run: labels are never changed, and a trained model gives values in
the unit of its labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forgefield.config.targets import TARGETS, given_targets
from forgefield.data.field_statistics import atom_moments, extensive_moments, intensive_moments, largest
from forgefield.data.fields import Field
from forgefield.data.module import DataModule
from forgefield.data.readers import plain
from forgefield.errors import ForgefieldError
from forgefield.tasks.task import require_labels

TAKEN = ("atomic_energy", "energy_total")
"""Names of outputs and errors that every potential has."""
ROUNDING = 1e-12
"""A spread below this share of the largest value is none."""


def field_targets(task: Any) -> dict[str, Any]:
    """Options of those targets that are fields."""
    return {name: options for name, options in given_targets(task).items() if name not in TARGETS}


def has_energy(task: Any) -> bool:
    """Whether energies are trained, themselves or through their derivatives."""
    return any(name in TARGETS for name in given_targets(task))


def head_facts(task: Any, data: DataModule) -> dict[str, dict[str, Any]]:
    """For each target that is a field what a head is made for (`models.heads.HeadOptions`)."""
    targets = field_targets(task)
    require_labels(targets, data.statistics.labels, "training")
    return {name: _facts(name, options, data) for name, options in targets.items()}


def _facts(name: str, options: Any, data: DataModule) -> dict[str, Any]:
    if name in TAKEN:
        raise ForgefieldError(
            f"task.{name}: a model has an output of that name already; call the field something else."
        )
    field = data.train.fields[name]
    if field.per == "atom" and options.reduce is not None:
        raise ForgefieldError(f"task.{name}.reduce does not apply: {name} has a value for every atom.")
    reduce = options.reduce or "mean"
    shift, scale = _moments(name, plain(options.normalise), field, reduce, data)
    return {
        "per": field.per,
        "shape": list(field.shape),
        "unit": field.unit,
        "reduce": reduce,
        "shift": shift.reshape(len(data.species), -1).tolist(),
        "scale": float(scale),
    }


def _moments(name: str, normalise: Any, field: Field, reduce: str, data: DataModule) -> tuple[np.ndarray, float]:
    """(n_species, *shape) and a positive number."""
    species, table = data.species, data.train.frames
    if normalise in (None, "none"):
        return np.zeros((len(species), *field.shape)), 1.0
    if isinstance(normalise, Mapping):
        return _given(f"task.{name}.normalise.mean", normalise["mean"], field, species.symbols), normalise["scale"]
    measure = intensive_moments if reduce == "mean" else extensive_moments
    shift, scale = (atom_moments if field.per == "atom" else measure)(table, name, species)
    if not scale > ROUNDING * largest(table, name):
        how = {"atom": "the species of an atom", "frame": "the composition"}[field.per]
        why = (
            "all training frames have the same value"
            if reduce == "mean" and field.per == "frame"
            else f"{how} says it all"
        )
        raise ForgefieldError(
            f"task.{name}.normalise=auto: {why}, so the scale would be zero and there is nothing to learn; check the label "
            f"{name} (data.labels.fields.{name}), or give task.{name}.normalise={{mean: ..., scale: ...}}."
        )
    return shift, scale


def _given(where: str, mean: Any, field: Field, symbols: tuple[str, ...]) -> np.ndarray:
    if not isinstance(mean, Mapping):
        mean = dict.fromkeys(symbols, mean)
    if set(mean) != set(symbols):
        raise ForgefieldError(
            f"{where} names {', '.join(mean)}; the species are {', '.join(symbols)}, give each a value."
        )
    try:
        return np.stack([np.broadcast_to(np.array(mean[symbol], dtype=float), field.shape) for symbol in symbols])
    except ValueError:
        raise ForgefieldError(f"{where} does not have the shape of the field, {list(field.shape)}.") from None
