"""LMDB sets: pickles are read without running them, in numeric order; geometry and labels are what they claim to be."""

from __future__ import annotations

import collections
import datetime
import io
import os
import pickle
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import covalent_radii

from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.neighbours.graph import edge_vectors, neighbour_list
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import chunks, frames_of, read_frames, source_files
from forgefield.errors import ForgefieldError
from forgefield.untrusted.safe_pickle import RefusedPickle, safe_loads
from tests.support.lmdb_files import sample, write_lmdb


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_arrays_and_tensors_come_through_every_protocol(protocol):
    shared = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    value = {
        "list": [1, 2.5, "x", None, True, (3, 4), b"raw"],
        "ordered": collections.OrderedDict(a=1, b=[2]),
        "when": datetime.datetime(2024, 1, 2, 3, 4, 5),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "text": np.array(["Li", "P"]),
        "scalar": np.float64(0.1),
        "tensor": shared,
        "view": shared[1:3, ::2],
        "transposed": shared.T,
        "integers": torch.tensor([1, 2]),
        "nothing": torch.zeros(0, 3),
    }
    read = safe_loads(pickle.dumps(value, protocol=protocol))
    assert list(read) == list(value)
    for key, item in value.items():
        expected = item.numpy() if isinstance(item, torch.Tensor) else item
        if isinstance(expected, (np.ndarray, np.generic)):
            np.testing.assert_array_equal(read[key], expected)
            assert read[key].dtype == np.asarray(expected).dtype.newbyteorder("=")
        else:
            assert read[key] == item


class Calls:
    """Pickles into a call of `function`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def touches(tmp_path: Path) -> dict[str, tuple[object, str]]:
    """Values whose unpickling would leave a file behind, and what the refusal names."""
    mark = str(tmp_path / "touched")
    inner = io.BytesIO()
    torch.save(Calls(os.mkdir, mark), inner, _use_new_zipfile_serialization=False)
    return {
        "function": (Calls(os.mkdir, mark), "(posix|nt|os).mkdir"),
        "builtin": (Calls(eval, f"__import__('os').mkdir({mark!r})"), "builtins.eval"),
        "nested": ({"pos": [Calls(os.mkdir, mark)]}, "mkdir"),
        "load": (Calls(torch.storage._load_from_bytes, inner.getvalue()), "torch file that is not plain numbers"),
        "class": (Atoms("H"), r"ase\.atoms\.Atoms"),
        "partial": (Calls(__import__("functools").partial, os.mkdir, mark), r"functools\.partial"),
        "getattr": (Calls(getattr, "x", "join"), r"builtins\.getattr"),
        "load_numpy": (Calls(np.load, mark), r"numpy\.\S*load"),
        "objects": (np.array([{}, 1], dtype=object), "only numbers and text"),
        "structured": (np.zeros(2, dtype=[("a", "f8")]), "only (numbers and text|arrays)"),
    }


@pytest.mark.parametrize("name", ["function", "builtin", "nested", "load", "class", "partial", "getattr", "load_numpy",
                                  "objects", "structured"])  # fmt: skip
def test_anything_else_is_refused_by_name_and_not_run(tmp_path, name):
    value, message = touches(tmp_path)[name]
    data = pickle.dumps(value)
    with pytest.raises(RefusedPickle, match=message):
        safe_loads(data)
    path = write_lmdb(tmp_path / "a.lmdb", {"0": sample(), "1": data})
    with pytest.raises(ForgefieldError, match=rf"a\.lmdb, frame 1 \(key 1\): its value is refused.*{message}"):
        read_frames(path)
    assert not (tmp_path / "touched").exists()


def test_a_pickle_cannot_change_what_it_may_call():
    """BUILD on a function would set its attributes: `__defaults__`, or a method of a class."""
    change = (
        pickle.PROTO + b"\x02" + pickle.GLOBAL + b"collections\nOrderedDict\n"
        + pickle.NONE + pickle.EMPTY_DICT + pickle.BINUNICODE + b"\x01\x00\x00\x00x" + pickle.BININT1 + b"\x01"
        + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD + pickle.STOP
    )  # fmt: skip
    with pytest.raises(RefusedPickle, match="tries to change a function"):
        safe_loads(change)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x04.", b"not a pickle", b"\x81\xa3abc\x01"])
def test_damaged_values_are_refused(tmp_path, data):
    with pytest.raises(ForgefieldError, match=r"frame 0 \(key 0\): (its value is refused|a sample must be)"):
        read_frames(write_lmdb(tmp_path / "a.lmdb", {"0": data or b"\x00"}))


def test_tensors_beyond_their_numbers_are_refused():
    tensor = torch.zeros(4)
    function, arguments = torch.storage.TypedStorage(wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype,
                                                     _internal=True).__reduce__()  # fmt: skip
    storage = Calls(function, *arguments)
    for offset, size, stride in ((0, (5,), (1,)), (3, (2,), (1,)), (-1, (1,), (1,)), (0, (2,), (-1,))):
        value = Calls(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, collections.OrderedDict())
        with pytest.raises(RefusedPickle, match="impossible shape|beyond its numbers"):
            safe_loads(pickle.dumps(value))


def test_keys_are_read_as_numbers_and_other_keys_left_out(tmp_path):
    values = {str(i): sample(float(i)) for i in (0, 10, 9, 2, 1, 100)}
    path = write_lmdb(tmp_path / "a.lmdb", {**values, "metadata": {"preprocessed": False}, "length": 6})
    assert [frame.energy for frame in read_frames(path)] == [0, 1, 2, 9, 10, 100]
    (file,) = source_files(path)
    reader = LabelReader(LabelOptions(), UnitOptions())
    parts = [[f.energy for f in frames_of(file, reader, UnitOptions(), *part)] for part in chunks(file, 2)]
    assert parts == [[0, 1], [2, 9], [10, 100]]
    # Two readers of one file at once, as prefetching makes them.
    pairs = zip(frames_of(file, reader, UnitOptions()), frames_of(file, reader, UnitOptions(), 1))
    assert [(a.energy, b.energy) for a, b in pairs] == [(0, 1), (1, 2), (2, 9), (9, 10), (10, 100)]


def test_files_of_a_folder_and_environments_that_are_folders(tmp_path):
    write_lmdb(tmp_path / "data_001.lmdb", {"0": sample(2.0)})
    write_lmdb(tmp_path / "data_000.lmdb", {"0": sample(1.0)})
    (tmp_path / "data_000.lmdb-lock").touch()
    write_lmdb(tmp_path / "data_002.lmdb", {"0": sample(3.0)}, subdir=True)
    assert [frame.energy for frame in read_frames(tmp_path)] == [1, 2, 3]
    assert [frame.energy for frame in read_frames(tmp_path / "data_002.lmdb")] == [3]
    before = sorted(tmp_path.rglob("*"))
    read_frames(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_lips_energies_and_forces(shared):
    frames = read_frames(shared / "matsciml_lmdb" / "lips")
    assert len(frames) == 200
    numbers, counts = np.unique(frames[0].numbers, return_counts=True)
    assert dict(zip(numbers.tolist(), counts.tolist())) == {3: 27, 15: 12, 16: 44}
    energies = np.array([frame.energy for frame in frames])
    assert energies.mean() == pytest.approx(-357.604, abs=1e-3)
    assert energies.std() == pytest.approx(0.545, abs=2e-3)
    forces = np.stack([frame.forces for frame in frames])
    assert np.sqrt((forces**2).mean()) == pytest.approx(0.610, abs=1e-3)
    assert np.abs(forces.sum(axis=1)).max() < 0.04
    assert frames[0].pbc.all()


def closest(frame) -> float:
    """Shortest distance over the sum of the covalent radii."""
    source, destination, shifts = neighbour_list(frame.positions, frame.cell, frame.pbc, 4.0)
    if not len(source):
        return np.inf
    lengths = np.linalg.norm(edge_vectors(frame.positions, frame.cell, source, destination, shifts), axis=1)
    radii = covalent_radii[frame.numbers]
    return float((lengths / (radii[source] + radii[destination])).min())


@pytest.mark.parametrize(("name", "count"), [("alexandria", 98), ("oqmd", 200)])
def test_crystals_have_distances_of_crystals(shared, name, count):
    frames = read_frames(shared / "matsciml_lmdb" / name)
    assert len(frames) == count
    assert all(closest(frame) > 0.7 for frame in frames)
    assert all(4 < frame.volume / len(frame) < 120 for frame in frames)


def test_oqmd_fractional_coordinates_give_the_bond_lengths_of_its_lattice(shared):
    frames = read_frames(shared / "matsciml_lmdb" / "oqmd")
    full_heusler = frames[7]  # TlOs2Rh, F-43m, a = 6.36184: neighbours at a quarter of the body diagonal
    assert full_heusler.numbers.tolist() == [76, 76, 45, 81]
    source, destination, shifts = neighbour_list(full_heusler.positions, full_heusler.cell, full_heusler.pbc, 3.0)
    vectors = edge_vectors(full_heusler.positions, full_heusler.cell, source, destination, shifts)
    lengths = np.linalg.norm(vectors, axis=1)
    np.testing.assert_allclose(lengths, 6.36184 * np.sqrt(3) / 4, rtol=1e-6)
    assert len(lengths) == 4 * 8


def test_only_total_energies_are_energies(shared):
    oqmd = shared / "matsciml_lmdb" / "oqmd"
    assert {frame.energy for frame in read_frames(oqmd)} == {None}
    named = read_frames(oqmd, LabelOptions(energy="delta_e"))
    assert named[0].energy == pytest.approx(-1.59414634085853)
    alexandria = read_frames(shared / "matsciml_lmdb" / "alexandria")
    assert alexandria[0].energy == -12.32530943
    np.testing.assert_allclose(alexandria[0].forces.sum(axis=0), 0, atol=1e-12)
    assert max(np.abs(frame.forces).max() for frame in alexandria) == pytest.approx(0.030, abs=1e-3)


def test_a_target_called_energy_is_not_taken_for_one(tmp_path):
    bare = {key: value for key, value in sample().items() if key != "energy"}
    path = write_lmdb(tmp_path / "a.lmdb", {"0": {**bare, "targets": {"regression": {"energy": -0.3, "gap": 1.0}}}})
    assert read_frames(path)[0].energy is None
    assert read_frames(path, LabelOptions(energy="targets.energy"))[0].energy == -0.3


def fractional(numbers, coordinates, **rest):
    return {"cart_coords": coordinates, "atomic_numbers": numbers, "cell": (np.eye(3) * 4.0).tolist(), **rest}


def test_fractional_values_are_detected_by_site_lists_and_by_impossible_distances(tmp_path):
    salt, hydrogen = [[0.0, 0, 0], [0.5, 0.5, 0.5]], [[0.0, 0, 0], [0, 0, 0.74]]
    listed = fractional([1, 1], hydrogen, sites=["H @ 0 0 0", "H @ 0 0 0.74"])
    path = write_lmdb(
        tmp_path / "a.lmdb", {"0": fractional([55, 17], salt), "1": fractional([1, 1], hydrogen), "2": listed}
    )
    frames = read_frames(path)
    assert frames[0].positions[1].tolist() == [2, 2, 2]  # caesium and chlorine are not 0.87 A apart
    assert frames[1].positions[1].tolist() == [0, 0, 0.74]  # a hydrogen molecule is possible
    assert frames[2].positions[1, 2] == pytest.approx(2.96)
    without = {key: value for key, value in fractional([55, 17], salt).items() if key != "cell"}
    with pytest.raises(ForgefieldError, match="are fractional, but there is no cell"):
        read_frames(write_lmdb(tmp_path / "b.lmdb", {"0": without}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos": torch.zeros(3, 3)}, r"pos has shape \(3, 3\), but there are 2 atoms"),
        ({"natoms": 3}, "natoms is 3, but there are 2 atoms"),
        ({"volume": 100.0}, r"its cell has 125 A\^3, but it says its volume is 100"),
        ({"force": torch.zeros(3, 3)}, r"forces has shape \(3, 3\)"),
        ({"pos": None}, "no positions and atomic numbers"),
        ({"cell": np.zeros((2, 3))}, "not one that Forgefield knows"),
    ],
)
def test_samples_that_contradict_themselves_are_refused(tmp_path, change, message):
    with pytest.raises(ForgefieldError, match=message):
        read_frames(write_lmdb(tmp_path / "a.lmdb", {"0": sample(**change)}))


def test_files_that_are_not_lmdb(tmp_path):
    for name in ("a.lmdb", "a.aselmdb"):
        (tmp_path / name).write_bytes(b"something else" * 100)
        with pytest.raises(ForgefieldError, match=rf"{name}: it could not be opened as LMDB"):
            read_frames(tmp_path / name)
    with pytest.raises(ForgefieldError, match="there are no frames in this file"):
        read_frames(write_lmdb(tmp_path / "b.lmdb", {"metadata": {}}))


def images() -> list[Atoms]:
    rng = np.random.default_rng(3)
    out = []
    for i in range(5):
        atoms = bulk("Cu", cubic=True) if i % 2 else Atoms("OH2", rng.normal(size=(3, 3)))
        forces = rng.normal(size=(len(atoms), 3))
        stress = rng.normal(size=6) if i % 2 else None
        atoms.calc = SinglePointCalculator(atoms, energy=float(i), forces=forces, stress=stress)
        out.append(atoms)
    return out


def write_aselmdb(path: Path) -> tuple[Path, list[Atoms]]:
    backend = pytest.importorskip("ase_db_backends.aselmdb")
    database, structures = backend.LMDBDatabase(str(path)), images()
    for i, atoms in enumerate(structures):
        database.write(atoms, data={"tag": [i, 2 * i], "own_energy": -1.0 * i}, extra=i)
    database.close()
    return path, structures


def assert_same(frame, atoms):
    np.testing.assert_array_equal(frame.positions, atoms.positions)
    np.testing.assert_array_equal(frame.numbers, atoms.numbers)
    np.testing.assert_array_equal(frame.cell, atoms.cell[:])
    np.testing.assert_array_equal(frame.pbc, atoms.pbc)
    assert frame.energy == atoms.calc.results["energy"]
    np.testing.assert_array_equal(frame.forces, atoms.calc.results["forces"])


def test_ase_lmdb_reads_back_what_its_own_library_wrote(tmp_path):
    path, structures = write_aselmdb(tmp_path / "a.aselmdb")
    frames = read_frames(path)
    assert len(frames) == 5
    for frame, atoms in zip(frames, structures):
        assert_same(frame, atoms)
    assert frames[0].stress is None
    assert frames[1].stress[1, 2] == structures[1].calc.results["stress"][3]
    assert [frame.energy for frame in read_frames(path, LabelOptions(energy="own_energy"))] == [0, -1, -2, -3, -4]
    assert [frame.energy for frame in read_frames(tmp_path)] == [0, 1, 2, 3, 4]


def test_ase_lmdb_leaves_deleted_rows_out(tmp_path):
    path, _ = write_aselmdb(tmp_path / "a.aselmdb")
    backend = pytest.importorskip("ase_db_backends.aselmdb")
    database = backend.LMDBDatabase(str(path))
    database.delete([2, 5])
    database.close()
    assert [frame.energy for frame in read_frames(path)] == [0, 2, 3]
    (file,) = source_files(path)
    assert chunks(file, 1) == [(0, 1), (1, 2), (2, None)]
    environment = lmdb.open(str(path), subdir=False)
    with environment.begin(write=True) as transaction:
        transaction.delete(b"3")
    environment.close()
    with pytest.raises(ForgefieldError, match="row 3 is neither there nor marked as deleted"):
        read_frames(path)


def test_ase_lmdb_rows_that_are_not_compressed_json(tmp_path):
    path = write_lmdb(tmp_path / "a.aselmdb", {"1": sample()})
    with pytest.raises(ForgefieldError, match=r"frame 0 \(id 1\): it is not compressed JSON"):
        read_frames(path)
