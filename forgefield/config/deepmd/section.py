"""A section of a DeePMD-kit input while it is translated: every key is taken, refused with a reason, or unknown.

A value is checked when it is taken; keys that were not taken are an error at `finish`. So no key is ever ignored, and
every message names the file, the key and what would be right.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import Limits
from forgefield.errors import ForgefieldError

LARGEST = sys.float_info.max
MISSING: Any = object()
"""Default of a required key."""


class Section:
    """One mapping of the input. key: its dotted name, empty for the file. notes: messages for the user, by key.

    Keys that begin with `_` are comments. A value of null counts as missing.
    """

    program: ClassVar[str] = "DeePMD-kit"
    """Whose input it is, for messages."""
    comment: ClassVar[str | None] = "_"
    """Beginning of keys that are comments."""

    def __init__(self, values: object, file: Path, key: str = "", notes: dict[str, str] | None = None) -> None:
        self.file, self.key = file, key
        self.notes: dict[str, str] = {} if notes is None else notes
        if not isinstance(values, Mapping):
            raise ForgefieldError(f"{file}: '{key}' must be a section (a mapping of keys), not {values!r:.60}.")
        self._left = {str(name): value for name, value in values.items() if not self._is_comment(str(name))}
        self._names: dict[str, None] = {}
        self._written: dict[str, str] = {}

    def _is_comment(self, name: str) -> bool:
        return self.comment is not None and name.startswith(self.comment)

    def names(self) -> list[str]:
        """The keys that were not taken yet, in their order."""
        return list(self._left)

    def written(self, name: str) -> str:
        """Under which of its names a key was taken."""
        return self._written.get(name, name)

    def peek(self, name: str) -> Any:
        """The value of a key that is taken later; None if it was taken."""
        return self._left.get(name)

    # --- values

    def take(self, name: str, default: object = None, *, also: Sequence[str] = ()) -> Any:
        """The value of a key, as it is. also: other names that DeePMD-kit accepts for it."""
        self._names |= dict.fromkeys((name, *also))
        aliases_set = [alias for alias in (name, *also) if self._left.get(alias) is not None]
        if len(aliases_set) > 1:
            raise ForgefieldError(
                f"{self.file}: '{self.path(aliases_set[0])}' and '{self.path(aliases_set[1])}' are two names of one key."
            )
        for alias in (name, *also):
            if alias in self._left and alias not in aliases_set:
                del self._left[alias]
        if aliases_set:
            self._written[name] = aliases_set[0]
            return self._left.pop(aliases_set[0])
        if default is MISSING:
            raise ForgefieldError(f"{self.file}: '{self.path(name)}' is missing.")
        return default

    def integer(
        self, name: str, default: object = None, *, at_least: int | None = None, also: Sequence[str] = ()
    ) -> int | Any:
        """A whole number."""
        value = self.take(name, default, also=also)
        if value is default:
            return value
        kind = "a whole number" if at_least is None else f"a whole number of at least {at_least}"
        if not is_number(value) or value != int(value) or (at_least is not None and value < at_least):
            raise self.wrong(name, value, kind)
        return int(value)

    def number(
        self,
        name: str,
        default: object = None,
        *,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        below: float | None = None,
        also: Sequence[str] = (),
    ) -> float | Any:
        """A number within bounds."""
        value = self.take(name, default, also=also)
        if value is default:
            return value
        if not is_number(value):
            raise self.wrong(name, value, "a number")
        limits = Limits(at_least, above, at_most, below)
        if not limits.allows(value):
            raise self.wrong(name, value, limits.describe())
        return float(value)

    def flag(self, name: str, default: object = False, *, also: Sequence[str] = ()) -> bool | Any:
        """True or false."""
        value = self.take(name, default, also=also)
        if value is not default and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: object = None, *, also: Sequence[str] = ()) -> str | Any:
        value = self.take(name, default, also=also)
        if value is not default and (not isinstance(value, str) or not value.strip()):
            raise self.wrong(name, value, "text")
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        value = self.take(name, default)
        if value not in choices:
            valid = ", ".join(choices)
            hint = did_you_mean(str(value), choices)
            raise ForgefieldError(f"{self.file}: '{self.path(name)}' must be one of {valid}, not {value!r:.60}.{hint}")
        return str(value)

    def below(self, name: str) -> Self | None:
        """The section inside this one, None where there is none."""
        values = self.take(name)
        return None if values is None else type(self)(values, self.file, self.path(name), self.notes)

    def below_each(self, name: str) -> list[Self]:
        """The sections in a list of this one; empty where there is none."""
        values = self.take(name, [])
        if not isinstance(values, list):
            raise self.wrong(name, values, "a list of sections")
        return [
            type(self)(value, self.file, f"{self.path(name)}[{number}]", self.notes)
            for number, value in enumerate(values)
        ]

    # --- what has no counterpart

    def only(self, name: str, default: object, why: str, *, also: Sequence[str] = ()) -> None:
        """Accept a key at its default, at which it does nothing; refuse any other value."""
        value = self.take(name, default, also=also)
        if value != default or isinstance(value, bool) != isinstance(default, bool):
            what = "is set" if isinstance(value, (dict, list)) else f"is {value!r:.60}"
            raise self.refused(name, f"{what}, but {why}")

    def note(self, name: str, text: str, *, unless: Collection[Any] = ()) -> None:
        """Take a key that has no setting in Forgefield, and note `text` unless it has one of these values."""
        value = self.take(name)
        if value is not None and value not in unless:
            self.notes[self.path(name)] = text

    def finish(self) -> None:
        """Refuse keys that were not taken."""
        for name in self._left:
            names = list(self._names)
            where = f"'{self.key}' has" if self.key else "an input has"
            hint = did_you_mean(name, names) or f" {self.program}'s {where}: {', '.join(names)}."
            raise ForgefieldError(f"{self.file}: unknown key '{self.path(name)}'.{hint}")

    # --- messages

    def path(self, name: str) -> str:
        """Dotted name of a key of this section, as it was written."""
        return f"{self.key}.{self.written(name)}" if self.key else self.written(name)

    def wrong(self, name: str, value: object, expected: str) -> ForgefieldError:
        return ForgefieldError(f"{self.file}: '{self.path(name)}' must be {expected}, not {value!r:.60}.")

    def refused(self, name: str, why: str) -> ForgefieldError:
        return ForgefieldError(f"{self.file}: '{self.path(name)}' {why}.")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST < value < LARGEST
