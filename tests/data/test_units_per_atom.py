"""Energies per atom: accepted wherever a unit is, multiplied by the number of atoms, whatever the file format."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from forgefield.cli import main
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import read_frames
from forgefield.data.reading import read_table
from forgefield.data.store.convert import convert
from forgefield.errors import ForgefieldError
from forgefield.physics.units import label_energy_factor

KCAL = label_energy_factor("kcal/mol")[0]
SIZES = (2, 5, 3)
PER_ATOM = (-3.0, -3.5, -4.0)
VIRIAL = " ".join(["1 0 0 0 1 0 0 0 1"])


def xyz(path):
    frames = []
    for n, energy in zip(SIZES, PER_ATOM):
        header = f'Lattice="20 0 0 0 20 0 0 0 20" Properties=species:S:1:pos:R:3:forces:R:3 energy={energy} virial="{VIRIAL}"'
        frames.append("\n".join([str(n), header, *(f"Cu {2.5 * i} 0 0 1 2 3" for i in range(n))]))
    path.write_text("\n".join(frames) + "\n")
    return path


def deepmd(folder):
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text("0 0 0 0\n")
    (folder / "type_map.raw").write_text("Cu\n")
    np.save(folder / "set.000" / "coord.npy", np.arange(24.0).reshape(2, 12))
    np.save(folder / "set.000" / "box.npy", np.tile(20 * np.eye(3).reshape(-1), (2, 1)))
    np.save(folder / "set.000" / "energy.npy", np.array([[-3.0], [-4.0]]))
    return folder


@pytest.mark.parametrize(("unit", "factor"), [("eV/atom", 1.0), ("meV / atom", 1e-3), ("kcal/mol/atom", KCAL)])
def test_energies_per_atom_become_total_energies(tmp_path, unit, factor):
    frames = read_frames(xyz(tmp_path / "a.xyz"), units=UnitOptions(energy=unit))
    assert [frame.energy for frame in frames] == pytest.approx(
        [factor * n * e for n, e in zip(SIZES, PER_ATOM)], rel=1e-14
    )
    total = read_frames(tmp_path / "a.xyz", units=UnitOptions(energy=unit.replace(" / ", "/").removesuffix("/atom")))
    for one, other in zip(frames, total):  # forces and virials are in the unit of energy, not per atom
        np.testing.assert_array_equal(one.forces, other.forces)
        np.testing.assert_array_equal(one.stress, other.stress)


def test_blocks_of_frames_and_stores_are_alike(tmp_path):
    units = UnitOptions(energy="eV/atom")
    assert [frame.energy for frame in read_frames(deepmd(tmp_path / "sys"), units=units)] == [-12.0, -16.0]
    convert(str(tmp_path / "sys"), tmp_path / "store", units=units)
    assert read_table(str(tmp_path / "store")).column("energy").tolist() == [-12.0, -16.0]


def test_convert_takes_units_per_atom_and_refuses_shifted_lines(tmp_path, capsys):
    path = xyz(tmp_path / "a.xyz")
    for target in ("store", "b.extxyz"):
        assert main(["data", "convert", str(path), str(tmp_path / target), "--energy-unit", "eV/atom"]) == 0
        assert read_table(str(tmp_path / target)).column("energy").tolist() == pytest.approx([-6.0, -17.5, -12.0])
    lines = path.read_text().splitlines()
    lines[2], lines[3] = lines[2] + " 9", lines[3].rpartition(" ")[0]
    path.write_text("\n".join(lines))
    for target in ("other", "other.extxyz"):
        capsys.readouterr()
        assert main(["data", "convert", str(path), str(tmp_path / target)]) == 2
        assert f"{path}, frame 0: line 3 has 8 columns instead of 7" in capsys.readouterr().err
        assert not (tmp_path / target).exists()


def test_npz_that_states_energies_per_atom_must_be_read_so(tmp_path):
    arrays = {"z": np.full(4, 29), "R": np.arange(24.0).reshape(2, 4, 3), "E": np.array([-3.0, -4.0])}
    np.savez(tmp_path / "a.npz", **arrays, e_unit="eV/atom")
    with pytest.raises(ForgefieldError, match=r"set data.units.energy=eV/atom"):
        read_frames(tmp_path / "a.npz")
    assert [f.energy for f in read_frames(tmp_path / "a.npz", units=UnitOptions(energy="eV/atom"))] == [-12.0, -16.0]
    np.savez(tmp_path / "b.npz", **arrays, e_unit="eV")
    with pytest.raises(ForgefieldError, match=r"set data.units.energy=eV"):
        read_frames(tmp_path / "b.npz", units=UnitOptions(energy="eV/atom"))


def hdf5(path, unit, name="energy"):
    with h5py.File(path, "w") as file:
        group = file.create_group("cu4")
        group["atomic_numbers"] = np.full(4, 29)
        group["positions"] = np.arange(24.0).reshape(2, 4, 3)
        group[name] = np.array([-3.0, -4.0])
        group[name].attrs["units"] = unit
    return path


def test_hdf5_that_states_its_unit_decides(tmp_path):
    stated, total = hdf5(tmp_path / "a.h5", "eV/atom"), hdf5(tmp_path / "b.h5", "eV")
    assert [frame.energy for frame in read_frames(stated)] == [-12.0, -16.0]
    assert [frame.energy for frame in read_frames(stated, units=UnitOptions(energy="eV/atom"))] == [-12.0, -16.0]
    for path, unit in ((stated, "meV"), (total, "eV/atom")):
        with pytest.raises(ForgefieldError, match="contradicts data.units"):
            read_frames(path, units=UnitOptions(energy=unit))


def test_hdf5_values_of_other_names_are_left_out_rather_than_misread(tmp_path):
    labels, units = LabelOptions(energy="my_value"), UnitOptions(energy="eV/atom")
    path = hdf5(tmp_path / "a.h5", "eV/atom", "my_value")
    assert [frame.energy for frame in read_frames(path, labels, units)] == [-12.0, -16.0]
    with pytest.raises(ForgefieldError, match="no frame"):
        read_frames(path, labels)
    with pytest.raises(ForgefieldError, match="no frame"):
        read_frames(hdf5(tmp_path / "b.h5", "eV", "my_value"), labels, units)


def test_colabfit_energies_are_per_atom(shared):
    labels, units = LabelOptions(energy="potential-energy"), UnitOptions(energy="eV/atom", stress="kbar")
    table = read_table(str(shared / "matsciml_lmdb" / "colabfit"), labels, units)
    per_atom = table.column("energy") / table.n_atoms
    assert -4.2 < per_atom.min() < per_atom.max() < -3.4
    assert len(np.unique(table.n_atoms)) > 1


def test_an_unknown_unit_per_atom_is_an_error():
    with pytest.raises(ForgefieldError, match="'eX' is not an energy unit"):
        read_frames([], units=UnitOptions(energy="eX/atom"))
