"""Units of targets on a grid: what to multiply stored values by to have LDOS in 1/(eV*A^3), DOS in 1/eV, density in 1/A^3.

Files are never rewritten; the factor is applied on reading. An openPMD file states its unit in SI itself.
"""

from __future__ import annotations

import re

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ldos.electronic.unit_guess import LDOS_UNITS
from forgefield.physics.units import JOULE, energy_factor, length_factor

STANDARD = {"ldos": "1/(eV*A^3)", "dos": "1/eV", "density": "1/A^3"}
"""The unit in which each kind of target is served."""

_IN_SI = {"ldos": JOULE * 1e30, "dos": JOULE, "density": 1e30}
"""One standard unit of each kind in SI."""

_ENERGIES, _LENGTHS = ("eV", "Ry", "Ha"), ("A", "Bohr")
KNOWN = {
    "ldos": tuple(LDOS_UNITS),
    "dos": tuple(f"1/{energy}" for energy in _ENERGIES),
    "density": tuple(f"1/{length}^3" for length in _LENGTHS),
}


def target_factor(target: str, unit: str, where: str = "data.points.units") -> float:
    """Values in `unit` times this are in the standard unit of `target` (ldos, dos or density)."""
    known = {_bare(name): name for name in KNOWN[require_target(target)]}
    name = known.get(_bare(unit))
    if name is None:
        raise ForgefieldError(
            f"{where}={unit!r} is not a unit of {target}; it should be one of {', '.join(KNOWN[target])}."
            f"{did_you_mean(str(unit), KNOWN[target])}"
        )
    if target == "ldos":
        return LDOS_UNITS[name]
    energy = next((word for word in _ENERGIES if f"/{word}" in name), None)
    length = next((word for word in _LENGTHS if f"{word}^3" in name), None)
    factor = 1.0
    factor /= energy_factor(energy) if energy else 1.0
    return factor / (length_factor(length) ** 3 if length else 1.0)


def require_target(target: str) -> str:
    """`target` if it is a kind of target."""
    if target not in STANDARD:
        raise ForgefieldError(
            f"data.points.target={target!r} is not known; it should be one of {', '.join(STANDARD)}."
            f"{did_you_mean(str(target), STANDARD)}"
        )
    return target


def factor_from_si(target: str, unit_si: float) -> float:
    """Values whose unit is `unit_si` in SI, times this, are in the standard unit of `target`."""
    factor = unit_si / _IN_SI[require_target(target)]
    return 1.0 if abs(factor - 1.0) < 1e-6 else factor  # constants of other programs differ in the last digits


def _bare(unit: str) -> str:
    """The unit without spaces, brackets and the ways of writing a power."""
    text = re.sub(r"[\s()]", "", str(unit)).replace("**", "^").lower()
    return text.replace("angstrom", "a").replace("a0", "bohr").replace("hartree", "ha").replace("rydberg", "ry")
