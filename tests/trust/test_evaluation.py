"""Evaluations: closed forms, results of other programs, and a model that is EMT, which must agree with EMT exactly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from ase.phonons import Phonons
from ase.vibrations import Vibrations

import forgefield
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.trust.options import RelaxOptions
from forgefield.trust.relaxation import relax_atoms
from forgefield.trust.suites.molecule import harmonic_wavenumbers, rotatable_bonds
from forgefield.trust.suites.motion import radial_distribution, velocity_autocorrelation
from tests.support.emt_run import emt_run, kill_when, start_command

STATIC = ["dimers", "eos", "elastic", "phonons", "vacancy", "surfaces", "relaxation"]
SMALL = {"supercell": 8.0}


@pytest.fixture(scope="module")
def copper(tmp_path_factory):
    """All static evaluations of copper with the model that is EMT, next to EMT itself."""
    run = emt_run(tmp_path_factory.mktemp("evaluation"), ["Cu"])
    return forgefield.evaluate(run, suite="crystal", reference="ase.calculators.emt.EMT", only=STATIC, **SMALL)


def test_the_model_that_is_emt_agrees_with_emt_in_everything(copper):
    values = [value for result in copper.results for value in result["values"]]
    assert [result["status"] for result in copper.results] == ["done"] * len(STATIC)
    assert len(values) > 25
    for value in values:
        assert value["model"] == pytest.approx(value["reference"], rel=1e-9, abs=1e-9), value
    for result in copper.results:
        for panel in result["panels"]:
            for ours, theirs in zip(panel["curves"], panel["reference"], strict=True):
                assert ours["y"] == pytest.approx(theirs["y"], rel=1e-6, abs=1e-6)


def emt_copper() -> Atoms:
    atoms = bulk("Cu")
    atoms.calc = EMT()
    relax_atoms(atoms, RelaxOptions(cell=True, fmax=1e-4))
    return atoms


def test_elastic_constants_are_second_derivatives_of_the_energy(copper):
    atoms, size, values = emt_copper(), 0.004, copper.values()

    def curvature(strain: np.ndarray) -> float:
        energies = []
        for sign in (1, 0, -1):
            strained = atoms.copy()
            strained.calc = EMT()
            strained.set_cell(atoms.cell @ (np.eye(3) + sign * size * strain), scale_atoms=True)
            energies.append(strained.get_potential_energy())
        return (energies[0] - 2 * energies[1] + energies[2]) / size**2 / atoms.get_volume() / units.GPa

    c11 = curvature(np.diag([1.0, 0, 0]))
    both = curvature(np.diag([1.0, 1.0, 0]))
    shear = curvature(np.array([[0, 0.5, 0], [0.5, 0, 0], [0, 0, 0]]))
    assert values["elastic.Cu.C11"] == pytest.approx(c11, rel=0.02)
    assert values["elastic.Cu.C12"] == pytest.approx(both / 2 - c11, rel=0.02)
    assert values["elastic.Cu.C44"] == pytest.approx(shear, rel=0.02)
    assert values["eos.Cu.bulk modulus"] == pytest.approx(values["elastic.Cu.bulk modulus (Voigt)"], rel=0.02)


def test_phonons_agree_with_those_of_ase(copper, tmp_path):
    atoms = emt_copper()
    phonons = Phonons(atoms, EMT(), supercell=(4, 4, 4), delta=0.01, name=str(tmp_path / "phonons"))
    phonons.run()
    phonons.read(acoustic=True)
    thz = 1 / (units._hplanck * units.J * 1e12)
    frequencies = phonons.band_structure([atoms.cell.bandpath().special_points["X"]])[0] * thz
    assert copper.values()["phonons.Cu.highest frequency at X"] == pytest.approx(frequencies.max(), rel=1e-3)
    assert abs(copper.values()["phonons.Cu.lowest frequency"]) < 1e-4


def test_the_page_has_every_evaluation_and_its_figures(copper):
    page = copper.page.read_text()
    for title in ("Equation of state of Cu", "Elastic constants of Cu", "Phonons of Cu", "Surfaces of Cu"):
        assert title in page
    assert page.count("<svg") == len(STATIC)
    assert "bulk modulus: 1" in repr(copper)


def test_an_interrupted_evaluation_resumes_and_repeats_nothing(tmp_path, monkeypatch):
    emt_run(tmp_path / "runs", ["Cu"])
    words = ["evaluate", "emt", "--suite", "crystal", "--only", "eos", "elastic", "nve"]
    words += ["--ps", 0.1, "--supercell", 5, "--trust-code", "--device", "cpu", "-o"]
    folder = tmp_path / "a/crystal"
    kill_when(start_command(tmp_path, *words, "a"), (folder / "nve-0.extxyz.state.npz").exists)
    before = {name: (folder / name).stat().st_mtime_ns for name in ("eos-0.json", "elastic-0.json")}
    assert not (folder / "nve-0.json").exists()
    monkeypatch.chdir(tmp_path)
    for out in ("a", "b"):
        assert main([*map(str, words), out]) == 0
    assert before == {name: (folder / name).stat().st_mtime_ns for name in before}
    ours, theirs = (json.loads((tmp_path / out / "crystal/evaluation.json").read_text())["results"] for out in "ab")
    for one, other in zip(ours, theirs, strict=True):
        del one["seconds"], other["seconds"]
        assert one == other


def test_stored_results_of_earlier_calls_stay_on_the_page(tmp_path):
    run = emt_run(tmp_path, ["Cu"])

    def keys(only: str, **options) -> tuple[list[str], list[str]]:
        """Evaluations in `evaluation.json`, and first lines of the messages about them."""
        lines: list[str] = []
        report = forgefield.evaluate(run, suite="crystal", only=[only], notify=lines.append, **SMALL, **options)
        assert [result["name"] for result in report.results] == [only]
        stored = json.loads((report.folder / "evaluation.json").read_text())["results"]
        return [result["name"] for result in stored], [line for line in lines[1:] if not line.startswith(" ")]

    assert keys("elastic")[0] == ["elastic"]
    names, lines = keys("eos")
    assert names == ["eos", "elastic"]  # in the order of the suite
    assert len(lines) == 1
    assert lines[0].endswith(" s)")
    names, lines = keys("elastic")
    assert names == ["eos", "elastic"]
    assert lines == ["Elastic constants, Cu (stored)"]
    assert keys("eos", temperature=301)[0] == ["eos"]


def test_an_explosion_is_a_result_with_its_frame(tmp_path):
    run = emt_run(tmp_path, ["Cu"])
    report = forgefield.evaluate(run, suite="crystal", only=["nvt"], temperature=2000, timestep=60, ps=10, supercell=4)
    (result,) = report.results
    assert result["status"] == "done"
    assert report.values()["nvt.Cu.stable for"] < 10
    assert "exploded after" in result["notes"][0]
    assert "exploded" in ase.io.read(report.folder / "nvt-0.extxyz", index=-1).info


def test_phonons_are_skipped_without_phonopy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "phonopy", None)
    report = forgefield.evaluate(emt_run(tmp_path, ["Cu"]), suite="crystal", only=["phonons"])
    assert report.results[0]["status"] == "skipped"
    assert "pip install 'forgefield[evaluate]'" in report.results[0]["notes"][0]


def test_published_numbers_are_a_reference(tmp_path):
    (tmp_path / "known.json").write_text(json.dumps({"eos.Cu.volume": 11.81}))
    run = emt_run(tmp_path, ["Cu"])
    report = forgefield.evaluate(run, suite="crystal", only=["eos"], reference=str(tmp_path / "known.json"))
    assert report.results[0]["values"][0] | {"model": 0} == {
        "name": "volume",
        "unit": "A^3/atom",
        "model": 0,
        "reference": 11.81,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"suite": "crystal", "only": ["phonon"]},
            "--only phonon: there is no such evaluation. Did you mean 'phonons'",
        ),
        ({"suite": "crystal", "structures": molecule("H2O")}, "needs structures that are periodic"),
        ({"suite": "crystal", "structures": bulk("Ni")}, "Ni"),
        ({"suite": "liquid"}, "--structures FILE"),
        ({"reference": "ase.calculators.emt.EMTT"}, "EMTT"),
        ({"temperature": -1}, "'temperature' must be a positive number"),
    ],
    ids=["only", "periodic", "species", "structures", "reference", "temperature"],
)
def test_bad_input_is_refused(tmp_path, options, message):
    with pytest.raises(ForgefieldError, match=message):
        forgefield.evaluate(emt_run(tmp_path, ["Cu"]), **options)


# ---- molecules and liquids


def test_wavenumbers_agree_with_those_of_ase(tmp_path):
    atoms = molecule("H2O")
    atoms.calc = EMT()
    relax_atoms(atoms, RelaxOptions(fmax=1e-3))
    theirs = Vibrations(atoms, name=str(tmp_path / "vibrations"), delta=0.01)
    theirs.run()
    expected = theirs.get_frequencies()
    expected = np.sort(expected.real - expected.imag)
    assert harmonic_wavenumbers(atoms, 0.01) == pytest.approx(expected, abs=1.0)


def test_molecules_are_evaluated_next_to_their_reference(tmp_path):
    run = emt_run(tmp_path, ["H", "O"])
    report = forgefield.evaluate(
        run,
        structures=molecule("H2O2"),
        reference="ase.calculators.emt.EMT",
        only=["vibrations", "dihedrals", "relaxation"],
    )
    assert report.suite == "molecule"
    assert [result["status"] for result in report.results] == ["done", "done", "done"], report
    for value in (value for result in report.results for value in result["values"]):
        assert value["model"] == pytest.approx(value["reference"], rel=1e-6, abs=1e-6)


def test_bonds_in_rings_and_at_the_ends_are_not_rotated():
    assert rotatable_bonds(molecule("C6H6")) == []
    ((quadruple, moving),) = rotatable_bonds(molecule("C2H6"))
    assert set(quadruple[1:3]) == {0, 1}
    assert len(moving) == 4
    assert len(rotatable_bonds(molecule("trans-butane"))) == 3


def test_the_radial_distribution_of_an_ideal_gas_is_one():
    random = np.random.default_rng(0)
    frames = [Atoms("Cu60", positions=random.uniform(0, 12, (60, 3)), cell=[12, 12, 12], pbc=True) for _ in range(60)]
    distances, values = radial_distribution(frames, ("Cu", "Cu"), 6.0, bins=12)
    assert values[4:] == pytest.approx(1.0, abs=0.05)
    crystal = bulk("Cu", a=3.6, cubic=True).repeat(4)
    distances, values = radial_distribution([crystal], ("Cu", "Cu"), 7.0, bins=140)
    shells = 4 * np.pi * distances**2 * values * 0.05 * len(crystal) / crystal.get_volume()
    assert shells[distances < 3.0].sum() == pytest.approx(12, rel=0.01)


def test_the_velocity_autocorrelation_of_oscillators_is_a_cosine():
    frames, phases = [], np.random.default_rng(1).uniform(0, 2 * np.pi, 400)
    for step in range(300):
        atoms = Atoms("Cu400", positions=np.zeros((400, 3)))
        atoms.set_velocities(np.cos(0.1 * step + phases)[:, None] * np.ones(3))
        frames.append(atoms)
    values = velocity_autocorrelation(frames, 60)
    assert values / values[0] == pytest.approx(np.cos(0.1 * np.arange(60)), abs=0.03)


def labelled_trajectory(path: Path) -> list[Atoms]:
    """A dynamics of copper with EMT, with energies, forces, momenta and times, and dimers."""
    frames = []
    atoms = bulk("Cu", cubic=True) * (2, 2, 2)
    atoms.calc = EMT()
    MaxwellBoltzmannDistribution(atoms, temperature_K=600, rng=np.random.default_rng(0))
    dynamics = VelocityVerlet(atoms, timestep=2 * units.fs)
    for step in range(30):
        atoms.get_forces()
        image = atoms.copy()
        image.info["time_ps"] = step * 0.004
        image.calc = SinglePointCalculator(image, energy=atoms.get_potential_energy(), forces=atoms.get_forces())
        frames.append(image)
        dynamics.run(2)
    for distance in (2.0, 2.2, 2.5, 3.0, 5.5):
        dimer = Atoms("Cu2", positions=[[0, 0, 0], [distance, 0, 0]], calculator=EMT())
        energy, forces = dimer.get_potential_energy(), dimer.get_forces()
        dimer.calc = SinglePointCalculator(dimer, energy=energy, forces=forces)
        frames.append(dimer)
    ase.io.write(path, frames)
    return frames


def test_labelled_frames_are_a_reference(tmp_path):
    run = emt_run(tmp_path, species=("Cu",))
    frames = labelled_trajectory(tmp_path / "aimd.extxyz")
    start = bulk("Cu", cubic=True) * (2, 2, 2)
    report = forgefield.evaluate(
        run,
        suite="liquid",
        structures=start,
        reference=str(tmp_path / "aimd.extxyz"),
        only=["labels", "dimers", "liquid"],
        temperature=600,
        ps=0.2,
        supercell=5.0,
    )
    assert not report.failed
    by_name = {result["name"]: result for result in report.results}
    errors = {value["name"]: value["model"] for value in by_name["labels"]["values"]}
    # extxyz stores 8 digits of positions and forces
    assert errors["energy RMSE"] < 1e-3
    assert errors["force RMSE"] < 1e-2
    dimers = {value["name"]: value for value in by_name["dimers"]["values"]}
    exact = [frame.get_potential_energy() for frame in frames[30:]]
    assert dimers["Cu-Cu depth"]["reference"] == pytest.approx(exact[-1] - min(exact), abs=1e-6)
    assert dimers["Cu-Cu depth"]["model"] == pytest.approx(dimers["Cu-Cu depth"]["reference"], rel=0.05)
    liquid = {value["name"]: value for value in by_name["liquid"]["values"]}
    expected = radial_distribution(frames[:30], ("Cu", "Cu"), 7.22 / 2)
    assert liquid["height of the peak Cu-Cu"]["reference"] == pytest.approx(expected[1].max(), rel=1e-3)
    assert liquid["diffusion coefficient"]["reference"] is not None
    panel = next(panel for panel in by_name["liquid"]["panels"] if panel["title"] == "Radial distribution")
    assert panel["reference"]
    assert not next(panel for panel in by_name["liquid"]["panels"] if panel["title"].startswith("Temp"))["reference"]


def test_frames_without_labels_are_no_reference(tmp_path):
    ase.io.write(tmp_path / "frames.extxyz", [bulk("Cu")])
    with pytest.raises(ForgefieldError, match="none of 1 frames has labels"):
        forgefield.evaluate(emt_run(tmp_path), reference=str(tmp_path / "frames.extxyz"))
