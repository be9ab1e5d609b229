"""Targets: the outputs that are trained, with the settings of each, and the checks that the data has labels for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.interface import ExtraOutput
from forgefield.settings import default_weights
from forgefield.tasks.losses import Loss, find_loss, stratified_huber
from forgefield.tasks.options import (
    DENOISE,
    TARGETS,
    DenoiseOptions,
    FieldTargetOptions,
    TargetOptions,
    TaskOptions,
    quantity,
    targets_of,
)
from forgefield.tasks.schedules import WeightSchedule

LABELS = {"energy": "energy", "forces": "forces", "stress": "stress", "virial": "stress"}
"""The label that each of these targets is compared with, which is also the output of the model that it needs. Any other target
is a field, compared with the label and the output of its own name."""
MAX_SCALES = 4
"""Number of components whose scales a summary lists."""


@dataclass
class Target:
    """One trained output.

    name: of the target; `branch.name` for a target of a branch.
    weight: of the target in the loss; schedules change it.
    loss: of single elements.
    per_atom: whether extensive values are compared per atom; "root": divided by the root of the number of atoms.
    species_weights: (n_species,), weights of atoms by species.
    schedule: how the weight changes during a training.
    per: what has a value, "frame" or "atom".
    scale: errors are measured in units of it; one number, or one for each component of the value.
    unit: of the values.
    reduce: for a field of frames, how it follows from the contributions of atoms: "sum", "mean", "max" or "attention".
    classes: labels of the classes of a classifier, whose outputs are logits.
    per_atom_errors: whether errors of frames are also reported per atom.
    uncounted: indices of species whose atoms do not count in the number of atoms of a frame, nor in errors of forces.
    branch: index of the branch of the model whose frames are used; None: all frames.
    kind: how values transform under rotations: "values" (invariant), "vector", "symmetric" or "tensor".
    direct: for forces, whether they are an output of the model and not the derivative of its energy.
    """

    name: str
    weight: float
    loss: Loss
    per_atom: bool | str
    species_weights: Tensor | None
    schedule: WeightSchedule | None = None
    per: str = "frame"
    scale: float | tuple[float, ...] = 1.0
    unit: str = ""
    reduce: str | None = None
    classes: tuple[float, ...] | None = None
    per_atom_errors: bool = False
    uncounted: tuple[int, ...] = ()
    branch: int | None = None
    kind: str = "values"
    direct: bool = False

    @property
    def quantity(self) -> str:
        """The name without its branch."""
        return quantity(self.name)

    @property
    def label(self) -> str:
        """Key of the label in a batch, and of the output."""
        return LABELS.get(self.quantity, self.quantity)

    @property
    def is_field(self) -> bool:
        """Whether it is a field of the data, not one of energy, forces, stress and virial."""
        return self.quantity not in TARGETS

    def describe(self) -> str:
        """One line for summaries."""
        word = self.loss.name if self.classes is None else f"cross-entropy of {len(self.classes)} classes"
        schedule = "" if self.schedule is None else f" {self.schedule.describe()}"
        text = f"weight {self.weight:g}{schedule}, {word}"
        if self.is_field and self.classes is None:
            text += f", {self.kind}" if self.kind != "values" else ""
            text += {"sum": ", extensive", "mean": ", intensive", None: ", of atoms"}.get(
                self.reduce, f", intensive ({self.reduce})"
            )
            scale = self.scale if isinstance(self.scale, tuple) else (self.scale,)
            listed = [f"{value:.4g}" for value in scale[:MAX_SCALES]] + ["..."] * (len(scale) > MAX_SCALES)
            text += f", in units of {', '.join(listed)} {self.unit}".rstrip()
        if self.quantity in ("energy", "virial") or self.reduce == "sum":
            text += {True: ", per atom", False: ", total", "root": ", per root of the number of atoms"}[self.per_atom]
        if self.species_weights is not None:
            text += ", weighted by species"
        if self.direct:
            text += ", direct: not the derivative of an energy, so not conservative"
        return text


def build_targets(
    options: TaskOptions,
    species: tuple[str, ...],
    extra_outputs: Mapping[str, ExtraOutput],
    branches: tuple[str, ...],
    excluded: Sequence[int] = (),
) -> list[Target]:
    """Targets of a `task` section, in the order of `targets_of`.

    species: symbols, in the order of the batch's indices.
    extra_outputs: outputs of the model other than energy, forces and stress; every target that is a field is one of them.
    branches: of the model, in the order of the batch's indices.
    excluded: indices of species whose atoms do not count in losses and errors of energies, forces and virials.
    """
    by_name = targets_of(options)
    _check_branches(by_name, branches)
    targets = [
        _potential_target(name, target, species, branches, tuple(excluded))
        if isinstance(target, TargetOptions)
        else _field_target(name, target, extra_outputs)
        for name, target in by_name.items()
    ]
    if not targets:
        raise ForgefieldError(
            "task: there is no target; set at least one of task.energy, task.forces, task.stress, task.virial."
        )
    if all(target.weight == 0 and target.schedule is None for target in targets):
        raise ForgefieldError("task: every weight is zero, so nothing would be trained.")
    return targets


def _potential_target(
    name: str, options: TargetOptions, species: tuple[str, ...], branches: Sequence[str], excluded: tuple[int, ...]
) -> Target:
    weights = _species_weights(options.species_weights, species, f"task.{name}.species_weights")
    if excluded and quantity(name) == "forces":
        weights = torch.ones(len(species), dtype=torch.float64) if weights is None else weights
        weights[list(excluded)] = 0.0
    return Target(
        name=name,
        weight=_weight(name, options),
        loss=_loss(name, options),
        per_atom=options.per_atom,
        species_weights=weights,
        schedule=_schedule(options),
        per="atom" if quantity(name) == "forces" else "frame",
        uncounted=excluded,
        direct=bool(options.direct),
        branch=branches.index(name.partition(".")[0]) if "." in name else None,
    )


def _loss(name: str, options: TargetOptions) -> Loss:
    if options.huber_deltas is None:
        return find_loss(options.loss, huber_delta=options.huber_delta, key=f"task.{name}.loss")
    key = f"task.{name}.huber_deltas"
    if quantity(name) != "forces" or options.loss != "huber":
        raise ForgefieldError(f"{key} is for forces with loss: huber.")
    pairs = [list(pair) if isinstance(pair, (list, tuple)) else [] for pair in options.huber_deltas]
    if not pairs or not all(len(pair) == 2 and all(_is_finite(value) for value in pair) for pair in pairs):
        raise ForgefieldError(f"{key} must be a list of [force, delta], in eV/A, such as [[0, 0.01], [5, 0.02]].")
    strata = [(float(bound), float(delta)) for bound, delta in pairs]
    if strata[0][0] < 0 or any(a[0] >= b[0] for a, b in pairwise(strata)) or any(delta <= 0 for _, delta in strata):
        raise ForgefieldError(f"{key} must have ascending forces of at least 0, and positive deltas.")
    return stratified_huber(strata)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _field_target(
    name: str, options: FieldTargetOptions | DenoiseOptions, extra_outputs: Mapping[str, ExtraOutput]
) -> Target:
    output = extra_outputs.get(name)
    if output is None:
        available = ", ".join(extra_outputs) or "none"
        raise ForgefieldError(
            f"task.{name}: the model has no output of that name; its additional outputs: {available}."
        )
    per_atom = options.per_atom if isinstance(options, FieldTargetOptions) else None
    extensive = output.per == "frame" and output.reduce == "sum"
    return Target(
        name=name,
        weight=_weight(name, options),
        loss=find_loss(options.loss or "mse", huber_delta=options.huber_delta, key=f"task.{name}.loss"),
        per_atom=(True if per_atom is None else per_atom) if extensive else False,
        species_weights=None,
        schedule=_schedule(options),
        per=output.per,
        scale=tuple(map(float, output.scale)) if isinstance(output.scale, list) else float(output.scale),
        unit=output.unit,
        reduce=output.reduce if output.per == "frame" else None,
        classes=None if output.classes is None else tuple(output.classes),
        per_atom_errors=output.per_atom_errors,
        uncounted=tuple(output.uncounted),
        kind=output.kind,
    )


def _weight(name: str, options: TargetOptions | FieldTargetOptions | DenoiseOptions) -> float:
    if options.weight < 0:
        raise ForgefieldError(f"task.{name}.weight must not be negative, it is {options.weight}.")
    return float(options.weight)


def _schedule(options: TargetOptions | FieldTargetOptions | DenoiseOptions) -> WeightSchedule | None:
    return None if options.schedule is None else WeightSchedule.from_options(float(options.weight), options.schedule)


def _species_weights(weights: Mapping[str, float] | None, species: tuple[str, ...], key: str) -> Tensor | None:
    if weights is None:
        return None
    for symbol, weight in weights.items():
        if symbol not in species:
            raise ForgefieldError(f"{key} contains {symbol}, but the species of the model are {', '.join(species)}.")
        if weight < 0:
            raise ForgefieldError(f"{key}.{symbol} must not be negative, it is {weight}.")
    return torch.tensor([float(weights.get(symbol, 1.0)) for symbol in species], dtype=torch.float64)


def _check_branches(targets: Iterable[str], branches: tuple[str, ...]) -> None:
    """Raise ForgefieldError if the branches of targets are not those of the model."""
    named = {name.partition(".")[0] for name in targets if "." in name}
    for branch in sorted(named):
        if branch not in branches:
            available = f"its branches are {', '.join(branches)}" if branches else "it has no branches (model.branches)"
            raise ForgefieldError(f"task.branches.{branch}: the model has no branch of that name; {available}.")
    missing = [branch for branch in branches if branch not in named]
    if named and missing:
        raise ForgefieldError(f"task.branches: there is no entry for {missing[0]}, which is a branch of the model.")
    if named and any("." not in name for name in targets):
        raise ForgefieldError(
            "task: targets can be set for all frames or for each branch (task.branches), but not for both."
        )


# ---- labels


def default_task(
    labels: Mapping[str, int], hints: Mapping[str, str] | None = None, *, stress: bool = True
) -> TaskOptions:
    """Energy, forces and stress, as far as the data has them.

    labels: number of frames with each label. hints: as in `require_labels`. stress: False for runs of versions that did not
    train stress by default.
    """
    trained = {name: count for name, count in labels.items() if stress or name != "stress"}
    targets = {name: TargetOptions(weight=weight) for name, weight in default_weights(trained).items()}
    options = TaskOptions(energy=targets.get("energy"), forces=targets.get("forces"), stress=targets.get("stress"))
    if options.energy is None and options.forces is None:
        candidates = [hint for name in ("energy", "forces") if (hint := (hints or {}).get(name))]
        advice = "; ".join(candidates) or "if they have unusual names, set data.labels.energy and data.labels.forces"
        raise ForgefieldError(
            f"The training data has neither energies nor forces, so there is nothing to learn; {advice}."
        )
    return options


def require_labels(
    targets: Iterable[str], labels: Mapping[str, int], where: str, hints: Mapping[str, str] | None = None
) -> None:
    """Raise ForgefieldError for a target without labelled frames.

    labels: number of frames with each label and each field.
    where: which frames, for messages.
    hints: for labels, a sentence about values with other names that may be the label.
    """
    for name in targets:
        if name == DENOISE:
            continue
        label = LABELS.get(quantity(name), name)
        if label not in LABELS.values() and not labels.get(label):
            _refuse_field(name, labels, where)
        if not labels.get(label):
            also = "" if quantity(name) == label else f" or {quantity(name)}"
            hint = (hints or {}).get(label)
            raise ForgefieldError(
                f"task.{name} is set, but no {where} frame has {label}{also}; remove task.{name}, or set the name of the "
                f"label with data.labels.{quantity(name)}{f' ({hint})' if hint else ''}."
            )


def _refuse_field(name: str, labels: Mapping[str, int], where: str) -> NoReturn:
    fields = [label for label in labels if label not in LABELS.values()]
    if name in fields:
        raise ForgefieldError(
            f"task.{name} is set, but no {where} frame has {name}; remove task.{name}, or set its name in the source with "
            f"data.labels.fields.{name}.key."
        )
    hint = did_you_mean(name, [*TARGETS, *fields])
    available = f"it has the fields {', '.join(fields)}" if fields else "it has no fields"
    raise ForgefieldError(
        f"task.{name}: the data has no field of that name ({available}); to read a value of the source as a field, set "
        f"data.labels.fields={{{name}: {{}}}}.{hint}"
    )
