"""Properties of molecules: relaxation of shaken structures, vibrations, scans of dihedral angles."""

from __future__ import annotations

import numpy as np
from ase import Atoms, units
from ase.build import minimize_rotation_and_translation
from ase.neighborlist import build_neighbor_list, natural_cutoffs

from forgefield.errors import ForgefieldError
from forgefield.text import counted
from forgefield.trust.options import RelaxOptions
from forgefield.trust.relaxation import relax_atoms
from forgefield.trust.suites.measurement import Measurement, NotApplicable, Panel, Setting, curve

MOST_BONDS = 4
"""Largest number of dihedral angles that are scanned."""
ANGLES = np.arange(0.0, 361.0, 10.0)
PER_CM = units.invcm
"""Energy of one wavenumber, eV."""


def relaxed_molecule(setting: Setting) -> Atoms:
    """The structure with relaxed positions."""
    atoms = setting.atoms()
    converged, _ = relax_atoms(atoms, RelaxOptions(fmax=1e-3, steps=1000, optimiser="bfgs"))
    if not converged:
        raise ForgefieldError("The molecule did not relax within 1000 steps.")
    return atoms


def shaken_molecule(setting: Setting) -> Measurement:
    """How well a molecule with displaced atoms relaxes back."""
    relaxed = relaxed_molecule(setting)
    shaken = relaxed.copy()
    shaken.calc = setting.calculator
    random = np.random.default_rng(setting.options.seed)
    shaken.positions += random.normal(0, setting.options.rattle, shaken.positions.shape)
    converged, steps = relax_atoms(shaken, RelaxOptions(fmax=1e-3, steps=1000, optimiser="bfgs"))
    minimize_rotation_and_translation(relaxed, shaken)
    distance = np.linalg.norm(shaken.positions - relaxed.positions, axis=1)
    result = Measurement(notes=[] if converged else ["The relaxation did not converge within 1000 steps."])
    result.set("largest distance from the minimum", distance.max(), "A")
    difference = shaken.get_potential_energy() - relaxed.get_potential_energy()
    result.set("energy above the minimum", difference * 1e3, "meV")
    result.set("steps", steps, "")
    curves = [curve(range(len(distance)), np.sort(distance))]
    result.panels.append(
        Panel("Relaxation of a shaken molecule", "atom, sorted", "distance from the minimum, A", curves)
    )
    return result


def vibrations(setting: Setting) -> Measurement:
    """Harmonic frequencies of the relaxed molecule, by central differences of the forces."""
    atoms = relaxed_molecule(setting)
    wavenumbers = harmonic_wavenumbers(atoms, setting.options.displacement)
    moments = atoms.get_moments_of_inertia()
    rigid = 3 + int((moments > 1e-6 * moments.max()).sum()) if len(atoms) > 1 else 3
    internal = np.sort(wavenumbers[np.argsort(np.abs(wavenumbers))[rigid:]])
    if len(internal) == 0:
        raise NotApplicable("a single atom does not vibrate")
    result = Measurement()
    result.set("highest wavenumber", internal.max(), "1/cm")
    result.set("lowest wavenumber", internal.min(), "1/cm")
    result.set("zero-point energy", 0.5 * internal[internal > 0].sum() * PER_CM, "eV")
    imaginary = int((internal < 0).sum())
    result.set("imaginary modes", imaginary, "")
    if imaginary:
        modes = f"{counted(imaginary, 'mode')} {'is' if imaginary == 1 else 'are'}"
        result.notes.append(f"{modes} imaginary (shown as negative): the structure is not a minimum.")
    curves = [curve(range(len(internal)), internal, marker=True)]
    result.panels.append(Panel("Vibrations", "mode", "wavenumber, 1/cm", curves))
    return result


def harmonic_wavenumbers(atoms: Atoms, displacement: float) -> np.ndarray:
    """Wavenumbers, 1/cm, (3 n_atoms,), of all modes; imaginary ones are negative."""
    hessian = np.zeros((3 * len(atoms), 3 * len(atoms)))
    for row in range(3 * len(atoms)):
        sides = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions[row // 3, row % 3] += sign * displacement
            sides.append(moved.get_forces().ravel())
        hessian[row] = (sides[1] - sides[0]) / (2 * displacement)
    weights = np.repeat(atoms.get_masses() ** -0.5, 3)
    squares = np.linalg.eigvalsh((hessian + hessian.T) / 2 * np.outer(weights, weights))
    # units: sqrt(eV/A^2/u) = 1/time unit of ASE; hbar omega in eV
    return np.sign(squares) * np.sqrt(np.abs(squares)) * units._hbar * units.J * units.s / PER_CM


def dihedral_scans(setting: Setting) -> Measurement:
    """Energies along rigid rotations about single bonds that are not part of a ring."""
    atoms = relaxed_molecule(setting)
    found = rotatable_bonds(setting.structure)
    if not found:
        raise NotApplicable("the molecule has no bond to rotate about")
    result, curves = Measurement(), []
    for quadruple, moving in found[:MOST_BONDS]:
        start, energies = atoms.get_dihedral(*quadruple), []
        for angle in ANGLES:
            turned = atoms.copy()
            turned.calc = setting.calculator
            turned.set_dihedral(*quadruple, start + angle, indices=moving)
            energies.append(turned.get_potential_energy())
        name = "-".join(f"{atoms.symbols[i]}{i}" for i in quadruple)
        result.set(f"barrier {name}", 1e3 * (max(energies) - min(energies)), "meV")
        curves.append(curve(ANGLES, 1e3 * (np.array(energies) - energies[0]), name))
    if len(found) > MOST_BONDS:
        result.notes.append(f"{MOST_BONDS} of {len(found)} bonds are shown.")
    result.panels.append(Panel("Dihedral scans", "angle, degrees", "energy, meV", curves))
    return result


def rotatable_bonds(atoms: Atoms) -> list[tuple[tuple[int, int, int, int], list[int]]]:
    """Dihedral angles (a, b, c, d) about bonds b-c that are not in a ring, and the atoms on the side of c, which rotate."""
    neighbours = build_neighbor_list(
        atoms, cutoffs=natural_cutoffs(atoms, mult=1.15), self_interaction=False, bothways=True
    )
    bonded = [sorted(set(neighbours.get_neighbors(i)[0].tolist())) for i in range(len(atoms))]
    found = []
    for b in range(len(atoms)):
        for c in bonded[b]:
            ends = [i for i in bonded[b] if i != c], [i for i in bonded[c] if i != b]
            if c <= b or not all(ends):
                continue
            moving = _side(bonded, b, c)
            if b not in moving and len(moving) < len(atoms):
                found.append(((ends[0][0], b, c, ends[1][0]), sorted(moving)))
    return found


def _side(bonded: list[list[int]], b: int, c: int) -> set[int]:
    """Atoms that are connected to c without the bond b-c; b is among them if the bond is part of a ring."""
    reached, waiting = {c}, [c]
    while waiting:
        atom = waiting.pop()
        for other in bonded[atom]:
            if other not in reached and (atom, other) != (c, b):
                reached.add(other)
                waiting.append(other)
    return reached
