"""Options of the descriptors of grid points: the section `data.points.descriptors` of a config.

Names and defaults are those with which MALA calls LAMMPS' `sna/grid`, so that the settings of its files can be used directly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ase.data import atomic_numbers

from forgefield.config.nearest import did_you_mean
from forgefield.config.option import limits_of, option
from forgefield.errors import ForgefieldError

LARGEST_TWOJMAX = 20
_ONLY_FOR = {
    "twojmax": "bispectrum",
    "switch": "bispectrum",
    "rfac0": "bispectrum",
    "rmin0": "bispectrum",
    "element_weights": "bispectrum",
    "kernel": "bispectrum",
    "sigma": "gaussian",
    "species": "gaussian",
}


@dataclass(frozen=True)
class DescriptorOptions:
    """How descriptors of points are computed from the atoms around them."""

    type: str = option("bispectrum", choices=("bispectrum", "gaussian"))
    """bispectrum (SNAP, as in LAMMPS' sna/grid) or gaussian (sum of Gaussians at the atoms, one column per species)."""
    twojmax: int = option(10, at_least=0, at_most=LARGEST_TWOJMAX)
    """Bispectrum: twice the largest angular momentum; 10 gives 91 components."""
    cutoff: float = option(4.67637, above=0, unit="A")
    """Cutoff radius within which atoms contribute."""
    switch: bool = True
    """Bispectrum: let the weight of an atom decrease smoothly to 0 at the cutoff (half a cosine)."""
    rfac0: float = option(0.99363, above=0, at_most=1)
    """Bispectrum: largest angle on the sphere in four dimensions, reached at the cutoff, in units of pi."""
    rmin0: float = option(0.0, at_least=0, unit="A")
    """Bispectrum: distance that corresponds to angle 0."""
    element_weights: Mapping[str, float] | None = None
    """Bispectrum: weights of atoms by element, {Al: 1.0, O: 0.5}. Default: 1."""
    sigma: float | None = option(None, above=0, unit="A")
    """Gaussian: width. Default: 0.2 A for a grid spacing of 0.08099 A, and in proportion to the spacing."""
    species: Sequence[str] | None = None
    """Gaussian: elements in the order of the columns, [Al, O]. Required with several elements, because MALA and LAMMPS sort by
    symbol and `forgefield data descriptors` by atomic number."""
    precision: str = option("float64", choices=("float64", "float32"))
    """Precision of the sums over neighbours; geometry is always float64."""
    kernel: str = option("auto", choices=("auto", "compiled", "torch"))
    """Bispectrum on a CPU: a C loop compiled on this machine (compiled) or PyTorch (torch). auto: compiled if possible and if
    there are enough points."""

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], where: str = "descriptors") -> DescriptorOptions:
        """Options from a section of a config; `where` is its key, for messages."""
        names = [entry.name for entry in fields(cls)]
        for name in settings:
            if name not in names:
                raise ForgefieldError(
                    f"{where}.{name}: there is no such setting.{did_you_mean(str(name), names)} "
                    f"Settings of descriptors are {', '.join(names)}."
                )
        kind = settings.get("type", cls.type)
        for name in settings:
            if kind in _ONLY_FOR.values() and _ONLY_FOR.get(name, kind) != kind:
                raise ForgefieldError(
                    f"{where}.{name} is a setting of type={_ONLY_FOR[name]}; with type={kind} it has no effect: remove it"
                )
        try:
            return cls(**settings)
        except ForgefieldError as error:
            raise ForgefieldError(f"{where}.{error}") from None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, limits = getattr(self, entry.name), limits_of(entry)
            if limits.choices:
                hint = did_you_mean(str(value), limits.choices)
                _require(value in limits.choices, entry.name, value, f"{' or '.join(limits.choices)}.{hint}")
            if _ONLY_FOR.get(entry.name, self.type) != self.type:
                _require(
                    value == entry.default, entry.name, value, f"left out, since it is not used with type={self.type}"
                )
            elif limits.has_bounds and value is not None:
                expected = f"a whole number {limits.describe()}" if entry.type == "int" else limits.describe()
                is_valid = (
                    _is_number(value) and limits.allows(value) and (entry.type != "int" or isinstance(value, int))
                )
                _require(is_valid, entry.name, value, expected)
        if self.type == "gaussian":
            self._check_species()
        else:
            self._check_bispectrum()

    def _check_species(self) -> None:
        if self.species is None:
            return
        listed = isinstance(self.species, Sequence) and not isinstance(self.species, str)
        expected = "a list of different elements in the order of the columns, such as [Al, O]"
        _require(listed and len(self.species) > 0, "species", self.species, expected)
        valid = all(isinstance(symbol, str) and symbol in atomic_numbers and symbol != "X" for symbol in self.species)
        _require(valid and len(set(self.species)) == len(self.species), "species", list(self.species), expected)

    def _check_bispectrum(self) -> None:
        _require(isinstance(self.switch, bool), "switch", self.switch, "true or false")
        _require(self.rmin0 < self.cutoff, "rmin0", self.rmin0, f"a distance below the cutoff, {self.cutoff} A")
        if self.element_weights is None:
            return
        _require(isinstance(self.element_weights, Mapping), "element_weights", self.element_weights,
                 "weights by element, such as {Al: 1.0, O: 0.5}")  # fmt: skip
        for symbol, weight in self.element_weights.items():
            _require(
                symbol in atomic_numbers, "element_weights", symbol, "weights by chemical symbol, such as {Al: 1.0}"
            )
            _require(_is_number(weight), f"element_weights.{symbol}", weight, "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(met: bool, key: str, value: object, expected: str) -> None:
    if not met:
        raise ForgefieldError(f"{key} must be {expected}, not {value!r}")
