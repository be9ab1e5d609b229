"""Models of spins: steps of any engine, physical laws, structures of ASE, and the options that they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ase import Atoms

from forgefield import Calculator
from forgefield.checks.suite import run_checks
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference.ase import frame_of_atoms
from forgefield.models import resolve_model
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.verify import largest_difference
from tests.support.deepmd_models import loaded, predictions, unpacked
from tests.support.engine_cases import difference, labelled
from tests.support.spins import step_function, with_spins


@pytest.mark.parametrize("form", ["double", "tangent"])
@pytest.mark.parametrize("name", ["spin", "spin_atten"])
def test_steps_that_never_wait_are_the_same(name, form, tmp_path, monkeypatch):
    """On a GPU edges are masked; elsewhere those that are ignored are left out."""
    potential, batch = loaded(unpacked(tmp_path, f"{name}.dp")), with_spins(labelled(5, 1, 7, box=8.0))
    reference = Engine(step_function(potential, "double")).differentiate(batch)
    monkeypatch.setattr(type(potential.model.descriptor), "may_wait_for", lambda self, tensor: False)
    function = step_function(potential, form)
    found = Engine(function).differentiate(batch)
    assert largest_difference(found, reference, function.trained)[0] < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("spin", "tangent")])
def test_one_trace_serves_every_size(name, form, tmp_path):
    potential = loaded(unpacked(tmp_path, f"{name}.dp"))
    engine, eager = ScriptEngine(step_function(potential, form)), Engine(step_function(potential, "double"))
    for number, atoms in enumerate([(1,), (5, 1, 2)]):
        batch = with_spins(labelled(*atoms, seed=number, box=8.0), number)
        assert difference(engine, eager, batch) < 1e-9, atoms


def structure(potential, seed=0):
    """Three O and five H in a periodic cell, with spins of the O atoms, the first one zero."""
    expected, generator = predictions("spin"), np.random.default_rng(seed)
    kinds = expected["atype"][0]
    atoms = Atoms(
        [potential.species[kind] for kind in kinds], expected["coord"][0], cell=expected["box"].reshape(3, 3), pbc=True
    )
    spins = np.where(kinds[:, None] == 0, generator.normal(size=(len(atoms), 3)), 0.0)
    spins[0] = 0.0
    atoms.arrays["spin"] = spins
    return atoms


def test_laws_of_physics_hold(tmp_path):
    potential = loaded(unpacked(tmp_path, "spin.dp"))
    atoms = structure(potential)
    plain = frame_of_atoms(atoms)
    frame = replace(plain, fields={"spin": atoms.arrays["spin"]}, per_atom=frozenset(["spin"]))
    table = SpeciesTable(potential.species, trained=True)
    results = run_checks(potential, [frame], table, potential.cutoff, generator=np.random.default_rng(0))
    assert [result.name for result in results if not result.passed] == []
    assert "force_mag = -dE/dspin" in [result.name for result in results]


def test_a_calculator_reads_spins_of_arrays(tmp_path):
    potential = loaded(unpacked(tmp_path, "spin.dp"))
    atoms = structure(potential)
    atoms.calc = Calculator(potential)
    force = atoms.calc.get_property("force_mag", atoms)[3, 1]
    energies = []
    for step in (1e-4, -2e-4):
        atoms.arrays["spin"][3, 1] += step
        energies.append(atoms.get_potential_energy())
    assert force == pytest.approx((energies[1] - energies[0]) / 2e-4, rel=1e-5)
    assert np.all(atoms.calc.results["force_mag"][atoms.numbers == 1] == 0)
    atoms.arrays["spin"] *= 10
    with pytest.raises(ForgefieldError, match="neighbour lists have room for 1 A"):
        atoms.get_potential_energy()
    del atoms.arrays["spin"]
    with pytest.raises(ForgefieldError, match=r"atoms.arrays\['spin'\]"):
        atoms.get_potential_energy()


SECTION = {"name": "deeppot", "spin": {"use_spin": ["O"], "virtual_scale": 0.3, "rcut": 3.0}, "out_bias": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"descriptor": {"type": "se_e2_r"}}, "model.spin is for the descriptors se_e2_a"),
        ({"spin": {"use_spin": ["Fe"], "virtual_scale": 0.3, "rcut": 3.0}}, "use_spin is .*Fe.*names of these species"),
        ({"spin": {"use_spin": [0], "virtual_scale": [0.3, 0.1, 0.2], "rcut": 3.0}}, "virtual_scale is"),
        (
            {"spin": {"use_spin": [True, False], "virtual_scale": 0.3, "rcut": 4.0}},
            "rcut is 4.0; .* below data.cutoff=4",
        ),
        ({"fitting_net": {"type": "dipole"}}, "model.fitting_net.type cannot be combined with model.spin"),
    ],
)
def test_what_spins_do_not_combine_with_is_refused(changes, message):
    with pytest.raises(ForgefieldError, match=message):
        resolve_model({**SECTION, **changes}, species=["O", "H"], cutoff=4.0, statistics={})
