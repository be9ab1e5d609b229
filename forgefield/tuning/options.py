"""The section `tune` of a config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "halving", "none")


@dataclass(frozen=True)
class TuneOptions:
    """How a search is done. As in the config's other sections, the docstring under each field is its documentation."""

    trials: int = 50
    """Total number of trainings, including those ended early. Run the same command to resume until there are this many."""
    monitor: str | None = None
    """Metric to minimise, by the best value of a training: val/loss, val/band_energy_mae, ... Default: training.monitor."""
    space: Mapping[str, object] | None = None
    """Keys of the config and their values: a list of choices, {log: [low, high]}, {range: [low, high]} or {range: [low, high,
    step]}."""
    storage: str | None = None
    """Database of the search, for workers on several machines: sqlite:///FILE or another SQLAlchemy URL. Default: a file in
    the folder of the search."""
    sampler: str = "tpe"
    """tpe (learns from finished trials), random, or grid (all combinations of choices)."""
    pruner: str = "median"
    """Ends a training early: median (worse than half of the others at the same validation), halving (asynchronous successive
    halving) or none."""
    startup: int = 5
    """Number of trials before sampler and pruner use results."""
    warmup: int = 1
    """Number of validations before a training can be ended early."""
    repeats: int = 1
    """Number of trainings per trial, with consecutive seeds; their mean counts."""

    @classmethod
    def from_mapping(cls, section: object) -> TuneOptions:
        """Options of the section `tune` of a config; unknown keys are an error."""
        values = {} if section is None else section
        if not isinstance(values, Mapping):
            raise ForgefieldError(f"'tune' is {section!r}; it should be a section such as {{trials: 50, space: ...}}.")
        names = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in names:
                raise ForgefieldError(f"unknown key 'tune.{name}'.{did_you_mean(str(name), names)}")
        return cls(**values)

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
