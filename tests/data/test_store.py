"""A store gives back every frame to the last bit, makes the same batches as memory, and notices every damage."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from forgefield.config.schema import DataOptions, LabelOptions, UnitOptions
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.graphs.graph import GraphOptions
from forgefield.data.readers import read_frames
from forgefield.data.reading import read_table
from forgefield.data.sampling.batching import training_order
from forgefield.data.species import SpeciesTable
from forgefield.data.storage import convert as convert_module
from forgefield.data.storage.convert import convert
from forgefield.data.storage.store import StoreColumns, open_store
from forgefield.data.storage.table import FrameTable, Part
from forgefield.data.storage.writer import PartWriter
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
        FrameTable([Part(StoreColumns(folder, about, GraphOptions(4.0)))]),
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
    with patch("forgefield.data.storage.store.VERIFIED_BELOW", 0):
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
    assert (found["deviation"] / forces.size) ** 0.5 == pytest.approx(forces.std(), rel=1e-12)
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
    order = training_order(OmegaConf.structured(DataOptions), table, 0)(np.arange(80))
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
    with pytest.raises(ForgefieldError, match=r"data\.labels\.energy=DFT has no meaning for a store"):
        read_table(str(tmp_path / "store"), LabelOptions(energy="DFT"))
    with pytest.raises(ForgefieldError, match=r"data\.units\.energy=Ha has no meaning for a store"):
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
        ("version", "this store has format 99"),
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
