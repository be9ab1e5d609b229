"""How an option is declared: a field of a dataclass with its default, and with the bounds, choices and unit of its values.

    knots: int = option(1024, at_least=256, at_most=32767)
    \"\"\"Intervals of the table of radial weights.\"\"\"

The type is the annotation and the description is the docstring below. The checks of a config, `--help`, the comments in the
config that `forgefield init` writes, and the reference in docs/reference/options.md are all generated from this declaration.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

_KEY = "forgefield"
IMPORT_PATH = "an import path"
"""For `open_choices`: text with a dot."""
LARGEST_SEED = 2**32 - 1
"""NumPy's and Lightning's largest seed."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Allowed values of an option, in addition to its type. Bounds apply to numbers, and to each number of a list."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    """Allowed values, or allowed items of a list; None stands for null."""
    open_choices: str | None = None
    """What is allowed in addition to `choices`: `IMPORT_PATH`, or a description of mappings, which are checked elsewhere."""
    unit: str | None = None
    expected: str | None = None
    """Description of allowed values in messages. Default: a description of the bounds."""
    details: type | None = None
    """Dataclass that describes the keys of a mapping, or of each entry of a mapping by name, for the reference of options."""

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
        """The bounds: `a positive number`, `between 256 and 32767`, `above 0 and at most 1`; empty if there are none."""
        lower, upper = (self.at_least, self.above), (self.at_most, None if self.below == math.inf else self.below)
        if lower == (None, 0) and upper == (None, None):
            return "a positive number"
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least:.10g} and {self.at_most:.10g}"
        words = zip(("at least", "above", "at most", "below"), (*lower, *upper))
        return " and ".join(f"{word} {bound:.10g}" for word, bound in words if bound is not None)


def option(
    default: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Sequence[Any] = (),
    open_choices: str | None = None,
    unit: str | None = None,
    expected: str | None = None,
    details: type | None = None,
) -> Any:
    """A field of an options dataclass with this default; see `Limits` for what can be declared."""
    limits = Limits(at_least, above, at_most, below, tuple(choices), open_choices, unit, expected, details)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_KEY: limits})
    return dataclasses.field(default=default, metadata={_KEY: limits})


def allowed_values(limits: Limits, show: Callable[[object], str] = str) -> str:
    """The choices or bounds as text: `auto, vesin, matscipy`, `at least 0`; empty if every value of the type is allowed."""
    choices = [show(choice) for choice in limits.choices]
    choices += [limits.open_choices] if limits.open_choices is not None else []
    return ", ".join(choices) or limits.describe()


def seed_option(default: int | None) -> Any:
    """A seed of random numbers."""
    return option(default, at_least=0, at_most=LARGEST_SEED, expected=f"a whole number from 0 to {LARGEST_SEED}")


def limits_of(field: dataclasses.Field[Any]) -> Limits:
    """What is declared about a field; nothing for a plain one."""
    limits = field.metadata.get(_KEY)
    return limits if isinstance(limits, Limits) else Limits()


def declared_limits(cls: type, name: str) -> Limits:
    """What is declared about the field `name` of a dataclass."""
    return next(limits_of(field) for field in dataclasses.fields(cls) if field.name == name)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> its docstring as one line, inherited fields included; fields without one are left out."""
    inherited = [field_docs(base) for base in reversed(cls.__bases__) if dataclasses.is_dataclass(base)]
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    definition = tree.body[0]
    assert isinstance(definition, ast.ClassDef)
    docs = {name: text for base in inherited for name, text in base.items()}
    for statement, following in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _string(following)
            if text is not None:
                docs[statement.target.id] = " ".join(text.split())
    return docs


def first_sentence(description: str) -> str:
    """The first sentence of a description, without its full stop."""
    return description.partition(". ")[0].rstrip(".")


def class_doc(cls: type) -> str | None:
    """First docstring of the class as one line. (A dataclass without one gets its signature.)"""
    text = cls.__doc__
    return None if text is None or text.startswith(f"{cls.__name__}(") else " ".join(text.split())


def _string(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None
