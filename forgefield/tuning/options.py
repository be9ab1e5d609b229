"""The section `tune` of a config: options of a search, and the search space.

The search space consists of keys of the config, each with a list of choices or a range. In a config:
`training.lr: {log: [1e-5, 1e-2]}`, `model.hidden: [[100], [200, 200]]`, `training.ema: {range: [0.9, 0.999]}`,
`data.batch.points: {range: [500, 4000, 500]}` (whole numbers, with a step). Ranges of whole numbers give whole numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from forgefield.config.option import option
from forgefield.config.sources import Sources, wrong
from forgefield.errors import ForgefieldError

if TYPE_CHECKING:
    from optuna import Trial

Stored = None | bool | int | float | str
"""A value that Optuna can store."""
KINDS = ("range", "log")
FORM = "a list of choices, {range: [low, high]}, {range: [low, high, step]} or {log: [low, high]}"


@dataclass
class TuneOptions:
    """How a hyperparameter search is done."""

    trials: int = option(50, above=0, expected="a positive whole number")
    """Total number of trials, including those ended early. Run the same command to resume until there are this many."""
    monitor: str | None = None
    """Metric to minimise, by the best value of a training: val/loss, val/band_energy_mae, ... Default: training.monitor."""
    space: dict[str, Any] | None = None
    """Settings to vary, by key: a list of choices, {log: [low, high]}, {range: [low, high]} or {range: [low, high, step]}."""
    storage: str | None = None
    """Database of the search, for workers on several machines: sqlite:///FILE or another SQLAlchemy URL. Default: a file in the
    folder of the search."""
    sampler: str = option("tpe", choices=("tpe", "random", "grid"))
    """How values are chosen: tpe (learns from finished trials), random, or grid (all combinations of choices)."""
    pruner: str = option("median", choices=("median", "halving", "none"))
    """When a training is ended early: median (worse than half of the others at the same validation), halving (asynchronous
    successive halving) or none."""
    startup: int = option(5, at_least=0, expected="a whole number of at least 0")
    """Number of trials before sampler and pruner use results."""
    warmup: int = option(1, at_least=0, expected="a whole number of at least 0")
    """Number of validations before a training can be ended early."""
    repeats: int = option(1, above=0, expected="a positive whole number")
    """Number of trainings per trial, with consecutive seeds; their mean counts."""


def check_tune(tune: TuneOptions, sources: Sources) -> None:
    """Refuse a space or storage of the wrong form."""
    if tune.space is not None and not isinstance(tune.space, Mapping):
        raise wrong(sources, "tune.space", tune.space, "a mapping such as {training.lr: {log: [1e-5, 1e-2]}}")
    if tune.storage is not None and "://" not in tune.storage:
        raise wrong(sources, "tune.storage", tune.storage, "a URL such as sqlite:///search.db")


@dataclass(frozen=True)
class Dimension:
    """One key of the search space. choices: its values, or None for a range from low to high."""

    key: str
    choices: tuple[object, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether it is a range of whole numbers."""
        return self.choices is None and all(isinstance(x, int) for x in (self.low, self.high, self.step or 1))

    def suggest(self, trial: Trial) -> object:
        """The value that Optuna suggests for a trial."""
        if self.choices is not None:
            return self.decode(trial.suggest_categorical(self.key, [storable(choice) for choice in self.choices]))
        if self.is_integer:
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def decode(self, stored: Stored) -> object:
        """The value that Optuna stores as `stored`."""
        if self.choices is None:
            return stored
        return next(choice for choice in self.choices if storable(choice) == stored)

    def example(self) -> object:
        """Some value, to check whether a config accepts it."""
        return self.choices[0] if self.choices is not None else self.low

    def describe(self) -> list[object]:
        """A description as JSON values, equal for equal dimensions."""
        return list(self.choices) if self.choices is not None else [self.low, self.high, self.step, self.log]


def read_space(section: object, extra: Sequence[str] = ()) -> list[Dimension]:
    """The dimensions in `tune.space` of a config and in additional `KEY=SPEC` strings, which take precedence."""
    if section is not None and not isinstance(section, Mapping):
        raise ForgefieldError(f"tune.space is {section!r}; it should give for each key {FORM}.")
    specs = dict(section or {})
    for word in extra:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ForgefieldError(f"--space {word}: write KEY=SPEC, as in 'training.lr={{log: [1e-5, 1e-2]}}'.")
        try:
            specs[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ForgefieldError(f"--space {word}: '{text}' cannot be read as YAML.") from error
    if not specs:
        raise ForgefieldError(
            "There is nothing to vary: name keys of the config in tune.space, as in {training.lr: {log: [1e-5, 1e-2]}}, or "
            "with --space."
        )
    return [_dimension(str(key), spec) for key, spec in specs.items()]


def override(key: str, value: object) -> str:
    """`key=value` as a command line would give it."""
    return f"{key}={_hydra(value)}"


def _dimension(key: str, spec: object) -> Dimension:
    where = f"tune.space: {key}"
    if isinstance(spec, list):
        if len(spec) < 2 or len({storable(choice) for choice in spec}) != len(spec):
            raise ForgefieldError(f"{where} is {spec}; a list of choices has two or more, all different.")
        return Dimension(key, choices=tuple(spec))
    if not isinstance(spec, Mapping) or len(spec) != 1 or next(iter(spec)) not in KINDS:
        raise ForgefieldError(f"{where} must be {FORM}, not {spec!r}.")
    kind, numbers = next(iter(spec.items()))
    limits = [x for x in map(_number, numbers) if x is not None] if isinstance(numbers, list) else []
    if len(limits) not in ((2, 3) if kind == "range" else (2,)) or len(limits) != len(numbers):
        raise ForgefieldError(f"{where} must be {FORM}, not {spec!r}.")
    low, high = limits[:2]
    step = limits[2] if len(limits) > 2 else None
    if not low < high or (kind == "log" and not low > 0) or (step is not None and not 0 < step <= high - low):
        positive = ", above 0" if kind == "log" else ""
        raise ForgefieldError(f"{where}: {spec[kind]} should rise from low to high{positive}, with a step that fits.")
    return Dimension(key, None, low, high, step, kind == "log")


def _number(value: object) -> int | float | None:
    """A number; None for anything else. YAML reads 1e-5 as a string."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def storable(value: object) -> Stored:
    """The form in which Optuna stores a value: numbers and strings as they are, lists and mappings as JSON."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else json.dumps(value)


def _hydra(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    return json.dumps(value)


def short(value: object) -> str:
    """A value of a setting, with four digits if it is not a whole number."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)
