"""Is a fast engine exact? Its loss, its errors and every parameter's gradient against the eager engine, on the user's batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ops.kernels.dispatch import operators
from forgefield.tasks.task import Task
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import Differentiated

Batch = dict[str, Tensor]
SMALL = 1e-3
"""A gradient is compared on the scale of its own norm, but not below this share of the largest norm of all."""


def require_equal(engine: Engine, reference: Engine, batch: Batch, tolerance: float) -> float | None:
    """Stop where the engine's step differs from the reference's by more than `tolerance`, relative to the size of each value,
    and more than its function may differ by rounding. The reference computes by plain operations.

    Returns the largest difference; None for a model that is random in training, which cannot be compared.
    """
    batch, tolerance = unlearnt(batch, engine.function.task), max(tolerance, engine.function.rounding)
    with same_random_state(batch), operators(False):
        expected = reference.trial(batch)
    with same_random_state(batch), operators(False):
        again = reference.trial(batch)
    with same_random_state(batch):
        found = engine.trial(batch)
    names = engine.function.trained
    noise, _ = largest_difference(again, expected, names)
    if noise > tolerance:
        return None
    difference, where = largest_difference(found, expected, names)
    if not difference <= tolerance:
        raise ForgefieldError(
            f"training.engine={engine.name} is not exact for this model: {where} differs from that of {plain_way(engine)} by "
            f"{difference:.2g} of its size, more than the {tolerance:g} that rounding explains. The training was not started; "
            f"use {remedy(engine)}, and please report it."
        )
    return difference


def require_equal_evaluation(engine: Engine, reference: Engine, batch: Batch, tolerance: float) -> None:
    """The same for what a validation computes."""
    batch = unlearnt(batch, engine.function.task)
    found = engine.evaluate(batch)
    with operators(False):
        expected = reference.evaluate(batch)
    for what, a, b in (("the loss", found.sums, expected.sums), ("an error", found.errors, expected.errors)):
        difference = _relative(a, b, 0.0)
        if not difference <= tolerance:
            raise ForgefieldError(
                f"training.engine={engine.name} is not exact for this model: in validation {what} differs from that of "
                f"{plain_way(engine)} by {difference:.2g} of its size, more than {tolerance:g}; use {remedy(engine)}, and "
                "please report it."
            )


def unlearnt(batch: Batch, task: Task) -> Batch:
    """The same structures with labels that no model has learnt: forces and stress of the other sign, energies higher by 1 eV
    for each atom, other values by the scale of their errors; classes stay. Where a model has learnt its labels, gradients are
    small differences, made of rounding to a large part."""
    moved: Batch = {}
    for target in task.targets:
        label = batch.get(target.label)
        if label is None or target.classes is not None:
            continue
        if target.label in ("forces", "stress"):
            moved[target.label] = -label
        elif target.label == "energy":
            moved[target.label] = label + batch["n_atoms"]
        else:
            moved[target.label] = label + torch.tensor(target.scale).to(label)
    return {**batch, **moved}


def plain_way(engine: Engine) -> str:
    """What an engine is compared with."""
    return "plain operations" if engine.function.sums_by_kernels else "the eager engine"


def remedy(engine: Engine) -> str:
    """The setting that leaves out what is most likely at fault where an engine fails."""
    if engine.function.derivative == "kernels":
        return "training.derivative=double"
    return "training.kernels.edges=false" if engine.function.sums_by_kernels else "training.engine=eager"


def largest_difference(found: Differentiated, expected: Differentiated, names: Sequence[str]) -> tuple[float, str]:
    """Relative to the size of each value, and the name of what differs most."""
    differences = {
        "the loss": _relative(found.measured.sums, expected.measured.sums, 0.0),
        "an error": _relative(found.measured.errors, expected.measured.errors, 0.0),
    }
    norms = [float(gradient.norm()) for gradient in expected.gradients if gradient is not None]
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
    """|a - b| / |b|; not a number where one is and the other is not."""
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
