"""The nearest valid word to a misspelt one, for error messages.

Every message that refuses a name (a key, a unit, a species, a file) uses these two functions, so that all of them
read alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.75
"""How alike two words are where one may be a slip for the other, from 0 to 1: `num_layer` and `num_layers` (0.95) are,
`log_path` and `config_path` (0.74) are not."""

SHORT, NEAR_SHORT = 4, 0.66
"""In a word of up to four letters one letter may be wrong."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that looks most like `word`, ignoring case, or None if nothing comes close."""
    names = [str(candidate) for candidate in candidates]
    folded = [_fold(name) for name in names]
    if _fold(word) in folded:
        return names[folded.index(_fold(word))]
    cutoff = NEAR if len(_fold(word)) > SHORT else NEAR_SHORT
    close = difflib.get_close_matches(_fold(word), folded, n=1, cutoff=cutoff)
    return names[folded.index(close[0])] if close else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """ " Did you mean 'x'?" with its leading space, ready to follow a sentence; empty where nothing comes close."""
    candidate = nearest(word, candidates)
    return "" if candidate is None else f" Did you mean '{candidate}'?"


def _fold(word: str) -> str:
    return str(word).lower().lstrip("-").replace("-", "_")
