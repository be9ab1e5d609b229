"""The two sentences with which values of settings are refused: not what is expected, and none of the choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.config.sources import Sources
from forgefield.errors import ForgefieldError


def wrong(sources: Sources, key: str, value: object, expected: str) -> ForgefieldError:
    """The error for a value that is not what was expected."""
    shown = "null" if value is None else repr(value)
    return ForgefieldError(f"{sources.where(key)}: '{key}' is {expected}, not {shown}.")


def check_choice(value: object, choices: Sequence[Any], key: str, sources: Sources) -> None:
    """Refuse a value that is none of these."""
    if value not in choices:
        names = [
            "null" if choice is None else str(choice).lower() if isinstance(choice, bool) else str(choice)
            for choice in choices
        ]
        valid = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
        hint = did_you_mean(str(value), names)
        raise ForgefieldError(f"{sources.where(key)}: '{key}' is {valid}, not {value!r}.{hint}")
