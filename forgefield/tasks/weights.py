"""Weights of targets that change in the course of a training.

A schedule is a pure function of where a training stands, so that every rank and every resumed run has the same weights. Its
first step has exactly the first value and its last step exactly the last one, and no value lies outside of these two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgefield.errors import ForgefieldError

SLOPE, CENTRE = 14.5, 0.5
"""Of a sigmoid, where nothing is said: how steep it is, and where in the schedule it is half way."""

FLAT = 1e-8
"""A sigmoid with a slope below this is a straight line to the last bit."""


@dataclass(frozen=True)
class StepState:
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

    def value(self, moment: StepState) -> float:
        if self.kind == "lr":  # some schedulers raise the rate above its first value; the weight stays in its range
            return self._bounded(self.last + (self.first - self.last) * moment.lr_ratio)
        place, length = (moment.step, moment.steps) if self.unit == "step" else (moment.epoch, moment.epochs)
        if self.kind == "step":
            passed = sum(place >= position for position in self.at)
            return float([self.first, *self.to][passed])
        end = length - 1 if self.end is None else self.end
        if place >= max(end, self.begin):
            return self.last
        if place <= self.begin:
            return self.first
        progress = self._progress((place - self.begin) / (end - self.begin))
        return self._bounded(self.first + (self.last - self.first) * progress)

    def _bounded(self, value: float) -> float:
        """The value, or the nearer of the two ends where it lies outside of them."""
        return min(max(value, min(self.first, self.last)), max(self.first, self.last))

    def require_fit(self, length: int, *, key: str) -> None:
        """Refuse a schedule that would not complete in a training of `length` steps or epochs, whichever is its unit.

        length: -1 where the training has no end. key: of this schedule in the config, for messages.
        """
        if self.kind == "lr":
            return
        if length < 0:
            if self.needs_an_end:
                setting = "trainer.max_epochs" if self.unit == "epoch" else "trainer.max_steps or max_epochs"
                raise ForgefieldError(
                    f"{key} ends with the training, which has no limit of {self.unit}s ({setting}); give one, or {key}.end."
                )
            return
        last = length - 1
        name, place = ("at", max(self.at)) if self.at else ("end", self.end)
        if place is None and 0 < self.begin >= last:
            name, place = "begin", self.begin
        if place is None or (place <= last and name != "begin"):
            return
        never, earlier = ("change", "begin") if name == "begin" else ("reach its last value", "end")
        raise ForgefieldError(
            f"{key}.{name} is {self.unit} {place}, and the last {self.unit} of this training is {last} (counted from 0), so "
            f"the weight would never {never}. Train longer, or make the schedule {earlier} earlier."
        )

    def _progress(self, share: float) -> float:
        """How far the weight has come after this share of the schedule; 0 at 0 and 1 at 1."""
        if self.kind == "linear":
            return share
        if self.kind == "cosine":
            return 0.5 * (1.0 - math.cos(math.pi * share))
        return sigmoid_progress(share, slope=self.slope, centre=self.centre)

    def describe(self) -> str:
        if self.kind == "step":
            changes = ", ".join(f"{value:g} from {self.unit} {place}" for place, value in zip(self.at, self.to))
            return f"then {changes}"
        return f"to {self.last:g} ({'with the learning rate' if self.kind == 'lr' else self.kind})"


def sigmoid_progress(share: float, *, slope: float, centre: float) -> float:
    """The logistic function of slope * (share - centre), stretched such that it is 0 at 0 and 1 at 1.

    share, centre: from 0 to 1. slope: positive, of any size. Written with tanh, which neither overflows for steep curves nor
    cancels for flat ones.
    """
    if slope < FLAT:
        return share
    low, now, high = (math.tanh(0.5 * slope * (x - centre)) for x in (0.0, share, 1.0))
    return min(max((now - low) / (high - low), 0.0), 1.0)
