"""The ASE calculator with the evaluation engine, against the calculator with the eager model."""

from __future__ import annotations

import numpy as np
import pytest
from ase import Atoms, units
from ase.calculators.calculator import PropertyNotImplementedError
from ase.md.verlet import VelocityVerlet

from forgefield.errors import ForgefieldError
from forgefield.inference.ase import Calculator
from forgefield.models.potential import Potential
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.springs import Springs
from tests.support.structures import make_frame

pytestmark = needs_kernels


def structure() -> Atoms:
    frame = make_frame(4, seed=1, box=4.6)
    return Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)


def calculators(**options) -> tuple[Calculator, Calculator, list[str]]:
    """With the engine and without, and what the first one reports."""
    potential, messages = Potential(Springs()), []
    with_engine = Calculator(potential, device=DEVICE, engine=True, notify=messages.append, **options)
    return with_engine, Calculator(potential, device=DEVICE, engine=False), messages


def assert_equal(atoms: Atoms, *pair: Calculator) -> None:
    results = []
    for calculator in pair:
        atoms.calc = calculator
        results.append(
            [atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress(), atoms.get_potential_energies()]
        )
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-11)


def test_follows_changes_of_the_structure():
    by_engine, eager, messages = calculators()
    atoms = structure()
    assert_equal(atoms, by_engine, eager)
    assert by_engine.deviation.forces < 1e-10
    assert len(messages) == 1
    atoms.positions[0] += 0.1
    assert_equal(atoms, by_engine, eager)
    atoms.set_cell(atoms.cell * 1.01, scale_atoms=True)
    assert_equal(atoms, by_engine, eager)
    atoms.symbols[0] = "O" if atoms.symbols[0] == "H" else "H"
    assert_equal(atoms, by_engine, eager)
    del atoms[1]
    assert_equal(atoms, by_engine, eager)
    assert len(messages) == 1


def test_results_are_the_users_and_are_not_computed_twice():
    by_engine, _, _ = calculators()
    atoms = structure()
    atoms.calc = by_engine
    forces = atoms.get_forces()
    kept, evaluations = forces.copy(), []
    evaluate = by_engine.engine.evaluate_on_host
    by_engine.engine.evaluate_on_host = lambda *a, **k: evaluations.append(1) or evaluate(*a, **k)
    atoms.get_stress(), atoms.get_potential_energy()
    assert not evaluations
    atoms.positions[1] += 0.05
    atoms.get_forces()
    assert len(evaluations) == 1
    assert np.array_equal(forces, kept)
    held = by_engine.results["forces"]
    atoms.positions[1] -= 0.05
    atoms.get_forces()
    np.testing.assert_allclose(by_engine.results["forces"], kept, atol=1e-12)
    assert not np.allclose(held, kept)


def test_dynamics_follows_that_of_the_eager_model():
    by_engine, eager, _ = calculators(skin=0.3)
    pair = []
    for calculator in (by_engine, eager):
        atoms = structure()
        atoms.calc = calculator
        VelocityVerlet(atoms, 0.5 * units.fs).run(3)
        pair.append(atoms.positions)
    np.testing.assert_allclose(*pair, atol=1e-11)


def test_stress_without_a_volume_and_unusable_positions_are_refused():
    by_engine, _, _ = calculators()
    atoms = structure()
    atoms.pbc, atoms.cell = False, None
    atoms.calc = by_engine
    atoms.get_forces()
    with pytest.raises(PropertyNotImplementedError, match="volume"):
        atoms.get_stress()
    atoms.positions[0, 0] = np.nan
    with pytest.raises(ForgefieldError, match="not a finite number"):
        atoms.get_forces()
    atoms.positions[0] = atoms.positions[1]
    with pytest.raises(ForgefieldError, match="same place"):
        atoms.get_forces()


def test_an_engine_that_is_not_possible_is_refused():
    potential = Potential(Springs())
    potential.max_neighbours = 5
    with pytest.raises(ForgefieldError, match="not all pairs within one cutoff"):
        Calculator(potential, device=DEVICE, engine=True)
