"""Values that are text, such as space-group symbols, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

SPACE_GROUPS = "space_groups"
"""As `values` of a field: symbols of space groups become their numbers."""
_OLDER_SYMBOLS = {"Abm2": 39, "Aba2": 41, "Cmca": 64, "Cmma": 67, "Ccca": 68}
"""Before the International Tables of 1992."""


def number_of(text: str, values: str | Sequence[str]) -> float | None:
    """The number of a space group, or the position in a list; None for a text that is neither.

    values: `space_groups` or the list.
    """
    if isinstance(values, str):
        number = _space_groups().get(_squeezed(text))
        return None if number is None else float(number)
    return float(values.index(text)) if text in values else None


@lru_cache(maxsize=1)
def _space_groups() -> dict[str, int]:
    """Symbol of Hermann and Mauguin without blanks -> number of the space group."""
    from ase.spacegroup import Spacegroup

    return {_squeezed(Spacegroup(number).symbol): number for number in range(1, 231)} | _OLDER_SYMBOLS


def _squeezed(symbol: str) -> str:
    """Without blanks, and without the underscores that some data bases write before indices."""
    return symbol.replace(" ", "").replace("_", "")
