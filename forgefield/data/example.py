"""The built-in example data: copper-gold alloys with energies and forces of effective medium theory (ASE's EMT calculator).

Small bulk cells of random and ordered alloys, with vacancies and surfaces, are strained, rattled and sampled with
Langevin dynamics at several temperatures. The same seed gives the same bytes, and the test frames come from separate
trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import bulk, fcc100, fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically

TEMPERATURES = (300.0, 600.0, 900.0, 1200.0)
"""K."""
LATTICE_CONSTANTS = {"Cu": 3.59, "Au": 4.06}
"""Equilibrium fcc lattice constants of EMT, A."""
MAX_STRAIN = 0.04
TIME_STEP = 8.0 * units.fs
FRICTION = 0.02 / units.fs
EQUILIBRATION_STEPS = 8
STEPS_BETWEEN_SAMPLES = 5
SHAKEN_TEMPERATURE = 600.0
"""Highest temperature of rattled frames, K."""
SPRING = 5.0
"""Force constant of an atom, eV/A^2, that relates temperature and amplitude of rattled frames."""


@dataclass(frozen=True)
class Recipe:
    """Numbers of frames of each kind in one file."""

    trajectories: int
    samples: int
    """Frames taken from each trajectory."""
    shaken: int
    """Frames that are strained and rattled, without dynamics."""


TRAIN = Recipe(trajectories=40, samples=5, shaken=98)
TEST = Recipe(trajectories=12, samples=5, shaken=20)


def make_example(path: Path, seed: int) -> dict[str, object]:
    """Write `train.extxyz` and `test.extxyz` into the folder `path`.

    Energies are in eV, forces in eV/A, stress in eV/A^3. The training file starts with one isolated atom of each
    species, so that energies are counted from free atoms. Returns the files and the numbers of frames and atoms.
    """
    path = Path(path)
    train_stream, test_stream = np.random.SeedSequence(seed).spawn(2)
    train = [_isolated(symbol) for symbol in ("Cu", "Au")] + _frames(TRAIN, np.random.default_rng(train_stream))
    test = _frames(TEST, np.random.default_rng(test_stream))
    summary: dict[str, object] = {"species": ["Cu", "Au"], "seed": seed}
    for name, frames in (("train", train), ("test", test)):
        file = path / f"{name}.extxyz"
        _write(file, frames)
        summary[name] = {"file": str(file), "frames": len(frames), "atoms": sum(len(atoms) for atoms in frames)}
    return summary


def _frames(recipe: Recipe, random: np.random.Generator) -> list[Atoms]:
    frames = []
    for number in range(recipe.trajectories):
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        start = _strained(_structure(number, random), random)
        frames += _trajectory(start, temperature, recipe.samples, random)
    for number in range(recipe.shaken):
        temperature = float(random.uniform(0.0, SHAKEN_TEMPERATURE))
        atoms = _strained(_structure(number, random), random)
        frames.append(_labelled(_shaken(atoms, temperature, random), "shaken"))
    return frames


def _structure(number: int, random: np.random.Generator) -> Atoms:
    """An ideal structure; `number` cycles through the kinds, so that every file has all of them."""
    kinds = (_random_alloy, _ordered_alloy, _random_alloy, _vacancy, _random_alloy, _ordered_alloy, _surface)
    return kinds[number % len(kinds)](random)


def _random_alloy(random: np.random.Generator) -> Atoms:
    """Fcc with any composition, the pure metals included: 8 or 12 atoms."""
    repeats = ((2, 1, 1), (1, 1, 3))[random.integers(2)]
    return _alloyed(bulk("Cu", cubic=True, a=1.0) * repeats, random)


def _vacancy(random: np.random.Generator) -> Atoms:
    """Fcc cell of 16 sites with one atom missing."""
    atoms = _alloyed(bulk("Cu", cubic=True, a=1.0) * (2, 2, 1), random)
    del atoms[int(random.integers(len(atoms)))]
    return atoms


def _ordered_alloy(random: np.random.Generator) -> Atoms:
    """L1_2 Cu3Au, L1_2 CuAu3 or L1_0 CuAu: 8 atoms."""
    unit = [["Au", "Cu", "Cu", "Cu"], ["Cu", "Au", "Au", "Au"], ["Cu", "Cu", "Au", "Au"]][random.integers(3)]
    atoms = bulk("Cu", cubic=True, a=1.0)
    atoms.set_chemical_symbols(unit)
    return _at_equilibrium_volume(atoms * (1, 1, 2))


def _surface(random: np.random.Generator) -> Atoms:
    """A (111) or (100) slab of three layers, periodic in the plane: 12 atoms."""
    build: Callable[..., Atoms] = (fcc111, fcc100)[random.integers(2)]
    slab = build("Cu", size=(2, 2, 3), a=1.0)
    slab = _alloyed(slab, random)
    slab.center(vacuum=5.0, axis=2)
    slab.pbc = (True, True, False)
    return slab


def _alloyed(atoms: Atoms, random: np.random.Generator) -> Atoms:
    gold = int(random.integers(len(atoms) + 1))
    symbols = np.array(["Au"] * gold + ["Cu"] * (len(atoms) - gold))
    atoms.set_chemical_symbols(random.permutation(symbols).tolist())
    return _at_equilibrium_volume(atoms)


def _at_equilibrium_volume(atoms: Atoms) -> Atoms:
    """Scale a structure of lattice constant 1 to Vegard's lattice constant for its composition."""
    constant = np.mean([LATTICE_CONSTANTS[symbol] for symbol in atoms.get_chemical_symbols()])
    atoms.set_cell(atoms.cell * constant, scale_atoms=False)
    atoms.positions *= constant
    return atoms


def _strained(atoms: Atoms, random: np.random.Generator) -> Atoms:
    """Up to 4 % of volumetric strain and half as much shear, along the periodic axes."""
    shear = random.uniform(-0.5, 0.5, size=(3, 3)) * MAX_STRAIN
    strain = (shear + shear.T) / 2 + np.eye(3) * random.uniform(-1, 1) * MAX_STRAIN
    strain *= np.outer(atoms.pbc, atoms.pbc)
    atoms.set_cell(atoms.cell @ (np.eye(3) + strain), scale_atoms=False)
    atoms.positions = atoms.positions @ (np.eye(3) + strain)
    return atoms


def _shaken(atoms: Atoms, temperature: float, random: np.random.Generator) -> Atoms:
    """Displaced like independent harmonic oscillators at `temperature` (K)."""
    amplitude = np.sqrt(units.kB * temperature / SPRING)
    atoms.positions += amplitude * random.standard_normal((len(atoms), 3))
    return atoms


def _trajectory(atoms: Atoms, temperature: float, samples: int, random: np.random.Generator) -> list[Atoms]:
    """Frames along Langevin dynamics (the BAOAB splitting, whose sampling is accurate at long time steps)."""
    atoms = _shaken(atoms.copy(), temperature / 2, random)
    masses = atoms.get_masses()[:, None]
    thermal = np.sqrt(units.kB * temperature / masses)  # width of the velocity distribution
    decay = np.exp(-FRICTION * TIME_STEP)
    velocities = thermal * random.standard_normal((len(atoms), 3))
    atoms.calc = EMT()
    frames = []
    for step in range(1, EQUILIBRATION_STEPS + samples * STEPS_BETWEEN_SAMPLES + 1):
        velocities += 0.5 * TIME_STEP * atoms.get_forces() / masses
        atoms.positions += 0.5 * TIME_STEP * velocities
        noise = random.standard_normal((len(atoms), 3))
        velocities = decay * velocities + np.sqrt(1 - decay**2) * thermal * noise
        atoms.positions += 0.5 * TIME_STEP * velocities
        velocities += 0.5 * TIME_STEP * atoms.get_forces() / masses
        if step > EQUILIBRATION_STEPS and (step - EQUILIBRATION_STEPS) % STEPS_BETWEEN_SAMPLES == 0:
            frames.append(_labelled(atoms, f"md-{temperature:.0f}K"))
    return frames


def _isolated(symbol: str) -> Atoms:
    return _labelled(Atoms(symbol, positions=[(0.0, 0.0, 0.0)]), "isolated")


def _labelled(atoms: Atoms, kind: str) -> Atoms:
    """A copy with labels of EMT, at positions rounded as in the file, so that the labels are exact for what is read."""
    frame = Atoms(atoms.numbers, positions=np.round(atoms.positions, 8), cell=atoms.cell, pbc=atoms.pbc)
    frame.info["config_type"] = kind
    calculator = EMT()
    calculator.calculate(frame, properties=["energy", "forces"])
    results = {name: calculator.results[name] for name in ("energy", "forces", "stress") if name in calculator.results}
    frame.calc = SinglePointCalculator(frame, **{name: np.copy(value) for name, value in results.items()})
    return frame


def _write(file: Path, frames: list[Atoms]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForgefieldError(f"The example data could not be written to {file}: {error.strerror}.") from error
    with written_atomically(file) as partial:
        write(partial, frames, format="extxyz")
