"""Energy curves of two atoms for all pairs of elements, which show repulsion, binding and unphysical minima."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
from ase import Atoms
from ase.data import atomic_numbers, covalent_radii

from forgefield.trust.suites.measurement import Measurement, Panel, Setting, curve

POINTS = 100


def dimers(setting: Setting) -> Measurement:
    """Energies of pairs from 0.7 times the sum of covalent radii to beyond the cutoff, relative to the largest distance."""
    result, curves = Measurement(), []
    for one, other in combinations_with_replacement(setting.species, 2):
        bond = sum(covalent_radii[atomic_numbers[symbol]] for symbol in (one, other))
        distances = np.linspace(0.7 * bond, max(setting.cutoff, 2.5 * bond) + 0.2, POINTS)
        energies = np.array([_energy(setting, one, other, distance) for distance in distances])
        energies -= energies[-1]
        best, name = int(energies.argmin()), f"{one}-{other}"
        result.set(f"{name} distance", distances[best], "A")
        result.set(f"{name} depth", -energies[best], "eV")
        inner = energies[1:-1]
        minima = np.flatnonzero((inner < energies[:-2] - 1e-6) & (inner < energies[2:] - 1e-6))
        if best == 0:
            result.notes.append(f"{name}: the energy falls down to the smallest distance, {distances[0]:.2f} A.")
        if len(minima) > 1:
            result.notes.append(f"{name}: there are {len(minima)} minima, where one is expected.")
        shown = energies < max(4 * -energies[best], 2.0)
        curves.append(curve(distances[shown], energies[shown], name))
    result.panels.append(Panel("Dimers", "distance, A", "energy, eV", curves))
    return result


def _energy(setting: Setting, one: str, other: str, distance: float) -> float:
    atoms = Atoms([one, other], positions=[[0, 0, 0], [distance, 0, 0]])
    atoms.calc = setting.calculator
    return float(atoms.get_potential_energy())
