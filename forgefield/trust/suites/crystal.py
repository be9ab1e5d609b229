"""Properties of crystals: equation of state, elastic constants, phonons, vacancies, surfaces, relaxation of shaken cells."""

from __future__ import annotations

from typing import Any

import numpy as np
from ase import Atoms, units
from ase.build import make_supercell, surface
from ase.eos import EquationOfState
from ase.geometry import find_mic

from forgefield.errors import ForgefieldError
from forgefield.trust.options import RelaxOptions
from forgefield.trust.relaxation import relax_atoms
from forgefield.trust.suites.measurement import Measurement, NotApplicable, Panel, Setting, curve, repeats

TIGHT = 1e-4
"""Largest force after relaxation, eV/A."""
STILL = 1e-7
"""Forces below this, eV/A, vanish by symmetry."""
STILL_MODES = 1e-5
"""Frequencies below this, THz, are those of translations."""
FACES = ((1, 0, 0), (1, 1, 0), (1, 1, 1))
LAYERS = 10.0
"""Thickness of slabs, A."""
VACUUM = 10.0


def relaxed_crystal(setting: Setting) -> Atoms:
    """The structure with relaxed positions and cell."""
    atoms = setting.atoms()
    converged, _ = relax_atoms(atoms, RelaxOptions(cell=True, fmax=TIGHT, steps=500))
    if not converged:
        raise ForgefieldError("The crystal did not relax within 500 steps.")
    return atoms


def relax_positions(atoms: Atoms, *, fmax: float = TIGHT, steps: int = 500) -> bool:
    """Relax positions unless forces vanish by symmetry; whether they converged."""
    if np.abs(atoms.get_forces()).max() < STILL:
        return True
    return relax_atoms(atoms, RelaxOptions(fmax=fmax, steps=steps))[0]


def with_cell(atoms: Atoms, cell: np.ndarray) -> Atoms:
    """A copy, with the calculator, in another cell with the same fractional positions."""
    changed = atoms.copy()
    changed.calc = atoms.calc
    changed.set_cell(cell, scale_atoms=True)
    return changed


def equation_of_state(setting: Setting) -> Measurement:
    """Energies for volumes within 10 % of the equilibrium, and a Birch-Murnaghan fit."""
    atoms = relaxed_crystal(setting)
    volumes, energies = [], []
    for scale in np.linspace(0.9, 1.1, 11):
        strained = with_cell(atoms, np.array(atoms.cell) * scale ** (1 / 3))
        relax_positions(strained)
        volumes.append(strained.get_volume() / len(atoms))
        energies.append(strained.get_potential_energy() / len(atoms))
    volume, energy, modulus = EquationOfState(volumes, energies, eos="birchmurnaghan").fit()
    result = Measurement()
    result.set("volume", volume, "A^3/atom")
    result.set("bulk modulus", modulus / units.GPa, "GPa")
    for name, length in zip("abc", atoms.cell.cellpar()[:3]):
        result.set(f"cell length {name}", length, "A")
    curves = [curve(volumes, 1e3 * (np.array(energies) - energy))]
    result.panels.append(Panel("Equation of state", "volume, A^3/atom", "energy, meV/atom", curves))
    return result


def elastic_constants(setting: Setting) -> Measurement:
    """The 6 x 6 matrix of elastic constants, by central differences of the stress of relaxed strained cells."""
    atoms = relaxed_crystal(setting)
    constants = np.zeros((6, 6))
    for column in range(6):
        stresses = []
        for sign in (1, -1):
            strained = with_cell(
                atoms, np.array(atoms.cell) @ (np.eye(3) + _strain(column, sign * setting.options.strain))
            )
            relax_positions(strained)
            stresses.append(strained.get_stress())
        constants[:, column] = (stresses[0] - stresses[1]) / (2 * setting.options.strain) / units.GPa
    constants = (constants + constants.T) / 2
    result = Measurement()
    for row, column in _shown_constants(constants):
        result.set(f"C{row + 1}{column + 1}", constants[row, column], "GPa")
    bulk = constants[:3, :3].sum() / 9
    shear = (constants[:3, :3].trace() - (constants[0, 1] + constants[0, 2] + constants[1, 2])) / 15 + constants[
        3:, 3:
    ].trace() / 5
    result.set("bulk modulus (Voigt)", bulk, "GPa")
    result.set("shear modulus (Voigt)", shear, "GPa")
    smallest = float(np.linalg.eigvalsh(constants).min())
    if smallest < 0:
        result.notes.append(f"The crystal is mechanically unstable: the smallest eigenvalue is {smallest:.1f} GPa.")
    names = [f"C{row + 1}{column + 1}" for row, column in _shown_constants(constants)]
    values = [constants[row, column] for row, column in _shown_constants(constants)]
    ticks = [(float(number), name) for number, name in enumerate(names)]
    points = [curve(range(len(values)), values, marker=True)]
    result.panels.append(Panel("Elastic constants", "", "GPa", points, ticks))
    return result


def _strain(component: int, size: float) -> np.ndarray:
    """Symmetric strain tensor (3, 3) of one Voigt component; shear components are twice the tensor's."""
    strain = np.zeros((3, 3))
    i, j = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))[component]
    strain[i, j] += size / 2
    strain[j, i] += size / 2
    return strain


def _shown_constants(constants: np.ndarray) -> list[tuple[int, int]]:
    """C11, C12 and C44 of a cubic crystal in its usual orientation; otherwise all that are not zero."""
    scale = np.abs(constants).max()
    cubic = np.zeros((6, 6))
    cubic[:3, :3] = constants[0, 1]
    cubic[range(6), range(6)] = [constants[0, 0]] * 3 + [constants[3, 3]] * 3
    if np.abs(constants - cubic).max() < 0.01 * scale:
        return [(0, 0), (0, 1), (3, 3)]
    return [(i, j) for i in range(6) for j in range(i, 6) if abs(constants[i, j]) > 0.005 * scale]


def phonons(setting: Setting) -> Measurement:
    """Phonon dispersion of the relaxed primitive cell, with finite displacements (phonopy)."""
    try:
        from phonopy import Phonopy
        from phonopy.structure.atoms import PhonopyAtoms
    except ImportError as error:
        raise NotApplicable("phonopy is not installed: pip install 'forgefield[evaluate]'") from error
    atoms = relaxed_crystal(setting)
    cell = PhonopyAtoms(
        atoms.get_chemical_symbols(), cell=np.array(atoms.cell), scaled_positions=atoms.get_scaled_positions()
    )
    matrix = np.diag(repeats(atoms, setting.options.supercell))
    phonon = Phonopy(cell, supercell_matrix=matrix, primitive_matrix=np.eye(3), log_level=0)
    phonon.generate_displacements(distance=setting.options.displacement)
    forces = []
    for displaced in phonon.supercells_with_displacements or []:
        image = Atoms(displaced.symbols, cell=displaced.cell, scaled_positions=displaced.scaled_positions, pbc=True)
        image.calc = setting.calculator
        forces.append(image.get_forces())
    phonon.forces = forces
    phonon.produce_force_constants()
    phonon.symmetrize_force_constants()
    path = atoms.cell.bandpath(npoints=120)
    phonon.run_band_structure([path.kpts])
    bands: Any = phonon.get_band_structure_dict()
    frequencies = np.array(bands["frequencies"][0])  # (n_points, n_bands), THz
    frequencies[np.abs(frequencies) < STILL_MODES] = 0.0
    distances, positions, names = path.get_linear_kpoint_axis()
    result = Measurement()
    result.set("highest frequency", frequencies.max(), "THz")
    result.set("lowest frequency", frequencies.min(), "THz")
    result.set("mean frequency", frequencies.mean(), "THz")
    if frequencies.min() < -0.05:
        result.notes.append(f"There are imaginary modes, down to {frequencies.min():.2f} THz (shown as negative).")
    ticks = [(float(x), name.replace("G", "Γ")) for x, name in zip(positions, names)]
    for x, name in ticks:
        values = frequencies[int(np.argmin(np.abs(distances - x)))]
        result.set(f"highest frequency at {name}", values.max(), "THz")
    curves = [curve(distances, band) for band in frequencies.T]
    result.panels.append(Panel("Phonons", "", "frequency, THz", curves, ticks))
    return result


def vacancy(setting: Setting) -> Measurement:
    """Formation energy of a vacancy in a supercell with relaxed positions."""
    if len(set(setting.structure.symbols)) > 1:
        raise NotApplicable("the energy of a vacancy in a compound depends on chemical potentials")
    crystal = relaxed_crystal(setting)
    supercell = crystal.repeat(repeats(crystal, setting.options.supercell))
    supercell.calc = setting.calculator
    perfect, n = supercell.get_potential_energy(), len(supercell)
    del supercell[0]
    unrelaxed = supercell.get_potential_energy() - perfect * (n - 1) / n
    converged = relax_positions(supercell, fmax=0.005)
    energy = supercell.get_potential_energy() - perfect * (n - 1) / n
    result = Measurement(notes=[] if converged else ["The relaxation did not converge within 500 steps."])
    result.set("formation energy", energy, "eV")
    result.set("relaxation energy", unrelaxed - energy, "eV")
    points = [curve([0, 1], [unrelaxed, energy], marker=True)]
    result.panels.append(Panel("Vacancy", "", "formation energy, eV", points, [(0.0, "unrelaxed"), (1.0, "relaxed")]))
    return result


def surfaces(setting: Setting) -> Measurement:
    """Energies of the low-index surfaces of the conventional cell, with relaxed positions."""
    crystal = relaxed_crystal(setting)
    per_atom = crystal.get_potential_energy() / len(crystal)
    conventional = _conventional(crystal)
    result, energies = Measurement(), []
    for face in FACES:
        name = "".join(map(str, face))
        layers = 1
        slab = surface(conventional, face, layers, vacuum=VACUUM / 2)
        while np.ptp(slab.positions[:, 2]) < LAYERS:
            layers += 1
            slab = surface(conventional, face, layers, vacuum=VACUUM / 2)
        slab.pbc, slab.calc = True, setting.calculator
        if not relax_positions(slab, fmax=0.01):
            result.notes.append(f"({name}): the relaxation did not converge within 500 steps.")
        area = float(np.linalg.norm(np.cross(slab.cell[0], slab.cell[1])))
        energies.append((slab.get_potential_energy() - per_atom * len(slab)) / (2 * area) / (units.J / units.m**2))
        result.set(f"({name})", energies[-1], "J/m^2")
    ticks = [(float(i), "".join(map(str, face))) for i, face in enumerate(FACES)]
    points = [curve(range(len(FACES)), energies, marker=True)]
    result.panels.append(Panel("Surfaces", "", "surface energy, J/m^2", points, ticks))
    return result


def _conventional(crystal: Atoms) -> Atoms:
    """The cubic cell of a primitive fcc or bcc cell; any other cell as it is."""
    lattice = crystal.cell.get_bravais_lattice()
    transformations = {
        "FCC": [[-1, 1, 1], [1, -1, 1], [1, 1, -1]],
        "BCC": [[0, 1, 1], [1, 0, 1], [1, 1, 0]],
    }
    if lattice.name not in transformations:
        return crystal
    cubic = make_supercell(crystal, transformations[lattice.name])
    return cubic if np.allclose(cubic.cell.angles(), 90, atol=1e-3) else crystal


def shaken_crystal(setting: Setting) -> Measurement:
    """How well a supercell with displaced atoms relaxes back to the crystal."""
    crystal = relaxed_crystal(setting)
    supercell = crystal.repeat(repeats(crystal, setting.options.supercell * 0.7))
    supercell.calc = setting.calculator
    energy, ideal = supercell.get_potential_energy(), supercell.positions.copy()
    supercell.positions += np.random.default_rng(setting.options.seed).normal(0, setting.options.rattle, ideal.shape)
    before = supercell.get_potential_energy()
    converged = relax_positions(supercell, fmax=0.002)
    moved = find_mic(supercell.positions - ideal, supercell.cell, supercell.pbc)[0]
    moved -= moved.mean(axis=0)
    distance = np.linalg.norm(moved, axis=1)
    result = Measurement(notes=[] if converged else ["The relaxation did not converge within 500 steps."])
    result.set("largest distance from the crystal", distance.max(), "A")
    difference = supercell.get_potential_energy() - energy
    result.set("energy above the crystal", difference * 1e3 / len(supercell), "meV/atom")
    result.set("energy of the shaken cell", (before - energy) * 1e3 / len(supercell), "meV/atom")
    curves = [curve(range(len(distance)), np.sort(distance))]
    result.panels.append(Panel("Relaxation of a shaken cell", "atom, sorted", "distance from the crystal, A", curves))
    return result
