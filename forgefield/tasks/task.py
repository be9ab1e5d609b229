"""The task: which outputs are trained, and how their errors are combined into one loss.

Every term is a weighted mean over the labels that exist: `sum(weight * error) / sum(weight)`. Numerator and denominator are
kept apart until the end, so that the mean over a batch, over an epoch or over several processes is the same formula applied to
added sums: frames of different sizes and missing labels never change what "mean" means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.models.edges import volumes
from forgefield.models.interface import ExtraOutput
from forgefield.tasks.classes import cross_entropy, one_hot
from forgefield.tasks.metrics import ErrorMetrics, counted_atoms
from forgefield.tasks.options import TaskOptions
from forgefield.tasks.schedules import StepState
from forgefield.tasks.targets import Target, build_targets

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class LossParts:
    """total: what is minimised. sums, counts: (n_targets,), numerator and denominator of each term."""

    total: Tensor
    sums: Tensor
    counts: Tensor


@dataclass(frozen=True)
class _DeviceTensors:
    """Constants of the loss on one device, each a list over targets or a tensor (n_targets,).

    weights: weights of the loss. configured: weights without the factors of `Task.adapt`.
    species_weights: (n_species,). classes: (n_classes,), labels. scales: (n_components,); None where there are none.
    """

    weights: Tensor
    configured: Tensor
    species_weights: list[Tensor | None]
    classes: list[Tensor | None]
    scales: list[Tensor | None]


class Task:
    """The trained targets and their loss.

    options: the `task` section.
    species: symbols, in the order of the batch's indices.
    extra_outputs: outputs of the model other than energy, forces and stress; every target that is a field is one of them.
    branches: of the model, in the order of the batch's indices.
    """

    def __init__(
        self,
        options: TaskOptions,
        species: tuple[str, ...],
        extra_outputs: Mapping[str, ExtraOutput] | None = None,
        branches: Sequence[str] = (),
        excluded: Sequence[int] = (),
    ) -> None:
        self.branches = tuple(branches)
        self.targets = build_targets(options, species, extra_outputs or {}, self.branches, excluded)
        self.names = tuple(target.name for target in self.targets)
        self.weights = torch.tensor([target.weight for target in self.targets], dtype=torch.float64)
        self.reported = torch.tensor(
            [t.weight if t.schedule is None else t.schedule.last for t in self.targets]
        ).double()
        """(n_targets,): the constant weights with which losses are reported."""
        self._on_devices: dict[torch.device, _DeviceTensors] = {}

    @property
    def needs_forces(self) -> bool:
        """Whether forces are needed as derivatives of the energy."""
        return any(target.quantity == "forces" and not target.direct for target in self.targets)

    @property
    def needs_stress(self) -> bool:
        return "stress" in self.outputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Outputs that the model has to compute."""
        return tuple(dict.fromkeys(target.label for target in self.targets))

    @property
    def units(self) -> dict[str, str]:
        """Units of the targets that are fields, without classes."""
        return {t.name: t.unit for t in self.targets if t.is_field and t.classes is None}

    @property
    def classes(self) -> dict[str, tuple[float, ...]]:
        """Labels of the classes, of targets that are classified."""
        return {target.name: target.classes for target in self.targets if target.classes is not None}

    @property
    def extensive(self) -> tuple[str, ...]:
        """Names of the targets of frames whose errors are also reported per atom."""
        return tuple(target.name for target in self.targets if target.per_atom_errors)

    @property
    def is_scheduled(self) -> bool:
        return any(target.schedule is not None for target in self.targets)

    @property
    def needs_an_end(self) -> bool:
        """Whether a weight changes until the end of the training, so that its length has to be known."""
        return any(target.schedule is not None and target.schedule.needs_an_end for target in self.targets)

    def error_metrics(self, species: tuple[str, ...], *, maxima: bool = False) -> ErrorMetrics:
        """Accumulators for the errors of its targets. maxima: also for the largest errors."""
        return ErrorMetrics(
            self.names,
            species,
            classes=self.classes,
            extensive=self.extensive,
            branches=self.branches,
            uncounted={target.name: target.uncounted for target in self.targets if target.uncounted},
            maxima=maxima,
        )

    def follow(self, state: StepState) -> None:
        """Set the weights that schedules have at this step. Tensors are changed in place, without waiting for their device."""
        for i, target in enumerate(self.targets):
            if target.schedule is not None:
                self._set_weight(i, target.schedule.value(state))

    def set_weight(self, name: str, value: float) -> None:
        """Change the weight of this target from now on; reported losses keep their weights."""
        self._set_weight(self.names.index(name), float(value))

    def _set_weight(self, i: int, value: float) -> None:
        if value != self.targets[i].weight:
            self.targets[i].weight = value
            self.weights[i] = value
            for tensors in self._on_devices.values():
                tensors.configured[i].fill_(value)
                tensors.weights[i].fill_(value)

    def adapt(self, factors: Tensor, device: torch.device) -> None:
        """Use the task's weights times `factors`, (n_targets,), for the loss on a device."""
        tensors = self._on(device)
        tensors.weights.copy_(tensors.configured * factors.to(device, non_blocking=True))

    def configured_weights_on(self, device: torch.device) -> Tensor:
        """(n_targets,): the task's weights without factors."""
        return self._on(device).configured

    def loss(self, outputs: Batch, batch: Batch) -> LossParts:
        """The loss of one batch. A target without any label in the batch contributes zero."""
        sums, counts = self.sums(outputs, batch)
        return LossParts(total=self.combine(sums, counts), sums=sums, counts=counts)

    def sums(self, outputs: Batch, batch: Batch) -> tuple[Tensor, Tensor]:
        """(n_targets,) each: numerators and denominators of the loss of one batch."""
        weights, tensors = self._element_weights(batch), self._on(batch["weight"].device)
        sums = torch.stack(
            [
                _weighted_error(target, outputs, batch, weight, values, scale).sum()
                for target, weight, values, scale in zip(self.targets, weights, tensors.classes, tensors.scales)
            ]
        )
        return sums, torch.stack([weight.sum() for weight in weights])

    def counts(self, batch: Batch) -> Tensor:
        """(n_targets,): the denominators of the loss. They depend on labels and weights only, not on outputs."""
        return torch.stack([weight.sum() for weight in self._element_weights(batch)])

    def combine(self, sums: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss from (possibly added-up) sums and counts. weights: (n_targets,), in place of those of the task."""
        weights = self.weights_on(sums.device) if weights is None else weights
        return (weights * sums / torch.where(counts > 0, counts, 1.0)).sum()

    def report(self, sums: Tensor, counts: Tensor) -> float:
        """The loss for reports: with constant weights, so that its values are comparable while schedules change the weights."""
        return float(self.combine(sums, counts, self.reported.to(sums.device)))

    def weights_on(self, device: torch.device) -> Tensor:
        """(n_targets,): the weights, in a tensor whose address does not change, so that captured steps can read it."""
        return self._on(device).weights

    def species_weights_on(self, device: torch.device) -> list[Tensor | None]:
        """For every target (n_species,), or None where species have no weights."""
        return self._on(device).species_weights

    def _element_weights(self, batch: Batch) -> list[Tensor]:
        by_species = self._on(batch["weight"].device).species_weights
        return [_element_weights(target, batch, weights) for target, weights in zip(self.targets, by_species)]

    def _on(self, device: torch.device) -> _DeviceTensors:
        """Constants of the loss, copied to a device once: a copy makes the host wait."""
        if device not in self._on_devices:
            by_species = [None if t.species_weights is None else t.species_weights.to(device) for t in self.targets]
            classes = [
                None if t.classes is None else torch.tensor(t.classes, dtype=torch.float64, device=device)
                for t in self.targets
            ]
            scales = [
                torch.tensor(t.scale, dtype=torch.float64, device=device) if isinstance(t.scale, tuple) else None
                for t in self.targets
            ]
            weights, configured = (self.weights.to(device, copy=True) for _ in range(2))
            self._on_devices[device] = _DeviceTensors(weights, configured, by_species, classes, scales)
        return self._on_devices[device]

    def describe(self) -> list[tuple[str, str]]:
        """Name and one-line description of every target."""
        return [(target.name, target.describe()) for target in self.targets]


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
    """Weighted error of every element, zero where the label is missing.

    weight: of every element. classes: (n_classes,), labels of the classes. scale: (n_components,), of components that have
    different scales.
    """
    label, prediction = batch[target.label], outputs[target.label]
    if classes is not None:
        return weight * cross_entropy(prediction, one_hot(label, classes))
    factor = _factor(target, batch)
    if factor is not None:
        factor = factor.view(-1, *([1] * (label.dim() - 1))) if isinstance(factor, Tensor) else factor
        factor = factor if scale is None else factor / scale
        label, prediction = label * factor, prediction * factor
    labelled = ~label.isnan()
    # The prediction replaces a missing label, as a constant on both sides: the error is zero there, and no gradient reaches
    # the model, even where the derivative of a user's loss is infinite or undefined for an error of zero.
    constant = prediction.detach()
    error = target.loss(torch.where(labelled, prediction, constant), torch.where(labelled, label, constant))
    return torch.where(labelled, weight * error, 0.0)


def _factor(target: Target, batch: Batch) -> Tensor | float | None:
    """Factor of label and prediction before they are compared: a number, (n_frames,), or None for one."""
    unit = target.scale if isinstance(target.scale, float) else 1.0
    if target.is_field and not target.per_atom:
        return 1.0 / unit
    n_atoms = counted_atoms(batch, target.uncounted).to(batch["weight"].dtype)
    divisor = n_atoms.sqrt() if target.per_atom == "root" else n_atoms
    if target.quantity == "virial":
        return -volumes(batch["cell"]) / divisor if target.per_atom else -volumes(batch["cell"])
    if target.quantity in ("forces", "stress") or not target.per_atom:
        return None
    return 1.0 / (divisor if unit == 1.0 else unit * divisor)
