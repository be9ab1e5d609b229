"""Which outputs are trained and how their errors make one loss.

Every term is a weighted mean over the labels that exist: `sum(weight * error) / sum(weight)`. Numerator and denominator are
kept apart until the end, so that the mean over a batch, over an epoch or over several processes is the same formula
applied to added sums: unequal frames and missing labels never change what "mean" means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.config.schema import TargetOptions, TaskOptions
from forgefield.config.targets import DENOISE, TARGETS, given_targets, quantity
from forgefield.errors import ForgefieldError
from forgefield.models.edges import volumes
from forgefield.models.interface import ExtraOutput
from forgefield.tasks.classes import cross_entropy, one_hot
from forgefield.tasks.losses import ElementLoss, element_loss
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.weights import StepState, WeightSchedule

LABELS = {"energy": "energy", "forces": "forces", "stress": "stress", "virial": "stress"}
"""The label each of these targets is compared with, which is also the output of the model that it needs. Any other target is a
field, compared with the label and the output of its own name."""
Batch = dict[str, Tensor]
SHOWN = 4
"""How many components' scales a summary names."""


@dataclass(frozen=True)
class LossParts:
    """`total`: what is minimised. `sums`, `counts`: (n_targets,), numerator and denominator of each term."""

    total: Tensor
    sums: Tensor
    counts: Tensor


@dataclass
class Target:
    name: str
    weight: float
    loss: ElementLoss
    per_atom: bool | str
    species_weights: Tensor | None
    schedule: WeightSchedule | None = None
    per: str = "frame"
    """What has a value: frame or atom."""
    scale: float | tuple[float, ...] = 1.0
    """Errors are measured in it before the loss is taken; one number, or one for each component of the value."""
    unit: str = ""
    reduce: str | None = None
    """Of a field that frames have: sum or mean of its atoms' contributions."""
    classes: tuple[float, ...] | None = None
    """Labels of the classes, where the target is one of them; the output then has a logit for each."""
    per_atom_errors: bool = False
    """Errors of frames are also measured per atom."""
    uncounted: tuple[int, ...] = ()
    """Numbers of the species that do not count as atoms there."""
    branch: int | None = None
    """The branch of the model whose frames count; None: all do."""
    kind: str = "values"
    """How it turns with the structure: `values` where it does not."""
    direct: bool = False
    """Of forces: an output of the model and not the derivative of its energy."""

    @property
    def quantity(self) -> str:
        """What is learnt, in whichever branch."""
        return quantity(self.name)

    @property
    def label(self) -> str:
        return LABELS.get(self.quantity, self.quantity)


@dataclass(frozen=True)
class _OnDevice:
    """weights: what the loss is made with. plain: those of the task, without what adapts them."""

    weights: Tensor
    plain: Tensor
    species_weights: list[Tensor | None]
    classes: list[Tensor | None]
    scales: list[Tensor | None]
    """Of targets whose components have scales of their own."""


class Task:
    """The trained targets. `species` fixes the meaning of the batch's species indices.

    further: what the model says of its outputs beside energy, forces and stress; every target that is a field is one of them.
    branches: of the model, in the order of the batch's numbers.
    """

    def __init__(
        self,
        options: TaskOptions | Any,
        species: tuple[str, ...],
        extra_outputs: Mapping[str, ExtraOutput] | None = None,
        branches: Sequence[str] = (),
    ) -> None:
        self.branches = tuple(branches)
        targets = given_targets(options)
        _check_branches(targets, self.branches)
        self.targets = [
            _build_target(name, given, species, self.branches)
            if quantity(name) in TARGETS
            else _build_field_target(name, given, extra_outputs or {})
            for name, given in targets.items()
        ]
        if not self.targets:
            raise ForgefieldError(
                "task: no target is on; give at least one of task.energy, task.forces, task.stress, task.virial."
            )
        if all(target.weight == 0 and target.schedule is None for target in self.targets):
            raise ForgefieldError("task: every weight is zero, so nothing would be trained.")
        self.names = tuple(target.name for target in self.targets)
        self.weights = torch.tensor([target.weight for target in self.targets], dtype=torch.float64)
        self.reported = torch.tensor(
            [t.weight if t.schedule is None else t.schedule.last for t in self.targets]
        ).double()
        """(n_targets,): the weights with which losses are reported, the same from the first row to the last."""
        self._on_devices: dict[torch.device, _OnDevice] = {}

    @property
    def needs_forces(self) -> bool:
        """As derivatives of the energy."""
        return any(target.quantity == "forces" and not target.direct for target in self.targets)

    @property
    def needs_stress(self) -> bool:
        return "stress" in self.outputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the model has to give."""
        return tuple(dict.fromkeys(target.label for target in self.targets))

    @property
    def units(self) -> dict[str, str]:
        """Units of those targets that are fields with values."""
        return {t.name: t.unit for t in self.targets if t.quantity not in TARGETS and t.classes is None}

    @property
    def classes(self) -> dict[str, tuple[float, ...]]:
        """Labels of those targets that are classes."""
        return {target.name: target.classes for target in self.targets if target.classes is not None}

    @property
    def extensive(self) -> tuple[str, ...]:
        """Names of those targets of frames whose errors are also measured per atom."""
        return tuple(target.name for target in self.targets if target.per_atom_errors)

    @property
    def is_scheduled(self) -> bool:
        return any(target.schedule is not None for target in self.targets)

    @property
    def needs_an_end(self) -> bool:
        """Whether a weight changes until the end of the training, which then has to be known."""
        return any(target.schedule is not None and target.schedule.needs_an_end for target in self.targets)

    def error_metrics(self, species: tuple[str, ...]) -> ErrorMetrics:
        """Accumulators of its targets' errors."""
        return ErrorMetrics(
            self.names,
            species,
            classes=self.classes,
            extensive=self.extensive,
            branches=self.branches,
            uncounted={target.name: target.uncounted for target in self.targets if target.uncounted},
        )

    def follow(self, moment: StepState) -> None:
        """Take the weights of this moment. Tensors are changed in place, without waiting for their device."""
        for i, target in enumerate(self.targets):
            if target.schedule is not None:
                self._set_weight(i, target.schedule.value(moment))

    def set_weight(self, name: str, value: float) -> None:
        """From now on the weight of this target; losses are reported as before."""
        self._set_weight(self.names.index(name), float(value))

    def _set_weight(self, i: int, value: float) -> None:
        if value != self.targets[i].weight:
            self.targets[i].weight = value
            self.weights[i] = value
            for known in self._on_devices.values():
                known.plain[i].fill_(value)
                known.weights[i].fill_(value)

    def adapt(self, factors: Tensor, device: torch.device) -> None:
        """Let the loss on a device be made with the task's weights times `factors`, (n_targets,)."""
        known = self._on(device)
        known.weights.copy_(known.plain * factors.to(device, non_blocking=True))

    def plain_weights_on(self, device: torch.device) -> Tensor:
        """(n_targets,): the task's weights without factors."""
        return self._on(device).plain

    def loss(self, outputs: Batch, batch: Batch) -> LossParts:
        """The loss of one batch. A target that no frame of the batch is labelled for contributes zero."""
        sums, counts = self.sums(outputs, batch)
        return LossParts(total=self.combine(sums, counts), sums=sums, counts=counts)

    def sums(self, outputs: Batch, batch: Batch) -> tuple[Tensor, Tensor]:
        """(n_targets,) each: numerators and denominators of the loss of one batch."""
        weights, known = self._element_weights(batch), self._on(batch["weight"].device)
        sums = torch.stack(
            [
                _weighted_error(target, outputs, batch, weight, values, scale).sum()
                for target, weight, values, scale in zip(self.targets, weights, known.classes, known.scales)
            ]
        )
        return sums, torch.stack([weight.sum() for weight in weights])

    def counts(self, batch: Batch) -> Tensor:
        """(n_targets,): the denominators of the loss. They depend on labels and weights alone, not on any output."""
        return torch.stack([weight.sum() for weight in self._element_weights(batch)])

    def combine(self, sums: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss from (possibly added-up) sums and counts. weights: of the targets, in place of the task's own."""
        weights = self.weights_on(sums.device) if weights is None else weights
        return (weights * sums / torch.where(counts > 0, counts, 1.0)).sum()

    def report(self, sums: Tensor, counts: Tensor) -> float:
        """The loss to be reported: with lasting weights, so that it is comparable whatever a schedule does meanwhile."""
        return float(self.combine(sums, counts, self.reported.to(sums.device)))

    def weights_on(self, device: torch.device) -> Tensor:
        """(n_targets,): the weights in a tensor that stays where it is, so that captured steps may read it there."""
        return self._on(device).weights

    def species_weights_on(self, device: torch.device) -> list[Tensor | None]:
        """(n_species,) of every target that has weights of species."""
        return self._on(device).species_weights

    def _element_weights(self, batch: Batch) -> list[Tensor]:
        by_species = self._on(batch["weight"].device).species_weights
        return [_element_weights(target, batch, known) for target, known in zip(self.targets, by_species)]

    def _on(self, device: torch.device) -> _OnDevice:
        """What the loss needs on a device, copied there once: a copy makes the host wait."""
        if device not in self._on_devices:
            known = [None if t.species_weights is None else t.species_weights.to(device) for t in self.targets]
            classes = [
                None if t.classes is None else torch.tensor(t.classes, dtype=torch.float64, device=device)
                for t in self.targets
            ]
            scales = [
                torch.tensor(t.scale, dtype=torch.float64, device=device) if isinstance(t.scale, tuple) else None
                for t in self.targets
            ]
            weights, plain = (self.weights.to(device, copy=True) for _ in range(2))
            self._on_devices[device] = _OnDevice(weights, plain, known, classes, scales)
        return self._on_devices[device]

    def describe(self) -> list[tuple[str, str]]:
        return [(target.name, _describe_target(target)) for target in self.targets]


def default_task(labels: dict[str, int], hints: Mapping[str, str] | None = None) -> TaskOptions:
    """Energy, and forces where the data has them. labels: how many frames carry each label. hints: as in `require_labels`."""
    options = TaskOptions(
        energy=TargetOptions() if labels.get("energy") else None,
        forces=TargetOptions() if labels.get("forces") else None,
    )
    if options.energy is None and options.forces is None:
        seen = [hint for name in ("energy", "forces") if (hint := (hints or {}).get(name))]
        advice = "; ".join(seen) or "if they go by unusual names, set data.labels.energy and data.labels.forces"
        raise ForgefieldError(
            f"The training data carries neither energies nor forces, so there is nothing to learn; {advice}."
        )
    return options


def require_labels(
    targets: Iterable[str], labels: Mapping[str, int], where: str, hints: Mapping[str, str] | None = None
) -> None:
    """Refuse a target that no frame is labelled for.

    labels: how many frames carry each label and each field there is. hints: for labels, a sentence on values of other names
    that may be them.
    """
    for name in targets:
        if name == DENOISE:
            continue
        label = LABELS.get(quantity(name), name)
        if label not in LABELS.values() and not labels.get(label):
            _refuse_field(name, labels, where)
        if not labels.get(label):
            also = "" if quantity(name) == label else f" or {quantity(name)}"
            seen = (hints or {}).get(label)
            raise ForgefieldError(
                f"task.{name} is on, but no {where} frame carries {label}{also}; remove task.{name} "
                f"or name the label with data.labels.{quantity(name)}{f' ({seen})' if seen else ''}."
            )


def _refuse_field(name: str, labels: Mapping[str, int], where: str) -> NoReturn:
    fields = [label for label in labels if label not in LABELS.values()]
    if name in fields:
        raise ForgefieldError(
            f"task.{name} is on, but no {where} frame carries {name}; remove task.{name}, or say what the source calls it "
            f"with data.labels.fields.{name}.key."
        )
    hint = did_you_mean(name, [*TARGETS, *fields])
    held = f"it has the fields {', '.join(fields)}" if fields else "it has no fields"
    raise ForgefieldError(
        f"task.{name}: the data has no field of that name ({held}); a value of the source becomes one with "
        f"data.labels.fields={{{name}: {{}}}}.{hint}"
    )


def _build_field_target(name: str, options: Any, extra_outputs: Mapping[str, ExtraOutput]) -> Target:
    output = extra_outputs.get(name)
    if output is None:
        known = ", ".join(extra_outputs) or "none"
        raise ForgefieldError(f"task.{name}: the model has no output of that name; its further outputs: {known}.")
    if options.weight < 0:
        raise ForgefieldError(f"task.{name}.weight must not be negative, it is {options.weight}.")
    loss = options.loss or "mse"
    per_atom = getattr(options, "per_atom", None)
    per_atom = True if per_atom is None else per_atom
    extensive = output.per == "frame" and output.reduce == "sum"
    return Target(
        name=name,
        weight=float(options.weight),
        loss=element_loss(loss, huber_delta=options.huber_delta, where=f"task.{name}.loss"),
        per_atom=per_atom if extensive else False,
        species_weights=None,
        schedule=_schedule(options),
        per=output.per,
        scale=tuple(map(float, output.scale)) if isinstance(output.scale, list) else float(output.scale),
        unit=output.unit,
        reduce=output.reduce if output.per == "frame" else None,
        classes=None if output.classes is None else tuple(output.classes),
        per_atom_errors=getattr(output, "per_atom_errors", False),
        uncounted=tuple(getattr(output, "uncounted", ())),
        kind=output.kind,
    )


def _check_branches(targets: Iterable[str], branches: tuple[str, ...]) -> None:
    """Raise where targets are those of other branches than the model has."""
    named = {name.partition(".")[0] for name in targets if "." in name}
    for branch in sorted(named):
        if branch not in branches:
            known = f"its branches are {', '.join(branches)}" if branches else "it has no branches (model.branches)"
            raise ForgefieldError(f"task.branches.{branch}: the model has no branch of that name; {known}.")
    lacking = [branch for branch in branches if branch not in named]
    if named and lacking:
        raise ForgefieldError(f"task.branches: nothing is said of {lacking[0]}, which is a branch of the model.")
    if named and any("." not in name for name in targets):
        raise ForgefieldError("task: targets are given for all frames or for each branch (task.branches), not both.")


def _build_target(name: str, options: Any, species: tuple[str, ...], branches: Sequence[str] = ()) -> Target:
    if options.weight < 0:
        raise ForgefieldError(f"task.{name}.weight must not be negative, it is {options.weight}.")
    return Target(
        name=name,
        weight=float(options.weight),
        loss=element_loss(options.loss, huber_delta=options.huber_delta, where=f"task.{name}.loss"),
        per_atom=options.per_atom,
        species_weights=_species_weights(options.species_weights, species, f"task.{name}.species_weights"),
        schedule=_schedule(options),
        per="atom" if quantity(name) == "forces" else "frame",
        direct=bool(getattr(options, "direct", False)),
        branch=branches.index(name.partition(".")[0]) if "." in name else None,
    )


def _schedule(options: Any) -> WeightSchedule | None:
    given = getattr(options, "schedule", None)
    if given is None:
        return None
    return WeightSchedule.from_options(float(options.weight), asdict(given))


def _species_weights(weights: dict[str, float] | None, species: tuple[str, ...], where: str) -> Tensor | None:
    if weights is None:
        return None
    for symbol, weight in weights.items():
        if symbol not in species:
            raise ForgefieldError(f"{where} names {symbol}, but the model knows only {', '.join(species)}.")
        if weight < 0:
            raise ForgefieldError(f"{where}.{symbol} must not be negative, it is {weight}.")
    return torch.tensor([float(weights.get(symbol, 1.0)) for symbol in species], dtype=torch.float64)


def _element_weights(target: Target, batch: Batch, species_weights: Tensor | None) -> Tensor:
    """Weight of every element of the label, zero where it is missing. species_weights: (n_species,)."""
    label, weight = batch[target.label], batch["weight"]
    if target.branch is not None:
        weight = weight * (batch["branch"] == target.branch).to(weight.dtype)
    if target.per == "atom":
        weight = weight[batch["frame"]]
        if species_weights is not None:
            weight = weight * species_weights[batch["species"]]
    weight = weight.reshape(-1, *([1] * (label.dim() - 1))).expand_as(label)
    return torch.where(label.isnan(), 0.0, weight)


def _weighted_error(
    target: Target, outputs: Batch, batch: Batch, weight: Tensor, classes: Tensor | None, scale: Tensor | None
) -> Tensor:
    """Weighted error of every element, zero where the label is missing. classes: (n_classes,), labels of them. scale: of the
    components, where each has its own."""
    label, prediction = batch[target.label], outputs[target.label]
    if classes is not None:
        return weight * cross_entropy(prediction, one_hot(label, classes))
    factor = _factor(target, batch)
    if factor is not None:
        factor = factor.view(-1, *([1] * (label.dim() - 1))) if isinstance(factor, Tensor) else factor
        factor = factor if scale is None else factor / scale
        label, prediction = label * factor, prediction * factor
    labelled = ~label.isnan()
    # The prediction stands in for a missing label, as a constant on both sides: the error is zero there, and no gradient
    # reaches the model, also where the slope of a user's loss is infinite for an error of zero, or not defined at all.
    constant = prediction.detach()
    error = target.loss(torch.where(labelled, prediction, constant), torch.where(labelled, label, constant))
    return torch.where(labelled, weight * error, 0.0)


def _factor(target: Target, batch: Batch) -> Tensor | float | None:
    """A number, or (n_frames,): what label and prediction are multiplied with before they are compared."""
    unit = target.scale if isinstance(target.scale, float) else 1.0
    if target.quantity not in TARGETS and not target.per_atom:
        return 1.0 / unit
    n_atoms = batch["n_atoms"].to(batch["weight"].dtype)
    divisor = n_atoms.sqrt() if target.per_atom == "root" else n_atoms
    if target.quantity == "virial":
        return -volumes(batch["cell"]) / divisor if target.per_atom else -volumes(batch["cell"])
    if target.quantity in ("forces", "stress") or not target.per_atom:
        return None
    return 1.0 / (divisor if unit == 1.0 else unit * divisor)


def _describe_target(target: Target) -> str:
    loss = getattr(target.loss, "func", target.loss)
    word = getattr(loss, "__name__", type(loss).__name__)
    if target.classes is not None:
        word = f"cross-entropy of {len(target.classes)} classes"
    text = f"weight {target.weight:g}, {word}"
    if target.schedule is not None:
        text = text.replace(",", f" {target.schedule.describe()},", 1)
    if target.quantity not in TARGETS and target.classes is None:
        text += f", {target.kind}" if target.kind != "values" else ""
        text += {"sum": ", extensive", "mean": ", intensive", None: ", of atoms"}.get(
            target.reduce, f", intensive ({target.reduce})"
        )
        scale = target.scale if isinstance(target.scale, tuple) else (target.scale,)
        shown = [f"{value:.4g}" for value in scale[:SHOWN]] + ["..."] * (len(scale) > SHOWN)
        text += f", in units of {', '.join(shown)} {target.unit}".rstrip()
    if target.quantity in ("energy", "virial") or target.reduce == "sum":
        text += {True: ", per atom", False: ", total", "root": ", per root of the number of atoms"}[target.per_atom]
    if target.species_weights is not None:
        text += ", weighted by species"
    if target.direct:
        text += ", direct: not the derivative of an energy, so not conservative"
    return text
