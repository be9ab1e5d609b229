"""Is a fast engine exact? Its loss, its errors and every parameter's gradient against the eager engine, on the user's batch.

Labels are moved away from what a model may have learnt; by less, or the other way, where the loss is not finite for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""A gradient is compared on the scale of its own norm, but not below this share of the largest norm of all."""


SHARES = (1.0, -1.0, 0.1, -0.1, 0.01, -0.01, 0.0)
"""By how much labels are moved, as shares of what `moved_labels` says: the first for which the loss is finite is taken."""


class Comparison(NamedTuple):
    """difference: the largest one, relative; None for a model that is random in training, which cannot be compared.

    share: by which labels were moved. is_finite: whether the reference gave finite numbers only; where it did not for any
    labels, values that are not finite were required to be so in both, and only the others were compared.
    """

    difference: float | None
    share: float
    is_finite: bool

    def describe(self) -> str:
        """For the log, where labels were not those that are usually compared: a sentence with a space before it."""
        if self.difference is None or (self.is_finite and self.share == SHARES[0]):
            return ""
        if not self.is_finite:
            return (
                " On this batch the eager engine gives values that are not finite, with labels as they are and with moved "
                "ones; they were left out of the comparison."
            )
        labels = "the labels as they are" if self.share == 0 else f"labels moved by {self.share:g} of the usual amount"
        return f" It was compared on {labels}, because the loss is not finite for labels moved further."


def require_equal(engine: Engine, reference: Engine, batch: Batch, tolerance: float) -> Comparison:
    """Stop where the engine's step differs from the reference's by more than `tolerance`, relative to the size of each value,
    and more than its function may differ by rounding. The reference computes by plain operations."""
    tolerance = max(tolerance, engine.function.rounding)

    def by_reference(moved: Batch) -> Differentiated:
        with same_random_state(batch), execution(operators=False):
            return reference.trial(moved)

    share, batch, expected, is_finite = _first_finite(batch, engine.function.task, by_reference, _of_step)
    again = by_reference(batch)
    with same_random_state(batch):
        found = engine.trial(batch)
    names = engine.function.trained
    noise, _ = largest_difference(again, expected, names)
    if noise > tolerance:
        return Comparison(None, share, is_finite)
    difference, where = largest_difference(found, expected, names)
    if not difference <= tolerance:
        raise ForgefieldError(
            f"training.engine={engine.name} is not exact for this model: {where} {_by(difference, engine)} "
            f"more than the {tolerance:g} that rounding explains. The training was not started; "
            f"use {remedy(engine)}, and please report it."
        )
    return Comparison(difference, share, is_finite)


def require_equal_evaluation(engine: Engine, reference: Engine, batch: Batch, tolerance: float) -> None:
    """The same for what a validation computes."""

    def by_reference(moved: Batch) -> Measured:
        with execution(operators=False):
            return reference.evaluate(moved)

    _, batch, expected, _ = _first_finite(batch, engine.function.task, by_reference, list)
    found = engine.evaluate(batch)
    for what, a, b in (("the loss", found.sums, expected.sums), ("an error", found.errors, expected.errors)):
        difference = _relative(a, b, 0.0)
        if not difference <= tolerance:
            raise ForgefieldError(
                f"training.engine={engine.name} is not exact for this model: in validation {what} {_by(difference, engine)} "
                f"more than {tolerance:g}; use {remedy(engine)}, and please report it."
            )


def _by(difference: float, engine: Engine) -> str:
    """How a value of an engine differs."""
    if difference != difference:
        return f"is not finite where that of {plain_way(engine)} is, or the other way round,"
    return f"differs from that of {plain_way(engine)} by {difference:.2g} of its size,"


def _first_finite(
    batch: Batch, task: Task, compute: Callable[[Batch], T], tensors: Callable[[T], list[Tensor]]
) -> tuple[float, Batch, T, bool]:
    """The share by which labels are moved, the batch with them, what `compute` gives for it and whether that is finite: of the
    first share for which it is; the labels as they are, if there is none.

    A loss of the user's may be defined for some labels only, such as a logarithm.
    """
    for share in SHARES:
        moved = moved_labels(batch, task, share)
        result = compute(moved)
        if all(bool(tensor.isfinite().all()) for tensor in tensors(result)):
            return share, moved, result, True
    return share, moved, result, False


def _of_step(result: Differentiated) -> list[Tensor]:
    return [result.loss, *result.measured, *(gradient for gradient in result.gradients if gradient is not None)]


def moved_labels(batch: Batch, task: Task, share: float = 1.0) -> Batch:
    """The same structures with labels that no model has learnt: forces and stress of the other sign, energies higher by 1 eV
    for each atom, other values by the scale of their errors; classes stay. Where a model has learnt its labels, gradients are
    small differences, made of rounding to a large part.

    share: of these changes; labels move along a line, from where they are (0) to the other sign (1), or away from it (-1).
    """
    moved: Batch = {}
    for target in task.targets:
        label = batch.get(target.label)
        if label is None or target.classes is not None:
            continue
        if target.label in ("forces", "stress"):
            moved[target.label] = label - 2.0 * share * label
        elif target.label == "energy":
            moved[target.label] = label + share * batch["n_atoms"]
        else:
            moved[target.label] = label + share * torch.tensor(target.scale).to(label)
    return {**batch, **moved}


def plain_way(engine: Engine) -> str:
    """What an engine is compared with."""
    return "PyTorch's operations" if _uses_edge_kernels(engine) else "the eager engine"


def remedy(engine: Engine) -> str:
    """The setting that leaves out what is most likely at fault where an engine fails."""
    if engine.function.derivative == "kernels":
        return "training.derivative=double"
    return "training.kernels.edges=false" if _uses_edge_kernels(engine) else "training.engine=eager"


def _uses_edge_kernels(engine: Engine) -> bool:
    function = engine.function
    return function.uses_edge_kernels if engine.name == "eager" else function.sums_by_kernels


def largest_difference(found: Differentiated, expected: Differentiated, names: Sequence[str]) -> tuple[float, str]:
    """Relative to the size of each value, and the name of what differs most."""
    differences = {
        "the loss": _relative(found.measured.sums, expected.measured.sums, 0.0),
        "an error": _relative(found.measured.errors, expected.measured.errors, 0.0),
    }
    norms = [float(gradient[gradient.isfinite()].norm()) for gradient in expected.gradients if gradient is not None]
    floor = SMALL * max(norms, default=0.0)
    for name, a, b in zip(names, found.gradients, expected.gradients):
        if a is not None or b is not None:
            some = a if b is None else b
            assert some is not None
            zero = torch.zeros_like(some)
            differences[f"the gradient of {name}"] = _relative(
                zero if a is None else a, zero if b is None else b, floor
            )
    where = max(differences, key=lambda key: _order(differences[key]))
    return differences[where], where


def _order(value: float) -> float:
    return float("inf") if value != value else value


def _relative(a: Tensor, b: Tensor, floor: float) -> float:
    """|a - b| / |b| of the entries that are finite in both; not a number where an entry is so in one of them only."""
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
def same_random_state(batch: Batch):
    """Whatever is drawn inside is drawn again outside."""
    device = batch["positions"].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
