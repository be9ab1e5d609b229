"""LDOS runs used on structures: files, numbers and the calculator agree with the physics, and cells may be repeated at will."""

from __future__ import annotations

import json
from dataclasses import asdict

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io.cube import read_cube

from forgefield import Calculator, ForgefieldError, api
from forgefield.cli import main
from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors
from forgefield.ldos.electronic.density_energies import DensityEnergies
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.total_energy import total_energy
from forgefield.ldos.electronic.upf import read_upf
from forgefield.ldos.inference.electrons import ElectronModel, smooth_number
from forgefield.ldos.model import LDOSOptions, LinearScale, PointFacts, build_network, resolve
from forgefield.physics.units import BOHR
from forgefield.runs import create_run_from_model
from tests.support.helpers import SHARED_DATA

BE = SHARED_DATA / "be2_ldos"
GRID = EnergyGrid(-4.0, 2.0, 9)
DESCRIPTORS = {"type": "bispectrum", "twojmax": 2, "cutoff": 2.5}
CALCULATION = {"spacing": [0.37, 0.34, 0.38], "temperatures": [500.0], "ecutrho": 12.0}
UPF = """<UPF version="2.0.1">
<PP_HEADER element="Be" z_valence="2.0" functional="PBE" core_correction="F"/>
<PP_R>0.0 0.5 1.0</PP_R><PP_RAB>0.5 0.5 0.5</PP_RAB>
</UPF>
"""


def structure() -> Atoms:
    return Atoms("Be2", [[0.1, 0, 0], [1.2, 1.0, 1.4]], cell=[[2.2, 0, 0], [0.4, 2.0, 0], [0, 0.1, 3.0]], pbc=True)


def make_run(folder, name="be", target="ldos", descriptors=DESCRIPTORS, **facts):
    levels = GRID.levels if target == "ldos" else 1
    scales = LinearScale("standard", [3.0] * 5, [40.0] * 5), LinearScale("minmax", [0.03] * levels, [0.03] * levels)
    energies = GRID.to_dict() if target == "ldos" else None
    resolved = resolve(asdict(LDOSOptions([6], "tanh")), PointFacts(target, *scales, energies, descriptors))
    known = {"species": ["Be"], "cutoff": 2.5, "calculation": CALCULATION}
    return create_run_from_model(
        name=name,
        out=folder,
        resolved=resolved,
        potential=build_network(resolved, precision="float64", seed=1),
        origin="a test",
        precision="float64",
        facts={**known, **facts},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = make_run(tmp_path_factory.mktemp("electrons"))
    (made.path / "pseudopotentials").mkdir()
    (made.path / "pseudopotentials" / "Be.upf").write_text(UPF)
    return made


def test_the_command_writes_what_follows_from_the_network(run, tmp_path, capsys):
    atoms = structure()
    other = structure()
    other.positions[1] += 0.2
    other.info["snapshot"] = 7
    ase.io.write(tmp_path / "two.xyz", [atoms, other], format="extxyz")
    words = [
        "predict",
        str(run.path),
        str(tmp_path / "two.xyz"),
        "--temperature",
        "600",
        "--ldos",
        "-o",
        str(tmp_path / "o"),
    ]
    assert main(words) == 0
    first, second = json.loads((tmp_path / "o" / "results.json").read_text())
    shape = (6, 6, 8)
    raw = make_descriptors(DescriptorOptions(**DESCRIPTORS), ["Be"]).on_grid(
        atoms.cell, atoms.positions, atoms.numbers, True, shape
    )
    with torch.no_grad():
        ldos = api.load(run)(raw)
    upf = read_upf(run.path / "pseudopotentials" / "Be.upf")
    energies = DensityEnergies(
        torch.as_tensor(atoms.cell.array), torch.as_tensor(atoms.positions), [4, 4], {"Be": upf}, shape, 12.0
    )
    expected = total_energy(ldos, GRID, 600.0, energies)
    assert first["grid"] == list(shape)
    assert first["free_energy"] == pytest.approx(float(expected.total), abs=1e-9)
    assert first["band_energy"] == pytest.approx(float(expected.band_energy), abs=1e-9)
    assert first["fermi_energy"] == pytest.approx(float(expected.fermi), abs=1e-9)
    assert first["electrons_of_density"] == pytest.approx(4.0, abs=1e-9)
    np.testing.assert_allclose(np.load(tmp_path / "o" / "ldos-0.npy"), ldos, rtol=1e-9)
    dos = np.load(tmp_path / "o" / "dos.npy")
    np.testing.assert_allclose(dos[0], ldos.reshape(-1, 9).sum(0) * atoms.cell.volume / 288, rtol=1e-9)
    assert np.array_equal(np.load(tmp_path / "o" / "energies.npy"), GRID.energies().numpy())
    with (tmp_path / "o" / "density-1.cube").open() as file:
        cube = read_cube(file)
    np.testing.assert_allclose(cube["data"], np.load(tmp_path / "o" / "density-1.npy") * BOHR**3, rtol=1e-5)
    np.testing.assert_allclose(cube["atoms"].positions, other.positions, atol=1e-5)
    images = ase.io.read(tmp_path / "o" / "predicted.extxyz", ":")
    assert [image.get_potential_energy() for image in images] == [first["free_energy"], second["free_energy"]]
    assert images[1].info["snapshot"] == 7
    assert "free energy" in capsys.readouterr().out
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_calculator_of_a_repeated_cell_gives_n_times_the_energy(run):
    calculator = Calculator(run, temperature=600.0)
    atoms = structure()
    atoms.calc = calculator
    energy, band, dos = atoms.get_potential_energy(), calculator.results["band_energy"], calculator.results["dos"]
    level = calculator.results["fermi_energy"]
    atoms = atoms * (2, 1, 1)
    atoms.calc = calculator
    assert atoms.get_potential_energy() == pytest.approx(2 * energy, abs=1e-8)
    assert calculator.results["band_energy"] == pytest.approx(2 * band, abs=1e-9)
    assert calculator.results["fermi_energy"] == pytest.approx(level, abs=1e-9)
    np.testing.assert_allclose(calculator.results["dos"], 2 * dos, rtol=1e-9)
    assert ElectronModel(run, spacing=0.5).grid_of(atoms) == (9, 5, 6)
    assert [smooth_number(x) for x in (10.6, 18.004, 22.5, 1.0)] == [12, 18, 24, 2]


def test_a_model_of_densities_needs_no_temperature_and_has_no_energy(tmp_path):
    made = make_run(tmp_path, target="density", calculation={"spacing": [0.4] * 3, "electrons_per_atom": 2.0})
    found = ElectronModel(made)(structure())
    assert found.density.shape == (6, 6, 8)
    assert (found.free_energy, found.dos) == (None, None)
    with pytest.raises(ForgefieldError, match="not an LDOS"):
        Calculator(made)


def aluminium() -> Atoms:
    atoms = structure()
    atoms.symbols[0] = "Al"
    return atoms


@pytest.mark.parametrize(
    ("facts", "settings", "atoms", "temperature", "words"),
    [
        ({}, {}, structure(), None, "temperature of the electrons is missing.*had 500 K"),
        ({}, {}, structure(), -3.0, "-3.0 is not valid"),
        ({}, {"electrons": 4}, aluminium(), 300, "contains Al, on which run be was not trained; it supports Be"),
        ({"descriptors": None}, {}, structure(), 300, "does not state how its descriptors were computed"),
        (
            {"descriptors": {"twojmax": 4}},
            {"electrons": 4},
            structure(),
            300,
            "produces 14 columns, but its network expects 5",
        ),
        ({}, {}, structure(), 300, "number of electrons of Be2 is unknown.*--pseudopotentials"),
        ({}, {"pseudopotentials": "nowhere"}, structure(), 300, "no pseudopotential of Be in nowhere"),
        ({"calculation": {}}, {"electrons": 4}, structure(), 300, "--grid 18 18 27"),
        ({}, {"grid": (4, 4)}, structure(), 300, "three whole numbers"),
        ({}, {"electrons": 4}, Atoms("Be"), 300, "not periodic"),
        ({}, {"electrons": 4000}, structure(), 300, "Fermi"),
    ],
)
def test_what_is_missing_is_reported(facts, settings, atoms, temperature, words, tmp_path):
    with pytest.raises(ForgefieldError, match=f"(?s){words}"):
        ElectronModel(make_run(tmp_path, **facts), **settings)(atoms, temperature)


def test_without_pseudopotentials_there_is_a_band_energy_and_no_free_energy(tmp_path):
    made = make_run(tmp_path, calculation={"spacing": [0.4] * 3, "electrons_per_atom": 2.0})
    atoms = structure()
    atoms.calc = Calculator(made, temperature=600.0)
    with pytest.raises(ForgefieldError, match=r"not available: run be contains no pseudopotentials.*band_energy"):
        atoms.get_potential_energy()
    assert np.isfinite(atoms.calc.get_property("band_energy", atoms))
    negative = ElectronModel(make_run(tmp_path, "zero", negative="zero", calculation=made.info["calculation"]))
    assert negative.negative(torch.tensor(-1.0)) == 0


def test_settings_of_electrons_are_none_of_potentials(tmp_path, monkeypatch):
    from forgefield.kinds import FRAMES
    from forgefield.runs import Run

    made = make_run(tmp_path)
    monkeypatch.setattr(Run, "kind", FRAMES)
    with pytest.raises(ForgefieldError, match="temperature is an option of LDOS runs"):
        Calculator(made, temperature=300.0)
    with pytest.raises(ForgefieldError, match="temperature is for LDOS runs"):
        api.predict(made, "x.xyz", tmp_path / "o", electrons=api.ElectronOptions(temperature=300.0))


@pytest.mark.skipif(not BE.is_dir(), reason="shared data is not there")
def test_a_real_snapshot_from_its_atoms_is_the_one_from_its_descriptor_file(tmp_path):
    """Training, prediction from the structure and the test on files: one physics."""
    config = {
        "name": "be",
        "out": str(tmp_path / "runs"),
        "data": {
            "train": str(BE / "Be_snapshot0.in.npy"),
            "val": str(BE / "Be_snapshot2.in.npy"),
            "points": {
                "energies": {"first": -5.0, "spacing": 2.5, "levels": 11},
                "descriptors": {"type": "bispectrum", "twojmax": 10, "cutoff": 4.67637},
            },
        },
        "model": {"name": "ldos", "hidden": [24]},
        "training": {"lr": 0.01, "tensorboard": 0},
        "trainer": {"max_epochs": 4, "accelerator": "cpu", "enable_progress_bar": False},
    }
    made = api.train(config)
    from forgefield.ldos.data.info import read_info

    info = read_info(BE / "Be_snapshot2.info.json")
    found = ElectronModel(made)(info.atoms(), info.temperature)
    stored = np.load(made.path / "predictions" / "val-points.npz")
    assert found.grid_shape == (18, 18, 27)
    assert found.band_energy == pytest.approx(float(stored["band_energy_pred"][0]), abs=2e-4)
    assert found.fermi_energy == pytest.approx(float(stored["fermi_pred"][0]), abs=2e-4)
    assert found.free_energy == pytest.approx(float(stored["total_pred"][0]), abs=2e-4)
