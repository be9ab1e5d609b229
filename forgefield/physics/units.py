"""Unit conversion: what to multiply a number by to have it in eV, A, eV/A or eV/A^3.

Names are case-sensitive where case carries meaning (`meV` is not `MeV`). The constants are those of CODATA 2014, from
which ASE derives its units too, so a file written by ASE reads back to the last digit.
"""

from __future__ import annotations

import difflib
import math
import re

from forgefield.errors import ForgefieldError

_SPEED_OF_LIGHT = 299792458.0  # m/s
_MU0 = 4.0e-7 * math.pi  # N/A^2
_HBAR = 6.626070040e-34 / (2 * math.pi)  # J s
_ELEMENTARY_CHARGE = 1.6021766208e-19  # C
_ELECTRON_MASS = 9.10938356e-31  # kg
_AVOGADRO = 6.022140857e23  # 1/mol
_BOLTZMANN = 1.38064852e-23  # J/K
_EPS0 = 1 / _MU0 / _SPEED_OF_LIGHT**2

JOULE = 1 / _ELEMENTARY_CHARGE  # eV
HARTREE = _ELECTRON_MASS * _ELEMENTARY_CHARGE**3 / (16 * math.pi**2 * _EPS0**2 * _HBAR**2)  # eV
RYDBERG = HARTREE / 2  # eV
BOHR = 4e10 * math.pi * _EPS0 * _HBAR**2 / _ELECTRON_MASS / _ELEMENTARY_CHARGE**2  # A
BOLTZMANN = _BOLTZMANN * JOULE  # eV/K
PASCAL = JOULE / 1e30  # eV/A^3
EV_PER_A3_TO_GPA = 1 / (1e9 * PASCAL)

_ENERGY = {
    "eV": 1.0,
    "meV": 1e-3,
    "keV": 1e3,
    "kcal/mol": 4184.0 * JOULE / _AVOGADRO,
    "kJ/mol": 1000.0 * JOULE / _AVOGADRO,
    "Ha": HARTREE,
    "mHa": HARTREE / 1000,
    "Ry": HARTREE / 2,
}
_LENGTH = {"A": 1.0, "Bohr": BOHR, "nm": 10.0}
_PRESSURE = {
    "Pa": PASCAL,
    "kPa": 1e3 * PASCAL,
    "MPa": 1e6 * PASCAL,
    "GPa": 1e9 * PASCAL,
    "bar": 1e5 * PASCAL,
    "kbar": 1e8 * PASCAL,
    "Mbar": 1e11 * PASCAL,
    "atm": 101325.0 * PASCAL,
}
_FACTOR = re.compile(r"\s*([+-]?)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)?\s*(.*)", re.DOTALL)
"""A sign, a number and a unit. It matches any text."""
_ALIASES = {
    "ev": "eV",
    "Hartree": "Ha",
    "hartree": "Ha",
    "ha": "Ha",
    "Eh": "Ha",
    "Rydberg": "Ry",
    "rydberg": "Ry",
    "ry": "Ry",
    "Kcal/mol": "kcal/mol",
    "kcal/Mol": "kcal/mol",
    "kj/mol": "kJ/mol",
    "Angstrom": "A",
    "angstrom": "A",
    "Ang": "A",
    "ang": "A",
    "Å": "A",
    "bohr": "Bohr",
    "a0": "Bohr",
    "au": "Bohr",
    "gpa": "GPa",
    "kBar": "kbar",
    "kB": "kbar",
}


def energy_factor(unit: str) -> float:
    """Energy in `unit` times this is in eV."""
    return _look_up(unit, _ENERGY, "an energy")


def split_per_atom(unit: str) -> tuple[str, bool]:
    """The unit of energy in `unit`, and whether it is per atom: `meV/atom` gives `meV` and True."""
    energy, _, last = unit.strip().rpartition("/")
    return (energy.strip(), True) if last.strip().lower() == "atom" else (unit, False)


def label_energy_factor(unit: str) -> tuple[float, bool]:
    """What turns the energy of a frame in `unit`, such as `eV` or `kcal/mol/atom`, into eV: a factor, and whether to multiply
    by the number of atoms as well."""
    energy, per_atom = split_per_atom(unit)
    return energy_factor(energy), per_atom


def length_factor(unit: str) -> float:
    """Length in `unit` times this is in A."""
    return _look_up(unit, _LENGTH, "a length")


def force_factor(unit: str) -> float:
    """Force in `unit`, such as `kcal/mol/A` or `Ha/Bohr`, times this is in eV/A."""
    energy, slash, length = unit.strip().rpartition("/")
    if not slash or not _is_known(energy, _ENERGY) or not _is_known(length, _LENGTH):
        raise _unknown(unit, [f"{e}/{x}" for e in _ENERGY for x in _LENGTH], "a force")
    return energy_factor(energy) / length_factor(length)


def stress_factor(unit: str) -> float:
    """Stress in `unit`, such as `GPa` or `kcal/mol/A^3`, times this is in eV/A^3.

    A sign and a number may come first: `-kbar` for the opposite sign, `-0.1 GPa`.
    """
    match = _FACTOR.fullmatch(unit)
    sign, number, unit = match.groups(default="") if match else ("", "", unit)
    factor = float(number or 1) * (-1 if sign == "-" else 1)
    if not 0 < abs(factor) < math.inf:
        raise ForgefieldError(f"{number} {unit}: the factor of a stress must be a positive number or a negative one")
    return factor * _stress_factor(unit)


def _stress_factor(unit: str) -> float:
    if _is_known(unit, _PRESSURE):
        return _look_up(unit, _PRESSURE, "a stress")
    energy, _, volume = unit.strip().rpartition("/")
    length = volume.strip().removesuffix("3").removesuffix("**").removesuffix("^")
    if not volume.strip().endswith("3") or not _is_known(energy, _ENERGY) or not _is_known(length, _LENGTH):
        raise _unknown(unit, [*_PRESSURE, *(f"{e}/{x}^3" for e in _ENERGY for x in _LENGTH)], "a stress")
    return energy_factor(energy) / length_factor(length) ** 3


def _canonical(unit: str) -> str:
    unit = unit.strip()
    return _ALIASES.get(unit, unit)


def _is_known(unit: str, table: dict[str, float]) -> bool:
    return _canonical(unit) in table


def _look_up(unit: str, table: dict[str, float], kind: str) -> float:
    if not _is_known(unit, table):
        raise _unknown(unit, list(table), kind)
    return table[_canonical(unit)]


def _unknown(unit: str, supported: list[str], kind: str) -> ForgefieldError:
    by_lower = {name.lower(): name for name in supported}
    nearest = difflib.get_close_matches(unit.strip().lower(), by_lower, n=1, cutoff=0.4)
    hint = f"did you mean {by_lower[nearest[0]]!r}?" if nearest else f"known: {', '.join(supported[:9])}, ..."
    return ForgefieldError(f"{unit!r} is not {kind} unit that Forgefield supports; {hint}")
