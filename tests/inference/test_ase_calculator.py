"""The ASE calculator: exact with any skin, conservative, consistent between energy, forces and stress."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, fcc111
from ase.calculators.calculator import PropertyNotImplementedError
from ase.eos import EquationOfState
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS

from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference.ase import Calculator, VerletList
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import resolve_model
from forgefield.runs import Run, create_run_from_model
from tests.support.toy_models import REFERENCE, Morse


def alloy(repeats=(2, 1, 1), seed: int = 0, amplitude: float = 0.1) -> Atoms:
    random = np.random.default_rng(seed)
    atoms = bulk("Cu", cubic=True, a=3.7) * repeats
    atoms.symbols[::3] = "Au"
    atoms.positions += random.normal(0, amplitude, size=atoms.positions.shape)
    return atoms


def slab() -> Atoms:
    atoms = fcc111("Cu", size=(2, 2, 3), a=3.7, vacuum=5.0)
    atoms.symbols[::4] = "Au"
    atoms.pbc = (True, True, False)
    atoms.positions += np.random.default_rng(2).normal(0, 0.08, size=atoms.positions.shape)
    return atoms


def as_frame(atoms: Atoms) -> Frame:
    return Frame(atoms.positions.copy(), atoms.numbers.astype(np.int64), np.array(atoms.cell), atoms.pbc.copy())


def calculator(**options) -> Calculator:
    return Calculator(Potential(Morse()), **options)


def move_at_random(atoms: Atoms, steps: int):
    """A walk that wanders out of the cell, with one whole-lattice jump and one change of the cell on the way."""
    random = np.random.default_rng(7)
    for step in range(steps):
        atoms.positions += random.normal(0, 0.04, size=atoms.positions.shape)
        if step == steps // 3:
            atoms.wrap()
        if step == steps // 2:
            atoms.set_cell(atoms.cell * 1.01, scale_atoms=True)
        yield step


@pytest.mark.parametrize("structure", [alloy(), alloy((1, 1, 1)), slab()], ids=["crystal", "small-cell", "slab"])
def test_agrees_with_the_potential_on_a_fresh_batch(structure):
    structure.calc = calculator()
    out = Potential(Morse()).eval()(
        batch_from_frames([as_frame(structure)], SpeciesTable(Morse.species), Morse.cutoff), stress=True
    )
    assert structure.get_potential_energy() == out["energy"].item()
    assert structure.calc.results["free_energy"] == out["energy"].item()
    assert np.array_equal(structure.get_forces(), out["forces"].numpy())
    assert np.array_equal(structure.get_potential_energies(), out["atomic_energy"].numpy())
    assert np.array_equal(structure.get_stress(voigt=False), out["stress"][0].numpy())


def test_results_do_not_depend_on_the_skin_to_the_last_bit():
    lazy, eager = alloy(amplitude=0.05), alloy(amplitude=0.05)
    lazy.calc, eager.calc = calculator(skin=0.8), calculator(skin=0.0)
    for step in move_at_random(lazy, 30):
        eager.set_cell(lazy.cell)
        eager.positions = lazy.positions
        assert lazy.get_potential_energy() == eager.get_potential_energy(), step
        assert np.array_equal(lazy.get_forces(), eager.get_forces()), step
        assert np.array_equal(lazy.get_stress(), eager.get_stress()), step
    assert eager.calc.neighbours.builds >= 30
    assert lazy.calc.neighbours.builds <= 15


def test_neighbours_are_found_again_exactly_when_needed():
    verlet = VerletList(GraphOptions(4.0), skin=0.5)

    def builds_after(atoms: Atoms) -> int:
        verlet.edges(as_frame(atoms))
        return verlet.builds

    atoms = alloy()
    assert builds_after(atoms) == 1
    atoms.positions[3, 0] += 0.249
    assert builds_after(atoms) == 1
    atoms.positions[3, 0] += 0.002
    assert builds_after(atoms) == 2
    atoms.set_cell(atoms.cell * 1.0001)
    assert builds_after(atoms) == 3
    atoms.pbc = (True, False, True)
    assert builds_after(atoms) == 4
    atoms.numbers[0] = 29
    assert builds_after(atoms) == 5
    assert builds_after(atoms[:-1]) == 6


def test_pairs_in_the_skin_do_not_reach_the_model():
    frame = as_frame(alloy())
    source, destination, shifts = VerletList(GraphOptions(4.0), skin=1.0).edges(frame)
    lengths = np.linalg.norm(frame.positions[source] + shifts @ frame.cell - frame.positions[destination], axis=1)
    assert lengths.max() <= 4.0
    assert len(VerletList(GraphOptions(5.0), skin=0.0).edges(frame)[0]) > len(source)


def test_stress_is_the_strain_derivative_in_voigt_order():
    atoms = alloy()
    atoms.calc = calculator()
    step = 1e-5
    numerical = []
    for a, b in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        energies = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += sign * step / 2
            strain[b, a] += sign * step / 2
            strained = atoms.copy()
            strained.set_cell(atoms.cell @ strain, scale_atoms=True)
            strained.calc = atoms.calc
            energies.append(strained.get_potential_energy())
        numerical.append((energies[0] - energies[1]) / (2 * step) / atoms.get_volume())
    assert np.allclose(atoms.get_stress(), numerical, atol=1e-8)
    assert np.abs(atoms.get_stress()).min() > 1e-5  # all six are tested


def energy_wobble(timestep: float, duration: float) -> float:
    """Standard deviation of the total energy in constant-energy dynamics, eV/atom."""
    atoms = alloy((2, 2, 1), amplitude=0.0)
    random = np.random.default_rng(1)
    atoms.set_momenta(random.normal(size=(len(atoms), 3)) * np.sqrt(atoms.get_masses() * 600 * units.kB)[:, None])
    atoms.calc = calculator()
    energies = []
    dynamics = VelocityVerlet(atoms, timestep=timestep * units.fs)
    dynamics.attach(lambda: energies.append(atoms.get_total_energy()))
    dynamics.run(int(duration / timestep))
    assert atoms.calc.neighbours.builds < len(energies) / 3
    return float(np.std(energies)) / len(atoms)


def test_dynamics_conserve_energy_to_second_order_in_the_time_step():
    coarse, fine = energy_wobble(4.0, 320.0), energy_wobble(2.0, 320.0)
    assert coarse < 5e-4
    assert fine < 0.4 * coarse


def test_geometry_optimisation_finds_the_crystal():
    atoms = alloy(amplitude=0.15)
    atoms.calc = calculator()
    ideal = alloy(amplitude=0.0)
    ideal.calc = calculator()
    before = atoms.get_potential_energy()
    BFGS(atoms, logfile=None).run(fmax=1e-4, steps=200)
    assert np.abs(atoms.get_forces()).max() < 1e-4
    assert atoms.get_potential_energy() < before
    assert atoms.get_potential_energy() <= ideal.get_potential_energy() + 1e-9


def test_pressure_from_stress_is_the_slope_of_the_equation_of_state():
    volumes, energies, pressures = [], [], []
    for scale in np.linspace(0.97, 1.03, 9):
        atoms = bulk("Cu", a=3.4 * scale)
        atoms.calc = calculator()
        volumes.append(atoms.get_volume())
        energies.append(atoms.get_potential_energy())
        pressures.append(-atoms.get_stress()[:3].mean())
    slopes = np.polyval(np.polyder(np.polyfit(volumes, energies, 7)), volumes)
    assert np.allclose(pressures, -slopes, atol=1e-5)
    equilibrium, _, bulk_modulus = EquationOfState(volumes, energies).fit()
    assert volumes[0] < equilibrium < volumes[-1]
    assert np.isclose(np.interp(0.0, pressures[::-1], volumes[::-1]), equilibrium, rtol=1e-2)
    assert bulk_modulus > 0


def test_molecule_has_forces_but_no_stress():
    dimer = Atoms("CuAu", positions=[(0, 0, 0), (0, 0, 2.4)], calculator=calculator())
    assert np.allclose(dimer.get_forces().sum(axis=0), 0.0, atol=1e-14)
    with pytest.raises(PropertyNotImplementedError, match="volume"):
        dimer.get_stress()


def test_lone_atom_has_its_reference_energy():
    atom = Atoms("Au", calculator=calculator())
    assert atom.get_potential_energy() == REFERENCE["Au"]
    assert np.array_equal(atom.get_forces(), np.zeros((1, 3)))


def test_energy_alone_is_the_same_energy():
    atoms = alloy()
    atoms.calc = calculator()
    energy = atoms.get_potential_energy()
    assert "forces" not in atoms.calc.results
    atoms.get_forces()
    assert atoms.calc.results["energy"] == energy


def test_unknown_element_is_named():
    atoms = Atoms("CuZn", positions=[(0, 0, 0), (0, 0, 2.4)], calculator=calculator())
    with pytest.raises(ForgefieldError, match=r"Zn.*Cu, Au"):
        atoms.get_potential_energy()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda atoms: atoms.positions.__setitem__((1, 2), np.nan), "positions of atom 1"),
        (lambda atoms: atoms.positions.__setitem__(1, atoms.positions[0]), "atoms 0 and 1 are at the same place"),
        (lambda atoms: atoms.set_cell(np.zeros((3, 3))), "no volume"),
    ],
)
def test_impossible_structure_is_one_clear_error(change, message):
    atoms = alloy()
    atoms.calc = calculator()
    change(atoms)
    with pytest.raises(ForgefieldError, match=message):
        atoms.get_forces()


def test_negative_skin_is_refused():
    with pytest.raises(ForgefieldError, match="skin"):
        calculator(skin=-0.1)


def test_precision_of_a_potential_is_its_own():
    with pytest.raises(ForgefieldError, match="dtype"):
        calculator(dtype="float32")


def test_the_potential_passed_in_is_not_changed():
    potential = Potential(Morse()).train()
    atoms = alloy()
    atoms.calc = Calculator(potential)
    atoms.get_forces()
    assert potential.training
    assert all(p.requires_grad for p in potential.parameters())


@pytest.fixture
def run(tmp_path) -> Run:
    """A small NequIP with random weights, trained nowhere, as a run in float32."""
    options = {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": 8, "radial_mlp_width": 8}
    facts = {"mean_neighbours": 14.0, "forces_rms": 1.0, "reference_energies": REFERENCE}
    resolved = resolve_model(options, species=("Cu", "Au"), cutoff=4.0, statistics=facts)
    potential = build_model(resolved, precision="float32", seed=1)
    return create_run_from_model(
        name="mine", out=tmp_path, resolved=resolved, potential=potential, origin="test", precision="float32"
    )


def test_run_is_a_folder_or_an_object_also_in_another_precision(run):
    results = []
    for given, options in ((run, {}), (run.path, {}), (str(run.path), {"which": "last"}), (run, {"dtype": "float64"})):
        atoms = alloy()
        atoms.calc = Calculator(given, **options)
        results.append(atoms.get_forces())
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    error = np.abs(results[0] - results[3]).max() / np.abs(results[3]).max()
    assert 1e-9 < error < 1e-5  # float32 inside the network, and not in the float64 one


@pytest.mark.parametrize("graph", [{"adaptive_cutoff": 6.0}, {"max_neighbours": 1}])
def test_a_deployed_model_sees_the_graph_it_was_made_for(graph, tmp_path):
    """An atom that leaves: alone beyond the cutoff, with a radius that grows, or among the nearest of the others."""
    options = {"name": "nequip", "num_layers": 1, "l_max": 1, "num_features": 4, "radial_mlp_width": 8}
    facts = {"mean_neighbours": 14.0, "forces_rms": 1.0, "reference_energies": REFERENCE}
    resolved = resolve_model(options, species=("Cu", "Au"), cutoff=3.0, statistics=facts, **graph)
    potential = build_model(resolved, precision="float64", seed=1)
    run = create_run_from_model(
        name="mine", out=tmp_path, resolved=resolved, potential=potential, origin="test", precision="float64"
    )
    assert run.graph == GraphOptions(3.0, **graph)
    plain = build_model({k: v for k, v in resolved.items() if k not in graph}, precision="float64", seed=1)
    calculator, differs = Calculator(run), []
    for distance in (2.5, 2.9, 3.5, 5.0, 6.5):
        atoms = alloy()
        atoms.set_pbc(False)
        atoms.positions[0] = atoms.positions.max(axis=0) + np.array([distance, 0, 0])
        atoms.calc = calculator
        frame = as_frame(atoms)
        expected = potential.eval()(batch_from_frames([frame], SpeciesTable(("Cu", "Au")), run.graph))
        assert atoms.get_potential_energy() == pytest.approx(float(expected["energy"]), abs=1e-12)
        np.testing.assert_allclose(atoms.get_forces(), expected["forces"].detach().numpy(), rtol=0, atol=1e-12)
        other = plain.eval()(batch_from_frames([frame], SpeciesTable(("Cu", "Au")), 3.0))
        differs.append(abs(float(other["energy"]) - float(expected["energy"])) > 1e-6)
    assert any(differs)


def test_nequip_in_float64_has_exact_forces(run):
    atoms = alloy()
    atoms.calc = Calculator(run, dtype="float64")
    force, step, energies = atoms.get_forces()[2, 1], 1e-4, []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[2, 1] += sign * step
        moved.calc = atoms.calc
        energies.append(moved.get_potential_energy())
    assert np.isclose(-(energies[0] - energies[1]) / (2 * step), force, rtol=1e-5, atol=1e-8)


def test_unknown_run_is_one_clear_error(tmp_path):
    with pytest.raises(ForgefieldError, match="no run 'nothing'"):
        Calculator("nothing")


def test_results_survive_in_a_trajectory_file(tmp_path):
    atoms = alloy()
    atoms.calc = calculator()
    atoms.get_stress()
    ase.io.write(tmp_path / "frames.extxyz", atoms)
    assert np.isclose(ase.io.read(tmp_path / "frames.extxyz").get_potential_energy(), atoms.get_potential_energy())
