"""Sources, streams and parts: every way to the frames of a source gives the same frames, without holding the file."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.data.frame import Frame, RawBlock, RawFrame, even_ranges
from forgefield.data.labels.block_labels import block_frames
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.data.readers import SourceFile, chunks, frames_of, read_frames, registry, source_files
from forgefield.data.readers.base import Reader
from forgefield.data.readers.registry import file_format
from forgefield.data.store.convert import convert
from forgefield.errors import ForgefieldError


def reader(labels: LabelOptions | None = None, units: UnitOptions | None = None) -> LabelReader:
    return LabelReader(labels or LabelOptions(), units or UnitOptions())


def assert_equal(one: Frame, two: Frame) -> None:
    for name in Frame.__dataclass_fields__:
        a, b = getattr(one, name), getattr(two, name)
        assert (a is None) == (b is None), name
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name


@st.composite
def raw_blocks(draw):
    """Blocks of all kinds: usual ones, ones with something to decide, ones with something wrong."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_frames, n_atoms = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([np.float64, np.float32]))
    shapes = {
        "energy": st.sampled_from([(), (1,), (2,)]),
        "free_energy": st.just(()),
        "REF_energy": st.just(()),
        "forces": st.sampled_from([(n_atoms, 3), (n_atoms, 3), (3 * n_atoms,), (n_atoms + 1, 3)]),
        "stress": st.sampled_from([(3, 3), (9,), (6,), (4,)]),
        "virial": st.sampled_from([(3, 3), (9,), (6,)]),
        "weight": st.just(()),
    }
    names = draw(st.sets(st.sampled_from(sorted(shapes)), max_size=4))
    values = {name: rng.uniform(0.1, 1, size=(n_frames, *draw(shapes[name]))).astype(dtype) for name in sorted(names)}
    for name in names:
        if draw(st.integers(0, 9)) == 0:
            values[name].reshape(-1)[-1] = draw(st.sampled_from([np.nan, -1.0, np.inf]))
    numbers = rng.integers(1, 119, size=draw(st.sampled_from([(n_atoms,), (n_frames, n_atoms)])))
    if draw(st.integers(0, 9)) == 0:
        numbers.reshape(-1)[0] = 0
    cell = rng.normal(size=(n_frames, 3, 3)) + 5 * np.eye(3)
    cell[-1] *= draw(st.sampled_from([1.0, 1.0, 1.0, 0.0]))
    pbc = np.array(draw(st.sampled_from([(True,) * 3, (False,) * 3, (True, True, False)])))
    positions = rng.normal(size=(n_frames, n_atoms, 3)).astype(dtype)
    return RawBlock(positions, numbers, cell, pbc, "s", draw(st.integers(0, 5)), values, values, {})


@settings(max_examples=300, deadline=None)
@given(
    raw_blocks(),
    st.sampled_from([{}, {"energy": "REF_energy"}, {"energy": "none"}, {"virial": "none"}, {"forces": "absent"}]),
    st.sampled_from([{}, {"energy": "kcal/mol", "length": "Bohr"}, {"forces": "meV/A", "stress": "GPa"}]),
)
def test_a_block_gives_the_frames_it_would_give_one_by_one(block, labels, units):
    labels, units = LabelOptions(**labels), UnitOptions(**units)
    plain, fast = reader(labels, units), reader(labels, units)
    frames = block_frames(block, fast)
    try:
        expected = [plain.frame(raw) for raw in block.frames()]
    except ForgefieldError:
        assert frames is None
        return
    if frames is not None:
        assert len(frames) == len(expected)
        for one, two in zip(frames, expected):
            assert_equal(one, two)
        assert fast.notes() == plain.notes()


def test_the_usual_block_takes_the_short_way():
    rng = np.random.default_rng(0)
    values = {
        "energy": rng.normal(size=(2, 1)),
        "forces": rng.normal(size=(2, 3, 3)),
        "virial": rng.normal(size=(2, 9)),
    }
    cells = np.tile(np.eye(3) * 4, (2, 1, 1))
    block = RawBlock(rng.normal(size=(2, 3, 3)), np.array([1, 1, 8]), cells, np.full(3, True), "s", 0, values, values)
    assert len(block_frames(block, reader())) == 2


def xyz(n: int, ending: str = "\n") -> str:
    header = 'Lattice="4 0 0 0 4 0 0 0 4" Properties=species:S:1:pos:R:3 note="ü" energy={}'
    return "".join(
        ending.join([str(1 + i % 3), header.format(i), *(f"H 0 0 {a + 0.01 * i}" for a in range(1 + i % 3)), ""])
        for i in range(n)
    )


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "\n\n  \n"])
def test_parts_of_an_xyz_file_are_the_whole(tmp_path, ending, tail):
    path = tmp_path / "a.xyz"
    path.write_bytes((xyz(23, ending) + tail).encode())
    (file,) = source_files(path)
    whole = read_frames(path)
    assert [frame.energy for frame in whole] == list(range(23))
    for size in (1, 4, 10, 100):
        frames = [frame for part in chunks(file, size) for frame in frames_of(file, reader(), UnitOptions(), *part)]
        assert len(frames) == 23
        for one, two in zip(frames, whole):
            assert_equal(one, two)
    assert [frame.index for frame in frames_of(file, reader(), UnitOptions(), 21, 40)] == [21, 22]
    assert list(frames_of(file, reader(), UnitOptions(), 23)) == []


def test_errors_in_a_part_name_the_frame_and_line_of_the_whole_file(tmp_path):
    path = tmp_path / "a.xyz"
    lines = xyz(9).splitlines()
    at = next(i for i, line in enumerate(lines) if "energy=7" in line) + 1
    lines[at] = "H 0 zero 0"
    path.write_text("\n".join(lines))
    (file,) = source_files(path)
    with pytest.raises(ForgefieldError, match=f"frame 7: line {at + 1}: 'zero' in column 'pos' is not a number"):
        list(frames_of(file, reader(), UnitOptions(), 6))
    lines[at] = "H 0 0"
    path.write_text("\n".join(lines))
    with pytest.raises(ForgefieldError, match=f"frame 7: line {at + 1} has 3 columns instead of 4"):
        list(frames_of(file, reader(), UnitOptions(), 6))


def test_a_changed_file_is_indexed_again(tmp_path):
    path = tmp_path / "a.xyz"
    path.write_text(xyz(4))
    (file,) = source_files(path)
    assert len(chunks(file, 1)) == 4
    path.write_text(xyz(6))
    assert len(chunks(file, 1)) == 6
    assert [frame.energy for frame in frames_of(file, reader(), UnitOptions(), 5)] == [5]


def test_a_damaged_xyz_file_is_one_part_whose_reading_reports_the_error(tmp_path):
    path = tmp_path / "a.xyz"
    path.write_text(xyz(3) + "rubbish\n")
    (file,) = source_files(path)
    assert chunks(file, 1) == [(0, None)]
    with pytest.raises(ForgefieldError, match="frame 3: line 13 should hold its number of atoms, not 'rubbish'"):
        list(frames_of(file, reader(), UnitOptions()))
    path.write_text(xyz(3)[:-20])
    with pytest.raises(ForgefieldError, match="frame 2"):
        list(frames_of(file, reader(), UnitOptions()))


def peak_memory(path) -> int:
    (file,) = source_files(path)
    source = reader()
    for _ in frames_of(file, source, UnitOptions(), 0, 1):
        pass
    tracemalloc.start()
    try:
        for _ in frames_of(file, source, UnitOptions()):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.xyz", "a.npz", "system"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    """Twelve times the frames take the same memory, a small part of the file."""
    peaks = []
    for n_frames in (500, 6000):
        rng = np.random.default_rng(0)
        positions = rng.normal(size=(n_frames, 60, 3)).astype(np.float32)
        path = tmp_path / f"{n_frames}" / name
        path.parent.mkdir()
        if name == "a.npz":
            np.savez(path, R=positions, z=np.ones(60, dtype=np.int64), E=np.zeros(n_frames))
        elif name == "a.xyz":
            body = "\n".join(f"H {x:.4f} {y:.4f} {z:.4f}" for x, y, z in positions[0])
            path.write_text(f"60\nProperties=species:S:1:pos:R:3\n{body}\n" * (n_frames // 10))
        else:
            (path / "set.000").mkdir(parents=True)
            (path / "type.raw").write_text("0 " * 60)
            (path / "type_map.raw").write_text("H")
            (path / "nopbc").touch()
            np.save(path / "set.000" / "coord.npy", positions.reshape(n_frames, -1))
        peaks.append(peak_memory(path))
    assert peaks[1] < 1.2 * peaks[0] + 200_000


def test_compressed_npz_is_read_but_not_divided(tmp_path):
    arrays = {
        "R": np.random.default_rng(0).normal(size=(300, 20, 3)),
        "z": np.ones(20, dtype=int),
        "E": np.arange(300.0),
    }
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez_compressed(tmp_path / "small.npz", **arrays)
    (plain,), (small,) = source_files(tmp_path / "plain.npz"), source_files(tmp_path / "small.npz")
    assert len(chunks(plain, 100)) == 3
    assert chunks(small, 100) == [(0, None)]
    for one, two in zip(read_frames(plain.path), read_frames(small.path)):
        np.testing.assert_array_equal(one.positions, two.positions)
        assert one.energy == two.energy
    part = list(frames_of(plain, reader(), UnitOptions(), 100, 200))
    assert [frame.energy for frame in part] == list(range(100, 200))


def test_a_flipped_bit_in_an_npz_file_is_noticed(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, R=np.random.default_rng(0).normal(size=(300, 20, 3)), z=np.ones(20, dtype=int), E=np.arange(300.0))
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("R.npy").header_offset + 50_000
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ForgefieldError, match=r"a\.npz: it could not be read as npz; it is damaged"):
        read_frames(path)


def energies_in_parts(file: SourceFile, labels: LabelOptions, part: tuple[int, int | None]):
    source = LabelReader(labels, UnitOptions())
    return [frame.energy for frame in frames_of(file, source, UnitOptions(), *part)], source.notes()


def test_parts_read_by_other_processes_are_finished_as_one(tmp_path):
    path = tmp_path / "a.xyz"
    path.write_text(xyz(20) + xyz(1).replace("energy", "special"))
    (file,) = source_files(path)
    labels = LabelOptions(energy="special")
    parts = [(file, labels, part) for part in chunks(file, 5)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.starmap(energies_in_parts, parts)
    assert [energy for energies, _ in results for energy in energies] == [None] * 20 + [0.0]
    whole = LabelReader(labels, UnitOptions())
    for _, notes in results[:-1]:
        whole.merge(pickle.loads(pickle.dumps(notes)))
    with pytest.raises(ForgefieldError, match="data.labels.energy=special: no frame of these has that key.*energy"):
        whole.finish("these")
    whole.merge(results[-1][1])
    whole.finish("these")


def test_energies_and_free_energies_in_two_parts_are_noticed_when_merged(tmp_path):
    (tmp_path / "a.xyz").write_text(xyz(2) + xyz(1).replace("energy", "free_energy"))
    (file,) = source_files(tmp_path / "a.xyz")
    one, two = reader(), reader()
    list(frames_of(file, one, UnitOptions(), 0, 2))
    list(frames_of(file, two, UnitOptions(), 2))
    with pytest.raises(ForgefieldError, match="frame 2: it has free_energy but no energy, while .* frame 0 has energy"):
        one.merge(two.notes())


@given(st.integers(1, 1000), st.integers(1, 300))
def test_even_ranges_cover_everything_once_in_parts_of_about_the_size(n, size):
    ranges = even_ranges(n, size)
    assert [i for start, stop in ranges for i in range(start, n if stop is None else stop)] == list(range(n))
    lengths = [(n if stop is None else stop) - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= 2 * size


def test_shares_weights_and_entries_are_carried(tmp_path):
    for name in ("a1", "a2", "b", "c"):
        (tmp_path / f"{name}.xyz").write_text("1\nenergy=1\nH 0 0 0\n")
    spec = [
        {"path": str(tmp_path / "a*.xyz"), "share": 0.25, "weight": 2},
        str(tmp_path / "b.xyz"),
        {"path": [{"path": str(tmp_path / "c.xyz"), "weight": 3}], "weight": 2, "share": 0},
    ]
    files = source_files(spec)
    assert [(f.path.stem, f.weight, f.share, f.entry) for f in files] == [
        ("a1", 2, 0.25, 0),
        ("a2", 2, 0.25, 0),
        ("b", 1, None, 1),
        ("c", 6, 0, 2),
    ]
    assert [frame.weight for frame in read_frames(spec)] == [2, 2, 1, 6]


@pytest.mark.parametrize("share", [-1, "much", True, float("nan"), float("inf")])
def test_a_share_is_a_number_that_is_not_negative(tmp_path, share):
    (tmp_path / "a.xyz").write_text("1\n\nH 0 0 0\n")
    with pytest.raises(ForgefieldError, match=r"the share of .*a\.xyz is .*; it must be a number of at least 0"):
        source_files({"path": str(tmp_path / "a.xyz"), "share": share})


def test_a_share_within_a_share_and_a_group_of_what_has_none_are_refused(tmp_path):
    path = tmp_path / "a.xyz"
    path.write_text("1\n\nH 0 0 0\n")
    with pytest.raises(ForgefieldError, match="is given twice"):
        source_files({"path": {"path": str(path), "share": 1}, "share": 1})
    with pytest.raises(ForgefieldError, match="only HDF5 files have groups"):
        source_files(f"{path}#/group")
    with pytest.raises(ForgefieldError, match=r"'Hx', which is not a chemical element"):
        source_files({"path": str(path), "type_map": ["Hx"]})
    (tmp_path / "a#1.xyz").write_text("1\n\nH 0 0 0\n")  # a name with the mark is just a name
    assert source_files(str(tmp_path / "a#1.xyz"))[0].group is None


def test_formats_by_name_and_by_what_a_folder_holds(tmp_path):
    names = {"a.xyz": "extxyz", "a.npz": "npz", "a.db": "db", "a.h5": "hdf5", "a.hdf5": "hdf5", "a.lmdb": "lmdb",
             "a.aselmdb": "aselmdb", "a.traj": "traj", "a.unknown": None}  # fmt: skip
    assert {name: file_format(tmp_path / name) for name in names} == names
    for inside, expected in (("manifest.json", "store"), ("type.raw", "deepmd"), ("data.mdb", "lmdb"), ("x.npy", None)):
        folder = tmp_path / f"with-{inside}"
        folder.mkdir()
        (folder / inside).touch()
        assert file_format(folder) == expected


def test_a_reader_in_the_table_is_used_wherever_files_are_read(tmp_path, monkeypatch):
    class Lines(Reader):
        """One helium atom at x for each line."""

        name = "lines"
        suffixes = (".lines",)

        def read(self, source, options, start=0, stop=None):
            for index, x in list(enumerate(source.path.read_text().split()))[start:stop]:
                yield RawFrame(np.array([[float(x), 0, 0]]), np.array([2]), np.zeros((3, 3)), np.zeros(3, dtype=bool),
                               source.name, index, info={"energy": -float(x)})  # fmt: skip

        def count(self, source):
            return len(source.path.read_text().split())

    (tmp_path / "a.lines").write_text("1 2 3")
    with pytest.raises(ForgefieldError, match="holds no structure file"):
        source_files(str(tmp_path))
    monkeypatch.setattr(registry, "READERS", (*registry.READERS, Lines()))
    assert [frame.energy for frame in read_frames(str(tmp_path))] == [-1.0, -2.0, -3.0]
    (file,) = source_files(str(tmp_path))
    assert chunks(file, 1) == [(0, 1), (1, 2), (2, None)]
    convert(str(tmp_path), tmp_path / "store")
    assert [frame.positions[0, 0] for frame in read_frames(tmp_path / "store")] == [1.0, 2.0, 3.0]


def test_a_store_is_a_source_like_any_other(tmp_path):
    path, store = tmp_path / "a.xyz", tmp_path / "store"
    path.write_text(xyz(7))
    convert(str(path), store)
    frames, whole = read_frames({"path": str(store), "weight": 2}), read_frames(path)
    for one, two in zip(frames, whole):
        np.testing.assert_array_equal(one.positions, two.positions)
        assert (one.energy, one.weight) == (two.energy, 2.0)
    (file,) = source_files(store)
    parts = [[f.energy for f in frames_of(file, reader(), UnitOptions(), *part)] for part in chunks(file, 3)]
    assert parts == [[0, 1, 2], [3, 4, 5, 6]]
    # Its labels were chosen when it was written: a name given for the files still fits, `none` leaves a label out.
    assert read_frames(store, LabelOptions(energy="my_energy"))[1].energy == 1
    assert read_frames(store, LabelOptions(energy="none"))[1].energy is None
    with pytest.raises(ForgefieldError, match="data.labels.forces=my_forces: no frame"):
        read_frames(store, LabelOptions(forces="my_forces"))


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
@pytest.mark.parametrize(
    "name",
    ["a.h5", "a.lmdb", "a.aselmdb", "system/type.raw", "system/set.000/coord.npy", "system/set.000", "deep/below"],
)
def test_no_permission_is_reported(name):
    folder = Path(tempfile.mkdtemp())
    (folder / "system" / "set.000").mkdir(parents=True)
    (folder / "deep" / "below").mkdir(parents=True)
    (folder / "system" / "type.raw").write_text("0")
    (folder / "system" / "type_map.raw").write_text("H")
    np.save(folder / "system" / "set.000" / "coord.npy", np.zeros((1, 3)))
    for file in ("a.h5", "a.lmdb", "a.aselmdb"):
        (folder / file).write_bytes(b"x")
    folder.chmod(0o755)
    (folder / name).chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # the administrator may read anything
        with pytest.raises(ForgefieldError, match="no permission to"):
            read_frames(folder / name.partition("/")[0])
    finally:
        os.seteuid(user)
        (folder / name).chmod(0o755)
        shutil.rmtree(folder)
