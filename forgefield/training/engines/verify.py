"""Verification of engines: loss, errors and all gradients are compared with those of the eager engine, on the user's batch.

Labels are shifted away from what the model may have learnt; by less, or in the other direction, if the loss is not finite for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from forgefield.data.batch import Batch
from forgefield.errors import ForgefieldError
from forgefield.ops.execution import execution
from forgefield.tasks.task import Task
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import Differentiated, Measured

T = TypeVar("T")
SMALL = 1e-3
"""Gradients are compared relative to their norm, but at least to this fraction of the largest norm."""
SHARES = (1.0, -1.0, 0.1, -0.1, 0.01, -0.01, 0.0)
"""Fractions of the shift of labels (`shifted_labels`): the first one for which the loss is finite is used."""


class Comparison(NamedTuple):
    """difference: the largest relative difference; None for a model that is random in training, which cannot be compared.

    share: fraction of the shift of labels. is_finite: whether all values of the reference were finite for some labels; if not,
    only the finite ones were compared, and the others had to be non-finite in both.
    """

    difference: float | None
    share: float
    is_finite: bool

    def describe(self) -> str:
        """A sentence for the log, after a space, if the comparison was not the usual one; else an empty string."""
        if self.difference is None or (self.is_finite and self.share == SHARES[0]):
            return ""
        if not self.is_finite:
            return (
                " On this batch some values of the eager engine are not finite, with the original and with shifted labels; "
                "they were not compared."
            )
        labels = "the original labels" if self.share == 0 else f"labels shifted by {self.share:g} of the usual amount"
        return f" It was compared on {labels}, because the loss is not finite for labels that are shifted further."


def require_equal(engine: Engine, reference: Engine, batch: Batch, tolerance: float) -> Comparison:
    """Raise ForgefieldError if a step of the engine differs from the reference's by more than `tolerance`, relative to the size
    of each value, and by more than the rounding of its kernels. The reference uses PyTorch operations."""
    tolerance = max(tolerance, engine.function.rounding)

    def by_reference(moved: Batch) -> Differentiated:
        with same_random_state(batch), execution(operators=False):
            return reference.trial(moved)

    share, batch, expected, is_finite = _first_finite(batch, engine.function.task, by_reference, _of_step)
    repeated = by_reference(batch)
    with same_random_state(batch):
        result = engine.trial(batch)
    names = engine.function.trained
    noise, _ = largest_difference(repeated, expected, names)
    if noise > tolerance:
        return Comparison(None, share, is_finite)
    difference, name = largest_difference(result, expected, names)
    if not difference <= tolerance:
        raise ForgefieldError(
            f"training.engine={engine.name} is not exact for this model: {name} {_describe_difference(difference, engine)} "
            f"more than the {tolerance:g} that rounding explains. The training was not started; "
            f"use {remedy(engine)}, and please report it."
        )
    return Comparison(difference, share, is_finite)


def require_equal_evaluation(engine: Engine, reference: Engine, batch: Batch, tolerance: float) -> None:
    """As `require_equal`, for the evaluation of a batch in validation."""

    def by_reference(moved: Batch) -> Measured:
        with execution(operators=False):
            return reference.evaluate(moved)

    _, batch, expected, _ = _first_finite(batch, engine.function.task, by_reference, list)
    result = engine.evaluate(batch)
    for name, a, b in (("the loss", result.sums, expected.sums), ("an error", result.errors, expected.errors)):
        difference = _relative(a, b, 0.0)
        if not difference <= tolerance:
            raise ForgefieldError(
                f"training.engine={engine.name} is not exact for this model: in validation {name} "
                f"{_describe_difference(difference, engine)} more than {tolerance:g}; use {remedy(engine)}, and please report "
                "it."
            )


def _describe_difference(difference: float, engine: Engine) -> str:
    if math.isnan(difference):
        return f"is not finite where that of {reference_name(engine)} is, or vice versa,"
    return f"differs from that of {reference_name(engine)} by {difference:.2g} of its size,"


def _first_finite(
    batch: Batch, task: Task, compute: Callable[[Batch], T], tensors: Callable[[T], list[Tensor]]
) -> tuple[float, Batch, T, bool]:
    """Fraction of the shift, batch with shifted labels, result of `compute`, and whether it is finite: for the first fraction
    with a finite result, else for the original labels.

    A user-defined loss may be defined for some labels only, such as a logarithm.
    """
    for share in SHARES:
        shifted = shifted_labels(batch, task, share)
        result = compute(shifted)
        if all(bool(tensor.isfinite().all()) for tensor in tensors(result)):
            return share, shifted, result, True
    return share, shifted, result, False


def _of_step(result: Differentiated) -> list[Tensor]:
    return [result.loss, *result.measured, *(gradient for gradient in result.gradients if gradient is not None)]


def shifted_labels(batch: Batch, task: Task, share: float = 1.0) -> Batch:
    """The batch with labels that no model has learnt: forces and stress with the opposite sign, energies higher by 1 eV per
    atom, other values by the scale of their errors; classes are not changed. Gradients of a model that has learnt its labels
    would be dominated by rounding.

    share: fraction of these changes: 0 for the original labels, 1 for the full change, -1 for the opposite direction.
    """
    shifted: Batch = {}
    for target in task.targets:
        label = batch.get(target.label)
        if label is None or target.classes is not None:
            continue
        if target.label in ("forces", "stress"):
            shifted[target.label] = label - 2.0 * share * label
        elif target.label == "energy":
            shifted[target.label] = label + share * batch["n_atoms"]
        else:
            shifted[target.label] = label + share * torch.tensor(target.scale).to(label)
    return {**batch, **shifted}


def reference_name(engine: Engine) -> str:
    """What an engine is compared with, for messages."""
    return "PyTorch's operations" if _uses_edge_kernels(engine) else "the eager engine"


def remedy(engine: Engine) -> str:
    """The setting that switches off the most likely cause of a failure of this engine."""
    if engine.function.derivative == "kernels":
        return "training.derivative=double"
    return "training.kernels.edges=false" if _uses_edge_kernels(engine) else "training.engine=eager"


def _uses_edge_kernels(engine: Engine) -> bool:
    function = engine.function
    return function.uses_edge_kernels if engine.name == "eager" else function.sums_by_kernels


def largest_difference(result: Differentiated, expected: Differentiated, names: Sequence[str]) -> tuple[float, str]:
    """The largest difference, relative to the size of each value, and the name of that value.

    names: of the weights.
    """
    differences = {
        "the loss": _relative(result.measured.sums, expected.measured.sums, 0.0),
        "an error": _relative(result.measured.errors, expected.measured.errors, 0.0),
    }
    norms = [float(gradient[gradient.isfinite()].norm()) for gradient in expected.gradients if gradient is not None]
    floor = SMALL * max(norms, default=0.0)
    for name, a, b in zip(names, result.gradients, expected.gradients):
        if a is None and b is not None:
            a = torch.zeros_like(b)
        elif b is None and a is not None:
            b = torch.zeros_like(a)
        if a is not None and b is not None:
            differences[f"the gradient of {name}"] = _relative(a, b, floor)
    largest = max(differences, key=lambda key: math.inf if math.isnan(differences[key]) else differences[key])
    return differences[largest], largest


def _relative(a: Tensor, b: Tensor, floor: float) -> float:
    """|a - b| / |b| of the entries that are finite in both; NaN if an entry is finite in only one of them."""
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return float("nan")
    if not bool(finite.all()):
        a, b = a[finite], b[finite]
    difference, size = float((a.double() - b.double()).norm()), float(b.double().norm())
    if difference == 0:
        return 0.0
    return difference / max(size, floor, 1e-300)


@contextmanager
def same_random_state(batch: Batch) -> Iterator[None]:
    """Random numbers drawn inside are drawn again after the block."""
    device = batch["positions"].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
