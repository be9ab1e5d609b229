"""What descriptors of grid points are made of: the section `data.points.descriptors` of a config.

The names and defaults are those with which MALA calls LAMMPS' `sna/grid`, so that files made there can be told from their
settings alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ase.data import atomic_numbers

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError

DESCRIPTOR_TYPES = ("bispectrum", "gaussian")
DESCRIPTOR_KERNELS = ("auto", "compiled", "torch")
DESCRIPTOR_PRECISIONS = ("float64", "float32")
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

    type: str = "bispectrum"
    """bispectrum (SNAP, as LAMMPS' sna/grid) or gaussian (density of Gaussians on the atoms, one column per species)."""
    twojmax: int = 10
    """Bispectrum: largest degree, twice the largest angular momentum; 10 gives 91 components."""
    cutoff: float = 4.67637
    """Radius within which atoms are seen, A."""
    switch: bool = True
    """Bispectrum: whether the weight of an atom falls to 0 at the cutoff (half a cosine)."""
    rfac0: float = 0.99363
    """Bispectrum: largest angle on the sphere of four dimensions, reached at the cutoff, in units of pi."""
    rmin0: float = 0.0
    """Bispectrum: the distance that has angle 0, A."""
    element_weights: Mapping[str, float] | None = None
    """Bispectrum: weight of the atoms of each element, {Al: 1.0, O: 0.5}. Default: 1 for all."""
    sigma: float | None = None
    """Gaussian: width, A. Default: 0.2 A for a grid spacing of 0.08099 A, and in proportion to it."""
    species: Sequence[str] | None = None
    """Gaussian: elements in the order of the columns, [Al, O]. MALA and LAMMPS order them by symbol, `forgefield data
    descriptors` by atomic number; with several elements it has to be said."""
    precision: str = "float64"
    """float64, or float32 for the sums over neighbours and what follows; geometry is always float64."""
    kernel: str = "auto"
    """Bispectrum on a CPU: compiled (a loop in C, made by the C compiler at hand), torch, or auto: compiled if possible and if
    there are points enough."""

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
            if kind in DESCRIPTOR_TYPES and _ONLY_FOR.get(name, kind) != kind:
                raise ForgefieldError(
                    f"{where}.{name} is a setting of type={_ONLY_FOR[name]}; with type={kind} it has no "
                    "meaning and should be left out"
                )
        try:
            return cls(**settings)
        except ForgefieldError as error:
            raise ForgefieldError(f"{where}.{error}") from None

    def __post_init__(self) -> None:
        _require(
            self.type in DESCRIPTOR_TYPES,
            "type",
            self.type,
            f"{' or '.join(DESCRIPTOR_TYPES)}.{did_you_mean(str(self.type), DESCRIPTOR_TYPES)}",
        )
        _require(_is_number(self.cutoff) and self.cutoff > 0, "cutoff", self.cutoff, "a radius in A above 0")
        _require(
            self.precision in DESCRIPTOR_PRECISIONS, "precision", self.precision, " or ".join(DESCRIPTOR_PRECISIONS)
        )
        for entry in fields(self):
            mine = _ONLY_FOR.get(entry.name, self.type) == self.type
            _require(mine or getattr(self, entry.name) == entry.default, entry.name, getattr(self, entry.name),
                     f"left out, since it has no meaning with type={self.type}")  # fmt: skip
        if self.type == "gaussian":
            _require(self.sigma is None or (_is_number(self.sigma) and self.sigma > 0), "sigma", self.sigma,
                     "a width in A above 0")  # fmt: skip
            self._check_species()
        else:
            self._check_bispectrum()

    def _check_species(self) -> None:
        if self.species is None:
            return
        listed = isinstance(self.species, Sequence) and not isinstance(self.species, str)
        right = "elements in the order of the columns, each once, such as [Al, O]"
        _require(listed and len(self.species) > 0, "species", self.species, right)
        known = all(isinstance(symbol, str) and symbol in atomic_numbers and symbol != "X" for symbol in self.species)
        _require(known and len(set(self.species)) == len(self.species), "species", list(self.species), right)

    def _check_bispectrum(self) -> None:
        whole = isinstance(self.twojmax, int) and not isinstance(self.twojmax, bool)
        _require(whole and 0 <= self.twojmax <= LARGEST_TWOJMAX, "twojmax", self.twojmax,
                 f"a whole number from 0 to {LARGEST_TWOJMAX}")  # fmt: skip
        _require(self.kernel in DESCRIPTOR_KERNELS, "kernel", self.kernel, " or ".join(DESCRIPTOR_KERNELS))
        _require(isinstance(self.switch, bool), "switch", self.switch, "true or false")
        _require(_is_number(self.rfac0) and 0 < self.rfac0 <= 1, "rfac0", self.rfac0, "above 0 and at most 1")
        _require(_is_number(self.rmin0) and 0 <= self.rmin0 < self.cutoff, "rmin0", self.rmin0,
                 f"a distance in A from 0 to below the cutoff, {self.cutoff}")  # fmt: skip
        if self.element_weights is None:
            return
        _require(isinstance(self.element_weights, Mapping), "element_weights", self.element_weights,
                 "weights by element, such as {Al: 1.0, O: 0.5}")  # fmt: skip
        for symbol, weight in self.element_weights.items():
            _require(symbol in atomic_numbers, "element_weights", symbol, "a chemical symbol, such as Al")
            _require(_is_number(weight), f"element_weights.{symbol}", weight, "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(met: bool, key: str, value: object, right: str) -> None:
    if not met:
        raise ForgefieldError(f"{key}={value!r} is not valid: it should be {right}")
