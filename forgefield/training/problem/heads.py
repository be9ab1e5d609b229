"""Specifications of the heads of a model, from the targets of a task and the data: shape, unit, reduction, mean and scale.

The numbers become part of the model's options and of the run: labels are never changed, and predictions of a trained model have
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
from forgefield.models.interface import DirectOutput
from forgefield.models.resolved import FORCES
from forgefield.tasks.options import DENOISE, FieldTargetOptions, TargetOptions, TaskOptions, targets_of
from forgefield.tasks.targets import require_labels

RESERVED = ("atomic_energy", "energy_total")
"""Names of outputs and errors of every potential."""
MAX_CLASSES = 1000
"""Targets with more different labels are assumed to be numbers."""
ROUNDING = 1e-12
"""A standard deviation below this fraction of the largest value is zero."""


def field_targets(task: TaskOptions) -> dict[str, FieldTargetOptions]:
    """Options of the targets that are fields."""
    return {name: options for name, options in targets_of(task).items() if isinstance(options, FieldTargetOptions)}


def has_energy(task: TaskOptions) -> bool:
    """Whether energies or their derivatives are trained."""
    return any(
        isinstance(options, TargetOptions) and not (name == FORCES and options.direct)
        for name, options in targets_of(task).items()
    )


def head_specifications(
    task: TaskOptions, data: FrameData, derivatives: Mapping[str, DirectOutput] | None = None
) -> dict[str, dict[str, Any]]:
    """Specifications (`models.heads.HeadOptions`) of the heads, by target. derivatives: outputs that need none."""
    targets = field_targets(task)
    require_labels(targets, data.statistics.labels, "training", data.label_hints)
    for name in targets:
        if name in (derivatives or {}):
            _refuse_head_options(name, targets[name], (derivatives or {})[name])
            _require_shape_of_output(name, (derivatives or {})[name], data)
    heads = {
        name: _specification(name, options, data)
        for name, options in targets.items()
        if name not in (derivatives or {})
    }
    neighbours = float(data.statistics.mean_neighbours)
    vector = {"per": "atom", "shape": [3], "kind": "vector", "neighbours": neighbours}
    if task.forces is not None and task.forces.direct:
        scale, net_zero = data.statistics.forces_rms, task.forces.net_zero is not False
        heads[FORCES] = {**vector, "unit": "eV/A", "scale": float(scale or 1.0), "net_zero": net_zero}
    if task.denoise is not None:
        heads[DENOISE] = {**vector, "unit": "A", "scale": float(task.denoise.sigma), "net_zero": True}
    return heads


def output_units(outputs: Mapping[str, DirectOutput], task: TaskOptions | None, data: FrameData) -> dict[str, str]:
    """Units of the targets of a model with direct outputs. Raises ForgefieldError for targets that it does not have.

    outputs: of the model (`models.resolving.direct_outputs`).
    """
    frames = [name for name, output in outputs.items() if output.per == "frame"]
    if task is None or has_energy(task):
        raise ForgefieldError(
            f"task: the fitting network of this model predicts {', '.join(outputs)} and no energy; write "
            f"task: {{{frames[0]}: {{}}}}."
        )
    targets = field_targets(task)
    for name, options in targets.items():
        if name not in outputs:
            raise ForgefieldError(f"task.{name}: the fitting network of this model predicts {', '.join(outputs)}.")
        _refuse_head_options(name, options, outputs[name])
    require_labels(targets, data.statistics.labels, "training", data.label_hints)
    for name in targets:
        _require_shape_of_output(name, outputs[name], data)
    return {name: data.train.fields[name].unit for name in targets}


def _refuse_head_options(name: str, options: FieldTargetOptions, output: DirectOutput) -> None:
    applies = {
        "classes": options.classes is None,
        "reduce": options.reduce in (None, output.reduce),
        "normalise": options.normalise == "auto",
        "kind": options.kind in (None, output.kind),
    }
    for key, applies_to_model in applies.items():
        if not applies_to_model:
            raise ForgefieldError(f"task.{name}.{key} does not apply: it is part of the model; leave it out.")


def _require_shape_of_output(name: str, output: DirectOutput, data: FrameData) -> None:
    field = data.train.fields[name]
    if (field.per, list(field.shape)) != (output.per, list(output.shape)):
        raise ForgefieldError(
            f"task.{name}: the model predicts a value of shape {list(output.shape)} for each {output.per}, but the data "
            f"has it {field.describe()}; set data.labels.fields.{name}={{per: {output.per}, shape: {list(output.shape)}}}."
        )


def _specification(name: str, options: FieldTargetOptions, data: FrameData) -> dict[str, Any]:
    if name in RESERVED:
        raise ForgefieldError(f"task.{name}: models have an output of that name already; rename the field.")
    field = data.train.fields[name]
    if field.per == "atom" and options.reduce is not None:
        raise ForgefieldError(f"task.{name}.reduce does not apply: {name} has a value for every atom.")
    reduce, kind = options.reduce or "mean", options.kind or "values"
    if options.classes is not None:
        return _class_specification(name, options, field, data)
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
            f"task.{name}.kind={kind}: {name} has the shape {list(field.shape)}, but a {kind} has {list(shape)}; set "
            f"data.labels.fields.{name}.shape, or leave kind out for invariant numbers."
        )
    if kind != "symmetric":
        return
    for split, dataset in data.splits():
        if name not in dataset.fields:
            continue
        labels = _labelled(dataset.frames, name)
        skew = np.abs(labels - labels.swapaxes(1, 2)).max(initial=0.0)
        if skew > 1e-6 * np.abs(labels).max(initial=0.0):
            raise ForgefieldError(
                f"task.{name}.kind=symmetric: labels of data.{split} differ from their transposes by up to {skew:.3g}; use "
                f"kind: tensor, or make the labels symmetric."
            )


def _labelled(table: FrameTable, name: str) -> np.ndarray:
    """(n, *shape): all values without missing ones."""
    values = table.find(np.arange(len(table))).field(name)
    missing = np.isnan(values).any(axis=tuple(range(1, values.ndim)))
    return np.asarray(values[~missing])


def _class_specification(name: str, options: FieldTargetOptions, field: Field, data: FrameData) -> dict[str, Any]:
    """Initial logits are the logarithms of the frequencies of the classes in the training data."""
    if field.shape:
        raise ForgefieldError(
            f"task.{name}.classes: a class is one number, but {name} has the shape {list(field.shape)}."
        )
    table = data.train.frames
    classes = _classes(options.classes, table, name)
    for _, dataset in data.splits():
        if name in dataset.fields:
            _require_classes(name, classes, dataset.frames, automatic=options.classes == "auto")
    counts = np.array([(_labelled(table, name) == value).sum() for value in classes], dtype=float)
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


def _classes(setting: int | str | list[float] | None, table: FrameTable, name: str) -> list[float]:
    """Labels of the classes. setting: `task.*.classes`."""
    if isinstance(setting, int):
        classes = [float(value) for value in range(setting)]
    else:
        labels = setting if isinstance(setting, list) else np.unique(_labelled(table, name)).tolist()
        classes = [float(value) for value in labels]
    if len(classes) < 2:
        raise ForgefieldError(
            f"task.{name}.classes=auto: all training frames have the label {classes[0]:g}, so there is nothing to classify."
        )
    if len(classes) > MAX_CLASSES:
        raise ForgefieldError(
            f"task.{name}.classes=auto: the training data has {len(classes)} different labels; if {name} is a number, leave "
            f"task.{name}.classes out."
        )
    return classes


def _require_classes(name: str, classes: list[float], table: FrameTable, *, automatic: bool) -> None:
    """Raise ForgefieldError for a label that is not one of the classes. automatic: they are the labels of training frames."""
    if np.isin(_labelled(table, name), classes).all():
        return
    for row in range(len(table)):
        labels = _labelled(table[row : row + 1], name)
        unknown = labels[~np.isin(labels, classes)]
        if len(unknown):
            if automatic:
                raise ForgefieldError(
                    f"{table.where(row)}: its {name} is {unknown[0]:g}, which is not the label of any training frame; with "
                    f"task.{name}.classes=auto the classes are the labels of the training frames ({_listed(classes)}). Correct "
                    f"the label, move frames of this class to data.train, or list all classes: "
                    f"task.{name}.classes={_written([*classes, float(unknown[0])])}."
                )
            raise ForgefieldError(
                f"{table.where(row)}: its {name} is {unknown[0]:g}, but task.{name}.classes has {_listed(classes)}; correct "
                "the label, or list all classes."
            )


def _written(classes: list[float]) -> str:
    """A list of labels as a setting."""
    return f"[{', '.join(f'{value:g}' for value in sorted(classes))}]"


def _listed(classes: list[float]) -> str:
    labels = [f"{value:g}" for value in classes]
    return ", ".join(labels) if len(labels) <= 10 else f"{', '.join(labels[:4])}, ..., {labels[-1]}"


def _moments(
    name: str, normalise: str | Mapping[str, Any] | None, field: Field, reduce: str, kind: str, data: FrameData
) -> tuple[np.ndarray, float]:
    """Mean (n_species, *shape), and scale."""
    species, table = data.species, data.train.frames
    if normalise in (None, "none"):
        return np.zeros((len(species), *field.shape)), 1.0
    if isinstance(normalise, Mapping):
        mean = _means(f"task.{name}.normalise.mean", normalise["mean"], field, species.symbols)
        return mean * (np.eye(3) if len(field.shape) == 2 and kind != "values" else 1.0), normalise["scale"]
    measure = extensive_moments if reduce == "sum" else intensive_moments
    project = {"values": full_mean, "vector": zero_mean}.get(kind, isotropic_mean)
    shift, scale = (atom_moments if field.per == "atom" else measure)(table, name, species, project)
    if not scale > ROUNDING * largest_magnitude(table, name):
        determined_by = {"atom": "the species of an atom", "frame": "the composition"}[field.per]
        reason = (
            "all training frames have the same value"
            if reduce != "sum" and field.per == "frame"
            else f"{determined_by} determines the value"
        )
        raise ForgefieldError(
            f"task.{name}.normalise=auto: {reason}, so the scale would be zero and there is nothing to learn; check the label "
            f"{name} (data.labels.fields.{name}), or set task.{name}.normalise={{mean: ..., scale: ...}}."
        )
    return shift, scale


def _means(key: str, mean: Any, field: Field, symbols: tuple[str, ...]) -> np.ndarray:
    """(n_species, *shape). mean: one value, or one for each species. key: of the setting, for messages."""
    if not isinstance(mean, Mapping):
        mean = dict.fromkeys(symbols, mean)
    if set(mean) != set(symbols):
        raise ForgefieldError(f"{key} has values for {', '.join(mean)}, but the species are {', '.join(symbols)}.")
    try:
        return np.stack([np.broadcast_to(np.array(mean[symbol], dtype=float), field.shape) for symbol in symbols])
    except ValueError:
        raise ForgefieldError(f"{key} does not have the shape of the field, {list(field.shape)}.") from None
