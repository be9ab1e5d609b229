"""How an option is declared: a field of a dataclass with its default, and with the bounds, choices and unit of its values.

    knots: int = option(1024, at_least=256, at_most=32767)
    \"\"\"Intervals of the table of radial weights.\"\"\"

The type is the annotation and the description the docstring below. The checks of a config, the comments in the config that
`forgefield init` writes, and the reference in docs/options.md are all made from this declaration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

_KEY = "forgefield"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What values of an option are allowed, besides its type. Bounds apply to numbers, and to each number of a list."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    """All values that are allowed; None stands for null."""
    open_choices: str | None = None
    """What else is allowed where the choices are not all, such as "an import path"; checked elsewhere."""
    unit: str | None = None
    expected: str | None = None
    """What messages say is expected; made of the bounds where it is not given."""

    @property
    def has_bounds(self) -> bool:
        return any(bound is not None for bound in (self.at_least, self.above, self.at_most, self.below))

    def allows(self, number: float) -> bool:
        """Whether a number is within the bounds; nan is not."""
        return (
            not math.isnan(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def describe(self) -> str:
        """The bounds in words: `a positive number`, `from 256 to 32767`, `above 0, at most 1`; empty where there are none."""
        lower, upper = (self.at_least, self.above), (self.at_most, None if self.below == math.inf else self.below)
        if lower == (None, 0) and upper == (None, None):
            return "a positive number"
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least:.10g} to {self.at_most:.10g}"
        words = zip(("at least", "above", "at most", "below"), (*lower, *upper))
        return ", ".join(f"{word} {bound:.10g}" for word, bound in words if bound is not None)


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] = (),
    open_choices: str | None = None,
    unit: str | None = None,
    expected: str | None = None,
) -> Any:
    """A field of an options dataclass with this default; see `Limits` for what can be declared."""
    limits = Limits(at_least, above, at_most, below, tuple(choices), open_choices, unit, expected)
    return dataclasses.field(default=default, metadata={_KEY: limits})


def limits_of(field: dataclasses.Field[Any]) -> Limits:
    """What is declared about a field; nothing for a plain one."""
    limits = field.metadata.get(_KEY)
    return limits if isinstance(limits, Limits) else Limits()
