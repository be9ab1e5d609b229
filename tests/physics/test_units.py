"""Conversion factors agree with ASE, and unknown units are refused with a suggestion."""

from __future__ import annotations

import ase.units
import pytest

from forgefield.errors import ForgefieldError
from forgefield.physics.units import EV_PER_A3_TO_GPA, energy_factor, force_factor, length_factor, stress_factor


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (energy_factor("kcal/mol"), ase.units.kcal / ase.units.mol),
        (energy_factor("kJ/mol"), ase.units.kJ / ase.units.mol),
        (energy_factor("Hartree"), ase.units.Hartree),
        (energy_factor("Ry"), ase.units.Rydberg),
        (energy_factor("meV"), 1e-3),
        (length_factor("Bohr"), ase.units.Bohr),
        (length_factor("nm"), ase.units.nm),
        (force_factor("Ha/Bohr"), ase.units.Hartree / ase.units.Bohr),
        (force_factor("kcal/mol/A"), ase.units.kcal / ase.units.mol),
        (stress_factor("GPa"), ase.units.GPa),
        (stress_factor("kbar"), 1000 * ase.units.bar),
        (stress_factor("-kbar"), -1000 * ase.units.bar),
        (stress_factor("- 0.1 GPa"), -0.1 * ase.units.GPa),
        (stress_factor("1e1 eV/A^3"), 10.0),
        (stress_factor("Ha/Bohr^3"), ase.units.Hartree / ase.units.Bohr**3),
        (stress_factor("kcal/mol/A**3"), ase.units.kcal / ase.units.mol),
        (1 / EV_PER_A3_TO_GPA, ase.units.GPa),
    ],
)
def test_factors_are_those_of_ase(factor, expected):
    assert factor == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("function", "unit", "suggestion"),
    [
        (energy_factor, "kcalmol", "kcal/mol"),
        (energy_factor, "MeV", "meV"),
        (length_factor, "Bohrs", "Bohr"),
        (force_factor, "eV/Aa", "eV/A"),
        (force_factor, "eV", "eV/A"),
        (stress_factor, "Gpa", "GPa"),
        (stress_factor, "eV/A", "eV/A^3"),
    ],
)
def test_an_unknown_unit_names_the_nearest_known_one(function, unit, suggestion):
    with pytest.raises(ForgefieldError, match="did you mean") as error:
        function(unit)
    assert repr(suggestion) in str(error.value)
