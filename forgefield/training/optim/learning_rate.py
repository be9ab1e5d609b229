"""Learning rates of an optimiser: how they scale with the number of ranks, how they are read, replaced and reported.

W ranks take steps with W times as many frames. Everything that is a learning rate (that of the optimiser, floors and peaks of a
schedule) is then multiplied by the same factor, so the whole curve keeps its shape; lengths stay as written, in epochs or in
optimiser steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

RULES = ("none", "sqrt", "linear")


def learning_rate_factor(rule: str, world_size: int) -> float:
    """The factor by which `training.lr` is multiplied on `world_size` ranks. rule: `training.scale_lr`."""
    if rule not in RULES:
        raise ForgefieldError(f"training.scale_lr is {', '.join(RULES)}, not '{rule}'.{did_you_mean(str(rule), RULES)}")
    return {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": float(world_size)}[rule]


def describe_learning_rate(lr: float, rule: str, world_size: int, factor: float) -> str:
    """`lr 0.01`, or `lr 0.01 x 2 (scale_lr=sqrt, 4 ranks) = 0.02`."""
    if rule == "none":
        return f"lr {lr:g}"
    return f"lr {lr:g} x {factor:.4g} (scale_lr={rule}, {world_size} ranks) = {lr * factor:.4g}"


def current_learning_rate(optimiser: torch.optim.Optimizer) -> float:
    """The rate of the first parameter group, which is the one that is logged."""
    return float(optimiser.param_groups[0]["lr"])


def relative_learning_rate(optimiser: torch.optim.Optimizer, initial: float) -> float:
    """The current rate in units of its initial value. initial: that of parameters without a factor of their own."""
    group = optimiser.param_groups[0]
    return float(group["lr"]) / (initial * group.get("factor", 1.0))


@contextmanager
def replaced_learning_rates(optimiser: torch.optim.Optimizer, rates: Sequence[float | Tensor]) -> Iterator[None]:
    """Inside the block each parameter group has the given rate. rates: one for each group, also on the device."""
    groups = optimiser.param_groups
    before = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate in zip(groups, before):
            group["lr"] = rate
