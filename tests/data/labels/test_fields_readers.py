"""Fields from every kind of source: exactly the numbers that stand there, in the shape that was asked for, or a sentence."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.db import connect
from ase.io import write

from forgefield.data.frame import Frame, RawBlock
from forgefield.data.labels.fields import fits
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import frames_of, read_frames, source_files
from forgefield.errors import ForgefieldError
from tests.support.deepmd_sets import arrays, write_group, write_system
from tests.support.lmdb_files import sample, write_lmdb


def read(source: object, fields: dict[str, object], **rest) -> list[Frame]:
    return read_frames(source, LabelOptions(fields=fields), **rest)


def refused(source: object, fields: dict[str, object]) -> str:
    with pytest.raises(ForgefieldError) as caught:
        read(source, fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


COLUMNS = "Properties=species:S:1:pos:R:3:q:R:1:w:R:6:site:I:1"
XYZ = f"""2
energy=-1.5 gap=0.25 metal=F dipole="1 2 3" alpha="_JSON [[1, 2, 3], [4, 5, 6], [7, 8, 9]]" {COLUMNS}
H 0 0 0 0.5 1 2 3 4 5 6 3
O 0 0 1 -0.5 6 5 4 3 2 1 4
1
energy=-2.5 metal Properties=species:S:1:pos:R:3
H 0 0 0
"""
ASKED = {
    "band_gap": {"key": "gap", "factor": 2.0, "unit": "eV"},
    "metal": {},
    "dipole": {"shape": [3]},
    "alpha": {"shape": [3, 3]},
    "q": "atom",
    "pair": {"key": "w", "per": "atom", "shape": [2, 3]},
    "site": "atom",
}


def test_extended_xyz_gives_values_of_frames_and_of_atoms(tmp_path):
    (tmp_path / "a.xyz").write_text(XYZ)
    first, second = read(tmp_path / "a.xyz", ASKED)
    expected = {
        "band_gap": 0.5,
        "metal": 0.0,
        "dipole": [1, 2, 3],
        "alpha": [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        "q": [0.5, -0.5],
        "pair": [[[1, 2, 3], [4, 5, 6]], [[6, 5, 4], [3, 2, 1]]],
        "site": [3, 4],
    }
    assert first.fields.keys() == expected.keys()
    for name, values in expected.items():
        assert first.fields[name].dtype == np.float64
        np.testing.assert_array_equal(first.fields[name], values, strict=False)
        assert first.fields[name].shape == np.shape(values)
    assert first.per_atom == {"q", "pair", "site"}
    assert (dict(second.fields), second.per_atom) == ({"metal": np.array(1.0)}, frozenset())  # missing is missing
    assert (first.energy, second.energy) == (-1.5, -2.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dipole": {"shape": [4]}},
            r"a\.xyz, frame 0: dipole has shape \(3,\); according to data\.labels\.fields\.dipole it must be \(4,\)",
        ),
        ({"w": {"per": "atom", "shape": [3]}}, r"frame 0: w has shape \(2, 6\); .* it must be \(2, 3\)"),
        ({"alpha": {"per": "atom", "shape": [3]}}, r"frame 0: alpha has shape \(3, 3\); .* it must be \(2, 3\)"),
        ({"q": {}}, r"frame 0: q is a value per atom, but .* set data\.labels\.fields\.q\.per=atom"),
        (
            {"x": {"key": "y"}},
            r"fields\.x: no frame of .*a\.xyz has the key 'y'; keys found there: alpha, dipole, energy,",
        ),
        ({"q": {"per": "atom", "species": ["Xx"]}}, r"fields\.q\.species has 'Xx', which is not a chemical element"),
    ],
)
def test_what_does_not_fit_names_frame_and_shapes(tmp_path, fields, message):
    (tmp_path / "a.xyz").write_text(XYZ)
    with pytest.raises(ForgefieldError, match=message):
        read(tmp_path / "a.xyz", fields)


@pytest.mark.parametrize("value", ["nan", "inf", "blue"])
def test_values_that_are_not_numbers_are_refused(tmp_path, value):
    (tmp_path / "a.xyz").write_text(f"1\ngap={value}\nH 0 0 0\n")
    message = refused(tmp_path / "a.xyz", {"gap": {}})
    assert "a.xyz, frame 0: gap" in message
    assert ("is not a number" if value == "blue" else "contains NaN or infinity") in message


@pytest.mark.parametrize(
    ("found", "expected", "fitting"),
    [
        ((), (), True),
        ((1,), (), True),
        ((), (1,), True),
        ((9,), (3, 3), True),
        ((2, 9), (2, 3, 3), True),
        ((2, 1), (2,), True),
        ((18,), (2, 3, 3), True),
        ((3, 2), (2, 3), False),  # the wrong way round is not a matter of shape
        ((6, 3), (2, 3, 3), False),
        ((3,), (4,), False),
        ((2,), (), False),
    ],
)
def test_numbers_are_only_taken_for_others_where_nothing_changes_its_place(found, expected, fitting):
    assert fits(found, expected) is fitting


def test_files_and_databases_of_ase(tmp_path):
    atoms = Atoms("HO", positions=[[0, 0, 0], [0, 0, 1.0]], info={"gap": 0.5, "unused": "text"})
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0, dipole=[1.0, 2.0, 3.0], magmoms=[0.1, 0.2])
    fields = {"gap": {}, "dipole": {"shape": [3]}, "magmoms": "atom"}
    write(tmp_path / "a.traj", [atoms])
    (frame,) = read(tmp_path / "a.traj", fields)
    np.testing.assert_array_equal(frame.fields["dipole"], [1, 2, 3])
    np.testing.assert_array_equal(frame.fields["magmoms"], [0.1, 0.2])
    assert frame.fields["gap"] == 0.5

    with connect(tmp_path / "a.db") as database:
        database.write(atoms, key_value_pairs={"gap": 0.25}, data={"aparam": np.arange(4.0).reshape(2, 2)})
    (frame,) = read(tmp_path / "a.db", {**fields, "aparam": {"per": "atom", "shape": [2]}})
    assert frame.fields["gap"] == 0.25
    np.testing.assert_array_equal(frame.fields["aparam"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(frame.fields["dipole"], [1, 2, 3])
    assert frame.per_atom == {"magmoms", "aparam"}


def test_ase_lmdb_databases(tmp_path):
    pytest.importorskip("ase_db_backends")
    atoms = Atoms("HO", positions=[[0, 0, 0], [0, 0, 1.0]])
    with connect(str(tmp_path / "a.aselmdb"), type="aselmdb") as database:
        database.write(atoms, data={"charge": -1, "aparam": np.array([0.5, 1.5])}, spin=3)
    (frame,) = read(tmp_path / "a.aselmdb", {"charge": {}, "spin": {}, "aparam": "atom"})
    assert (frame.fields["charge"], frame.fields["spin"]) == (-1, 3)
    np.testing.assert_array_equal(frame.fields["aparam"], [0.5, 1.5])


def test_samples_of_open_matsciml(tmp_path):
    targets = {"regression": {"band_gap": 0.75, "energy_per_atom": -3.0}}
    path = write_lmdb(
        tmp_path / "a.lmdb",
        {
            "0": sample(1.0, dipole=np.array([1.0, 2.0]), magmoms=torch.tensor([0.5, 0.25]), targets=targets),
            "1": sample(2.0),
        },
    )
    fields = {
        "band_gap": {},
        "dipole": {"shape": [2]},
        "magmoms": "atom",
        "per_atom_energy": {"key": "targets.energy_per_atom"},
    }
    first, second = read(path, fields)
    assert (first.fields["band_gap"], first.fields["per_atom_energy"]) == (0.75, -3.0)
    np.testing.assert_array_equal(first.fields["dipole"], [1, 2])  # as long as there are atoms, and still of the frame
    np.testing.assert_array_equal(first.fields["magmoms"], [0.5, 0.25])
    assert first.per_atom == {"magmoms"}
    assert not second.fields


def test_real_crystals_carry_their_gaps(shared):
    frames = read(shared / "matsciml_lmdb" / "oqmd", {"band_gap": {"unit": "eV"}, "delta_e": {}})
    gaps = np.array([frame.fields["band_gap"] for frame in frames if "band_gap" in frame.fields])
    assert (len(frames), len(gaps)) == (200, 199)  # one has none, which is not zero
    assert gaps.min() >= 0
    assert gaps.max() > 1
    assert frames[0].fields["delta_e"] == pytest.approx(-1.59414634085853, abs=0)
    magnets = read(shared / "matsciml_lmdb" / "alexandria", {"magmoms": "atom"})
    assert all(frame.fields["magmoms"].shape == (len(frame),) for frame in magnets if frame.fields)


DEEPMD = {
    "fparam": {"shape": [2]},
    "aparam": {"per": "atom", "shape": [2]},
    "atom_ener": "atom",
    "dipole": {"shape": [3]},
    "atomic_dipole": {"per": "atom", "shape": [3]},
    "polarizability": {"shape": [3, 3]},
    "atom_dos": {"per": "atom", "shape": [5]},
    "dos": {"shape": [5]},
    "band_prop": {"shape": [4]},
}


def deepmd_arrays(n_frames: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed + 100)
    widths = {name: int(np.prod(said["shape"])) if isinstance(said, dict) else 1 for name, said in DEEPMD.items()}
    per_atom = {name for name, said in DEEPMD.items() if said == "atom" or said.get("per") == "atom"}
    return arrays(n_frames, seed) | {
        name: rng.normal(size=(n_frames, width * (4 if name in per_atom else 1))) for name, width in widths.items()
    }


def assert_deepmd(frame: Frame, columns: dict[str, np.ndarray], row: int, atoms: list[int]) -> None:
    assert frame.fields.keys() == DEEPMD.keys()
    for name, value in frame.fields.items():
        said = DEEPMD[name]
        shape = said["shape"] if isinstance(said, dict) else []
        expected = columns[name][row]
        if name in frame.per_atom:
            expected = expected.reshape(4, *shape)[atoms]
        np.testing.assert_array_equal(value, expected.reshape(value.shape))
        assert value.shape == ((len(atoms), *shape) if name in frame.per_atom else tuple(shape))


@pytest.mark.parametrize("layout", ["npy", "raw", "hdf5", "mixed"])
def test_systems_of_deepmd_kit(tmp_path, layout):
    columns = deepmd_arrays(3)
    atoms = [[0, 1, 2, 3]] * 3
    path: Path | str = tmp_path / "water"
    if layout == "npy":
        write_system(path, columns)
    elif layout == "raw":
        write_system(path)
        for name, values in columns.items():
            np.savetxt(tmp_path / "water" / f"{name}.raw", values, fmt="%.17g")
    elif layout == "hdf5":
        path = tmp_path / "water.h5"
        with h5py.File(path, "w") as file:
            write_group(file.create_group("a"), columns)
    else:
        types = np.array([[0, 1, 1, -1], [1, 1, -1, -1], [0, 0, 0, 1]])
        atoms = [[0, 1, 2], [0, 1], [0, 1, 2, 3]]
        write_system(path, {**columns, "real_atom_types": types}, types=[0, 0, 0, 0])
    frames = read(path, DEEPMD)
    for row, frame in enumerate(frames):
        assert_deepmd(frame, columns, row, atoms[row])
        np.testing.assert_array_equal(frame.forces, columns["force"][row].reshape(4, 3)[atoms[row]])


def test_an_array_that_deepmd_kit_would_not_take_either_is_refused_with_both_shapes(tmp_path):
    path = write_system(tmp_path / "water", {**arrays(2), "aparam": np.zeros((2, 6)), "fparam": np.zeros((2, 3))})
    message = refused(path, {"aparam": {"per": "atom", "shape": [2]}})
    assert "frame 0: aparam has shape (6,); according to data.labels.fields.aparam it must be (4, 2)" in message
    assert "fparam has shape (3,); according to data.labels.fields.fparam it must be (2,)" in refused(
        path, {"fparam": {"shape": [2]}}
    )
    (path / "set.000" / "fparam.npy").unlink()
    assert "fields.fparam: no frame of" in refused(path, {"fparam": {"shape": [3]}})
    second = {**arrays(1, 3), "fparam": np.array([[7.0]])}
    frames = read([path, write_system(tmp_path / "other", second)], {"fparam": {"shape": [1]}})
    assert [frame.fields.get("fparam", np.array([np.nan]))[0] for frame in frames][2] == 7.0
    assert not frames[0].fields


@pytest.mark.parametrize("layout", ["chosen", "all"])
def test_values_of_one_species_only(tmp_path, layout):
    """DeePMD-kit's atomic dipoles of the types in sel_type: the file may leave the other atoms out."""
    rng = np.random.default_rng(3)
    everything = rng.normal(size=(2, 4, 3))
    chosen = np.array([0, 2, 3])  # the hydrogens of H O H H
    stored = everything if layout == "all" else everything[:, chosen]
    path = write_system(tmp_path / "water", {**arrays(2), "atomic_dipole": stored.reshape(2, -1)})
    said = {"per": "atom", "shape": [3], "species": ["H"], "factor": 2.0}
    frames = read(path, {"atomic_dipole": said})
    for frame, values in zip(frames, everything, strict=True):
        np.testing.assert_array_equal(frame.fields["atomic_dipole"][chosen], 2 * values[chosen])
        assert np.isnan(frame.fields["atomic_dipole"][1]).all()
    lone = write_system(tmp_path / "oxygen", {**arrays(1), "atomic_dipole": np.zeros((1, 12))}, types=[0, 0, 0, 0])
    assert [len(frame.fields) for frame in read([path, lone], {"atomic_dipole": said})] == [1, 1, 0]
    message = refused(path, {"atomic_dipole": {**said, "species": ["O"], "shape": [2]}})
    assert "it must be (4, 2) or (1, 2)" in message


def test_npz_and_hdf5_columns_are_taken_as_they_stand(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "z": np.array([1, 8]),
        "R": rng.normal(size=(5, 2, 3)) + np.array([[0, 0, 0], [0, 0, 4]]),
        "E": rng.normal(size=5),
        "gap": rng.normal(size=5),
        "charges": rng.normal(size=(5, 2)),
        "metal": np.array([True, False, True, True, False]),
    }
    np.savez(tmp_path / "a.npz", **columns)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("mol")
        for name, values in columns.items():
            group[name] = values
        group["gap"].attrs["units"] = "hartree"  # of an energy it would be honoured; a field has its own factor
        group["charges"].attrs["units"] = "furlong"
    fields = {"gap": {"factor": 27.2, "unit": "eV"}, "q": {"key": "charges", "per": "atom"}, "metal": {}}
    for name in ("a.npz", "a.h5"):
        frames = read(tmp_path / name, fields)
        for i, frame in enumerate(frames):
            assert frame.fields["gap"] == columns["gap"][i] * 27.2
            assert frame.fields["metal"] == columns["metal"][i]
            np.testing.assert_array_equal(frame.fields["q"], columns["charges"][i])
            assert frame.energy == columns["E"][i]


def test_blocks_and_single_frames_give_the_same(tmp_path):
    """What a block cannot decide goes frame by frame; both ways are the same numbers."""
    columns = deepmd_arrays(4)
    path = write_system(tmp_path / "water", columns)
    (file,) = source_files(path)
    labels = LabelOptions(fields=DEEPMD)
    together = list(frames_of(file, LabelReader(labels, UnitOptions()), UnitOptions()))
    block = RawBlock(
        positions=columns["coord"].reshape(4, 4, 3),
        numbers=np.array([1, 8, 1, 1]),
        cell=columns["box"].reshape(4, 3, 3),
        pbc=np.ones(3, dtype=bool),
        source=str(path),
        start=0,
        info=columns,
        arrays={name: values.reshape(4, 4, -1) for name, values in columns.items() if values.shape[1] % 4 == 0},
    )
    reader = LabelReader(labels, UnitOptions())
    for one, other in zip(together, map(reader.frame, block.frames()), strict=True):
        assert one.per_atom == other.per_atom
        for name, value in one.fields.items():
            np.testing.assert_array_equal(value, other.fields[name], strict=True)
    reader.finish("all")


def test_names_that_are_fields_are_no_longer_other_values(tmp_path):
    (tmp_path / "a.xyz").write_text(XYZ)
    reader = LabelReader(LabelOptions(fields={"band_gap": {"key": "gap"}}), UnitOptions())
    (file,) = source_files(tmp_path / "a.xyz")
    list(frames_of(file, reader, UnitOptions()))
    assert reader.other_names() == ["alpha", "dipole", "metal", "q", "site", "w"]
    reader.finish("a.xyz")


def test_texts_become_their_positions_and_space_groups_their_numbers(tmp_path):
    columns = "Properties=species:S:1:pos:R:3:site:S:1"
    text = f'1\nphase=bcc group="I m -3 m" {columns}\nFe 0 0 0 bulk\n1\nphase=fcc {columns}\nFe 0 0 0 step\n'
    (tmp_path / "a.xyz").write_text(text)
    fields = {
        "phase": {"values": ["fcc", "bcc", "hcp"]},
        "group": {"values": "space_groups"},
        "site": {"per": "atom", "values": ["bulk", "step"]},
    }
    first, second = read(tmp_path / "a.xyz", fields)
    assert (first.fields["phase"], second.fields["phase"], first.fields["group"]) == (1, 0, 229)
    assert (first.fields["site"].tolist(), second.fields["site"].tolist()) == ([0], [1])
    assert "group" not in second.fields
    assert "phase is 'bcc', which is not in data.labels.fields.phase.values" in refused(
        tmp_path / "a.xyz", {"phase": {"values": ["fcc", "hcp"]}}
    )
    assert "which is not the symbol of a space group" in refused(
        tmp_path / "a.xyz", {"phase": {"values": "space_groups"}}
    )
    assert "list the texts in data.labels.fields.phase.values" in refused(tmp_path / "a.xyz", {"phase": {}})
    for wrong in (["fcc"], ["fcc", "fcc"], [1, 2], "space_group"):
        with pytest.raises(ForgefieldError, match="phase.values' must be a list of different texts, or space_groups"):
            read(tmp_path / "a.xyz", {"phase": {"values": wrong}})


def test_symbols_of_space_groups_have_the_numbers_of_real_crystals(shared):
    fields = {"number": {"key": "symmetry.number"}, "symbol": {"key": "symmetry.symbol", "values": "space_groups"}}
    for name in ("materials_project", "nomad", "carolina_db"):
        frames = read(shared / "matsciml_lmdb" / name, fields)
        assert [frame.fields["symbol"] for frame in frames] == [frame.fields["number"] for frame in frames]
        assert len({float(frame.fields["number"]) for frame in frames}) > 1
