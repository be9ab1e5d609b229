"""Files and numbers of MALA 1.4.0 (tests/fixtures/mala), read and computed here; and Forgefield's files read by MALA."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from forgefield import api
from forgefield.cli import main
from forgefield.ldos.data import find_snapshots
from forgefield.ldos.data.info import read_info
from forgefield.ldos.descriptors.acsd import candidate_settings, cosine_distance, score_descriptors
from forgefield.ldos.descriptors.computed import input_maker
from forgefield.ldos.electronic.density_energies import DensityEnergies
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.total_energy import total_energy
from forgefield.ldos.electronic.upf import read_upf
from forgefield.physics.structure_factor import shell_of, structure_factor

FILES = Path(__file__).parents[1] / "fixtures" / "mala"
NUMBERS = json.loads((FILES / "numbers.json").read_text())
GRID = EnergyGrid(-6.0, 2.5, 9)


def test_openpmd_files_of_mala_contain_values_and_calculation():
    (snapshot,) = find_snapshots({"inputs": str(FILES / "be0.in.h5"), "targets": str(FILES / "be0.out.h5")})
    inputs, targets = snapshot.read()
    assert np.array_equal(inputs, np.load(FILES / "be0.in.npy")[..., 3:].reshape(96, 5))
    assert np.array_equal(targets, np.load(FILES / "be0.out.npy").reshape(96, 9))
    found, stated = read_info(FILES / "be0.out.h5"), read_info(FILES / "be0.info.json")
    for name in ("fermi_energy", "electrons", "temperature", "energies", "ecutrho", "pseudopotentials", "grid_shape"):
        assert getattr(found, name) == getattr(stated, name)
    assert np.array_equal(found.numbers, stated.numbers)
    np.testing.assert_allclose(found.positions, stated.positions, rtol=0, atol=1e-14)
    np.testing.assert_allclose(found.cell, stated.cell, rtol=0, atol=1e-14)


def test_descriptors_are_computed_from_the_structure_in_an_openpmd_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path))
    make = input_maker({"type": "bispectrum", "twojmax": 2, "cutoff": 3.0})
    (snapshot,) = find_snapshots(
        {"targets": str(FILES / "be0.out.h5"), "info": str(FILES / "be0.out.h5")}, make_inputs=make
    )
    theirs = np.load(FILES / "be0.in.npy")[..., 3:].reshape(96, 5)
    np.testing.assert_allclose(snapshot.read()[0], theirs, rtol=1e-5)


def test_snapshots_become_openpmd_files_with_the_same_content(tmp_path):
    assert main(["data", "openpmd", str(FILES / "be1.in.npy"), "-o", str(tmp_path)]) == 0
    (copy,), (original,) = find_snapshots(str(tmp_path)), find_snapshots(str(FILES / "be1.in.npy"))
    for found, stored in zip(copy.read(), original.read()):
        assert np.array_equal(found, stored)
    assert copy.inputs.n_columns == 3 + 5
    assert copy.info.energies == original.info.energies
    np.testing.assert_array_equal(copy.info.positions, original.info.positions)
    np.testing.assert_allclose(copy.info.coordinates_of_points(), np.load(FILES / "be1.in.npy")[..., :3], atol=1e-6)


def test_arrays_that_cannot_become_openpmd_files_or_stores_are_named(tmp_path, capsys):
    np.save(tmp_path / "rows.in.npy", np.ones((20, 4)))
    (tmp_path / "rows.info.json").write_text('{"coordinates_in_inputs": false}')
    for words, message in (
        (["openpmd", str(tmp_path / "rows.in.npy"), "-o", str(tmp_path / "h5")], "rows: its points have no grid"),
        (["convert", str(FILES / "be0.out.npy"), str(tmp_path / "x")], "forgefield data openpmd"),
        (["align", str(FILES / "be0.out.npy"), "-o", str(tmp_path / "a"), "--first", "0", "--spacing", "0"], "above 0"),
    ):
        assert main(["data", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".npy", ".h5"])
def test_cubes_of_two_windows_are_joined_as_mala_joins_them(tmp_path, ending):
    low, high, out = str(FILES / "low_*.cube"), str(FILES / "high_*.cube"), tmp_path / f"a.out{ending}"
    assert main(["data", "cubes", low, "--join", high, "-o", str(out), "--double"]) == 0
    (snapshot,) = find_snapshots(str(out), need=("targets",))
    expected = np.array(NUMBERS["joined"]["values"])
    np.testing.assert_allclose(snapshot.read()[1].reshape(expected.shape), expected, rtol=1e-14)
    grid = EnergyGrid.from_segments([(-6.0, 1.0, 3), (-4.0, 2.0, 4)])
    assert grid.energies().tolist() == NUMBERS["joined"]["energies"]
    assert main(["data", "cubes", low, "--join", high, "-o", str(tmp_path / f"b.out{ending}"), "--disjoint"]) == 0
    assert find_snapshots(str(tmp_path / f"b.out{ending}"), need=("targets",))[0].n_targets == 7


def test_windows_that_cannot_be_joined_are_named(tmp_path, capsys):
    low = str(FILES / "low_*.cube")
    for join, message in (
        ([low], "is in two windows"),
        ([str(FILES / "high_1.cube"), "--join", low], "is the only level of its window"),
    ):
        assert main(["data", "cubes", low, "--join", *join, "-o", str(tmp_path / "a.out.npy")]) == 2
        assert message in capsys.readouterr().err


def test_snapshots_are_aligned_as_mala_aligns_them(tmp_path):
    for number in range(3):
        source = FILES / f"shifted{number}.out.npy"
        (tmp_path / source.name).write_bytes(source.read_bytes())
        (tmp_path / f"shifted{number}.info.json").write_text((FILES / f"be{number}.info.json").read_text())
        document = json.loads((tmp_path / f"shifted{number}.info.json").read_text())
        document["grid_dimensions"] = [2, 2, 3]
        (tmp_path / f"shifted{number}.info.json").write_text(json.dumps(document))
        np.save(tmp_path / f"shifted{number}.in.npy", np.ones((2, 2, 3, 4)))
    words = ["--first", "-8", "--spacing", "0.5", "--trim", "--last", "8"]
    assert main(["data", "align", str(tmp_path), "-o", str(tmp_path / "aligned"), *words]) == 0
    snapshots = find_snapshots(str(tmp_path / "aligned"))
    assert [snapshot.inputs.path.name for snapshot in snapshots] == [f"shifted{n}.in.npy" for n in range(3)]
    for number, (snapshot, theirs) in enumerate(zip(snapshots, NUMBERS["aligned"])):
        expected = np.array(theirs["values"])
        assert np.array_equal(snapshot.read()[1].reshape(expected.shape), expected)
        found = json.loads((tmp_path / "aligned" / f"shifted{number}.info.json").read_text())
        for key in ("ldos_shift_ev", "energy_shift_from_qe_ev"):
            assert found[key] == theirs[key]
        original, shift = read_info(FILES / f"be{number}.info.json"), theirs["ldos_shift_ev"]
        assert snapshot.info.fermi_energy == pytest.approx(original.fermi_energy - shift, abs=1e-12)
        assert snapshot.info.energies["band"] == pytest.approx(original.energies["band"] - 4 * shift, abs=1e-12)
        assert snapshot.info.energies["ewald"] == original.energies["ewald"]


def test_a_reference_may_begin_above_the_others(tmp_path):
    """MALA moves down only; here the first is moved up, and levels that one of them lacks are left out."""
    words = ["--first", "-8", "--spacing", "0.5", "--reference", "shifted1"]
    paths = [str(FILES / f"shifted{number}.out.npy") for number in (0, 1)]
    assert main(["data", "align", *paths, "-o", str(tmp_path / "aligned"), *words]) == 0
    first, second = find_snapshots(str(tmp_path / "aligned"), need=("targets",))
    assert np.array_equal(first.read()[1], np.load(paths[0]).reshape(12, 40)[:, :36])
    assert np.array_equal(second.read()[1], np.load(paths[1]).reshape(12, 40)[:, 4:])


def test_the_cosine_distance_is_that_of_mala():
    """Over all pairs of points; MALA rounds its descriptors to float32."""
    (snapshot,) = find_snapshots(str(FILES / "be0.info.json"), need=("targets",))
    candidates = candidate_settings({"twojmax": [2, 4], "cutoff": [3.0, 4.5]})
    scores = {(s.settings.twojmax, s.settings.cutoff): s.mean for s in score_descriptors([snapshot], candidates)}
    for theirs in NUMBERS["acsd"]:
        assert scores[theirs["twojmax"], theirs["cutoff"]] == pytest.approx(theirs["acsd"], rel=1e-4, abs=5e-10)
    stored = score_descriptors(find_snapshots(str(FILES / "be0.in.npy")), [])[0]
    assert stored.mean == pytest.approx(scores[2, 3.0], rel=1e-5)
    # Of single numbers, by hand: similarities 1, 1/4 and 1 of the first, 1, 1/2 and 1 of the second, pairs counted twice.
    assert cosine_distance(np.array([[1.0], [4.0]]), np.array([[1.0], [2.0]])) == 0.0
    assert cosine_distance(np.array([[1.0], [2.0]]), np.array([[1.0], [4.0]])) == pytest.approx((0.5 - 0.25) / 2)


def test_settings_are_compared_from_the_command_line(capsys):
    words = ["data", "acsd", str(FILES / "be0.info.json"), str(FILES / "be1.info.json"), "--twojmax", "2", "4"]
    assert main([*words, "--cutoff", "3", "--device", "cpu", "--points", "50"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:3] == ["4", "3.0", "14"]
    assert "data.points.descriptors: {type: bispectrum, twojmax: 4, cutoff: 3.0}" in out
    assert main([*words, "--type", "gaussian"]) == 2
    assert "twojmax is a setting of type=bispectrum" in capsys.readouterr().err


def test_structure_factors_of_single_wave_vectors_are_those_of_mala():
    """MALA averages over the octant of positive components; the same vectors give the same numbers."""
    stored = NUMBERS["structure_factor"]
    cell, k_max, shells = np.array(stored["cell"], dtype=float), 6.0, 24
    vectors = np.array(list(product(*(range(n) for n in np.ceil(k_max * cell / (2 * np.pi)).astype(int)))))[1:]
    vectors = vectors * 2 * np.pi / cell
    lengths = np.linalg.norm(vectors, axis=1)
    vectors, lengths = vectors[lengths <= k_max], lengths[lengths <= k_max]
    shell = shell_of(lengths, k_max, shells)
    sums = np.bincount(shell, structure_factor(np.array(stored["positions"]), vectors), minlength=shells)
    mean = sums / np.maximum(np.bincount(shell, minlength=shells), 1)
    np.testing.assert_allclose(mean, stored["values"], rtol=1e-10)


def test_a_model_of_mala_has_its_errors(tmp_path):
    """LDOS, Fermi energy, band energy at the own and at the reference's Fermi energy, and density of a test snapshot.

    Negative values of the LDOS are set to zero, as MALA does in tests.
    """
    run = api.import_mala(FILES / "be.zip", out=tmp_path)
    resolved = run.info["model"]
    assert (resolved["activation"], resolved["output_activation"]) == (["tanh", "relu"], "leakyrelu")
    errors = api.test(run, {"inputs": str(FILES / "be0.in.npy"), "targets": str(FILES / "be0.out.npy")}, device="cpu")
    (file,) = run.path.glob("test*.json")
    snapshot, theirs = json.loads(file.read_text())["snapshots"][0], NUMBERS["test"]
    assert errors["ldos_rmse"] ** 2 == pytest.approx(theirs["errors"]["ldos_mse"], rel=1e-4)
    assert snapshot["reference"]["fermi_energy"] == pytest.approx(theirs["fermi_energy"], abs=1e-6)  # float32 in MALA
    assert snapshot["reference"]["band_energy"] == pytest.approx(theirs["band_energy"], abs=1e-6)
    for name in ("band_energy", "band_energy_actual_fe"):
        assert snapshot["errors"][name] == pytest.approx(theirs["errors"][name], abs=0.02), name
    assert snapshot["errors"]["fermi_energy"] == pytest.approx(1000 * theirs["errors"]["fermi_energy"], abs=0.01)
    assert snapshot["errors"]["density"] == pytest.approx(theirs["errors"]["density_relative"], abs=1e-3)


UPF = """<UPF version="2.0.1">
<PP_HEADER element="Be" z_valence="2.0" functional="PBE" core_correction="F"/>
<PP_R>0.0 0.5 1.0</PP_R><PP_RAB>0.5 0.5 0.5</PP_RAB>
</UPF>
"""


def test_free_energies_with_the_fermi_energy_of_the_reference(tmp_path):
    """MALA's total_energy_actual_fe, from the LDOS as an array."""
    (tmp_path / "Be.UPF").write_text(UPF)
    for ending in ("in.npy", "out.npy", "info.json"):
        (tmp_path / f"be0.{ending}").write_bytes((FILES / f"be0.{ending}").read_bytes())
    document = json.loads((tmp_path / "be0.info.json").read_text()) | {"ecutrho": 8.0}  # as fine as the grid allows
    (tmp_path / "be0.info.json").write_text(json.dumps(document))
    run = api.import_mala(FILES / "be.zip", out=tmp_path)
    api.test(run, str(tmp_path / "be0.in.npy"), device="cpu")
    (file,) = run.path.glob("test*.json")
    snapshot, info = json.loads(file.read_text())["snapshots"][0], read_info(tmp_path / "be0.info.json")
    cell, positions = torch.as_tensor(info.cell), torch.as_tensor(info.positions)
    energies = DensityEnergies(
        cell, positions, [4, 4], {"Be": read_upf(tmp_path / "Be.UPF")}, info.grid_shape, info.ecutrho
    )
    with torch.no_grad():
        predicted = api.load(run)(torch.from_numpy(np.load(FILES / "be0.in.npy")[..., 3:])).double().relu()
    level = snapshot["reference"]["fermi_energy"]
    expected = float(total_energy(predicted, GRID, info.temperature, energies, fermi=level).total)
    errors, reference = snapshot["errors"], snapshot["reference"]["total_energy"]
    assert errors["total_energy_actual_fe"] == pytest.approx(500 * (expected - reference), abs=0.01)
    assert errors["total_energy"] == pytest.approx(500 * (snapshot["predicted"]["total_energy"] - reference), abs=1e-9)


READ_BY_MALA = """
import sys, numpy, mala
folder = sys.argv[1]
p = mala.Parameters()
p.verbosity, p.use_lammps = 0, False
p.descriptors.bispectrum_twojmax = 2
p.targets.ldos_gridsize, p.targets.ldos_gridspacing_ev, p.targets.ldos_gridoffset_ev = 9, 2.5, -6
target = mala.LDOS.from_openpmd_file(p, f"{folder}/be1.out.h5")
inputs = mala.Descriptor(p).read_from_openpmd_file(f"{folder}/be1.in.h5")
handler = mala.DataHandler(p)
for part in ("tr", "va"):
    handler.add_snapshot("be1.in.h5", folder, "be1.out.h5", folder, part, snapshot_type="openpmd")
handler.prepare_data()
trained_on = handler.training_data_sets[0][:][1].numpy().copy()
p.network.layer_sizes, p.running.max_number_epochs = [handler.input_dimension, 4, handler.output_dimension], 1
mala.Trainer(p, mala.Network(p), handler).train_network()
numpy.savez(f"{folder}/read.npz", inputs=inputs, ldos=target.local_density_of_states, voxel=numpy.array(target.voxel),
            positions=target.atoms.positions, trained_on=trained_on,
            numbers=[target.fermi_energy_dft, target.temperature, target.get_self_consistent_fermi_energy()])
"""


@pytest.mark.skipif("FORGEFIELD_MALA_PYTHON" not in os.environ, reason="$FORGEFIELD_MALA_PYTHON names no interpreter")
def test_mala_reads_openpmd_files_of_ours(tmp_path):
    assert main(["data", "openpmd", str(FILES / "be1.in.npy"), "-o", str(tmp_path)]) == 0
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [os.environ["FORGEFIELD_MALA_PYTHON"], "-c", READ_BY_MALA, str(tmp_path)],
        check=True,
        env=environment | {"OPENPMD_VERIFY_HOMOGENEOUS_EXTENTS": "0"},  # as for MALA's own files
    )
    found, info = np.load(tmp_path / "read.npz"), read_info(FILES / "be1.info.json")
    assert np.array_equal(found["inputs"], np.load(FILES / "be1.in.npy")[..., 3:])
    assert np.array_equal(found["ldos"], np.load(FILES / "be1.out.npy"))
    assert np.array_equal(found["trained_on"].reshape(found["ldos"].shape), found["ldos"])
    np.testing.assert_allclose(found["voxel"], info.voxel, atol=1e-14)
    np.testing.assert_allclose(found["positions"], info.positions, atol=1e-14)
    assert found["numbers"][:2].tolist() == [info.fermi_energy, info.temperature]
    assert info.fermi_energy - found["numbers"][2] == pytest.approx(0.05, abs=1e-6)  # make_files.py
