"""The section `tune` of a config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "halving", "none")


@dataclass(frozen=True)
class TuneOptions:
    """How a search goes. As in the config's other sections, the docstring under each field is its documentation."""

    trials: int = 50
    """Trainings in all, those that were ended early included. The same command again goes on until there are so many."""
    monitor: str | None = None
    """What is to become small, the best value of a training counts: val/loss, val/band_energy_mae, ... Default:
    training.monitor."""
    space: Any = None
    """Keys of the config and their values: a list of choices, {log: [low, high]}, {range: [low, high]} or {range: [low, high,
    step]}."""
    storage: str | None = None
    """Database of the search, for workers on several machines: sqlite:///FILE, or what SQLAlchemy takes. Default: a file in the
    folder of the search."""
    sampler: str = "tpe"
    """tpe (learns from finished trials), random, or grid (all combinations of choices)."""
    pruner: str = "median"
    """Ends a training early: median (worse than half of the others at the same validation), halving (asynchronous successive
    halving) or none."""
    startup: int = 5
    """Trials before sampler and pruner begin to judge."""
    warmup: int = 1
    """Validations of a training before it can be ended early."""
    repeats: int = 1
    """Trainings of a trial, with seeds one after the other; their mean counts."""

    @classmethod
    def from_mapping(cls, section: Any) -> TuneOptions:
        given = {} if section is None else section
        if not isinstance(given, Mapping):
            raise ForgefieldError(f"'tune' is {section!r}; it should be a section such as {{trials: 50, space: ...}}.")
        names = [entry.name for entry in fields(cls)]
        for name in given:
            if name not in names:
                raise ForgefieldError(f"unknown key 'tune.{name}'.{did_you_mean(str(name), names)}")
        return cls(**given)

    def __post_init__(self) -> None:
        for name, low in (("trials", 1), ("startup", 0), ("warmup", 0), ("repeats", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ForgefieldError(f"tune.{name} is {value!r}; it should be a whole number, {low} or more.")
        for name, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
            value = getattr(self, name)
            if value not in known:
                hint = did_you_mean(str(value), known)
                raise ForgefieldError(f"tune.{name} is {value!r}; it should be one of {', '.join(known)}.{hint}")
        if self.storage is not None and "://" not in str(self.storage):
            raise ForgefieldError(f"tune.storage is {self.storage!r}; it should be a URL such as sqlite:///search.db.")
