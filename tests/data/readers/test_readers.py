"""Readers give what the file says, exactly, in eV and A; anything wrong is one sentence with file and frame."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import ase.db
import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import frames_from_atoms, read_frames
from forgefield.errors import ForgefieldError
from forgefield.physics.units import energy_factor


def emt_images(n=4):
    rng = np.random.default_rng(1)
    images = []
    for i in range(n):
        atoms = bulk("Cu", cubic=True) if i % 2 else molecule("CO")
        atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        if atoms.pbc.all():
            results["stress"] = atoms.get_stress()
        atoms.calc = SinglePointCalculator(atoms, **results)
        images.append(atoms)
    return images


def assert_same(frame, atoms, rtol=0.0):
    np.testing.assert_allclose(frame.positions, atoms.positions, rtol=rtol, atol=1e-8 if rtol else 0)
    np.testing.assert_array_equal(frame.numbers, atoms.numbers)
    np.testing.assert_allclose(frame.cell, atoms.cell[:], rtol=rtol)
    np.testing.assert_array_equal(frame.pbc, atoms.pbc)
    assert frame.energy == pytest.approx(atoms.get_potential_energy(), rel=1e-14)
    np.testing.assert_allclose(frame.forces, atoms.get_forces(), rtol=rtol, atol=1e-8 if rtol else 0)
    if "stress" in atoms.calc.results:
        np.testing.assert_allclose(frame.stress, atoms.get_stress(voigt=False), rtol=rtol, atol=1e-9)
    else:
        assert frame.stress is None


@pytest.mark.parametrize("name", ["a.traj", "a.json", "a.extxyz", "a.xyz", "a.db"])
def test_what_ase_writes_reads_back(tmp_path, name):
    images = emt_images()
    path = tmp_path / name
    if name.endswith(".db"):
        with ase.db.connect(path) as database:
            for atoms in images:
                database.write(atoms)
    else:
        ase.io.write(path, images, format="extxyz" if name.endswith("xyz") else None)
    frames = read_frames(str(path))
    assert [frame.index for frame in frames] == [0, 1, 2, 3]
    for frame, atoms in zip(frames, images):
        assert_same(frame, atoms, rtol=1e-7 if name.endswith("xyz") else 0.0)


@pytest.mark.parametrize(
    "name", ["3bpa/train_300K.xyz", "3bpa/iso_atoms.xyz", "mlearn/Li_train.xyz", "mlearn/Cu_test.xyz"]
)
def test_real_files_equal_ase_to_the_last_bit(shared, name):
    frames, images = read_frames(shared / name), ase.io.read(shared / name, ":")
    assert len(frames) == len(images)
    for frame, atoms in zip(frames, images):
        np.testing.assert_array_equal(frame.positions, atoms.positions)
        np.testing.assert_array_equal(frame.numbers, atoms.numbers)
        np.testing.assert_array_equal(frame.cell, atoms.cell[:])
        np.testing.assert_array_equal(frame.pbc, atoms.pbc)
        assert frame.energy == atoms.calc.results["energy"]
        if "forces" in atoms.calc.results:
            np.testing.assert_array_equal(frame.forces, atoms.calc.results["forces"])
        else:
            assert frame.forces is None


def test_rmd17_is_converted_from_kcal_per_mol(shared):
    path = shared / "rmd17" / "rmd17_ethanol_train_01.npz"
    frames = read_frames(path, LabelOptions(), UnitOptions(energy="kcal/mol"))
    with np.load(path) as data:
        assert len(frames) == 1000
        np.testing.assert_allclose(frames[7].forces, data["forces"][7] * energy_factor("kcal/mol"), rtol=1e-14)
        assert frames[7].energy == pytest.approx(data["energies"][7] * 0.0433641, rel=1e-6)
        np.testing.assert_array_equal(frames[7].positions, data["coords"][7])
    old = read_frames(path, LabelOptions(energy="old_energies"), UnitOptions(energy="kcal/mol"))
    assert old[7].energy != frames[7].energy


def test_npz_with_short_names_cells_and_species_of_each_frame(tmp_path):
    rng = np.random.default_rng(0)
    positions = rng.normal(size=(3, 2, 3))
    stress = rng.normal(size=(3, 6))
    path = tmp_path / "a.npz"
    np.savez(path, z=[[1, 8], [8, 1], [1, 1]], R=positions, E=[[1.0], [2.0], [3.0]], F=positions, stress=stress,
             cell=4 * np.eye(3))  # fmt: skip
    frames = read_frames(path)
    assert [f.energy for f in frames] == [1.0, 2.0, 3.0]
    assert frames[1].numbers.tolist() == [8, 1]
    assert frames[1].pbc.all()
    np.testing.assert_array_equal(frames[2].forces, positions[2])
    assert frames[0].stress[1, 2] == stress[0, 3]


def test_npz_that_states_other_units_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, z=[1, 8], R=np.ones((1, 2, 3)) * [[0], [1]], E=[1.0], e_unit="kcal/mol", r_unit="Ang")
    with pytest.raises(ForgefieldError, match=r"set data\.units\.energy=kcal/mol"):
        read_frames(path)
    assert read_frames(path, None, UnitOptions(energy="kcal/mol"))[0].energy == pytest.approx(0.0433641, rel=1e-6)


def test_units_of_length_forces_and_stress(tmp_path):
    path = write(tmp_path, "a.xyz", HEADER.format("energy=2") + "H 0 0 1 1 2 3\n")
    frame = read_frames(path, None, UnitOptions(energy="Ha", length="Bohr"))[0]
    assert frame.positions[0, 2] == pytest.approx(0.529177, rel=1e-6)
    assert frame.forces[0, 1] == pytest.approx(2 * 51.42207, rel=1e-6)
    frame = read_frames(path, None, UnitOptions(forces="meV/A"))[0]
    assert frame.forces[0].tolist() == pytest.approx([1e-3, 2e-3, 3e-3])
    box = 'Lattice="2 0 0 0 2 0 0 0 2" Properties=species:S:1:pos:R:3 stress="1 2 3 4 5 6"'
    path = write(tmp_path, "b.xyz", f"1\n{box}\nH 0 0 0\n")
    stress = read_frames(path, None, UnitOptions(stress="GPa"))[0].stress
    np.testing.assert_allclose(stress * 160.2176621, [[1, 6, 5], [6, 2, 4], [5, 4, 3]], rtol=1e-8)


HEADER = "1\nProperties=species:S:1:pos:R:3:forces:R:3 {}\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_folder_glob_list_and_weights(tmp_path):
    for name in ("b.xyz", "a.extxyz", "notes.md"):
        write(tmp_path, name, f"1\nenergy={ord(name[0])} weight=2\nH 0 0 0\n")
    assert [f.energy for f in read_frames(str(tmp_path))] == [97, 98]
    assert [f.energy for f in read_frames(str(tmp_path / "*xyz"))] == [97, 98]
    spec = [{"path": str(tmp_path / "b.xyz"), "weight": 3}, str(tmp_path / "a.extxyz")]
    assert [(f.energy, f.weight) for f in read_frames(spec)] == [(98, 6), (97, 2)]
    with pytest.raises(ForgefieldError, match="named twice"):
        read_frames([str(tmp_path), str(tmp_path / "b.xyz")])
    with pytest.raises(ForgefieldError, match=r"path: \.\.\., weight"):
        read_frames({"path": str(tmp_path / "b.xyz"), "wieght": 3})


def test_plain_xyz_and_atomic_numbers_as_species(tmp_path):
    path = write(tmp_path, "a.xyz", "2\nwater, or part of it\nO 0 0 0.5 extra\n1 0 0 1.5 extra\n\n\n")
    (frame,) = read_frames(path)
    assert frame.numbers.tolist() == [8, 1]
    assert frame.positions[:, 2].tolist() == [0.5, 1.5]
    assert not frame.pbc.any()
    assert (frame.energy, frame.forces, frame.stress) == (None, None, None)


def test_integer_and_logical_columns_are_skipped_over(tmp_path):
    text = '1\nProperties=tag:I:1:species:S:1:move:L:1:pos:R:3:force:R:3 pbc="F F F" energy=1e-1\n3 He T 1 2 3 4 5 6\n'
    (frame,) = read_frames(write(tmp_path, "a.xyz", text))
    assert frame.numbers.tolist() == [2]
    assert frame.positions.tolist() == [[1, 2, 3]]
    assert frame.forces.tolist() == [[4, 5, 6]]


def labelled(**info) -> Atoms:
    arrays = {key: info.pop(key) for key in list(info) if "force" in key.lower()}
    atoms = Atoms("H2", positions=[[0, 0, 0], [0, 0, 1]], cell=[2, 2, 2], pbc=True, info=info)
    for key, value in arrays.items():
        atoms.arrays[key] = np.asarray(value, dtype=float)
    return atoms


def test_usual_names_are_found():
    forces = np.arange(6.0).reshape(2, 3)
    for energy_name, force_name in (("REF_energy", "REF_forces"), ("dft_energy", "dft_forces"), ("energy", "force")):
        (frame,) = frames_from_atoms([labelled(**{energy_name: 3.0, force_name: forces})])
        assert frame.energy == 3.0
        np.testing.assert_array_equal(frame.forces, forces)


def test_equal_candidates_are_fine_and_different_ones_name_the_deciding_setting():
    assert frames_from_atoms([labelled(energy=3.0, REF_energy=3.0)])[0].energy == 3.0
    two = labelled(energy=3.0, REF_energy=4.0)
    with pytest.raises(ForgefieldError, match=r"energy \(3\), REF_energy \(4\).*data\.labels\.energy=REF_energy"):
        frames_from_atoms([two])
    assert frames_from_atoms([two], LabelOptions(energy="REF_energy"))[0].energy == 4.0
    assert frames_from_atoms([two], LabelOptions(energy="none"))[0].energy is None


def test_calculator_against_info_is_decided_by_name():
    atoms = labelled(energy=3.0)
    atoms.calc = SinglePointCalculator(atoms, energy=5.0)
    with pytest.raises(ForgefieldError, match=r"data\.labels\.energy=calculator"):
        frames_from_atoms([atoms])
    assert frames_from_atoms([atoms], LabelOptions(energy="calculator"))[0].energy == 5.0
    assert frames_from_atoms([atoms], LabelOptions(energy="energy"))[0].energy == 3.0


def test_free_energy_is_taken_only_where_there_is_no_energy_or_when_named():
    both = labelled(energy=3.0, free_energy=2.9)
    assert frames_from_atoms([both])[0].energy == 3.0
    assert frames_from_atoms([both], LabelOptions(energy="free_energy"))[0].energy == 2.9
    assert frames_from_atoms([labelled(free_energy=2.9)])[0].energy == 2.9


def test_energies_and_free_energies_are_not_mixed_within_a_source(tmp_path):
    mixed = [labelled(free_energy=2.9), labelled(), labelled(dft_energy=3.0, free_energy=2.8)]
    for images, free, usual in ((mixed, 0, 2), (mixed[::-1], 2, 0)):
        with pytest.raises(ForgefieldError) as caught:
            frames_from_atoms(images, source="s")
        message = str(caught.value)
        assert f"s, frame {free}: it has free_energy but no energy" in message
        assert f"s, frame {usual} has energy (dft_energy)" in message
        assert "data.labels.energy=free_energy" in message
        assert "data.labels.energy=dft_energy" in message
    assert [f.energy for f in frames_from_atoms(mixed, LabelOptions(energy="free_energy"))] == [2.9, None, 2.8]
    assert [f.energy for f in frames_from_atoms(mixed, LabelOptions(energy="dft_energy"))] == [None, None, 3.0]
    # A list of files is one source.
    for name, image in (("a.extxyz", mixed[0]), ("b.extxyz", mixed[2])):
        ase.io.write(tmp_path / name, image, format="extxyz")
    with pytest.raises(ForgefieldError, match=r"a\.extxyz, frame 0: it has free_energy.*b\.extxyz, frame 0 has energy"):
        read_frames([str(tmp_path / "a.extxyz"), str(tmp_path / "b.extxyz")])


def test_virial_is_minus_volume_times_stress():
    virial = np.arange(9.0).reshape(3, 3) + np.arange(9.0).reshape(3, 3).T
    (frame,) = frames_from_atoms([labelled(virial=virial)])
    np.testing.assert_allclose(frame.stress, -virial / 8.0)
    (frame,) = frames_from_atoms([labelled(virials=virial.reshape(-1), stress=-virial / 8)])
    np.testing.assert_allclose(frame.stress, -virial / 8.0)
    wrong_sign = labelled(virial=virial, stress=virial / 8)
    with pytest.raises(ForgefieldError, match=r"data\.labels\.stress=none or data\.labels\.virial=none"):
        frames_from_atoms([wrong_sign])
    np.testing.assert_allclose(frames_from_atoms([wrong_sign], LabelOptions(virial="none"))[0].stress, virial / 8)
    np.testing.assert_allclose(frames_from_atoms([wrong_sign], LabelOptions(stress="none"))[0].stress, -virial / 8)


def test_a_named_key_may_be_missing_in_some_frames_but_not_in_all():
    frames = frames_from_atoms([labelled(x=1.0), labelled(y=2.0)], LabelOptions(energy="x"))
    assert [f.energy for f in frames] == [1.0, None]
    with pytest.raises(ForgefieldError, match=r"data\.labels\.energy=z.*keys found there: x, y"):
        frames_from_atoms([labelled(x=1.0), labelled(y=2.0)], LabelOptions(energy="z"))


def test_a_named_key_may_be_missing_altogether_where_labels_are_not_required(tmp_path):
    ase.io.write(tmp_path / "a.extxyz", labelled(energy=1.0), format="extxyz")
    labels = LabelOptions(energy="my_E")
    with pytest.raises(ForgefieldError, match=r"data\.labels\.energy=my_E: no frame"):
        read_frames(tmp_path / "a.extxyz", labels)
    (frame,) = read_frames(tmp_path / "a.extxyz", labels, required=False)
    assert frame.energy is None  # not the one of another name


GOOD = 'Lattice="4 0 0 0 4 0 0 0 4" Properties=species:S:1:pos:R:3:forces:R:3 energy=1 pbc="T T T"\n'
ATOMS = "H 0 0 0 1 2 3\nH 0 0 1 1 2 3\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.xyz", "", "a.xyz: the file is empty"),
        ("a.npz", "", "a.npz: the file is empty"),
        ("a.db", "", "a.db: the file is empty"),
        ("a.xyz", f"2\n{GOOD}{ATOMS}2\n{GOOD}H 0 0 0 1 2 3\n", "frame 1: it is truncated: 2 atoms announced, 1 there"),
        ("a.xyz", f"2\n{GOOD}H 0 0 0 1 2 3\nH 0 0 1 1", "frame 0: line 4 has 5 columns instead of 7"),
        ("a.xyz", f"2\n{GOOD}{ATOMS}rubbish\n", "frame 1: line 5 should hold its number of atoms, not 'rubbish'"),
        ("a.xyz", f"2\n{GOOD}{ATOMS.replace('2', 'nan')}", "frame 0: forces of atom 0 contains NaN or infinity"),
        ("a.xyz", f"2\n{GOOD}{ATOMS.replace('0 1 1', 'inf 1 1')}", "frame 0: positions of atom 1 contains NaN"),
        ("a.xyz", f"2\n{GOOD.replace('energy=1', 'energy=nan')}{ATOMS}", "frame 0: energy contains NaN"),
        ("a.xyz", f"2\n{GOOD.replace('energy=1', 'energy=high')}{ATOMS}", "energy='high' is not a number"),
        ("a.xyz", f"2\n{GOOD.replace('energy=1', 'energy=[1,2]')}{ATOMS}", r"energy has shape \(2,\)"),
        ("a.xyz", f"2\n{GOOD.replace('forces:R:3', 'forces:R:2:x:R:1')}{ATOMS}", r"forces has shape \(2, 2\)"),
        ("a.xyz", f"2\n{GOOD.replace('forces:R:3', 'forces:3')}{ATOMS}", "is not a list of name:kind:columns"),
        ("a.xyz", f"2\n{GOOD.replace('energy=1', 'stress=&1 2 3 4&'.replace('&', chr(34)))}{ATOMS}", r"shape \(4,\)"),
        ("a.xyz", f"2\n{GOOD.replace('4 0 0 0 4 0 0 0 4', '4 0 0 0 4 0 0 0 0')}{ATOMS}", "along xyz.*no volume"),
        ("a.xyz", f"2\n{GOOD.replace('4 0 0 0 4 0 0 0 4', '4 0 0 8 0 0 0 0 4')}{ATOMS}", "along xyz.*no volume"),
        ("a.xyz", f"2\n{GOOD.replace('0 4 0 0', '0 4 0')}{ATOMS}", "must be nine numbers"),
        ("a.xyz", f"2\n{GOOD.replace('T T T', 'T T')}{ATOMS}", "must be three of T and F"),
        ("a.xyz", f"2\n{GOOD}{ATOMS.replace('H 0 0 1', 'Hx 0 0 1')}", "frame 0: 'Hx' is not a chemical element"),
        ("a.xyz", f"2\n{GOOD.replace('energy', 'weight=-1 energy')}{ATOMS}", "weights should not be negative"),
        ("a.npz", "not a zip", "a.npz: it could not be read as npz"),
        ("a.db", "not a database", "a.db, frame 0: it could not be read as an ASE database"),
        ("a.traj", "not a trajectory", "a.traj, frame 0: it could not be read as the format traj"),
        ("a.cif", "data_x\n_cell_length_a 4\n", "a.cif"),
        ("a.strange", "what is this", "a.strange: its format is not known"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(tmp_path, name, text, message):
    path = write(tmp_path, name, text)
    with pytest.raises(ForgefieldError, match=message) as error:
        read_frames(path)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert path.read_text() == text


def test_missing_files_patterns_and_empty_folders(tmp_path):
    with pytest.raises(ForgefieldError, match=r"none\.xyz: there is no such file"):
        read_frames(tmp_path / "none.xyz")
    with pytest.raises(ForgefieldError, match="no file matches"):
        read_frames(str(tmp_path / "*.xyz"))
    with pytest.raises(ForgefieldError, match="holds no structure file"):
        read_frames(tmp_path)
    with pytest.raises(ForgefieldError, match="not a source of frames"):
        read_frames(3)


def test_truncated_binary_files_are_an_error(tmp_path):
    ase.io.write(tmp_path / "a.traj", emt_images(6))
    data = (tmp_path / "a.traj").read_bytes()
    (tmp_path / "a.traj").write_bytes(data[: len(data) // 2])
    np.savez(tmp_path / "a.npz", z=[1], R=np.zeros((50, 1, 3)), E=np.zeros(50))
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[:-300])
    for name in ("a.traj", "a.npz"):
        with pytest.raises(ForgefieldError, match=f"{name}.*damaged or truncated"):
            read_frames(tmp_path / name)


def test_pickles_are_never_read(tmp_path):
    np.savez(tmp_path / "a.npz", z=np.array([1, {}], dtype=object), R=np.zeros((1, 1, 3)))
    with pytest.raises(ForgefieldError, match="values of type object"):
        read_frames(tmp_path / "a.npz")


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
@pytest.mark.parametrize("name", ["a.xyz", "a.npz", "a.db", "a.traj"])
def test_no_permission_is_reported(name):
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    path = write(folder, name, f"2\n{GOOD}{ATOMS}")
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # the administrator may read anything
        with pytest.raises(ForgefieldError, match="no permission to read"):
            read_frames(path)
    finally:
        os.seteuid(user)
        shutil.rmtree(folder)


def test_a_stress_without_volume_is_refused(tmp_path):
    text = '1\nProperties=species:S:1:pos:R:3 stress="1 2 3 4 5 6" pbc="F F F"\nH 0 0 0\n'
    with pytest.raises(ForgefieldError, match="has a stress, but its cell has no volume"):
        read_frames(write(tmp_path, "a.xyz", text))
