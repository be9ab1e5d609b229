"""Which unit of a local density of states explains a number of electrons that is wrong.

Forgefield counts in 1/(eV A^3); files of others hold 1/(eV Bohr^3) or, straight from Quantum ESPRESSO, 1/(Ry Bohr^3).
"""

from __future__ import annotations

import math
import re

from forgefield.errors import ForgefieldError
from forgefield.physics.units import energy_factor, length_factor

LDOS_UNITS = {
    f"1/({energy}*{length}^3)": 1 / (energy_factor(energy) * length_factor(length) ** 3)
    for energy in ("eV", "Ry", "Ha")
    for length in ("A", "Bohr")
}
"""What to multiply an LDOS with to have it in 1/(eV A^3)."""


def likely_unit_factor(
    electrons_found: float, electrons_expected: float, unit: str = "1/(eV*A^3)", tolerance: float = 0.2
) -> tuple[str, float] | None:
    """The unit that an LDOS, read as `unit`, is really in, and the factor that would mend it; None if no unit explains it.

    `electrons_found` is the LDOS integrated over space, and over energy with the occupations of the reference Fermi energy;
    a coarse energy grid makes it inexact, so it is compared within `tolerance` (relative).
    """
    if not (electrons_found > 0 and electrons_expected > 0):
        return None
    assumed, needed = LDOS_UNITS[_known(unit)], electrons_expected / electrons_found
    miss = {name: abs(math.log(factor / assumed / needed)) for name, factor in LDOS_UNITS.items()}
    name = min(miss, key=lambda candidate: miss[candidate])
    if miss[name] > math.log1p(tolerance):
        return None
    return name, LDOS_UNITS[name] / assumed


def check_electrons(
    electrons_found: float,
    electrons_expected: float,
    *,
    where: str,
    unit: str = "1/(eV*A^3)",
    tolerance: float = 0.2,
) -> None:
    """A ForgefieldError naming the unit that would fit, if the electrons of an LDOS contradict those of its calculation.

    where: what the LDOS is, for the message. unit: the one it was read as. tolerance: relative.
    """
    if abs(electrons_found - electrons_expected) <= tolerance * electrons_expected:
        return
    likely = likely_unit_factor(electrons_found, electrons_expected, unit, tolerance)
    if likely is None or likely[0] == _known(unit):
        hint = "no other unit of an LDOS explains it: check the energies of the levels, the cell and the Fermi energy"
    else:
        hint = f"it is probably in {likely[0]} (a factor of {likely[1]:.5g}): set units: {likely[0]}"
    raise ForgefieldError(
        f"{where}: the LDOS, read as {unit}, holds {electrons_found:.4g} electrons where the calculation has "
        f"{electrons_expected:.4g}; {hint}"
    )


def _known(unit: str) -> str:
    """The unit as it is written here: `1/(eV*A^3)` of `1 / (ev Angstrom**3)`, `1/eV/A^3` and the like."""
    name = next((name for name in LDOS_UNITS if _factors(name) == _factors(unit)), None)
    if name is None:
        raise ForgefieldError(f"{unit!r} is not a unit of an LDOS; it should be one of {', '.join(LDOS_UNITS)}")
    return name


def _factors(unit: str) -> list[str]:
    text = unit.lower().replace("**", "^").replace("angstrom", "a").replace("rydberg", "ry").replace("hartree", "ha")
    return sorted(re.split(r"[\s*()/]+", text.strip("()/ ")))
