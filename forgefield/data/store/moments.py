"""Numbers that describe a column and can be merged: of blocks to a part, of parts to a store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from ase.data import chemical_symbols


@dataclass
class Moments:
    """Count, mean, sum of squared deviations from it, and range of a set of numbers."""

    count: int = 0
    mean: float = 0.0
    squared_deviations: float = 0.0
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        """Of all that is not NaN."""
        values = values[~np.isnan(values)].reshape(-1)
        if values.size == 0:
            return cls()
        mean = float(values.mean())
        return cls(values.size, mean, float(((values - mean) ** 2).sum()), float(values.min()), float(values.max()))

    def merge(self, other: Moments) -> Moments:
        """Of both sets together."""
        if other.count == 0 or self.count == 0:
            return self if other.count == 0 else other
        count = self.count + other.count
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * other.count / count,
            self.squared_deviations + other.squared_deviations + step**2 * self.count * other.count / count,
            min(low for low in (self.low, other.low) if low is not None),
            max(high for high in (self.high, other.high) if high is not None),
        )

    @property
    def std(self) -> float | None:
        return (self.squared_deviations / self.count) ** 0.5 if self.count else None


LABELS = {"energy_per_atom": "eV/atom", "forces": "eV/A", "stress": "eV/A^3"}
"""Labels that are described, and their units."""


@dataclass
class PartStatistics:
    """What the manifest of a store says about the numbers in it."""

    species: dict[str, int] = field(default_factory=dict)
    """Atoms of each species."""
    atoms: Moments = field(default_factory=Moments)
    """Of the number of atoms in a frame."""
    labels: dict[str, Moments] = field(default_factory=lambda: {name: Moments() for name in LABELS})
    """Of all energies per atom, force components, stress components, and numbers in fields."""

    def add(self, arrays: dict[str, np.ndarray], n_atoms: np.ndarray, fields: Iterable[str] = ()) -> None:
        """Take in a block of columns. fields: names of fields among them."""
        counts = np.bincount(arrays["numbers"])
        self.merge(
            PartStatistics(
                {chemical_symbols[z]: int(counts[z]) for z in np.flatnonzero(counts)},
                Moments.of(n_atoms.astype(np.float64)),
                {
                    "energy_per_atom": Moments.of(arrays["energy"] / n_atoms),
                    "forces": Moments.of(arrays["forces"]),
                    "stress": Moments.of(arrays["stress"]),
                    **{name: Moments.of(arrays[name]) for name in fields},
                },
            )
        )

    def merge(self, other: PartStatistics) -> None:
        """Take in those of other frames."""
        for symbol, count in other.species.items():
            self.species[symbol] = self.species.get(symbol, 0) + count
        self.atoms = self.atoms.merge(other.atoms)
        for name, moments in other.labels.items():
            self.labels[name] = self.labels.get(name, Moments()).merge(moments)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PartStatistics:
        labels = {name: Moments(**moments) for name, moments in values["labels"].items()}
        return cls(dict(values["species"]), Moments(**values["atoms"]), labels)
