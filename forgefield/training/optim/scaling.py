"""Learning rates for larger batches: W ranks take steps with W times as many frames.

One rule for schedules: everything that is a learning rate (that of the optimiser, floors and peaks of a schedule) is multiplied
by the same factor, so the whole curve keeps its shape; lengths stay as written, in epochs or in optimiser steps.
"""

from __future__ import annotations

import math

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

RULES = ("none", "sqrt", "linear")


def learning_rate_factor(rule: str, world_size: int) -> float:
    """By how much `training.lr` is multiplied on `world_size` ranks."""
    if rule not in RULES:
        raise ForgefieldError(f"training.scale_lr is {', '.join(RULES)}, not '{rule}'.{did_you_mean(str(rule), RULES)}")
    return {"none": 1.0, "sqrt": math.sqrt(world_size), "linear": float(world_size)}[rule]
