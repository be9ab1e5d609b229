"""HDF5 files of any layout: systems are found by what they hold, units and signs are those the file states."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import chunks, frames_of, read_frames, source_files
from forgefield.errors import ForgefieldError
from forgefield.physics.units import BOHR, HARTREE, energy_factor

RNG = np.random.default_rng(5)


def quantity(group, name, values, unit=None):
    group[name] = values
    if unit is not None:
        group[name].attrs["units"] = unit


def test_ani_layout_with_symbols(tmp_path):
    positions, energies = RNG.normal(size=(4, 3, 3)), RNG.normal(size=4)
    with h5py.File(tmp_path / "ani.h5", "w") as file:
        for name in ("gdb/s10", "gdb/s2"):
            file[f"{name}/coordinates"] = positions + (name == "gdb/s10") * 10
            file[f"{name}/energies"] = energies
            file[f"{name}/species"] = np.array([b"O", b"H", b"H"])
            file[f"{name}/smiles"] = np.array([b"O", b"H"])
    frames = read_frames(tmp_path / "ani.h5", units=UnitOptions(energy="Ha"))
    assert len(frames) == 8
    np.testing.assert_array_equal([frame.positions for frame in frames[:4]], positions)  # s2 before s10
    np.testing.assert_allclose([frame.energy for frame in frames[4:]], energies * HARTREE, rtol=1e-14)
    assert frames[0].numbers.tolist() == [8, 1, 1]
    assert not frames[0].pbc.any()


def write_spice(path):
    values = {
        "conformations": RNG.normal(size=(3, 2, 3)),
        "energy": RNG.normal(size=3),
        "grad": RNG.normal(size=(3, 2, 3)),
    }
    with h5py.File(path, "w") as file:
        group = file.create_group("hcl")
        quantity(group, "atomic_numbers", [1, 17])
        quantity(group, "conformations", values["conformations"], "bohr")
        quantity(group, "dft_total_energy", values["energy"], "hartree")
        quantity(group, "formation_energy", values["energy"] + 1, "hartree")
        quantity(group, "dft_total_gradient", values["grad"], "hartree / bohr")
        quantity(group, "mbis_charges", np.zeros((3, 2, 1)), "elementary_charge")
        group["subset"] = [b"test"]
    return path, values


def test_stated_units_are_converted_and_a_gradient_is_minus_the_forces(tmp_path):
    path, values = write_spice(tmp_path / "spice.hdf5")
    frames = read_frames(path)
    np.testing.assert_allclose([f.positions for f in frames], values["conformations"] * BOHR, rtol=1e-14)
    np.testing.assert_allclose([f.energy for f in frames], values["energy"] * HARTREE, rtol=1e-14)
    np.testing.assert_allclose([f.forces for f in frames], -values["grad"] * HARTREE / BOHR, rtol=1e-14)
    named = read_frames(path, LabelOptions(energy="formation_energy"))
    np.testing.assert_allclose([f.energy for f in named], (values["energy"] + 1) * HARTREE, rtol=1e-14)
    # The settings may say the same, and then nothing is converted twice.
    same = read_frames(path, units=UnitOptions(energy="Ha", length="Bohr"))
    np.testing.assert_allclose([f.forces for f in same], [f.forces for f in frames], rtol=1e-12)


def test_units_that_contradict_the_settings_are_refused(tmp_path):
    path, _ = write_spice(tmp_path / "spice.hdf5")
    with pytest.raises(ForgefieldError, match=r"dft_total_energy: it says its unit is hartree, which contradicts"):
        read_frames(path, units=UnitOptions(energy="kcal/mol", length="Bohr", forces="Ha/Bohr"))
    with h5py.File(path, "a") as file:
        file["hcl/dft_total_energy"].attrs["units"] = "furlong"
    with pytest.raises(ForgefieldError, match=r"hcl/dft_total_energy: its attribute units: 'furlong' is not an energy"):
        read_frames(path)


@pytest.mark.parametrize(
    ("unit", "factor"),
    [("kilojoule/mole", energy_factor("kJ/mol")), ("kilocalories / mole", energy_factor("kcal/mol")), ("eV", 1.0)],
)
def test_spelled_out_units(tmp_path, unit, factor):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        quantity(file, "positions", np.zeros((1, 1, 3)), "angstroms")
        quantity(file, "numbers", [2])
        quantity(file, "energy", [2.0], unit)
        quantity(file, "forces", np.ones((1, 1, 3)), f"{unit}/angstrom")
    (frame,) = read_frames(tmp_path / "a.h5")
    assert frame.energy == pytest.approx(2 * factor, rel=1e-14)
    assert frame.forces[0, 0] == pytest.approx(factor, rel=1e-14)


def write_mace(path, *, nested: bool, n: int = 12):
    with h5py.File(path, "w") as file:
        for i in range(n):
            group = file.create_group(f"config_batch_0/config_{i}")
            group["atomic_numbers"] = [29, 29]
            group["positions"] = np.array([[0.0, 0, 0], [0, 0, 2 + 0.1 * i]])
            group["cell"] = np.eye(3) * 6 if i else "None"
            group["pbc"] = np.array([True, True, True]) if i else "None"
            group["weight"] = 1.0 + i
            home = group.create_group("properties") if nested else group
            weights = group.create_group("property_weights") if nested else group
            home["energy"] = float(i)
            home["forces"] = np.full((2, 3), float(i)) if i != 3 else np.zeros((2, 3))
            home["stress"] = "None" if i < 5 else np.eye(3)
            home["virials"] = "None"
            for label in ("energy", "forces", "stress", "virials"):
                weights[label if nested else f"{label}_weight"] = 0.0 if (label, i) == ("forces", 3) else 1.0
            group["config_type"] = "Default"
    return path


@pytest.mark.parametrize("nested", [False, True])
def test_mace_files_in_numeric_order_with_missing_labels_missing(tmp_path, nested):
    frames = read_frames(write_mace(tmp_path / "train.h5", nested=nested))
    assert [frame.energy for frame in frames] == list(range(12))
    assert [frame.weight for frame in frames] == [1.0 + i for i in range(12)]
    assert [frame.forces is None for frame in frames] == [i == 3 for i in range(12)]
    assert [frame.stress is None for frame in frames] == [i < 5 for i in range(12)]
    assert not frames[0].pbc.any()
    assert frames[1].pbc.all()
    assert frames[1].cell[0, 0] == 6


def test_matsciml_samples(tmp_path):
    with h5py.File(tmp_path / "train.h5", "w") as file:
        for i in (0, 2, 10):
            group = file.create_group(str(i))
            group["index"], group["num_atoms"] = i, 2
            group["cart_coords"] = np.array([[0.0, 0, 0], [0, 0, 2.5]])
            group["atomic_numbers"] = [14, 14]
            group["lattice_matrix"] = np.eye(3) * 5
            group["pbc/x"], group["pbc/y"], group["pbc/z"] = True, True, False
            group["total_energy"] = float(i)
            group["forces"] = np.ones((2, 3))
            group["stresses"] = np.zeros((2, 3, 3))
            group.attrs["datatype"] = "OptimizationTrajectory"
    (tmp_path / "metadata.json").write_text('{"name": "train"}')
    frames = read_frames(tmp_path)
    assert [frame.energy for frame in frames] == [0, 2, 10]
    assert frames[0].pbc.tolist() == [True, True, False]
    assert frames[0].stress is None  # those of single atoms are another quantity


def test_one_frame_many_frames_and_species_of_each_frame(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["one/positions"], file["one/numbers"], file["one/energy"] = np.zeros((1, 3)), [18], 7.0
        file["many/positions"] = RNG.normal(size=(3, 2, 3))
        file["many/numbers"] = [[1, 8], [8, 1], [6, 8]]
        file["many/cell"] = np.eye(3)[None] * np.array([4.0, 5, 6])[:, None, None]
        file["many/E"] = [[1.0], [2.0], [3.0]]
    frames = read_frames(tmp_path / "a.h5")
    assert [frame.energy for frame in frames] == [1, 2, 3, 7]
    assert frames[2].numbers.tolist() == [6, 8]
    assert [frame.cell[1, 1] for frame in frames] == [4, 5, 6, 0]
    assert read_frames(f"{tmp_path / 'a.h5'}#/one")[0].energy == 7


def test_parts_of_a_file_are_the_whole(tmp_path):
    write_mace(tmp_path / "a.h5", nested=True)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["extra/positions"], file["extra/numbers"] = RNG.normal(size=(9, 2, 3)), [1, 1]
        file["extra/energy"] = np.arange(12.0, 21.0)
    (file,) = source_files(tmp_path / "a.h5")
    for size in (1, 4, 5, 100):
        reader = LabelReader(LabelOptions(), UnitOptions())
        parts = chunks(file, size)
        energies = [f.energy for part in parts for f in frames_of(file, reader, UnitOptions(), *part)]
        assert energies == list(range(21))
    assert [f.index for f in frames_of(file, reader, UnitOptions(), 11, 14)] == [11, 12, 13]


def good(file):
    file["a/positions"], file["a/numbers"], file["a/energy"] = RNG.normal(size=(3, 2, 3)), [1, 8], np.zeros(3)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("positions", np.zeros((3, 2, 2)), r"#/a: positions has shape \(3, 2, 2\)"),
        ("numbers", [1, 8, 1], r"#/a: numbers has shape \(3,\), but there are positions of 2 atoms"),
        ("numbers", [1.5, 8], r"the atomic number of atom 0 is 1\.5"),
        ("numbers", [b"H", b"Qq"], "'Qq' in numbers is not a chemical element"),
        ("energy", np.zeros(2), r"#/a: energy has shape \(2,\), but there are 3 frames"),
        ("forces", np.zeros((3, 3, 3)), r"#/a: forces has shape \(3, 3, 3\), but there are 2 atoms"),
        ("energy", [0.0, np.inf, 0.0], "frame 1: energy contains NaN or infinity"),
        (
            "energies",
            [0.0, 1.0, 2.0],
            r"frame 1: several candidates for the energy disagree: energy \(0\), energies \(1\)",
        ),
        ("coordinates", np.ones((3, 2, 3)), "positions and coordinates both could be the positions and disagree"),
        ("cell", np.zeros((2, 3)), r"cell has shape \(2, 3\)"),
        ("pbc", [True, False], "pbc has shape"),
        ("lattice_parameters", np.ones(6), "add a lattice_matrix"),
    ],
)
def test_what_does_not_fit_is_named_and_refused(tmp_path, name, values, message):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        good(file)
        if name in file["a"]:
            del file[f"a/{name}"]
        file[f"a/{name}"] = values
    with pytest.raises(ForgefieldError, match=message) as error:
        read_frames(tmp_path / "a.h5")
    assert "a.h5" in str(error.value)


def test_files_without_systems_damaged_files_and_needless_type_maps(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x/y"] = [1, 2]
    with pytest.raises(ForgefieldError, match=r"a\.h5: no group holds positions"):
        read_frames(path)
    with pytest.raises(ForgefieldError, match="this is a dataset, not a group"):
        read_frames(f"{path}#/x/y")
    with h5py.File(path, "w") as file:
        good(file)
    with pytest.raises(ForgefieldError, match="a type_map was given, but this group is not a DeePMD system"):
        read_frames({"path": str(path), "type_map": ["H"]})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ForgefieldError, match=r"a\.h5: it could not be opened as HDF5; it is damaged or truncated"):
        read_frames(path)


def test_links_to_other_files_are_not_followed(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        good(file)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        good(file)
        file["far"] = h5py.ExternalLink("other.h5", "/a")
        file["loop"] = h5py.SoftLink("/")
    assert len(read_frames(tmp_path / "a.h5")) == 3
