"""Values that a source holds under names that are no label, and which of them may be the label that was not found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from forgefield.data.frame import RawFrame

SHOWN = 5
"""How many candidates are named."""
_SIZES = {"energy": (("frame", 1),), "forces": (("atom", 3),), "stress": (("frame", 6), ("frame", 9))}
"""Label -> what has how many numbers."""
_WORDS = {"energy": ("energ", "ener", "e_", "_e"), "forces": ("forc", "frc", "grad"), "stress": ("stress", "virial")}
"""Parts of names that make a value a likelier candidate."""


class LabelCandidates:
    """Remembers names of values that are numbers, with how many there are of each frame or atom."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[str, int]] = {}
        """Name -> frame or atom, and how many numbers each has."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def note(self, raw: RawFrame) -> None:
        """Remember the values of a frame whose names have not been seen before."""
        for per, values in (("atom", raw.arrays), ("frame", raw.info), ("frame", raw.results)):
            for name in values:
                if name not in self._sizes:
                    size = _count(values[name])
                    if per == "frame" and size == 3 * len(raw.numbers) and np.ndim(values[name]) == 2:
                        per, size = "atom", 3  # results of calculators are not divided into the two
                    elif per == "atom":
                        size //= max(len(raw.numbers), 1)
                    if size:
                        self._sizes[name] = (per, size)

    def hint(self, label: str, known: Iterable[str]) -> str:
        """What may be `label`, the likeliest first, and the setting that says so; empty where nothing fits.

        known: names that are labels already.
        """
        known = set(known)
        fitting = [name for name, size in self._sizes.items() if size in _SIZES[label] and name not in known]
        likely = [name for name in fitting if any(word in name.lower() for word in _WORDS[label])]
        names = [*likely, *(name for name in fitting if name not in likely)]
        if not names:
            return ""
        shown = ", ".join(f"{name} ({self._describe(name)})" for name in names[:SHOWN])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        which = "it" if len(names) == 1 else "the first"
        return f"the data has {shown}{more}; to use {which} as the {label}, set data.labels.{label}={names[0]}"

    def _describe(self, name: str) -> str:
        per, size = self._sizes[name]
        return f"one number per {per}" if size == 1 else f"{size} numbers per {per}"


def _count(value: object) -> int:
    """How many numbers a value holds; 0 where it is something else."""
    if isinstance(value, (bool, str, bytes, Mapping)) or value is None:
        return 0
    try:
        array = np.asarray(value)
    except ValueError:
        return 0
    return int(array.size) if array.dtype.kind in "fiu" else 0
