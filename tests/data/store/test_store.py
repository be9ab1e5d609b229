"""A store gives back every frame to the last bit, makes the same batches as memory, and notices every damage."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.options import DataOptions, LabelOptions, UnitOptions
from forgefield.data.readers import read_frames
from forgefield.data.reading import read_table
from forgefield.data.sampling.batching import training_order
from forgefield.data.species import SpeciesTable
from forgefield.data.store import convert as convert_module
from forgefield.data.store.convert import convert, store_frames
from forgefield.data.store.store import StoreColumns, manifest_hash, open_store
from forgefield.data.store.table import FrameTable, TablePart
from forgefield.data.store.writer import PartWriter
from forgefield.errors import ForgefieldError

SPECIES = SpeciesTable(["H", "C", "O", "Cu"])


def some_frames(rng: np.random.Generator, n: int, source: str = "a.xyz") -> list[Frame]:
    """Frames of all kinds: one to nine atoms, periodic along any axes, with any labels."""
    frames = []
    for index in range(n):
        size = int(rng.integers(1, 10))
        periodic = rng.random(3) < 0.5
        cell = np.diag(rng.uniform(3, 6, 3)) + rng.uniform(-0.5, 0.5, (3, 3))
        frames.append(
            Frame(
                positions=rng.uniform(0, 5, (size, 3)),
                numbers=rng.choice(SPECIES.numbers, size),
                cell=cell if periodic.any() else np.zeros((3, 3)),
                pbc=periodic,
                energy=float(rng.normal()) if rng.random() < 0.7 else None,
                forces=rng.normal(size=(size, 3)) if rng.random() < 0.7 else None,
                stress=rng.normal(size=(3, 3)) if periodic.any() and rng.random() < 0.5 else None,
                weight=float(rng.uniform(0, 2)),
                source=source,
                index=index,
            )
        )
    return frames


def assert_same_frame(one: Frame, other: Frame) -> None:
    for field in fields(Frame):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype
        else:
            assert left == right


def assert_same_batch(one, other) -> None:
    assert set(one) == set(other)
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=0, atol=0, equal_nan=True)


def write_extxyz(path: Path, frames: list[Frame]) -> Path:
    from ase import Atoms
    from ase.io import write

    images = []
    for frame in frames:
        atoms = Atoms(frame.numbers, frame.positions, cell=frame.cell, pbc=frame.pbc)
        atoms.info = {"config_weight": frame.weight}
        if frame.energy is not None:
            atoms.info["REF_energy"] = frame.energy
        if frame.forces is not None:
            atoms.arrays["REF_forces"] = frame.forces
        images.append(atoms)
    write(path, images, format="extxyz")
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    return write_extxyz(tmp_path / "frames.extxyz", some_frames(np.random.default_rng(3), 60))


@pytest.fixture
def small_parts():
    """Several parts from a few frames."""
    with patch.object(convert_module, "CHUNK", 7), patch.object(convert_module, "BLOCK", 3):
        yield


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_in_memory_and_on_disk_give_back_the_frames(tmp_path, seed, sizes):
    rng = np.random.default_rng(seed)
    frames = some_frames(rng, sum(sizes))
    folder = tmp_path / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    writer, begin = PartWriter(folder / "part", GraphOptions(4.0)), 0
    for size in sizes:
        writer.add(frames[begin : begin + size])
        begin += size
    about = writer.finish()
    for table in (
        FrameTable.from_frames(frames),
        FrameTable([TablePart(StoreColumns(folder, about, GraphOptions(4.0)))]),
    ):
        assert len(table) == len(frames)
        for frame, kept in zip(frames, table):
            assert_same_frame(frame, kept)
        rows = rng.permutation(len(frames))[: max(1, len(frames) // 2)]
        for row, kept in zip(rows, table.select(rows)):
            assert_same_frame(frames[row], kept)
        for name in ("energy", "forces", "stress"):
            assert table.carries(name).tolist() == [getattr(frame, name) is not None for frame in frames]
    np.testing.assert_array_equal(
        np.load(folder / "part" / "positions.npy"), np.concatenate([f.positions for f in frames])
    )


@pytest.mark.usefixtures("small_parts")
def test_batches_from_a_store_are_those_from_memory(source, tmp_path):
    graph = GraphOptions(3.5)
    manifest = convert(str(source), tmp_path / "kept", graph=graph)
    assert len(manifest["parts"]) > 3
    convert(str(source), tmp_path / "bare")
    in_memory = GraphDataset(read_frames(str(source)), SPECIES, graph)
    kept = GraphDataset(open_store(tmp_path / "kept").table(), SPECIES, graph)
    bare = GraphDataset(open_store(tmp_path / "bare").table(), SPECIES, graph)
    assert (kept.edges.kind, bare.edges.kind) == ("read from the store", "made for each batch")
    np.testing.assert_array_equal(kept.n_edges, in_memory.n_edges)
    np.testing.assert_array_equal(kept.edges.neighbours, in_memory.edges.neighbours)
    np.testing.assert_array_equal(kept.edges.closest, in_memory.edges.closest)
    rng = np.random.default_rng(0)
    for rows in ([5], range(60), rng.permutation(60)[:13], [8, 8, 1]):
        expected = in_memory.batch(rows)
        assert_same_batch(expected, kept.batch(rows))
        assert_same_batch(expected, bare.batch(rows))


@pytest.mark.usefixtures("small_parts")
def test_lists_of_another_cutoff_are_not_used(source, tmp_path):
    convert(str(source), tmp_path / "kept", graph=GraphOptions(3.5))
    other = GraphDataset(open_store(tmp_path / "kept").table(), SPECIES, GraphOptions(3.0))
    assert other.edges.kind == "made for each batch"
    assert_same_batch(GraphDataset(read_frames(str(source)), SPECIES, 3.0).batch(range(60)), other.batch(range(60)))


def test_opening_reads_the_manifest_and_no_column(source, tmp_path):
    convert(str(source), tmp_path / "store")
    with patch("forgefield.data.store.store.VERIFIED_BELOW", 0):
        store = open_store(tmp_path / "store")
    table = store.table()
    assert len(table) == 60
    files = [file for part in store.parts for file in part._files.values()]
    assert not any("mapped" in file.__dict__ or "_descriptor" in file.__dict__ for file in files)


@pytest.mark.usefixtures("small_parts")
def test_a_store_knows_where_its_frames_came_from_and_what_they_are(source, tmp_path):
    manifest = convert(str(source), tmp_path / "store")
    table = open_store(tmp_path / "store").table()
    assert table.where(41) == f"{source}, frame 41"
    frames = read_frames(str(source))
    forces = np.concatenate([f.forces for f in frames if f.forces is not None])
    found = manifest["statistics"]["labels"]["forces"]
    assert found["count"] == forces.size
    assert found["mean"] == pytest.approx(forces.mean(), rel=1e-12)
    assert (found["squared_deviations"] / forces.size) ** 0.5 == pytest.approx(forces.std(), rel=1e-12)
    assert (found["low"], found["high"]) == (forces.min(), forces.max())
    assert sum(manifest["statistics"]["species"].values()) == manifest["n_atoms"] == sum(map(len, frames))


def test_memory_and_store_make_one_table_with_their_weights(source, tmp_path):
    convert(str(source), tmp_path / "store")
    extra = write_extxyz(tmp_path / "more.extxyz", some_frames(np.random.default_rng(9), 5))
    table = read_table([{"path": str(tmp_path / "store"), "weight": 3.0}, str(extra)])
    frames, more = read_frames(str(source)), read_frames(str(extra))
    assert len(table) == 65
    for frame, kept in zip(frames, table):
        assert_same_frame(replace(frame, weight=frame.weight * 3.0), kept)
    for frame, kept in zip(more, table[60:]):
        assert_same_frame(frame, kept)
    mixed = GraphDataset(table, SPECIES, 3.0)
    rows = [64, 0, 61, 30]
    expected = GraphDataset([*(replace(f, weight=3 * f.weight) for f in frames), *more], SPECIES, 3.0).batch(rows)
    assert_same_batch(expected, mixed.batch(rows))


def test_lazy_files_are_converted_once_and_give_the_same_table(source, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
    graph = GraphOptions(3.0)
    lazy = read_table(str(source), lazy=True, graph=graph)
    (kept,) = [path for path in (tmp_path / "cache" / "stores").iterdir() if path.is_dir()]
    written = kept.stat().st_mtime_ns
    again = read_table(str(source), lazy=True, graph=graph)
    assert kept.stat().st_mtime_ns == written
    assert again.fingerprint == lazy.fingerprint
    for frame, one in zip(read_frames(str(source)), lazy):
        assert_same_frame(frame, one)
    assert GraphDataset(lazy, SPECIES, graph).edges.kind == "read from the store"
    source.write_text(source.read_text() + source.read_text())
    assert len(read_table(str(source), lazy=True, graph=graph)) == 120


def test_a_store_can_be_read_as_a_whole(source, tmp_path):
    convert(str(source), tmp_path / "store")
    table = read_table(str(tmp_path / "store"), lazy=False)
    assert GraphDataset(table, SPECIES, 3.0).edges.kind == "kept in memory"
    for frame, one in zip(read_frames(str(source)), table):
        assert_same_frame(frame, one)


def test_a_share_of_the_draws_belongs_to_all_that_one_entry_names(source, tmp_path):
    convert(str(source), tmp_path / "store")
    for name in ("b1", "b2"):
        write_extxyz(tmp_path / f"{name}.extxyz", some_frames(np.random.default_rng(5), 10))
    table = read_table([{"path": str(tmp_path / "b*.extxyz"), "share": 0.75}, str(tmp_path / "store")])
    assert table.systems.shares == [0.75, None]
    assert np.bincount(table.systems.of_frame).tolist() == [20, 60]
    order = training_order(DataOptions(), table, 0)(np.arange(80), table.n_atoms)
    assert (order.rows(0) < 20).sum() == 60


def test_labels_of_a_store_can_be_left_out_but_not_renamed(source, tmp_path):
    convert(str(source), tmp_path / "store")
    whole = read_table(str(tmp_path / "store"))
    for lazy in (None, False):
        table = read_table(str(tmp_path / "store"), LabelOptions(forces="none", weight="none"), lazy=lazy)
        assert not table.carries("forces").any()
        assert (table.carries("energy") == whole.carries("energy")).all()
        assert table.fingerprint != whole.fingerprint
        for frame, kept in zip(whole, table):
            assert_same_frame(replace(frame, forces=None, weight=1.0), kept)
    assert np.isnan(table.components.force_squares).all()
    with pytest.raises(ForgefieldError, match=r"data\.labels\.energy=DFT does not apply to a store"):
        read_table(str(tmp_path / "store"), LabelOptions(energy="DFT"))
    with pytest.raises(ForgefieldError, match=r"data\.units\.energy=Ha does not apply to a store"):
        read_table(str(tmp_path / "store"), units=UnitOptions(energy="Ha"))


def damaged(store: Path, how: str) -> None:
    column = store / "part-00000" / "positions.npy"
    if how == "flipped":
        content = bytearray(column.read_bytes())
        content[777] ^= 1
        column.write_bytes(content)
    elif how == "short":
        column.write_bytes(column.read_bytes()[:-8])
    elif how == "missing":
        column.unlink()
    else:
        manifest = json.loads((store / "manifest.json").read_text())
        if how == "edited":
            manifest["n_frames"] += 1
        if how == "version":
            manifest["version"] = 99
        (store / "manifest.json").write_text("{" if how == "not JSON" else json.dumps(manifest))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("flipped", r"positions\.npy: its content does not match the hash"),
        ("short", r"positions\.npy: the file holds \d+ bytes and the manifest says \d+"),
        ("missing", r"positions\.npy: this file of the store is missing"),
        ("edited", "the manifest does not match its own hash"),
        (
            "version",
            r"manifest\.json is a store of format version 99; Forgefield .* reads versions up to 1",
        ),
        ("not JSON", "not valid JSON"),
    ],
)
def test_a_damaged_store_is_refused(source, tmp_path, how, message):
    convert(str(source), tmp_path / "store")
    damaged(tmp_path / "store", how)
    with pytest.raises(ForgefieldError, match=message):
        read_table(str(tmp_path / "store"))


def test_a_file_cut_short_while_it_is_used_is_an_error_and_not_a_crash(source, tmp_path):
    convert(str(source), tmp_path / "store")
    table = open_store(tmp_path / "store").table()
    column = tmp_path / "store" / "part-00000" / "positions.npy"
    with column.open("r+b") as stream:
        stream.truncate(300)
    with pytest.raises(ForgefieldError, match=r"positions\.npy: the file ends too early"):
        table[59]


def test_a_refused_conversion_leaves_nothing(tmp_path):
    good = write_extxyz(tmp_path / "good.extxyz", some_frames(np.random.default_rng(1), 4))
    bad = tmp_path / "bad.extxyz"
    bad.write_text(good.read_text().replace("REF_energy=", "REF_energy=nan nothing=", 1))
    before = set(tmp_path.iterdir())
    with pytest.raises(ForgefieldError, match=r"bad\.extxyz"):
        convert([str(good), str(bad)], tmp_path / "store")
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"store.partial"}
    assert not (tmp_path / "store").exists()
    with pytest.raises(ForgefieldError, match="exists already"):
        convert(str(good), tmp_path)


def test_a_table_that_was_copied_or_sent_to_another_process_reads_its_own_files(source, tmp_path):
    """Deleting the copy must not close what the original reads from."""
    convert(str(source), tmp_path / "store")
    table = open_store(tmp_path / "store").table()
    before = table[5].positions
    copied = copy.deepcopy(table)
    np.testing.assert_array_equal(copied[5].positions, before)
    del copied
    with (tmp_path / "other").open("wb") as other:
        other.write(bytes(10**5))
        other.flush()
        np.testing.assert_array_equal(table[5].positions, before)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(table))[5].positions, before)


def test_more_stores_than_files_may_be_open_at_first(tmp_path):
    """The limit is raised as far as the system allows, and only then is it an error in words."""
    frames = some_frames(np.random.default_rng(1), 3)
    names = [str(tmp_path / f"s{i}") for i in range(12)]
    for name in names:
        store_frames(frames, Path(name))
    script = (
        "import resource, sys\n"
        "from forgefield.data.reading import read_table\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, int(sys.argv[1])))\n"
        "print(sum(len(frame) for frame in read_table(sys.argv[2:])))\n"
    )
    for hard, expected in ((4096, 0), (60, 1)):
        done = subprocess.run([sys.executable, "-c", script, str(hard), *names], capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
    assert "raise the limit (ulimit -n), or convert several stores into one" in done.stderr


def test_stores_of_files_with_one_name_are_different_systems(tmp_path):
    for name, n in (("a", 3), ("b", 30)):
        (tmp_path / name).mkdir()
        source = write_extxyz(tmp_path / name / "train.xyz", some_frames(np.random.default_rng(n), n))
        store_frames([replace(frame, source="train.xyz") for frame in read_frames(str(source))], tmp_path / name / "st")
    table = read_table([str(tmp_path / "a" / "st"), str(tmp_path / "b" / "st")])
    assert np.bincount(table.systems.of_frame).tolist() == [3, 30]


def test_the_fingerprint_is_that_of_the_frames_however_they_are_kept(source, tmp_path):
    convert(str(source), tmp_path / "one")
    with patch.object(convert_module, "CHUNK", 7):
        convert(str(source), tmp_path / "many")
    tables = [
        read_table(str(source)),
        read_table(str(tmp_path / "one")),
        read_table(str(tmp_path / "many")),
        read_table(str(tmp_path / "many"), lazy=False),
    ]
    assert len(tables[2].parts) > 2
    assert len({table.fingerprint for table in tables}) == 1
    rows = np.random.default_rng(0).permutation(60)[:20]
    assert len({table.select(rows).fingerprint for table in tables}) == 1
    assert tables[0].select(rows[::-1]).fingerprint != tables[0].select(rows).fingerprint
    assert read_table({"path": str(source), "weight": 2}).fingerprint != tables[0].fingerprint


@pytest.mark.parametrize(
    "settings", [(LabelOptions(energy="REF_energy"), None), (None, UnitOptions(energy="kcal/mol"))]
)
def test_lazy_files_obey_labels_and_units(settings, source, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
    lazy, in_memory = read_table(str(source), *settings, lazy=True), read_table(str(source), *settings)
    assert lazy.fingerprint == in_memory.fingerprint
    with pytest.raises(ForgefieldError, match=r"no frame of .*frames\.extxyz.* has that key|NOTHERE"):
        read_table(str(source), LabelOptions(energy="NOTHERE"), lazy=True)


def rewritten(store: Path, change) -> None:
    file = store / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    manifest["hash"] = manifest_hash(manifest)
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["parts"][0].update(name="../elsewhere"),
        lambda m: m["parts"][0].update(n_frames=61),
        lambda m: m["parts"][0].update(n_atoms=1),
        lambda m: m["parts"][0]["columns"].pop("cell"),
        lambda m: m["parts"][0].pop("sources"),
        lambda m: m.pop("parts"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_although_its_hash_is_right(source, tmp_path, change):
    convert(str(source), tmp_path / "store")
    rewritten(tmp_path / "store", change)
    with pytest.raises(ForgefieldError, match=r"manifest\.json: it (contradicts itself|lacks)"):
        read_table(str(tmp_path / "store"))


def test_an_empty_source_is_named_by_a_conversion(tmp_path):
    (tmp_path / "empty.xyz").write_text("\n\n")
    with pytest.raises(ForgefieldError, match=r"empty\.xyz: there are no frames"):
        convert(str(tmp_path / "empty.xyz"), tmp_path / "store")
