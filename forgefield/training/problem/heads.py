"""From the fields that a task trains to what the model has to know of them: shape, unit, sum or mean of atoms, mean and scale.

The numbers become part of the model's options and so of the run: labels are never changed, and a trained model gives values in
the unit of its labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forgefield.data.labels.fields import Field
from forgefield.data.module import FrameData
from forgefield.data.statistics import (
    atom_moments,
    extensive_moments,
    full_mean,
    intensive_moments,
    isotropic_mean,
    largest_magnitude,
    zero_mean,
)
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.models.heads.options import SHAPES
from forgefield.models.predictor import FORCES
from forgefield.tasks.options import DENOISE, TARGETS, quantity, targets_of
from forgefield.tasks.targets import require_labels

TAKEN = ("atomic_energy", "energy_total")
"""Names of outputs and errors that every potential has."""
MOST_CLASSES = 1000
"""More different labels are taken for numbers."""
ROUNDING = 1e-12
"""A spread below this share of the largest value is none."""


def field_targets(task: Any) -> dict[str, Any]:
    """Options of those targets that are fields."""
    return {name: options for name, options in targets_of(task).items() if quantity(name) not in (*TARGETS, DENOISE)}


def has_energy(task: Any) -> bool:
    """Whether energies are trained, themselves or through their derivatives."""
    given = targets_of(task)
    return any(quantity(name) in TARGETS and not (name == FORCES and given[name].direct) for name in given)


def head_specifications(task: Any, data: FrameData) -> dict[str, dict[str, Any]]:
    """For each target that a head gives what the head is made for (`models.heads.HeadOptions`)."""
    targets, given = field_targets(task), targets_of(task)
    require_labels(targets, data.statistics.labels, "training", data.label_hints)
    facts = {name: _facts(name, options, data) for name, options in targets.items()}
    neighbours = float(data.statistics.mean_neighbours)
    vector = {"per": "atom", "shape": [3], "kind": "vector", "neighbours": neighbours}
    if FORCES in given and given[FORCES].direct:
        scale, net_zero = data.statistics.forces_rms, given[FORCES].net_zero is not False
        facts[FORCES] = {**vector, "unit": "eV/A", "scale": float(scale or 1.0), "net_zero": net_zero}
    if DENOISE in given:
        facts[DENOISE] = {**vector, "unit": "A", "scale": float(given[DENOISE].sigma), "net_zero": True}
    return facts


def output_units(outputs: Mapping[str, Any], task: Any, data: FrameData) -> dict[str, str]:
    """Unit of each target, where the model gives its outputs by itself; raises for what it does not give.

    outputs: what it can give (`models.registry.direct_outputs`).
    """
    frames = [name for name, facts in outputs.items() if facts.per == "frame"]
    if task is None or has_energy(task):
        raise ForgefieldError(
            f"task: the fitting network of this model gives {', '.join(outputs)} and no energy; write "
            f"task: {{{frames[0]}: {{}}}}."
        )
    targets = field_targets(task)
    for name, options in targets.items():
        if name not in outputs:
            raise ForgefieldError(f"task.{name}: the fitting network of this model gives {', '.join(outputs)}.")
        for key, fixed in (("classes", None), ("reduce", (None, outputs[name].reduce)), ("normalise", ("auto",))):
            if getattr(options, key) not in (fixed or (None,)):
                raise ForgefieldError(
                    f"task.{name}.{key} does not apply: it is part of model.fitting_net; leave it out."
                )
    require_labels(targets, data.statistics.labels, "training", data.label_hints)
    for name in targets:
        field, facts = data.train.fields[name], outputs[name]
        if (field.per, list(field.shape)) != (facts.per, list(facts.shape)):
            raise ForgefieldError(
                f"task.{name}: the model gives a value of shape {list(facts.shape)} for each {facts.per}, and the data has it "
                f"{field.describe()}; set data.labels.fields.{name}={{per: {facts.per}, shape: {list(facts.shape)}}}."
            )
    return {name: data.train.fields[name].unit for name in targets}


def _facts(name: str, options: Any, data: FrameData) -> dict[str, Any]:
    if name in TAKEN:
        raise ForgefieldError(
            f"task.{name}: a model has an output of that name already; call the field something else."
        )
    field = data.train.fields[name]
    if field.per == "atom" and options.reduce is not None:
        raise ForgefieldError(f"task.{name}.reduce does not apply: {name} has a value for every atom.")
    reduce, kind = options.reduce or "mean", options.kind or "values"
    if options.classes is not None:
        return _class_facts(name, options, field, data)
    if kind != "values":
        _require_shape(name, kind, field, data)
    shift, scale = _moments(name, options.normalise, field, reduce, kind, data)
    return {
        "kind": kind,
        "neighbours": 1.0 if kind == "values" else float(data.statistics.mean_neighbours),
        "per": field.per,
        "shape": list(field.shape),
        "unit": field.unit,
        "reduce": reduce,
        "shift": shift.reshape(len(data.species), -1).tolist(),
        "scale": float(scale),
    }


def _require_shape(name: str, kind: str, field: Field, data: FrameData) -> None:
    shape = SHAPES[kind]
    if field.shape != shape:
        raise ForgefieldError(
            f"task.{name}.kind={kind}: {name} has the shape {list(field.shape)}, and a {kind} has {list(shape)}; set "
            f"data.labels.fields.{name}.shape, or leave kind out for numbers that do not turn with the structure."
        )
    if kind != "symmetric":
        return
    for split, part in data.splits():
        if name not in part.fields:
            continue
        labels = _labelled(part.frames, name)
        skew = np.abs(labels - labels.swapaxes(1, 2)).max(initial=0.0)
        if skew > 1e-6 * np.abs(labels).max(initial=0.0):
            raise ForgefieldError(
                f"task.{name}.kind=symmetric: labels of data.{split} differ from their transposes by up to {skew:.3g}; use "
                f"kind: tensor, or make the labels symmetric."
            )


def _labelled(table: FrameTable, name: str) -> np.ndarray:
    """(n, *shape): values of the frames or atoms that have one."""
    values = table.find(np.arange(len(table))).field(name)
    return values[~np.isnan(values.reshape(len(values), -1)).any(axis=1)]


def _class_facts(name: str, options: Any, field: Field, data: FrameData) -> dict[str, Any]:
    """Logits begin as the logarithms of how often each class occurs in the training data."""
    if field.shape:
        raise ForgefieldError(
            f"task.{name}.classes: a class is one number, and {name} has the shape {list(field.shape)}."
        )
    table = data.train.frames
    classes = _classes(options.classes, table, name)
    for _, part in data.splits():
        if name in part.fields:
            _refuse_other_classes(name, classes, part.frames)
    counts = np.array([(_labels(table, name) == value).sum() for value in classes], dtype=float)
    shares = (counts + 1) / (counts.sum() + len(classes))
    shift = np.zeros(len(classes)) if options.normalise in (None, "none") else np.log(shares)
    return {
        "per": field.per,
        "shape": [],
        "unit": field.unit,
        "reduce": options.reduce or "mean",
        "shift": np.repeat(shift[None], len(data.species), axis=0).tolist(),
        "scale": 1.0,
        "classes": [float(value) for value in classes],
    }


def _classes(given: Any, table: FrameTable, name: str) -> list[float]:
    classes = np.unique(_labels(table, name)).tolist() if given == "auto" else given
    classes = list(range(classes)) if isinstance(classes, int) else classes
    if len(classes) < 2:
        raise ForgefieldError(
            f"task.{name}.classes=auto: all training frames have the label {classes[0]:g}, so there is nothing to tell apart."
        )
    if len(classes) > MOST_CLASSES:
        raise ForgefieldError(
            f"task.{name}.classes=auto: the training data has {len(classes)} different labels; is {name} a number to be "
            f"learnt (then leave task.{name}.classes out)?"
        )
    return [float(value) for value in classes]


def _refuse_other_classes(name: str, classes: list[float], table: FrameTable) -> None:
    if np.isin(_labels(table, name), classes).all():
        return
    for row in range(len(table)):
        labels = _labels(table[row : row + 1], name)
        strange = labels[~np.isin(labels, classes)]
        if len(strange):
            raise ForgefieldError(
                f"{table.where(row)}: its {name} is {strange[0]:g}, and task.{name}.classes has {_listed(classes)}; correct "
                "the label, or give all classes."
            )


def _listed(classes: list[float]) -> str:
    words = [f"{value:g}" for value in classes]
    return ", ".join(words) if len(words) <= 10 else f"{', '.join(words[:4])}, ..., {words[-1]}"


def _labels(table: FrameTable, name: str) -> np.ndarray:
    """(n,): all labels that are there."""
    values = table.find(np.arange(len(table))).field(name)
    return values[~np.isnan(values)]


def _moments(
    name: str, normalise: Any, field: Field, reduce: str, kind: str, data: FrameData
) -> tuple[np.ndarray, float]:
    """(n_species, *shape) and a positive number."""
    species, table = data.species, data.train.frames
    if normalise in (None, "none"):
        return np.zeros((len(species), *field.shape)), 1.0
    if isinstance(normalise, Mapping):
        mean = _given(f"task.{name}.normalise.mean", normalise["mean"], field, species.symbols)
        return mean * (np.eye(3) if len(field.shape) == 2 and kind != "values" else 1.0), normalise["scale"]
    measure = extensive_moments if reduce == "sum" else intensive_moments
    part = {"values": full_mean, "vector": zero_mean}.get(kind, isotropic_mean)
    shift, scale = (atom_moments if field.per == "atom" else measure)(table, name, species, part)
    if not scale > ROUNDING * largest_magnitude(table, name):
        how = {"atom": "the species of an atom", "frame": "the composition"}[field.per]
        why = (
            "all training frames have the same value"
            if reduce != "sum" and field.per == "frame"
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
