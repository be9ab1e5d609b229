"""Options of the section `task` of a config, and their checks.

A `task` section has two forms: as written, where all targets are in the section itself, and as `TaskOptions`, where targets
that are fields of the data are in `fields` and those of grid points in `points`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forgefield.config.option import IMPORT_PATH, option
from forgefield.config.sources import Sources, wrong
from forgefield.errors import ForgefieldError
from forgefield.ldos.options import PointTaskOptions
from forgefield.tasks.losses import LOSSES


@dataclass
class ScheduleOptions:
    """How the weight of a target changes from `weight` to `to`."""

    kind: str = option("linear", choices=("linear", "cosine", "sigmoid", "step", "lr"))
    """Shape of the change. step: jumps at the positions in `at`; lr: in proportion to the learning rate, as in DeePMD-kit."""
    to: float | list[float] | None = None
    """Final weight; for kind step a list with one weight for each position."""
    unit: str | None = option(None, choices=("step", "epoch"))
    """Unit of `begin`, `end` and `at`: optimiser steps (step, the default) or epochs."""
    begin: int | None = option(None, at_least=0, expected="a whole number of at least 0")
    """Start of the change. Default: 0."""
    end: int | None = None
    """End of the change. Default: the end of the training."""
    slope: float | None = option(None, above=0, below=math.inf)
    """Sigmoid only: steepness, in units of the length of the schedule. Default: 14.5."""
    centre: float | None = option(None, at_least=0, at_most=1, expected="a number from 0 to 1")
    """Sigmoid only: midpoint, as a fraction of the schedule. Default: 0.5."""
    at: list[int] | None = None
    """Kind step only: ascending positions of the jumps."""


@dataclass
class TargetOptions:
    """A target of a potential: energy, forces, stress or virial."""

    weight: float = option(1.0, at_least=0, below=math.inf, expected="a finite number, zero or larger")
    """Weight of this target in the loss."""
    loss: str = option("mse", choices=tuple(LOSSES), open_choices=IMPORT_PATH)
    """Loss function; rmse is the root of the mean square over the components of a value. An import path names a function
    (prediction, target) -> error of the same shape."""
    huber_delta: float = option(0.01, above=0, below=math.inf)
    """Error at which the Huber loss changes from quadratic to linear, in eV, eV/A or eV/A^3."""
    huber_deltas: list[Any] | None = None
    """Forces with the loss huber only: `huber_delta` by the magnitude of the reference force, [[0, 0.01], [5, 0.02]] from 0 and
    from 5 eV/A on. Below the first magnitude the loss is half the squared error. Default: `huber_delta` for all."""
    per_atom: bool | str = option(True, choices=(True, False, "root"))
    """Energy and virial only: whether errors are divided by the number of atoms. root divides by its square root, so that
    squared errors are those of DeePMD-kit."""
    species_weights: dict[str, float] | None = None
    """Forces only: weights of atoms by species. Default: 1."""
    direct: bool = False
    """Forces only: predict forces with a head instead of the derivative of the energy. This is faster, but not conservative."""
    net_zero: bool | None = None
    """Direct forces only: subtract the net force of each frame. Default: true."""
    schedule: ScheduleOptions | None = None
    """How the weight changes during the training: {kind: linear, to: 0.1}. Default: constant."""


@dataclass
class FieldTargetOptions:
    """A target that is a field of the data (`data.labels.fields`), such as a band gap."""

    weight: float = option(1.0, at_least=0, below=math.inf, expected="a finite number, zero or larger")
    """Weight of this target in the loss."""
    loss: str | None = option(None, choices=tuple(LOSSES), open_choices=IMPORT_PATH)
    """Loss function of errors in units of the scale of `normalise`. Default: mse. Classes always use the cross-entropy."""
    classes: int | str | list[float] | None = None
    """Classification: the number of classes (labels 0, 1, ...), a list of their labels, or auto (the labels of the
    training frames; another label in validation or test data is then an error). Default: regression."""
    huber_delta: float = option(1.0, above=0, below=math.inf)
    """Error at which the Huber loss changes from quadratic to linear, in units of the scale."""
    kind: str | None = option(None, choices=("values", "vector", "symmetric", "tensor"))
    """Behaviour under rotation: values are invariant (the default); a vector (shape [3]) and a symmetric or general tensor
    (shape [3, 3]) are equivariant."""
    reduce: str | None = option(None, choices=("sum", "mean", "max", "attention"))
    """How contributions of atoms are combined into a value per frame: mean (intensive, the default) or sum (extensive). For
    invariant values also max or attention: the last layer of the head reads the maximum or a learnt weighted mean of
    features."""
    per_atom: bool | str | None = option(None, choices=(True, False, "root"))
    """With reduce: sum, whether errors are divided by the number of atoms (true, the default), its square root (root) or not
    (false)."""
    normalise: str | dict[str, Any] | None = option(
        "auto", choices=("auto", "none"), open_choices="{mean: ..., scale: ...}"
    )
    """Mean and scale of the network's output, which become part of the model. auto: from the training data (by composition if
    the target is extensive, by species if it is per atom); none: 0 and 1."""
    schedule: ScheduleOptions | None = None
    """How the weight changes during the training: {kind: linear, to: 0.1}. Default: constant."""


@dataclass
class DenoiseOptions:
    """Denoising: atoms are displaced at random and the model learns the displacements. This target needs no labels."""

    sigma: float = option(0.1, above=0, below=math.inf, unit="A", expected="a positive length in A")
    """Standard deviation of each component of the displacements."""
    share: float | None = option(None, above=0, at_most=1, expected="a share of the frames, above 0 and at most 1")
    """Fraction of the frames of an epoch whose atoms are displaced. Default: 1, or 0.5 if there are other targets."""
    keep_labels: bool = False
    """Whether displaced frames keep their other labels, which belong to the original structure."""
    weight: float = option(1.0, at_least=0, below=math.inf, expected="a finite number, zero or larger")
    """Weight of this target in the loss."""
    loss: str | None = option(None, choices=tuple(LOSSES), open_choices=IMPORT_PATH)
    """Loss function of errors in units of sigma. Default: mse."""
    huber_delta: float = option(1.0, above=0, below=math.inf)
    """Error at which the Huber loss changes from quadratic to linear, in units of sigma."""
    schedule: ScheduleOptions | None = None
    """How the weight changes during the training: {kind: linear, to: 0.1}. Default: constant."""


@dataclass
class BranchTaskOptions:
    """Targets of one branch of the model."""

    energy: TargetOptions | None = None
    """Energy; errors in eV or eV/atom."""
    forces: TargetOptions | None = None
    """Forces; errors in eV/A."""
    stress: TargetOptions | None = None
    """Stress; errors in eV/A^3."""
    virial: TargetOptions | None = None
    """Virial; errors in eV or eV/atom."""


@dataclass
class TaskOptions:
    """Targets of the training. A target is used if its section is present (`forces: {}`). Fields of the data are targets by
    name: `band_gap: {loss: mae}`."""

    energy: TargetOptions | None = None
    """Energy; errors in eV or eV/atom."""
    forces: TargetOptions | None = None
    """Forces; errors in eV/A."""
    stress: TargetOptions | None = None
    """Stress; errors in eV/A^3."""
    virial: TargetOptions | None = None
    """Virial, minus the stress times the volume; errors in eV or eV/atom."""
    denoise: DenoiseOptions | None = None
    """Random displacements of atoms, {sigma: 0.1}; errors in A."""
    fields: dict[str, FieldTargetOptions] = field(default_factory=dict)
    """Targets that are fields of the data; in a config their names are keys of `task` itself."""
    branches: dict[str, BranchTaskOptions] = field(default_factory=dict)
    """Targets of each branch, for a model with branches; they replace those above."""
    points: PointTaskOptions | None = None
    """Targets of grid points; in a config they are keys of `task` itself."""


FIELDS = "fields"
BRANCHES = "branches"
DENOISE = "denoise"
POINTS = "points"
_APART = (FIELDS, BRANCHES, DENOISE, POINTS)
TARGETS = tuple(item.name for item in dataclasses.fields(TaskOptions) if item.name not in _APART)
"""Targets that every potential has; all others are fields, except `denoise`, which needs no label."""


def quantity(name: str) -> str:
    """The quantity of a target or an error: `energy` for `energy`, and for `water.energy` of the branch water."""
    return name.rpartition(".")[2]


def as_typed(task: object, *, points: bool = False) -> object:
    """A `task` section in the form of `TaskOptions`. points: whether its targets are those of grid points."""
    if not isinstance(task, Mapping):
        return task
    if points:
        return {POINTS: {name: value for name, value in task.items() if name not in TARGETS}}
    reserved = {name: value for name, value in task.items() if name in (*TARGETS, BRANCHES, DENOISE)}
    return {**reserved, FIELDS: {name: value for name, value in task.items() if name not in reserved}}


def as_written(task: object) -> object:
    """A section in the form of `TaskOptions` as it is written in a config."""
    if not isinstance(task, Mapping):
        return task
    if isinstance(task.get(POINTS), Mapping):
        return dict(task[POINTS])
    if not isinstance(task.get(FIELDS, {}), Mapping):
        return task
    others = {
        name: value for name, value in task.items() if name not in (FIELDS, POINTS) and (name != BRANCHES or value)
    }
    return {**others, **task.get(FIELDS, {})}


AnyTargetOptions = TargetOptions | FieldTargetOptions | DenoiseOptions


def targets_of(task: TaskOptions) -> dict[str, AnyTargetOptions]:
    """Options of all targets by name: those of potentials and `denoise`, then fields sorted by name, then those of branches as
    `branch.target`, sorted by branch."""
    targets: dict[str, AnyTargetOptions] = {**_potential_targets(task)}
    if task.denoise is not None:
        targets[DENOISE] = task.denoise
    targets |= {
        name: options for name, options in sorted(task.fields.items()) if options is not None
    }  # null: not a target
    for branch in sorted(task.branches):
        targets |= {f"{branch}.{name}": options for name, options in _potential_targets(task.branches[branch]).items()}
    return targets


def _potential_targets(section: TaskOptions | BranchTaskOptions) -> dict[str, TargetOptions]:
    values = {"energy": section.energy, "forces": section.forces, "stress": section.stress, "virial": section.virial}
    return {name: options for name, options in values.items() if options is not None}


def check_task(task: TaskOptions, sources: Sources) -> None:
    """Raise ForgefieldError for targets with invalid settings."""
    if not targets_of(task):
        raise ForgefieldError(
            f"{sources.where('task')}: 'task' trains nothing; set at least one of {', '.join((*TARGETS, DENOISE))}."
        )
    sections: dict[str, TaskOptions | BranchTaskOptions] = {"task": task}
    sections |= {f"task.branches.{name}": section for name, section in task.branches.items()}
    for prefix, section in sections.items():
        for target, options in _potential_targets(section).items():
            _check_potential_target(options, target, prefix, sources)
    if task.denoise is not None:
        _check_denoise(task.denoise, f"task.{DENOISE}", sources)
    for name, field_options in task.fields.items():
        _check_target(field_options, f"task.{name}", FieldTargetOptions(), sources)
        _check_field_target(field_options, f"task.{name}", sources)


def _check_potential_target(options: TargetOptions, target: str, prefix: str, sources: Sources) -> None:
    """prefix: key of the section that contains the target."""
    key = f"{prefix}.{target}"
    _check_target(options, key, TargetOptions(), sources)
    _only_for("per_atom", ("energy", "virial"), target, options, sources, prefix)
    for name in ("species_weights", "direct", "net_zero"):
        _only_for(name, ("forces",), target, options, sources, prefix)
    if options.direct and prefix != "task":
        raise ForgefieldError(
            f"{sources.where(f'{key}.direct')}: '{key}.direct' does not apply to a branch, whose forces are derivatives of its "
            "energy."
        )
    if options.net_zero is not None and not options.direct:
        raise ForgefieldError(
            f"{sources.where(f'{key}.net_zero')}: '{key}.net_zero' applies to direct forces only ({key}.direct=true); the sum "
            "of forces that are derivatives of an energy is always zero."
        )


def _check_target(options: AnyTargetOptions, key: str, default: AnyTargetOptions, sources: Sources) -> None:
    """Check what all targets have. default: options without any setting."""
    if options.schedule is not None:
        _check_schedule(options.schedule, f"{key}.schedule", sources)
    delta = f"{key}.huber_delta"
    if options.loss != "huber" and (sources.explicit(delta) or options.huber_delta != default.huber_delta):
        raise ForgefieldError(
            f"{sources.where(delta)}: '{delta}' applies to loss huber only, but '{key}.loss' is {options.loss or 'mse'}."
        )


def _check_denoise(options: DenoiseOptions, key: str, sources: Sources) -> None:
    _check_target(options, key, DenoiseOptions(), sources)


def _check_field_target(options: FieldTargetOptions, key: str, sources: Sources) -> None:
    if options.kind not in (None, "values"):
        _check_equivariant(options, key, sources)
    if options.per_atom is not None and options.reduce != "sum":
        raise ForgefieldError(
            f"{sources.where(f'{key}.per_atom')}: '{key}.per_atom' applies to extensive values only ({key}.reduce=sum)."
        )
    if options.classes is not None:
        _check_classes(options, key, sources)
    normalise = options.normalise
    if normalise is None or isinstance(normalise, str):
        return
    if not isinstance(normalise, Mapping) or set(normalise) != {"mean", "scale"}:
        raise wrong(sources, f"{key}.normalise", normalise, "auto, none or {mean: ..., scale: ...}")
    scale = normalise["scale"]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise wrong(
            sources, f"{key}.normalise.scale", scale, "a positive number, by which network outputs are multiplied"
        )
    mean = normalise["mean"] if isinstance(normalise["mean"], (list, dict)) else [normalise["mean"]]
    for value in mean.values() if isinstance(mean, dict) else _leaves(mean):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(
                sources, f"{key}.normalise.mean", normalise["mean"], "a number, one for each component, or {H: ...}"
            )


def _check_equivariant(options: FieldTargetOptions, key: str, sources: Sources) -> None:
    """Check the settings of a vector or tensor."""
    if options.classes is not None:
        raise ForgefieldError(f"{sources.where(f'{key}.kind')}: '{key}.kind' does not apply to classes.")
    if options.reduce in ("max", "attention"):
        raise ForgefieldError(
            f"{sources.where(f'{key}.reduce')}: '{key}.reduce' must be sum or mean for a {options.kind}; {options.reduce} is "
            "for invariant values only."
        )
    normalise = options.normalise
    mean = normalise.get("mean") if isinstance(normalise, Mapping) else 0
    if (options.kind == "vector" and mean != 0) or isinstance(mean, Sequence):
        allowed = (
            "0, the mean of an equivariant vector"
            if options.kind == "vector"
            else "one number (times the unit matrix), or one for each species: {H: ...}"
        )
        raise wrong(sources, f"{key}.normalise.mean", mean, allowed)


def _check_classes(options: FieldTargetOptions, key: str, sources: Sources) -> None:
    classes = options.classes
    valid = classes == "auto"
    if isinstance(classes, list):
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in classes)
        valid = numbers and len(set(map(str, classes))) == len(classes) > 1
    elif isinstance(classes, int) and not isinstance(classes, bool):
        valid = classes > 1
    if not valid:
        raise wrong(sources, f"{key}.classes", classes, "a number above 1, a list of different labels, or auto")
    fixed = {
        "loss": None,
        "reduce": ("mean", "max", "attention", None),
        "per_atom": None,
        "normalise": ("auto", "none", None),
    }
    for name, allowed in fixed.items():
        value = getattr(options, name)
        if value is not None and (allowed is None or value not in allowed):
            raise ForgefieldError(
                f"{sources.where(f'{key}.{name}')}: '{key}.{name}' does not apply to classes, whose cross-entropy is minimised."
            )


def _leaves(value: object) -> Iterator[object]:
    """The numbers of nested lists."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, list):
            yield from _leaves(item)
        else:
            yield item


_SCHEDULES = {
    "linear": ("unit", "begin", "end"),
    "cosine": ("unit", "begin", "end"),
    "sigmoid": ("unit", "begin", "end", "slope", "centre"),
    "step": ("unit", "at"),
    "lr": (),
}
"""Settings of each kind of schedule, in addition to `to`."""


def _check_schedule(schedule: ScheduleOptions, key: str, sources: Sources) -> None:
    for name, value in vars(schedule).items():
        if value is not None and name not in ("kind", "to", *_SCHEDULES[schedule.kind]):
            raise ForgefieldError(
                f"{sources.where(f'{key}.{name}')}: '{key}.{name}' does not apply to kind {schedule.kind}, "
                f"which takes {', '.join(['to', *_SCHEDULES[schedule.kind]])}."
            )
    values = schedule.to if isinstance(schedule.to, Sequence) and not isinstance(schedule.to, str) else [schedule.to]
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < math.inf for v in values):
        raise wrong(sources, f"{key}.to", schedule.to, "a finite number, zero or larger")
    if schedule.kind == "step":
        _check_positions(schedule, list(values), key, sources)
    elif len(values) != 1 or values[0] is not schedule.to:
        raise wrong(sources, f"{key}.to", list(values), "one number (lists are for kind step)")
    begin = schedule.begin or 0
    if schedule.end is not None and schedule.end <= begin:
        raise wrong(sources, f"{key}.end", schedule.end, f"larger than {key}.begin, which is {begin}")


def _check_positions(schedule: ScheduleOptions, values: Sequence[object], key: str, sources: Sources) -> None:
    positions = list(schedule.at or [])
    if not positions or positions != sorted(set(positions)) or positions[0] < 1:
        raise wrong(sources, f"{key}.at", positions, "ascending positive integers")
    if len(values) != len(positions):
        raise wrong(
            sources,
            f"{key}.to",
            values,
            f"a list with one value for each of the {len(positions)} positions in {key}.at",
        )


def _only_for(
    name: str, targets: tuple[str, ...], target: str, options: TargetOptions, sources: Sources, prefix: str
) -> None:
    key = f"{prefix}.{target}.{name}"
    # Configs from Python may contain defaults that the user did not write.
    is_set = sources.explicit(key) or vars(options)[name] != vars(TargetOptions())[name]
    if target not in targets and is_set:
        suggestion = f"{prefix}.{targets[0]}.{name}"
        raise ForgefieldError(f"{sources.where(key)}: '{key}' does not apply to {target}. Did you mean '{suggestion}'?")
