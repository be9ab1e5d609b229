"""What a search may vary: keys of a config, each with a range or a list of choices; and how a value becomes an override.

In a config: `training.lr: {log: [1e-5, 1e-2]}`, `model.hidden: [[100], [200, 200]]`, `training.ema: {range: [0.9, 0.999]}`,
`data.batch.points: {range: [500, 4000, 500]}` (whole numbers, with a step). Ranges of whole numbers give whole numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from forgefield.errors import ForgefieldError

KINDS = ("range", "log")
FORM = "a list of choices, {range: [low, high]}, {range: [low, high, step]} or {log: [low, high]}"


@dataclass(frozen=True)
class Dimension:
    """One key that is varied. choices: its values, or None for a range from low to high."""

    key: str
    choices: tuple[Any, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        return self.choices is None and all(isinstance(x, int) for x in (self.low, self.high, self.step or 1))

    def suggest(self, trial: Any) -> Any:
        """The value that a trial of Optuna takes."""
        if self.choices is not None:
            return self.decoded(trial.suggest_categorical(self.key, [_word(choice) for choice in self.choices]))
        if self.whole:
            return trial.suggest_int(self.key, self.low, self.high, step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def decoded(self, stored: Any) -> Any:
        """The value that Optuna keeps as `stored`: it knows numbers and words only."""
        if self.choices is None:
            return stored
        return next(choice for choice in self.choices if _word(choice) == stored)

    def example(self) -> Any:
        """A value, to see whether a config takes it."""
        return self.choices[0] if self.choices is not None else self.low

    def describe(self) -> Any:
        """Plain values that two searches over the same space share."""
        return list(self.choices) if self.choices is not None else [self.low, self.high, self.step, self.log]


def read_space(section: Any, extra: Sequence[str] = ()) -> list[Dimension]:
    """The space of a config's `tune.space` and of `KEY=SPEC` words, which come on top."""
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


def override(key: str, value: Any) -> str:
    """`key=value` as a command line would give it."""
    return f"{key}={_hydra(value)}"


def _dimension(key: str, spec: Any) -> Dimension:
    where = f"tune.space: {key}"
    if isinstance(spec, list):
        if len(spec) < 2 or len({_word(choice) for choice in spec}) != len(spec):
            raise ForgefieldError(f"{where} is {spec}; a list of choices has two or more, all different.")
        return Dimension(key, choices=tuple(spec))
    if not isinstance(spec, Mapping) or len(spec) != 1 or next(iter(spec)) not in KINDS:
        raise ForgefieldError(f"{where} is {spec!r}; it should be {FORM}.")
    kind, numbers = next(iter(spec.items()))
    numbers = [_number(x) for x in numbers] if isinstance(numbers, list) else []
    if len(numbers) not in ((2, 3) if kind == "range" else (2,)) or any(x is None for x in numbers):
        raise ForgefieldError(f"{where} is {spec!r}; it should be {FORM}.")
    low, high, step = (*numbers, None)[:3]
    if not low < high or (kind == "log" and not low > 0) or (step is not None and not 0 < step <= high - low):
        positive = ", above 0" if kind == "log" else ""
        raise ForgefieldError(f"{where}: {spec[kind]} should rise from low to high{positive}, with a step that fits.")
    return Dimension(key, None, low, high, step, kind == "log")


def _number(value: Any) -> Any:
    """YAML takes 1e-5 for a word."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _word(value: Any) -> Any:
    """What Optuna can keep: numbers and words as they are, lists and mappings as text."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else json.dumps(value)


def _hydra(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    return json.dumps(value)
