"""Learning rates as a function of the step number: exponential, cosine, and warm-up, stable, decay.

These are the three schedules of DeePMD-kit, with its names and options. Each rate is computed from the step number alone, not
from the previous rate, so that a resumed run has exactly the same rates. Step 0 has the optimiser's rate (without a warm-up),
step `T_max` exactly the last one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


def learning_rate_factor(rule: str, world_size: int) -> float:
    """The factor by which `training.lr` is multiplied on `world_size` ranks. rule: `training.scale_lr`."""
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
    return float(group["lr"]) / (initial * float(group.get("factor", 1.0)))


@contextmanager
def replaced_learning_rates(optimiser: torch.optim.Optimizer, rates: Sequence[float | Tensor]) -> Iterator[None]:
    """Inside the block parameter groups have these rates, one for each group; a rate may be a tensor on the device."""
    groups = optimiser.param_groups
    before = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate in zip(groups, before):
            group["lr"] = rate


TINY = 1e-10
"""Last rate of an exponential decay to zero."""
DECAYS = ("inverse_linear", "cosine", "linear")


class StepSchedule(LRScheduler, ABC):
    """Base class of the schedules: length, last rate and warm-up.

    optimizer: its rates are those after the warm-up.
    T_max: number of steps of the schedule, the warm-up included.
    stop_lr: rate at step `T_max` and after it; or
    stop_lr_ratio: the same as a fraction of the optimiser's rate.
    warmup_steps: number of steps in which the rate grows linearly; or
    warmup_ratio: the same as a fraction of `T_max`.
    warmup_start_factor: first rate of the warm-up as a fraction of the optimiser's rate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        T_max: int,
        *,
        stop_lr: float | None = None,
        stop_lr_ratio: float | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float | None = None,
        warmup_start_factor: float = 0.0,
    ) -> None:
        self.T_max = T_max
        self.stop_lr, self.stop_lr_ratio = stop_lr, stop_lr_ratio
        self.warmup_steps, self.warmup_ratio = warmup_steps, warmup_ratio
        self.warmup_start_factor = warmup_start_factor
        self._length_before: int | None = None
        self._check([group["lr"] / group.get("factor", 1.0) for group in optimizer.param_groups])
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_length_before"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at the step of the stored schedule, with the length of the present run."""
        length = self.T_max
        super().load_state_dict(state_dict)
        self._length_before, self.T_max = self.T_max, length
        if length != self._length_before:
            self._apply()

    def fit(self, length: int) -> None:
        """Change the length of a loaded schedule, and resume at the same fraction of it."""
        before = self.T_max if self._length_before is None else self._length_before
        if before != length:
            self.last_epoch = round(self.last_epoch * length / before)
            self.T_max = self._length_before = length
            self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr):
            group["lr"] = rate

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return int(self.warmup_ratio * self.T_max) if self.warmup_ratio is not None else self.warmup_steps

    @property
    def rest(self) -> int:
        """Steps after the warm-up."""
        return self.T_max - self.warmup

    def get_lr(self) -> list[float | torch.Tensor]:
        factors = [group.get("factor", 1.0) for group in self.optimizer.param_groups]
        return [
            self.rate(self.last_epoch, start=float(start), factor=factor)
            for start, factor in zip(self.base_lrs, factors)
        ]

    def rate(self, step: int, *, start: float, factor: float = 1.0) -> float:
        """The rate of a step, counted from 0. start: the optimiser's rate. factor: of the group of parameters, for
        `stop_lr`."""
        if step < self.warmup:
            first = self.warmup_start_factor * start
            return first + (start - first) * (step / self.warmup)
        return self.decayed(step - self.warmup, start, self.stop(start, factor))

    def stop(self, start: float, factor: float = 1.0) -> float:
        if self.stop_lr is not None:
            return float(self.stop_lr) * factor
        return start * float(self.stop_lr_ratio or 0.0)

    @abstractmethod
    def decayed(self, step: int, start: float, stop: float) -> float:
        """The rate `step` steps after the warm-up."""

    def _check(self, starts: list[float]) -> None:
        _check_integer("T_max", self.T_max, at_least=1)
        if (self.stop_lr is None) == (self.stop_lr_ratio is None):
            raise ValueError("it needs either stop_lr or stop_lr_ratio")
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio cannot be combined; set one of them")
        if self.warmup_ratio is not None:
            _check_range("warmup_ratio", self.warmup_ratio, 0, 1)
        else:
            _check_integer("warmup_steps", self.warmup_steps, at_least=0)
        _check_range("warmup_start_factor", self.warmup_start_factor, 0, 1)
        if not self.warmup < self.T_max:
            raise ValueError(f"a warm-up of {self.warmup} steps leaves nothing of the {self.T_max} steps of the run")
        if self.stop_lr_ratio is not None:
            _check_range("stop_lr_ratio", self.stop_lr_ratio, 0, 1)
        else:
            _check_range("stop_lr", self.stop_lr, 0, min(map(float, starts)))


class ExponentialTo(StepSchedule):
    """start * r^(t/s), changed every s = `decay_steps` steps or, if `smooth`, in every step; r follows from the last rate.

    A `decay_steps` that is not shorter than the schedule becomes 100, or about a hundredth of the schedule in runs of up to a
    thousand steps (as in DeePMD-kit). decay_rate: r; the last rate is then only a lower bound.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        T_max: int,
        *,
        decay_steps: int = 5000,
        decay_rate: float | None = None,
        smooth: bool = False,
        stop_lr: float | None = None,
        stop_lr_ratio: float | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float | None = None,
        warmup_start_factor: float = 0.0,
    ) -> None:
        _check_integer("decay_steps", decay_steps, at_least=1)
        if decay_rate is not None and not 0 < decay_rate <= 1:
            raise ValueError(f"decay_rate must be above 0 and at most 1, not {decay_rate}")
        self.decay_steps, self.decay_rate, self.smooth = decay_steps, decay_rate, bool(smooth)
        super().__init__(
            optimizer,
            T_max,
            stop_lr=stop_lr,
            stop_lr_ratio=stop_lr_ratio,
            warmup_steps=warmup_steps,
            warmup_ratio=warmup_ratio,
            warmup_start_factor=warmup_start_factor,
        )

    @property
    def period(self) -> int:
        """Steps between two changes of the rate."""
        if self.decay_rate is not None or self.decay_steps < self.rest:
            return self.decay_steps
        return 100 if self.rest // 10 > 100 else self.rest // 100 + 1

    def decayed(self, step: int, start: float, stop: float) -> float:
        exponent = step / self.period if self.smooth else step // self.period
        if self.decay_rate is not None:
            return max(start * self.decay_rate**exponent, stop)
        last = min(max(stop, TINY), start)  # rates never grow, even if the first one is tiny
        if step == self.rest and (self.smooth or step % self.period == 0):
            return last
        rate = math.exp(math.log(last / start) / (self.rest / self.period))
        return max(start * rate**exponent, stop)


class CosineTo(StepSchedule):
    """Half a cosine from the optimiser's rate to the last one."""

    def decayed(self, step: int, start: float, stop: float) -> float:
        return stop if step >= self.rest else _cosine(step / self.rest, start, stop)


class WarmupStableDecay(StepSchedule):
    """The optimiser's rate until the last `decay_phase_ratio` of the run, then down to the last one.

    decay_type: of the rate: `cosine`, `linear`; or `inverse_linear`, linear in one over the rate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        T_max: int,
        *,
        decay_phase_ratio: float = 0.1,
        decay_type: str = "inverse_linear",
        stop_lr: float | None = None,
        stop_lr_ratio: float | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float | None = None,
        warmup_start_factor: float = 0.0,
    ) -> None:
        if not 0 < decay_phase_ratio <= 1:
            raise ValueError(f"decay_phase_ratio must be above 0 and at most 1, not {decay_phase_ratio}")
        if decay_type not in DECAYS:
            raise ValueError(f"decay_type must be {', '.join(DECAYS[:-1])} or {DECAYS[-1]}, not {decay_type!r}")
        self.decay_phase_ratio, self.decay_type = decay_phase_ratio, decay_type
        super().__init__(
            optimizer,
            T_max,
            stop_lr=stop_lr,
            stop_lr_ratio=stop_lr_ratio,
            warmup_steps=warmup_steps,
            warmup_ratio=warmup_ratio,
            warmup_start_factor=warmup_start_factor,
        )

    def decayed(self, step: int, start: float, stop: float) -> float:
        phase = max(1, min(int(self.decay_phase_ratio * self.T_max), self.rest))
        stable = self.rest - phase
        if step < stable:
            return start
        if step >= self.rest:
            return stop
        done = (step - stable) / phase
        if self.decay_type == "cosine":
            return _cosine(done, start, stop)
        if self.decay_type == "linear":
            return start + (stop - start) * done
        return 1 / (done / stop + (1 - done) / start)

    def _check(self, starts: list[float]) -> None:
        super()._check(starts)
        if any(self.stop(float(start)) <= 0 for start in starts):
            raise ValueError("the last rate of this schedule must be positive; set stop_lr or stop_lr_ratio above 0")


SCHEDULES: dict[str, type[StepSchedule]] = {"exp": ExponentialTo, "cosine_to": CosineTo, "wsd": WarmupStableDecay}
"""Schedules by their names in `training.scheduler`."""


def _cosine(done: float, start: float, stop: float) -> float:
    return stop + (start - stop) * 0.5 * (1 + math.cos(math.pi * done))


def _check_integer(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, not {value!r}")


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value!r}")
