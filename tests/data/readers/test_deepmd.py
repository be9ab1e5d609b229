"""DeePMD-kit systems: exactly the arrays on disk, as frames; what does not fit together is refused with the file's name."""

from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest

from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import chunks, frames_of, read_frames, source_files
from forgefield.data.readers.deepmd import open_folder, read_system
from forgefield.errors import ForgefieldError
from tests.support.deepmd_sets import N_ATOMS, arrays, write_group, write_system


def assert_frame(frame, columns, row, numbers=(1, 8, 1, 1)):
    n = len(numbers)
    assert frame.numbers.tolist() == list(numbers)
    np.testing.assert_array_equal(frame.positions, columns["coord"][row].reshape(n, 3))
    np.testing.assert_array_equal(frame.cell, columns["box"][row].reshape(3, 3))
    assert frame.pbc.all()
    assert frame.energy == columns["energy"][row, 0]
    np.testing.assert_array_equal(frame.forces, columns["force"][row].reshape(n, 3))
    volume = 9.0 * 8.0 * 7.0
    np.testing.assert_allclose(frame.stress, -columns["virial"][row].reshape(3, 3) / volume, rtol=1e-14)


def test_sets_come_one_after_the_other_with_their_numbers_unchanged(tmp_path):
    first, second = arrays(3, 1), arrays(2, 2)
    path = write_system(tmp_path / "water", first, second)
    frames = read_frames(path)
    assert [frame.index for frame in frames] == [0, 1, 2, 3, 4]
    for frame, (columns, row) in zip(frames, [(first, 0), (first, 1), (first, 2), (second, 0), (second, 1)]):
        assert_frame(frame, columns, row)
        assert frame.source == str(path)


def test_real_water_equals_the_arrays_and_parent_folders_are_searched(shared):
    frames = read_frames(shared / "water_dp")
    assert len(frames) == 400
    coordinates = np.concatenate([np.load(p) for p in sorted((shared / "water_dp").glob("data_*/set.*/coord.npy"))])
    energies = np.concatenate(
        [np.load(p).ravel() for p in sorted((shared / "water_dp").glob("data_*/set.*/energy.npy"))]
    )
    np.testing.assert_array_equal([frame.positions.ravel() for frame in frames], coordinates.astype(np.float64))
    np.testing.assert_array_equal([frame.energy for frame in frames], energies.astype(np.float64))
    numbers, counts = np.unique(frames[0].numbers, return_counts=True)
    assert dict(zip(numbers.tolist(), counts.tolist())) == {1: 128, 8: 64}
    assert {frame.stress is None for frame in frames} == {True}
    by_glob = read_frames(str(shared / "water_dp" / "data_*"))
    assert [frame.source for frame in by_glob] == [frame.source for frame in frames]


def test_systems_are_found_at_any_depth_in_sorted_order(tmp_path):
    for name in ("b/inner/sys", "a/sys2", "a/sys1"):
        write_system(tmp_path / name, arrays(1))
    found = [file.path.relative_to(tmp_path).as_posix() for file in source_files(tmp_path)]
    assert found == ["a/sys1", "a/sys2", "b/inner/sys"]
    assert [f.path for f in source_files(str(tmp_path / "**"))] == [f.path for f in source_files(tmp_path)]


def test_text_arrays_next_to_type_raw(tmp_path):
    columns = arrays(130)
    path = write_system(tmp_path / "old")
    for name, values in columns.items():
        np.savetxt(path / f"{name}.raw", values, fmt="%.17g")
    frames = read_frames(path)
    assert len(frames) == 130
    for row in (0, 63, 64, 129):
        assert_frame(frames[row], columns, row)
    (path / "energy.raw").write_text("1\n2\n")
    with pytest.raises(ForgefieldError, match=r"old: energy has shape \(2, 1\), but coord has 130 frames"):
        read_frames(path)


def test_mixed_types_drop_padding_atoms(tmp_path):
    columns = arrays(3)
    types = np.array([[0, 1, 1, -1], [1, 1, -1, -1], [0, 0, 0, 1]])
    path = write_system(tmp_path / "mixed", {**columns, "real_atom_types": types}, types=[0, 0, 0, 0])
    frames = read_frames(path)
    assert [frame.numbers.tolist() for frame in frames] == [[8, 1, 1], [1, 1], [8, 8, 8, 1]]
    np.testing.assert_array_equal(frames[1].positions, columns["coord"][1].reshape(4, 3)[:2])
    np.testing.assert_array_equal(frames[0].forces, columns["force"][0].reshape(4, 3)[:3])
    assert_frame(frames[2], columns, 2, (8, 8, 8, 1))
    np.save(path / "set.000" / "real_atom_types.npy", types + 1)
    with pytest.raises(
        ForgefieldError, match=r"set\.000: it has atoms of type 2, but the type map \(O H\) has types 0 to 1"
    ):
        read_frames(path)


def test_without_periodicity(tmp_path):
    columns = {key: value for key, value in arrays(2).items() if key not in ("box", "virial")}
    path = write_system(tmp_path / "molecule", columns)
    with pytest.raises(ForgefieldError, match=r"set\.000: there is no box here.*nopbc"):
        read_frames(path)
    (path / "nopbc").touch()
    frames = read_frames(path)
    assert not frames[0].pbc.any()
    assert not frames[0].cell.any()


def test_elements_come_from_the_source_where_the_system_does_not_name_them(tmp_path):
    path = write_system(tmp_path / "water", arrays(1), type_map=None)
    with pytest.raises(ForgefieldError, match=r"no type_map\.raw.*\{path: .*water, type_map: \[O, H\]\}"):
        read_frames(path)
    (frame,) = read_frames({"path": str(path), "type_map": ["S", "F"]})
    assert frame.numbers.tolist() == [9, 16, 9, 9]
    (path / "type_map.raw").write_text("OW HW")
    with pytest.raises(ForgefieldError, match=r"'HW' in its type map is not a chemical element"):
        read_frames(path)
    assert read_frames({"path": str(path), "type_map": ["O", "H"]})[0].numbers.tolist() == [1, 8, 1, 1]
    named = {"path": str(path), "type_map": {"HW": "H", "OW": "O", "MG": "Mg"}}
    assert read_frames(named)[0].numbers.tolist() == [1, 8, 1, 1]
    (path / "type_map.raw").write_text("O H")
    with pytest.raises(ForgefieldError, match=r"type_map\.raw says O H, the source's type_map H O; leave it out"):
        read_frames({"path": str(path), "type_map": ["H", "O"]})
    (tmp_path / "a.xyz").write_text("1\n\nH 0 0 0\n")
    with pytest.raises(ForgefieldError, match=r"a\.xyz: a type_map was given, but only DeePMD systems"):
        read_frames({"path": str(tmp_path / "a.xyz"), "type_map": ["H"]})


def test_a_set_without_a_label_leaves_it_missing_there(tmp_path):
    second = {key: value for key, value in arrays(1, 2).items() if key not in ("force", "virial")}
    frames = read_frames(write_system(tmp_path / "partly", arrays(1, 1), second))
    assert frames[0].forces is not None
    assert (frames[1].forces, frames[1].stress) == (None, None)


def test_other_arrays_can_be_named_as_labels(tmp_path):
    columns = {**arrays(2), "other_energy": np.array([[5.0], [6.0]]), "other_force": np.ones((2, 3 * N_ATOMS))}
    path = write_system(tmp_path / "two", columns)
    frames = read_frames(path, LabelOptions(energy="other_energy", forces="other_force"))
    assert [frame.energy for frame in frames] == [5.0, 6.0]
    assert (frames[1].forces == 1).all()


def test_values_of_all_frames_in_one_row_are_divided_among_them(tmp_path):
    values = np.arange(3.0 * N_ATOMS)
    path = write_system(tmp_path / "row", {**arrays(3), "aparam": values[None]})
    (block,) = read_system(open_folder(path))
    assert (block.arrays["aparam"][:, :, 0] == values.reshape(3, N_ATOMS)).all()
    with pytest.raises(ForgefieldError, match=r"aparam has shape \(1, 13\), but coord has 3 frames"):
        read_frames(write_system(tmp_path / "bad", {**arrays(3), "aparam": np.ones((1, 13))}))


def broken(columns, name, values):
    return {key: value for key, value in {**columns, name: values}.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("coord", None, "there is no coord here"),
        ("coord", np.zeros((3, 9)), r"coord has 9 numbers a frame; with the 4 atoms of type\.raw it must be 12"),
        ("force", np.zeros((2, 12)), r"force has shape \(2, 12\), but coord has 3 frames"),
        ("force", np.zeros((3, 9)), "force has 9 numbers a frame"),
        ("energy", np.zeros((3, 2)), "energy has 2 numbers a frame"),
        ("virial", np.zeros((3, 6)), "virial has 6 numbers a frame"),
        ("box", np.zeros((3, 3)), "box has 3 numbers a frame"),
        ("box", np.zeros((3, 9)), "frame 0: it .*no volume"),
        ("energy", np.array([[1.0], [np.nan], [2.0]]), "frame 1: energy contains NaN"),
        (
            "energy",
            np.array([[1], [2], [{}]], dtype=object),
            r"energy\.npy: it holds values of type object",
        ),
        ("energy", np.array([["a"], ["b"], ["c"]]), "energy holds <U1, not numbers"),
    ],
)
def test_what_does_not_fit_is_named_and_refused(tmp_path, name, values, message):
    path = write_system(tmp_path / "water", broken(arrays(3), name, values))
    with pytest.raises(ForgefieldError, match=message) as error:
        read_frames(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_truncated_arrays_bad_types_and_missing_sets(tmp_path):
    path = write_system(tmp_path / "water", arrays(3))
    whole = (path / "set.000" / "coord.npy").read_bytes()
    (path / "set.000" / "coord.npy").write_bytes(whole[:-8])
    with pytest.raises(ForgefieldError, match=r"coord\.npy is cut off"):
        read_frames(path)
    (path / "set.000" / "coord.npy").write_bytes(whole)
    (path / "type.raw").write_text("0 1 1 7\n")
    with pytest.raises(ForgefieldError, match="it has atoms of type 7, but the type map"):
        read_frames(path)
    (path / "type.raw").write_text("0 1 x 1\n")
    with pytest.raises(ForgefieldError, match=r"type\.raw should hold one integer for each atom"):
        read_frames(path)
    shutil.rmtree(path / "set.000")
    with pytest.raises(ForgefieldError, match=r"needs folders set\.\*"):
        read_frames(path)


def test_hdf5_groups_and_whole_files(tmp_path):
    path = tmp_path / "systems.h5"
    one, two, three = arrays(2, 1), arrays(3, 2), arrays(1, 3)
    with h5py.File(path, "w") as file:
        write_group(file.create_group("water/b"), two)
        write_group(file.create_group("water/a"), one, three)
    frames = read_frames(f"{path}#/water/a")
    assert [frame.source for frame in frames] == [f"{path}#/water/a"] * 3
    assert_frame(frames[1], one, 1)
    assert_frame(frames[2], three, 0)
    everything = read_frames(path)
    assert [frame.index for frame in everything] == list(range(6))
    assert_frame(everything[5], two, 2)
    assert len(read_frames([f"{path}#/water/a", f"{path}#/water/b"])) == 6
    with pytest.raises(ForgefieldError, match="named twice"):
        read_frames([str(path), f"{path}#/water/b"])
    with pytest.raises(ForgefieldError, match=r"#/ice: there is no such group in the file; it holds water"):
        read_frames(f"{path}#/ice")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_chunks_put_together_are_the_whole(tmp_path, size):
    folder = write_system(tmp_path / "water", arrays(3, 1), arrays(4, 2))
    with h5py.File(tmp_path / "water.h5", "w") as file:
        write_group(file.create_group("x"), arrays(3, 1))
        write_group(file.create_group("y"), arrays(4, 2))
    for path in (folder, tmp_path / "water.h5"):
        (file,) = source_files(path)
        parts = chunks(file, size)
        assert len(parts) == {1: 7, 2: 4, 3: 2, 100: 1}[size]
        reader = LabelReader(LabelOptions(), UnitOptions())
        frames = [frame for part in parts for frame in frames_of(file, reader, UnitOptions(), *part)]
        whole = read_frames(path)
        assert [frame.index for frame in frames] == list(range(7))
        np.testing.assert_array_equal([f.positions for f in frames], [f.positions for f in whole])
