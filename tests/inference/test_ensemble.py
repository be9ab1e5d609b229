"""Ensembles: means, deviations by DeePMD-kit's formulas, files, and what cannot be combined."""

import subprocess

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.stress import voigt_6_to_full_3x3_stress

from forgefield import Calculator, Ensemble
from forgefield.api import train
from forgefield.errors import ForgefieldError
from forgefield.inference.ensemble import DEVIATIONS, write_model_devi
from tests.support.deepmd_program import deepmd_python
from tests.support.helpers import tiny_config
from tests.support.structures import make_batch, make_frame, make_potential


def members(n: int = 3):
    return [make_potential(seed=seed).eval() for seed in range(n)]


def test_means_and_deviations_follow_the_formulas() -> None:
    potentials, batch = members(), make_batch(make_frame(4, 1), make_frame(6, 2))
    outputs = Ensemble(potentials)(batch, forces=True, stress=True)
    single = [one(batch, forces=True, stress=True) for one in potentials]
    stacked = {name: np.array([one[name].detach().numpy() for one in single]) for name in single[0]}
    for name in ("energy", "atomic_energy", "forces", "stress"):
        np.testing.assert_allclose(outputs[name], stacked[name].mean(0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(outputs["energy_uncertainty"], stacked["energy"].std(0, ddof=1), rtol=1e-8)
    np.testing.assert_allclose(outputs["energies_uncertainty"], stacked["atomic_energy"].std(0, ddof=1), rtol=1e-8)
    np.testing.assert_allclose(outputs["forces_uncertainty"], stacked["forces"].std(0, ddof=1), rtol=1e-8)
    volumes = np.abs(np.linalg.det(batch["cell"].numpy()))
    for frame, (atoms, n) in enumerate(((slice(0, 4), 4), (slice(4, 10), 6))):
        of_atoms = np.linalg.norm(stacked["forces"][:, atoms].std(0), axis=1)
        virial = (stacked["stress"][:, frame] * volumes[frame] / n).std(0).ravel()
        expected = {
            "max_devi_v": virial.max(),
            "min_devi_v": virial.min(),
            "avg_devi_v": np.linalg.norm(virial) / 3,
            "max_devi_f": of_atoms.max(),
            "min_devi_f": of_atoms.min(),
            "avg_devi_f": of_atoms.mean(),
            "devi_e": (stacked["energy"][:, frame] / n).std(),
        }
        for name, value in expected.items():
            assert float(outputs[name][frame]) == pytest.approx(value, rel=1e-8), name


def test_species_may_have_another_order() -> None:
    batch = make_batch(make_frame(4, 1))
    one, other = make_potential(seed=0).eval(), make_potential(seed=1, species=("O", "H")).eval()
    swapped = batch | {"species": 1 - batch["species"]}
    expected = (one(batch)["energy"] + other(swapped)["energy"]) / 2
    torch.testing.assert_close(Ensemble([one, other])(batch)["energy"], expected.detach())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [make_potential()], "two or more runs"),
        (lambda: [make_potential(), make_potential(cutoff=2.5)], "same cutoff: the first has 3.0, a Potential has 2.5"),
        (lambda: [make_potential(), make_potential(species=("H", "C"))], "same species"),
        (lambda: "runs/one", "two or more runs"),
    ],
)
def test_what_cannot_be_combined_is_refused(make, message) -> None:
    with pytest.raises(ForgefieldError, match=message):
        Ensemble(make())


def test_a_calculator_of_several_runs(tmp_path) -> None:
    runs = [train(tiny_config(tmp_path, name=f"seed{seed}", seed=seed)) for seed in (1, 2)]
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=1)
    atoms.calc = Calculator([run.path for run in runs])
    forces = atoms.get_forces()
    single = np.array([Calculator(run).get_forces(atoms) for run in runs])
    np.testing.assert_allclose(forces, single.mean(0), atol=1e-12)
    results = atoms.calc.results
    np.testing.assert_allclose(results["forces_uncertainty"], single.std(0, ddof=1), atol=1e-9)
    assert results["max_devi_f"] == pytest.approx(np.linalg.norm(single.std(0), axis=1).max(), abs=1e-9)
    assert results["max_devi_v"] > 0


def test_deviations_are_written_as_deepmd_does(tmp_path) -> None:
    ensemble, water = Ensemble(members()), molecule("H2O")
    calculator = Calculator(ensemble)
    calculator.get_forces(water)
    path = write_model_devi(tmp_path / "model_devi.out", [calculator.results] * 2, interval=10)
    lines = path.read_text().splitlines()
    assert lines[0].split() == ["#", "step", *DEVIATIONS]
    assert [len(line) for line in lines] == [12 + 7 * 19] * 3
    table = np.loadtxt(path)
    assert table[:, 0].tolist() == [0, 10]
    assert np.isnan(table[:, 1:4]).all()  # there is no volume
    assert table[0, 4] == pytest.approx(calculator.results["max_devi_f"], rel=1e-6)


@pytest.mark.skipif(deepmd_python() is None, reason="deepmd-kit is not installed")
def test_deviations_are_those_of_deepmd_kit(tmp_path) -> None:
    ensemble, numbers = Ensemble(members()), np.random.default_rng(0)
    frames = [bulk("H", "fcc", a=2.5, cubic=True).repeat((1, 1, 2)) for _ in range(3)]
    energies, forces, virials, rows = [], [], [], []
    for atoms in frames:
        atoms.rattle(0.1, rng=numbers)
        outputs = []
        for potential in (*ensemble.members, ensemble):
            atoms.calc = Calculator(potential)
            atoms.get_forces()
            outputs.append(dict(atoms.calc.results))
        rows.append(outputs.pop())
        energies.append([[each["energy"]] for each in outputs])
        forces.append([each["forces"] for each in outputs])
        virials.append([-voigt_6_to_full_3x3_stress(each["stress"]).ravel() * atoms.get_volume() for each in outputs])
    by_member = {"E": energies, "F": forces, "V": virials}
    arrays = {name: np.swapaxes(np.array(values), 0, 1) for name, values in by_member.items()}
    np.savez(tmp_path / "members.npz", n=len(frames[0]), **arrays)
    script = (
        "import numpy as np; from deepmd.infer import model_devi as m; z = np.load('members.npz'); n = int(z['n']);"
        "columns = [np.arange(3), *m.calc_model_devi_v(z['V'] / n), *m.calc_model_devi_f(z['F'])];"
        "columns.append(np.ravel(m.calc_model_devi_e(z['E'] / n)));"
        "m.write_model_devi_out(np.vstack(columns).T, 'theirs.out')"
    )
    subprocess.run([deepmd_python(), "-c", script], cwd=tmp_path, check=True)
    ours = write_model_devi(tmp_path / "ours.out", rows)
    theirs = np.loadtxt(tmp_path / "theirs.out")
    assert np.allclose(np.loadtxt(ours), theirs, rtol=2e-6, atol=1e-12)
    written = [line for line in (tmp_path / "theirs.out").read_text().splitlines() if not line.startswith("#")]
    assert [len(line) for line in ours.read_text().splitlines()[1:]] == [len(line) for line in written]
