"""Weights of targets that change in the course of a training.

A schedule is a pure function of where a training stands, so that every rank and every resumed run has the same weights. Its
first step has exactly the first value and its last step exactly the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SLOPE, CENTRE = 14.5, 0.5
"""Of a sigmoid, where nothing is said: how steep it is, and where in the schedule it is half way."""


@dataclass(frozen=True)
class Moment:
    """Where a training stands: number of the step and of the epoch, how many there will be (-1: no end is known), and the
    learning rate over its value at the start."""

    step: int
    steps: int
    epoch: int
    epochs: int
    lr_ratio: float = 1.0


@dataclass(frozen=True)
class WeightSchedule:
    """first: the target's `weight`. The other fields are those of `task.*.schedule`, see `config.schema.ScheduleOptions`."""

    first: float
    kind: str
    to: Any
    unit: str = "step"
    begin: int = 0
    end: int | None = None
    slope: float = SLOPE
    centre: float = CENTRE
    at: tuple[int, ...] = ()

    @classmethod
    def from_options(cls, first: float, options: Mapping[str, Any]) -> WeightSchedule:
        given = {key: value for key, value in options.items() if value is not None}
        return cls(first, **{**given, "at": tuple(given.get("at", ()))})

    @property
    def last(self) -> float:
        """The value it ends with."""
        return float(self.to[-1] if self.kind == "step" else self.to)

    @property
    def needs_an_end(self) -> bool:
        """Whether it has to know how long the training is."""
        return self.kind not in ("step", "lr") and self.end is None

    def value(self, moment: Moment) -> float:
        if self.kind == "lr":
            return self.last + (self.first - self.last) * moment.lr_ratio
        place, length = (moment.step, moment.steps) if self.unit == "step" else (moment.epoch, moment.epochs)
        if self.kind == "step":
            passed = sum(place >= position for position in self.at)
            return float([self.first, *self.to][passed])
        end = length - 1 if self.end is None else self.end
        if place >= end:
            return self.last
        share = max(0.0, (place - self.begin) / (end - self.begin))
        return self.first + (self.last - self.first) * self._progress(share)

    def _progress(self, share: float) -> float:
        """How far the weight has come after this share of the schedule; 0 at 0 and 1 at 1."""
        if self.kind == "linear":
            return share
        if self.kind == "cosine":
            return 0.5 * (1.0 - math.cos(math.pi * share))
        low, now, high = (_logistic(self.slope * (x - self.centre)) for x in (0.0, share, 1.0))
        return (now - low) / (high - low)

    def describe(self) -> str:
        if self.kind == "step":
            changes = ", ".join(f"{value:g} from {self.unit} {place}" for place, value in zip(self.at, self.to))
            return f"then {changes}"
        return f"to {self.last:g} ({'with the learning rate' if self.kind == 'lr' else self.kind})"


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
