"""Schedules of the weights of targets during a training.

A schedule is a pure function of the step, so that every rank and every resumed run has the same weights. The first step has
exactly the first value, the last step exactly the last one, and no value is outside of these two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forgefield.errors import ForgefieldError
from forgefield.tasks.options import ScheduleOptions

SLOPE, CENTRE = 14.5, 0.5
"""Defaults of a sigmoid: its steepness, and the fraction of the schedule at which it is half way."""

FLAT = 1e-8
"""A sigmoid with a smaller slope is a straight line to the last bit."""


@dataclass(frozen=True)
class StepState:
    """Progress of a training: index of the step and of the epoch, their total numbers (-1: no limit), and the learning rate
    divided by its initial value."""

    step: int
    steps: int
    epoch: int
    epochs: int
    lr_ratio: float = 1.0


@dataclass(frozen=True)
class WeightSchedule:
    """How a weight changes. first: the target's `weight`. The other fields are those of `task.*.schedule`, see
    `ScheduleOptions`."""

    first: float
    kind: str
    to: float | Sequence[float]
    unit: str = "step"
    begin: int = 0
    end: int | None = None
    slope: float = SLOPE
    centre: float = CENTRE
    at: tuple[int, ...] = ()

    @classmethod
    def from_options(cls, first: float, options: ScheduleOptions) -> WeightSchedule:
        """The schedule of a config. first: the target's `weight`."""
        assert options.to is not None, "the checks of the config require it"
        return cls(
            first,
            options.kind,
            options.to,
            unit=options.unit or "step",
            begin=options.begin or 0,
            end=options.end,
            slope=SLOPE if options.slope is None else options.slope,
            centre=CENTRE if options.centre is None else options.centre,
            at=tuple(options.at or ()),
        )

    @property
    def last(self) -> float:
        """The final value."""
        return float(self.to if isinstance(self.to, (int, float)) else self.to[-1])

    @property
    def needs_an_end(self) -> bool:
        """Whether it depends on the length of the training."""
        return self.kind not in ("step", "lr") and self.end is None

    def value(self, state: StepState) -> float:
        """The weight at this step."""
        if self.kind == "lr":  # some schedulers raise the rate above its first value; the weight stays in its range
            return self._bounded(self.last + (self.first - self.last) * state.lr_ratio)
        position, length = (state.step, state.steps) if self.unit == "step" else (state.epoch, state.epochs)
        if not isinstance(self.to, (int, float)):  # kind step
            passed = sum(position >= change for change in self.at)
            return float([self.first, *self.to][passed])
        end = length - 1 if self.end is None else self.end
        if position >= max(end, self.begin):
            return self.last
        if position <= self.begin:
            return self.first
        progress = self._progress((position - self.begin) / (end - self.begin))
        return self._bounded(self.first + (self.last - self.first) * progress)

    def _bounded(self, value: float) -> float:
        """The value, clamped to the range between the first and the last one."""
        return min(max(value, min(self.first, self.last)), max(self.first, self.last))

    def require_fit(self, length: int, *, key: str) -> None:
        """Raise if the schedule would not complete in a training of `length` steps or epochs, in its unit.

        length: -1 for a training without a limit.
        key: of this schedule in the config, for messages.
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
        name, position = ("at", max(self.at)) if self.at else ("end", self.end)
        if position is None and 0 < self.begin >= last:
            name, position = "begin", self.begin
        if position is None or (position <= last and name != "begin"):
            return
        never, earlier = ("change", "begin") if name == "begin" else ("reach its last value", "end")
        raise ForgefieldError(
            f"{key}.{name} is {self.unit} {position}, and the last {self.unit} of this training is {last} (counted from 0), so "
            f"the weight would never {never}. Train longer, or make the schedule {earlier} earlier."
        )

    def _progress(self, share: float) -> float:
        """Progress of the weight, from 0 to 1, at this fraction of the schedule."""
        if self.kind == "linear":
            return share
        if self.kind == "cosine":
            return 0.5 * (1.0 - math.cos(math.pi * share))
        return sigmoid_progress(share, slope=self.slope, centre=self.centre)

    def describe(self) -> str:
        """A few words for summaries."""
        if not isinstance(self.to, (int, float)):
            changes = ", ".join(f"{value:g} from {self.unit} {position}" for position, value in zip(self.at, self.to))
            return f"then {changes}"
        return f"to {self.last:g} ({'with the learning rate' if self.kind == 'lr' else self.kind})"


def sigmoid_progress(share: float, *, slope: float, centre: float) -> float:
    """The logistic function of slope * (share - centre), scaled and shifted such that it is 0 at 0 and 1 at 1.

    share, centre: from 0 to 1. slope: positive. Computed with tanh, which neither overflows for steep curves nor cancels for
    flat ones.
    """
    if slope < FLAT:
        return share
    low, now, high = (math.tanh(0.5 * slope * (x - centre)) for x in (0.0, share, 1.0))
    return min(max((now - low) / (high - low), 0.0), 1.0)
