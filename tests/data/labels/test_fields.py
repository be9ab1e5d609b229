"""Fields on their way from frames to batches: through columns, stores, splits and files nothing is lost or made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.io import read as ase_read
from hypothesis import given, settings
from hypothesis import strategies as st

from forgefield.config.checking import typed_config
from forgefield.config.sources import Sources
from forgefield.data.batch import SHAPES, BatchSpec, batch_from_frames, batch_shapes, without_labels
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame, check_frame
from forgefield.data.inspection.inspect import inspect_table
from forgefield.data.labels.fields import Field
from forgefield.data.module import read_data
from forgefield.data.neighbours.interop import to_pyg
from forgefield.data.options import DataOptions, LabelOptions, UnitOptions
from forgefield.data.readers import read_frames
from forgefield.data.reading import read_table
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.species import SpeciesTable
from forgefield.data.splits import resolve_splits
from forgefield.data.store.columns import frame_digest
from forgefield.data.store.convert import convert, store_frames
from forgefield.data.store.export import write_frames
from forgefield.data.store.store import manifest_hash, open_store
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError

SPECIES = SpeciesTable(["H", "O"])
SHAPE = {"gap": (), "dipole": (3,), "alpha": (3, 3), "aparam": (), "spin": (2, 2)}
PER_ATOM = ("aparam", "spin")
FIELDS = {name: Field("atom" if name in PER_ATOM else "frame", shape) for name, shape in SHAPE.items()}
ASKED = {name: {"per": field.per, "shape": list(field.shape)} for name, field in FIELDS.items()}


def some_frames(n: int, seed: int = 0, source: str = "a.xyz", **changes) -> list[Frame]:
    """Frames of one to six atoms, each with some of the fields; `aparam` is known of hydrogen only."""
    rng = np.random.default_rng(seed)
    frames = []
    for index in range(n):
        size = int(rng.integers(1, 7))
        numbers = rng.choice([1, 8], size)
        fields = {
            name: rng.normal(size=(size, *shape) if name in PER_ATOM else shape)
            for name, shape in SHAPE.items()
            if rng.random() < 0.7
        }
        fields = {name: np.asarray(value) for name, value in fields.items()}
        if "aparam" in fields:
            fields["aparam"][numbers == 8] = np.nan
            if (numbers == 8).all():
                del fields["aparam"]
        frames.append(
            Frame(
                positions=np.arange(size)[:, None] * np.array([1.1, 0.2, 0.3]) + rng.normal(scale=0.05, size=(size, 3)),
                numbers=numbers,
                cell=9 * np.eye(3),
                pbc=np.ones(3, dtype=bool),
                energy=float(rng.normal()),
                forces=rng.normal(size=(size, 3)),
                source=source,
                index=index,
                fields=fields,
                per_atom=frozenset(fields) & set(PER_ATOM),
                **changes,
            )
        )
    return frames


def assert_same_fields(one: Frame, other: Frame) -> None:
    assert one.fields.keys() == other.fields.keys()
    assert one.per_atom == other.per_atom
    for name, value in one.fields.items():
        np.testing.assert_array_equal(other.fields[name], value, strict=True)
        assert other.fields[name].dtype == np.float64


def expected(frames: list[Frame], name: str) -> torch.Tensor:
    """Values of a field in a batch of these frames, the slow and obvious way."""
    rows = []
    for frame in frames:
        shape = (len(frame), *SHAPE[name]) if name in PER_ATOM else (1, *SHAPE[name])
        rows.append(frame.fields[name].reshape(shape) if name in frame.fields else np.full(shape, np.nan))
    return torch.from_numpy(np.concatenate(rows))


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == torch.float64
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# ---- tables and batches


@given(rows=st.lists(st.integers(0, 29), min_size=1, max_size=9), in_store=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_batch_holds_the_values_of_its_frames_and_nan_for_what_is_missing(tmp_path_factory, rows, in_store):
    one, two, three = some_frames(10, 1), some_frames(10, 2, "b.xyz"), some_frames(10, 3, "c.xyz")
    three = [replace(frame, fields={}, per_atom=frozenset()) for frame in three]
    table = FrameTable.from_frames(one) + FrameTable.from_frames(two) + FrameTable.from_frames(three)
    if in_store:
        folder = tmp_path_factory.mktemp("store") / "x.store"
        store_frames(two, folder)
        table = FrameTable.from_frames(one) + open_store(folder).table() + FrameTable.from_frames(three)
    dataset = GraphDataset(table, SPECIES, 3.0)
    frames = [[*one, *two, *three][row] for row in rows]
    batch = dataset.batch(rows)
    assert dict(dataset.fields) == FIELDS
    again = batch_from_frames(frames, SPECIES, 3.0, FIELDS)
    for name in SHAPE:
        assert_equal(batch[name], expected(frames, name))
        assert_equal(again[name], batch[name])
    shapes = batch_shapes(dataset.fields)
    sizes = {"frames": len(frames), "atoms": sum(map(len, frames)), "edges": batch["edge_index"].shape[1]}
    for name, tensor in batch.items():
        assert tensor.shape == tuple(sizes.get(size, size) for size in shapes[name])
    for frame, row in zip(frames, rows):
        assert_same_fields(frame, table[row])


def test_without_fields_nothing_changes():
    plain = [replace(frame, fields={}, per_atom=frozenset()) for frame in some_frames(4)]
    dataset = GraphDataset(plain, SPECIES, 3.0)
    assert dataset.fields == {}
    assert set(dataset.batch(range(4))) == set(SHAPES) - {"branch", "frame_key", "denoise"}
    frame = Frame(
        np.arange(6.0).reshape(2, 3), np.array([1, 8]), 4 * np.eye(3), np.ones(3, dtype=bool), -1.5, np.ones((2, 3))
    )
    # As before there were fields: what was computed and stored then is found again.
    assert frame_digest(frame).hex() == "dfb4801a5de482e957f300b857d84438"
    assert FrameTable.from_frames([frame]).fingerprint == "4ecaf21af452277e43df2f54c86225fc"


def test_fields_distinguish_frames():
    (frame,) = some_frames(1, 4)
    value = np.array([1.0])
    variants = [
        replace(frame, fields={}, per_atom=frozenset()),
        replace(frame, fields={"gap": value}, per_atom=frozenset()),
        replace(frame, fields={"gap": 2 * value}, per_atom=frozenset()),
        replace(frame, fields={"cap": value}, per_atom=frozenset()),
    ]
    assert len({frame_digest(variant) for variant in variants}) == 4
    assert len({FrameTable.from_frames([variant]).fingerprint for variant in variants}) == 4


def test_frames_with_a_field_of_frames_or_of_atoms():
    frames = some_frames(400, 5)
    table = FrameTable.from_frames(frames)
    for name in SHAPE:
        assert table.carries(name).tolist() == [name in frame.fields for frame in frames]
    rows = np.arange(399, -1, -3)
    assert table.select(rows).carries("aparam").tolist() == ["aparam" in frames[row].fields for row in rows]


def test_a_blank_frame_has_the_inputs_of_a_model_and_no_labels():
    frames = [replace(frame, fields={"gap": np.array(1.0), "aparam": np.ones(len(frame))}, per_atom=frozenset(["aparam"]))
              for frame in some_frames(3)]  # fmt: skip
    dataset = GraphDataset(frames, SPECIES, 3.0, targets=frozenset(["gap"]))
    (batch,) = FrameLoader(dataset, 1, rank=6, world_size=7)
    assert batch["frame_id"].tolist() == [-1]
    assert batch["gap"].isnan().all()
    assert (batch["aparam"] == 1).all()
    assert not dataset[0]["gap"].isnan().any()
    kept = without_labels(dataset[0])
    assert (kept["gap"] == 1).all()
    assert kept["energy"].isnan().all()


def test_frames_that_contradict_each_other_are_refused():
    one, two = (replace(frame, fields={}, per_atom=frozenset()) for frame in some_frames(2))
    with pytest.raises(
        ForgefieldError, match=r"frame 1: the field x has shape \(3,\); in other frames it is per frame"
    ):
        FrameTable.from_frames([replace(one, fields={"x": np.ones(2)}), replace(two, fields={"x": np.ones(3)})])
    tables = [FrameTable.from_frames([replace(f, fields={"x": np.ones(n)})]) for f, n in ((one, 2), (two, 3))]
    with pytest.raises(ForgefieldError, match=r"the field 'x' is per frame, of shape \[2\] in .* of shape \[3\] in"):
        _ = (tables[0] + tables[1]).fields
    for bad in (np.ones((len(one) + 1, 2)), np.full((len(one), 2), np.nan), np.full((len(one), 2), np.inf)):
        with pytest.raises(ForgefieldError, match=r"frame 0: the field x (has shape|contains NaN or infinity)"):
            check_frame(replace(one, fields={"x": bad}, per_atom=frozenset(["x"])))


def test_other_libraries_get_fields_by_their_names():
    pytest.importorskip("torch_geometric")
    dataset = GraphDataset(some_frames(5, 6), SPECIES, 3.0)
    batch = dataset.batch([3, 1])
    graph = to_pyg(batch, SPECIES, dataset.fields)
    for name in SHAPE:
        assert_equal(graph[name], batch[name])


# ---- stores


def write_xyz(path: Path, frames: list[Frame]) -> Path:
    write_frames(frames, path)
    return path


def asked(*names: str, **more) -> LabelOptions:
    chosen = {name: dict(ASKED[name]) for name in names or ASKED}
    if "aparam" in chosen:
        chosen["aparam"]["species"] = ["H"]
    return LabelOptions(fields=chosen | more)


@pytest.mark.parametrize("suffix", ["extxyz", "traj", "db"])
def test_what_is_written_to_a_file_is_read_again_to_the_last_bit(tmp_path, suffix):
    frames = some_frames(12, 7)
    write_frames(frames, tmp_path / f"a.{suffix}")
    for one, other in zip(frames, read_frames(tmp_path / f"a.{suffix}", asked()), strict=True):
        assert_same_fields(one, other)
        np.testing.assert_array_equal(one.forces, other.forces)
    if suffix == "extxyz":
        for frame, atoms in zip(frames, ase_read(tmp_path / "a.extxyz", ":")):
            values = atoms.info | atoms.arrays | getattr(atoms.calc, "results", {})
            for name, value in frame.fields.items():
                np.testing.assert_array_equal(np.reshape(values[name], value.shape), value)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_store_keeps_fields_and_knows_what_they_are(tmp_path, workers):
    frames = some_frames(30, 8)
    source = write_xyz(tmp_path / "a.extxyz", frames)
    labels = asked()
    labels.fields["gap"] |= {"unit": "eV"}
    manifest = convert([str(source)], tmp_path / "a.store", labels=labels, workers=workers)
    assert manifest["fields"]["gap"] == {"per": "frame", "shape": [], "dtype": "float64", "unit": "eV"}
    assert manifest["fields"]["spin"] == {"per": "atom", "shape": [2, 2], "dtype": "float64", "unit": ""}
    gaps = [frame.fields["gap"] for frame in frames if "gap" in frame.fields]
    assert manifest["statistics"]["labels"]["gap"]["count"] == len(gaps)
    assert manifest["statistics"]["labels"]["gap"]["high"] == max(gaps)
    for table in (read_table(tmp_path / "a.store"), read_table(tmp_path / "a.store", lazy=False)):
        for one, other in zip(frames, table, strict=True):
            assert_same_fields(one, other)
    convert(str(tmp_path / "a.store"), tmp_path / "b.store")
    write_frames(read_table(tmp_path / "b.store"), tmp_path / "b.extxyz")
    for one, other in zip(frames, read_frames(tmp_path / "b.extxyz", asked()), strict=True):
        assert_same_fields(one, other)
    store_frames(read_table(tmp_path / "b.store"), tmp_path / "c.store")
    assert open_store(tmp_path / "c.store").table().fingerprint == read_table(source, asked()).fingerprint


def test_a_store_gives_the_fields_that_are_requested(tmp_path):
    frames = some_frames(10, 9)
    store_frames(frames, tmp_path / "a.store")
    assert set(read_table(tmp_path / "a.store").fields) == set(SHAPE)  # nothing said: what it holds
    assert read_table(tmp_path / "a.store", LabelOptions(fields={})).fields == {}
    some = read_table(tmp_path / "a.store", LabelOptions(fields={"gap": ASKED["gap"], "spin": ASKED["spin"]}))
    assert set(some.fields) == {"gap", "spin"}
    assert [set(frame.fields) for frame in some] == [set(frame.fields) & {"gap", "spin"} for frame in frames]
    batch = GraphDataset(some, SPECIES, 3.0).batch(range(10))
    assert_equal(batch["spin"], expected(frames, "spin"))
    assert "dipole" not in batch
    assert some.fingerprint != read_table(tmp_path / "a.store").fingerprint
    by_frames = read_frames(tmp_path / "a.store", LabelOptions(fields={"gap": ASKED["gap"]}))
    assert {name for frame in by_frames for name in frame.fields} == {"gap"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"density": {}},
            r"a\.store: this store has no field 'density' \(its fields: .*gap.*\); convert the data again",
        ),
        (
            {"gap": {"shape": [2]}},
            r"'gap' of this store is per frame, of shape \[\], but data\.labels\.fields\.gap is per frame, of shape \[2\]",
        ),
        ({"gap": {"key": "Eg"}}, r"fields\.gap\.key=Eg does not apply to a store"),
        ({"gap": {"factor": 2.0}}, r"fields\.gap\.factor=2\.0 does not apply to a store"),
    ],
)
def test_a_store_without_requested_fields_is_an_error_with_a_remedy(tmp_path, fields, message):
    store_frames(some_frames(10, 9), tmp_path / "a.store")
    with pytest.raises(ForgefieldError, match=message):
        read_table(tmp_path / "a.store", LabelOptions(fields=fields))
    with pytest.raises(ForgefieldError, match=message):
        convert(str(tmp_path / "a.store"), tmp_path / "b.store", labels=LabelOptions(fields=fields))
    assert not (tmp_path / "b.store.partial").exists()


def test_where_labels_may_be_missing_so_may_fields(tmp_path):
    store_frames(some_frames(3, 9), tmp_path / "a.store")
    write_xyz(tmp_path / "a.extxyz", [replace(f, fields={}, per_atom=frozenset()) for f in some_frames(3)])
    for name in ("a.store", "a.extxyz"):
        table = read_table(tmp_path / name, LabelOptions(fields={"density": {"shape": [2]}}), required=False)
        assert GraphDataset(table, SPECIES, 3.0).batch([0, 1])["density"].isnan().tolist() == [[True, True]] * 2


def test_a_manifest_cannot_name_a_field_that_leads_elsewhere(tmp_path):
    store_frames(some_frames(3, 9), tmp_path / "a.store")
    file = tmp_path / "a.store" / "manifest.json"
    for name, change in (
        ("../../gap", {}),
        ("gap", {"per": "edge"}),
        ("gap", {"shape": [-1]}),
        ("gap", {"dtype": "O"}),
    ):
        manifest = json.loads(file.read_text())
        manifest["fields"][name] = {**manifest["fields"]["gap"], **change}
        manifest["hash"] = manifest_hash(manifest)
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(
            ForgefieldError, match=r"manifest\.json: .*gap is (not a field|of type O); convert the data again"
        ):
            open_store(tmp_path / "b")


def test_data_converted_by_itself_keeps_its_fields(tmp_path):
    frames = some_frames(10, 11)
    source = write_xyz(tmp_path / "a.extxyz", frames)
    for _ in range(2):
        for one, other in zip(frames, read_table(source, asked(), lazy=True), strict=True):
            assert_same_fields(one, other)
    assert set(read_table(source, asked("gap"), lazy=True).fields) == {"gap"}
    assert read_table(source, lazy=True).fields == {}


# ---- a run's data


def options(**changes) -> DataOptions:
    return typed_config({"data": changes}, Sources()).data


def labelled(n: int, seed: int, gap: bool = True) -> list[Frame]:
    """Frames that a training accepts."""
    frames = [f for f in some_frames(4 * n, seed) if len(f) > 1][:n]
    fields = [{"gap": np.array(float(i))} if gap else {} for i in range(n)]
    return [replace(f, energy=0.0, fields=own, per_atom=frozenset()) for f, own in zip(frames, fields)]


def test_validation_files_bring_the_fields_of_the_training_data(tmp_path):
    store_frames(labelled(6, 1), tmp_path / "train.store")
    write_xyz(tmp_path / "val.extxyz", labelled(3, 2))
    write_xyz(tmp_path / "bare.extxyz", labelled(3, 2, gap=False))
    splits = resolve_splits(options(train=str(tmp_path / "train.store"), val=str(tmp_path / "val.extxyz")), 0)
    assert set(splits.train.fields) == set(splits.val.fields) == {"gap"}
    assert [float(frame.fields["gap"]) for frame in splits.val] == [0.0, 1.0, 2.0]
    with pytest.raises(ForgefieldError, match=r"fields\.gap: no frame of .*bare\.extxyz has the key 'gap'"):
        resolve_splits(options(train=str(tmp_path / "train.store"), val=str(tmp_path / "bare.extxyz")), 0)


def test_the_data_of_a_run_counts_fields_and_names_those_learnt(tmp_path):
    frames = labelled(8, 3)
    frames[0] = replace(frames[0], fields={})
    source = write_xyz(tmp_path / "a.extxyz", frames)
    data = read_data(options(train=str(source), val=2, labels={"fields": {"gap": {"unit": "eV"}}}, cutoff=3.0), 0)
    held = int(data.train.frames.carries("gap").sum())
    assert data.statistics.labels["gap"] == held
    assert f"gap {held}" in dict(data.describe())["frames with labels"]
    served = data.serve(BatchSpec(targets=frozenset({"energy", "forces", "gap"})))
    assert served.data.train.targets == served.data.val.targets == {"gap"}
    assert not data.train.targets
    batch = next(iter(served.train_dataloader()))
    assert_equal(batch["gap"], torch.from_numpy(np.array(data.train.frames.column("gap")))[batch["frame_id"]])


def test_info_shows_the_range_of_every_field_and_which_frames_lack_it():
    frames = some_frames(30, 12)
    found = {span.name: span for span in inspect_table(FrameTable.from_frames(frames)).labels}
    for name in SHAPE:
        values = np.concatenate([f.fields[name].reshape(-1) for f in frames if name in f.fields])
        span = found[name]
        assert span.frames == sum(name in f.fields for f in frames)
        assert (span.low, span.high) == (np.nanmin(values), np.nanmax(values))
        assert span.mean == pytest.approx(np.nanmean(values))
    without = sum("gap" not in f.fields for f in frames)
    remarks = inspect_table(FrameTable.from_frames(frames)).remarks
    assert any(remark.startswith(f"{without} frames without gap: a.xyz, frame") for remark in remarks)


def test_the_same_structure_with_another_field_is_not_the_same_frame():
    (frame,) = (replace(f, fields={}, per_atom=frozenset()) for f in some_frames(1, 4))
    twice = [replace(frame, fields={"gap": np.array(x)}, index=i) for i, x in enumerate((1.0, 1.0, 2.0))]
    remarks = inspect_table(FrameTable.from_frames(twice)).remarks
    assert any(remark.startswith("1 frame identical to an earlier one: a.xyz, frame 1") for remark in remarks)
    assert any(remark.startswith("1 frame with the structure of an earlier one") for remark in remarks)


def test_units_of_labels_leave_fields_alone(tmp_path):
    source = write_xyz(tmp_path / "a.extxyz", labelled(3, 1))
    table = read_table(source, LabelOptions(fields={"gap": {}}), UnitOptions(energy="kcal/mol"))
    assert table.column("gap").tolist() == [0.0, 1.0, 2.0]
