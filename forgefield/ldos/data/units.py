"""Units of targets on a grid: what to multiply stored values by to have LDOS in 1/(eV*A^3), DOS in 1/eV, density in 1/A^3.

Files are never rewritten; the factor is applied on reading. An openPMD file states its unit in SI itself.
"""

from __future__ import annotations

import math
import re

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.physics.units import JOULE, energy_factor, length_factor

LDOS_UNITS = {
    f"1/({energy}*{length}^3)": 1 / (energy_factor(energy) * length_factor(length) ** 3)
    for energy in ("eV", "Ry", "Ha")
    for length in ("A", "Bohr")
}
"""Factors that convert an LDOS to 1/(eV A^3)."""


def likely_unit_factor(
    electrons_integrated: float, electrons_expected: float, unit: str = "1/(eV*A^3)", tolerance: float = 0.2
) -> tuple[str, float] | None:
    """The probable unit of an LDOS that was read as `unit`, and the factor that corrects it; None if no unit explains it.

    `electrons_integrated` is the LDOS integrated over space, and over energy with the occupations of the reference Fermi
    energy; a coarse energy grid makes it inexact, so it is compared within `tolerance` (relative).
    """
    if not (electrons_integrated > 0 and electrons_expected > 0):
        return None
    assumed, needed = LDOS_UNITS[_canonical_unit(unit)], electrons_expected / electrons_integrated
    miss = {name: abs(math.log(factor / assumed / needed)) for name, factor in LDOS_UNITS.items()}
    name = min(miss, key=lambda candidate: miss[candidate])
    if miss[name] > math.log1p(tolerance):
        return None
    return name, LDOS_UNITS[name] / assumed


def check_electrons(
    electrons_integrated: float,
    electrons_expected: float,
    *,
    where: str,
    unit: str = "1/(eV*A^3)",
    tolerance: float = 0.2,
) -> None:
    """Raise a ForgefieldError that names the probable unit if an LDOS has the wrong number of electrons.

    where: description of the LDOS for the message. unit: the one it was read as. tolerance: relative.
    """
    if abs(electrons_integrated - electrons_expected) <= tolerance * electrons_expected:
        return
    likely = likely_unit_factor(electrons_integrated, electrons_expected, unit, tolerance)
    if likely is None or likely[0] == _canonical_unit(unit):
        hint = "no other unit of an LDOS explains it: check the energies of the levels, the cell and the Fermi energy"
    else:
        hint = f"it is probably in {likely[0]} (a factor of {likely[1]:.5g}): set units: {likely[0]}"
    raise ForgefieldError(
        f"{where}: the LDOS, read as {unit}, holds {electrons_integrated:.4g} electrons where the calculation has "
        f"{electrons_expected:.4g}; {hint}"
    )


def _canonical_unit(unit: str) -> str:
    """The canonical spelling of a unit: `1/(eV*A^3)` for `1 / (ev Angstrom**3)`, `1/eV/A^3` and so on."""
    name = next((name for name in LDOS_UNITS if _factors(name) == _factors(unit)), None)
    if name is None:
        raise ForgefieldError(f"{unit!r} is not a unit of an LDOS; it must be one of {', '.join(LDOS_UNITS)}")
    return name


def _factors(unit: str) -> list[str]:
    text = unit.lower().replace("**", "^").replace("angstrom", "a").replace("rydberg", "ry").replace("hartree", "ha")
    return sorted(re.split(r"[\s*()/]+", text.strip("()/ ")))


STANDARD = {"ldos": "1/(eV*A^3)", "dos": "1/eV", "density": "1/A^3"}
"""The unit to which targets are converted when they are read."""

_IN_SI = {"ldos": JOULE * 1e30, "dos": JOULE, "density": 1e30}
"""The standard units in SI."""

_ENERGIES, _LENGTHS = ("eV", "Ry", "Ha"), ("A", "Bohr")
TARGET_UNITS = {
    "ldos": tuple(LDOS_UNITS),
    "dos": tuple(f"1/{energy}" for energy in _ENERGIES),
    "density": tuple(f"1/{length}^3" for length in _LENGTHS),
}


def target_factor(target: str, unit: str, where: str = "data.points.units") -> float:
    """Factor that converts `unit` to the standard unit of `target` (ldos, dos or density)."""
    units = {_bare(name): name for name in TARGET_UNITS[require_target(target)]}
    name = units.get(_bare(unit))
    if name is None:
        raise ForgefieldError(
            f"{where}={unit!r} is not a unit of {target}; it must be one of {', '.join(TARGET_UNITS[target])}."
            f"{did_you_mean(str(unit), TARGET_UNITS[target])}"
        )
    if target == "ldos":
        return LDOS_UNITS[name]
    energy = next((word for word in _ENERGIES if f"/{word}" in name), None)
    length = next((word for word in _LENGTHS if f"{word}^3" in name), None)
    factor = 1.0
    factor /= energy_factor(energy) if energy else 1.0
    return factor / (length_factor(length) ** 3 if length else 1.0)


def require_target(target: str) -> str:
    """Return `target` if it is supported; otherwise raise an error."""
    if target not in STANDARD:
        raise ForgefieldError(
            f"data.points.target={target!r} is not known; it must be one of {', '.join(STANDARD)}."
            f"{did_you_mean(str(target), STANDARD)}"
        )
    return target


def factor_from_si(target: str, unit_si: float) -> float:
    """Factor that converts values with the unit `unit_si`, in SI, to the standard unit of `target`."""
    factor = unit_si / _IN_SI[require_target(target)]
    return 1.0 if abs(factor - 1.0) < 1e-6 else factor  # constants of other programs differ in the last digits


def unit_in_si(target: str) -> float:
    """The standard unit of `target` in SI."""
    return _IN_SI[require_target(target)]


def _bare(unit: str) -> str:
    """A normalised spelling: without spaces and brackets, powers as ^."""
    text = re.sub(r"[\s()]", "", str(unit)).replace("**", "^").lower()
    return text.replace("angstrom", "a").replace("a0", "bohr").replace("hartree", "ha").replace("rydberg", "ry")
