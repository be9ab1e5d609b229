"""Predictions as arrays and as files: each frame once, in order, with its labels beside it and nothing modified."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import ase.db
import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.data.batch import batch_from_frames
from forgefield.data.dataset import GraphDataset
from forgefield.data.options import LabelOptions
from forgefield.data.readers import read_frames
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference import predict
from forgefield.inference.evaluate import predict_dataset
from forgefield.inference.predict import predict_file
from forgefield.models.potential import Potential
from tests.support.helpers import emt_frames
from tests.support.toy_models import Morse

SPECIES = SpeciesTable(Morse.species)
WRITTEN = (".extxyz", ".xyz", ".traj", ".json", ".db")


@pytest.fixture
def source(tmp_path):
    """Crystals with all labels, a molecule with an energy only, a crystal without labels."""
    frames = emt_frames(4, seed=1)
    dimer = Atoms("CuAu", positions=[(0, 0, 0), (0, 0, 2.5)])
    dimer.calc = SinglePointCalculator(dimer, energy=-1.5)
    bare = emt_frames(1, seed=2)[0]
    bare.calc = None
    path = tmp_path / "source.extxyz"
    ase.io.write(path, [*frames, dimer, bare], format="extxyz")
    return path


@pytest.fixture
def potential():
    return Potential(Morse())


def dataset(source) -> GraphDataset:
    return GraphDataset(read_frames(source), SPECIES, Morse.cutoff)


def test_arrays_equal_single_evaluations(source, potential):
    data = dataset(source)
    arrays = predict_dataset(potential, data, forces=True, stress=True, batch=4)
    atom = 0
    for i, frame in enumerate(data.frames):
        out = potential.eval()(batch_from_frames([frame], SPECIES, Morse.cutoff), stress=True)
        rows = slice(atom, atom + len(frame))
        assert np.isclose(arrays["energy_pred"][i], out["energy"].item(), rtol=1e-14)
        assert np.allclose(arrays["forces_pred"][rows], out["forces"].numpy(), rtol=0, atol=1e-13)
        assert np.allclose(arrays["stress_pred"][i], out["stress"][0].numpy(), rtol=0, atol=1e-14, equal_nan=True)
        assert np.array_equal(arrays["species"][rows], SPECIES.index(frame.numbers))
        assert arrays["n_atoms"][i] == len(frame)
        atom += len(frame)
    assert atom == len(arrays["forces_pred"]) == len(arrays["forces_ref"])
    assert arrays["species_symbols"].tolist() == ["Cu", "Au"]


def test_missing_labels_are_nan_and_never_zero(source, potential):
    data = dataset(source)
    arrays = predict_dataset(potential, data, forces=True, stress=True)
    assert [bool(np.isnan(value)) for value in arrays["energy_ref"]] == [False] * 5 + [True]
    labelled = np.repeat([True] * 4 + [False] * 2, arrays["n_atoms"])
    assert np.array_equal(~np.isnan(arrays["forces_ref"]).any(axis=1), labelled)
    assert np.array_equal(~np.isnan(arrays["stress_ref"]).any(axis=(1, 2)), [True] * 4 + [False] * 2)
    assert np.array_equal(~np.isnan(arrays["stress_pred"]).any(axis=(1, 2)), [True] * 4 + [False, True])


def test_shuffled_loader_gives_the_order_of_the_data_set(source, potential):
    data = dataset(source)
    loader = FrameLoader(data, 2, shuffle=True, seed=5)
    assert [int(i) for batch in loader for i in batch["frame_id"]] != list(range(len(data)))
    ordered = predict_dataset(potential, data, forces=True, stress=True, batch=2)
    shuffled = predict_dataset(potential, loader, forces=True, stress=True)
    assert ordered.keys() == shuffled.keys()
    for name in ordered:
        if name != "species_symbols":
            assert np.allclose(ordered[name], shuffled[name], rtol=0, atol=1e-12, equal_nan=True), name


def test_what_is_not_asked_for_is_nan(source, potential):
    arrays = predict_dataset(potential, dataset(source), forces=False, stress=False)
    assert np.isfinite(arrays["energy_pred"]).all()
    assert np.isnan(arrays["forces_pred"]).all()
    assert arrays["forces_pred"].shape == arrays["forces_ref"].shape
    assert np.isnan(arrays["stress_pred"]).all()


@pytest.mark.parametrize("training", [True, False])
def test_model_is_left_in_the_mode_it_was_in(source, potential, training):
    potential.train(training)
    predict_dataset(potential, dataset(source))
    assert potential.training is training


def references(atoms: Atoms, row) -> dict:
    if row is not None:
        return row.data
    return {**atoms.info, **{k: v for k, v in atoms.arrays.items() if k.startswith("REF_")}}


@pytest.mark.parametrize("suffix", WRITTEN)
def test_file_holds_predictions_as_results_and_labels_as_references(source, potential, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    assert predict_file(potential, source, out, batch=4) == out
    images = ase.io.read(out, ":")
    rows = list(ase.db.connect(out).select()) if suffix in (".json", ".db") else [None] * len(images)
    frames = read_frames(source)
    expected = predict_dataset(potential, dataset(source), forces=True, stress=True)
    forces = np.split(expected["forces_pred"], np.cumsum(expected["n_atoms"])[:-1])
    assert len(images) == len(frames)
    for i, (atoms, row, frame) in enumerate(zip(images, rows, frames)):
        assert np.array_equal(atoms.numbers, frame.numbers)
        assert np.allclose(atoms.positions, frame.positions, atol=1e-8)
        assert np.array_equal(atoms.pbc, frame.pbc)
        assert np.isclose(atoms.get_potential_energy(), expected["energy_pred"][i], rtol=1e-7)
        assert np.allclose(atoms.get_forces(), forces[i], atol=1e-7)
        assert ("stress" in atoms.calc.results) == (frame.volume > 0)
        found = references(atoms, row)
        for label in ("energy", "forces", "stress"):
            value = getattr(frame, label)
            assert (f"REF_{label}" in found) == (value is not None)
            if value is not None:
                assert np.allclose(np.reshape(found[f"REF_{label}"], np.shape(value)), value, atol=1e-7)


def test_references_can_be_read_back_as_labels(source, potential, tmp_path):
    out = predict_file(potential, source, tmp_path / "out.extxyz")
    again = read_frames(out, LabelOptions(energy="REF_energy", forces="REF_forces", stress="REF_stress"))
    for before, after in zip(read_frames(source), again):
        assert (before.energy is None) == (after.energy is None)
        if before.forces is not None:
            assert np.allclose(before.forces, after.forces, atol=1e-8)
            assert np.allclose(before.stress, after.stress, atol=1e-8)


def test_predictions_written_as_labels_replace_those_of_the_source(source, potential, tmp_path):
    assert any(frame.forces is not None for frame in read_frames(source))
    out = predict_file(potential, source, tmp_path / "labels.extxyz", as_labels=True)
    predicted = ase.io.read(predict_file(potential, source, tmp_path / "out.extxyz"), ":")
    for atoms, frame in zip(predicted, read_frames(out), strict=True):  # several candidates for a label are an error
        assert np.isclose(frame.energy, atoms.get_potential_energy(), rtol=1e-7)
        assert np.allclose(frame.forces, atoms.get_forces(), atol=1e-7)


def test_source_is_not_modified(source, potential, tmp_path):
    before = hashlib.sha256(source.read_bytes()).digest()
    predict_file(potential, source, tmp_path / "out.extxyz")
    assert hashlib.sha256(source.read_bytes()).digest() == before


@pytest.mark.parametrize("name", ["out.cif", "out", "out.nonsense"])
def test_suffix_that_cannot_hold_the_results_is_refused_before_any_work(source, potential, tmp_path, name):
    with pytest.raises(ForgefieldError, match=r"\.extxyz, \.xyz, \.traj, \.json, \.db"):
        predict_file(potential, source, tmp_path / name)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("suffix", WRITTEN)
def test_failed_write_keeps_the_old_file_and_leaves_nothing_else(source, potential, tmp_path, monkeypatch, suffix):
    out = tmp_path / "results" / f"out{suffix}"
    out.parent.mkdir()
    out.write_text("precious")

    def disk_full(path, images):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(predict._WRITERS, suffix, disk_full)
    with pytest.raises(ForgefieldError, match="No space left"):
        predict_file(potential, source, out, overwrite=True)
    assert out.read_text() == "precious"
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_existing_file_is_replaced_not_appended_to(source, potential, tmp_path):
    for suffix in WRITTEN:
        out = tmp_path / f"out{suffix}"
        predict_file(potential, source, out)
        predict_file(potential, source, out, overwrite=True)
        assert len(ase.io.read(out, ":")) == 6, suffix


def test_missing_folder_is_one_clear_error(source, potential, tmp_path):
    with pytest.raises(ForgefieldError, match="Could not write"):
        predict_file(potential, source, tmp_path / "nowhere" / "out.extxyz")


def test_unknown_element_names_file_and_frame(potential, tmp_path):
    path = tmp_path / "zinc.extxyz"
    ase.io.write(path, [Atoms("Cu"), Atoms("Zn")], format="extxyz")
    with pytest.raises(ForgefieldError, match=r"zinc\.extxyz, frame 1.*Zn"):
        predict_file(potential, path, tmp_path / "out.extxyz")


def test_frames_in_memory_are_not_modified(source, potential):
    frames = read_frames(source)
    copies = [replace(frame, positions=frame.positions.copy()) for frame in frames]
    images = predict.predict_frames(potential, frames)
    images[0].positions += 1.0
    assert all(np.array_equal(frame.positions, copy.positions) for frame, copy in zip(frames, copies))


class Hungry(Morse):
    """Needs memory that no machine has where a batch has more than two frames: the allocator itself refuses."""

    def forward(self, batch):
        if batch["n_atoms"].shape[0] > 2:
            torch.empty(1 << 48, dtype=torch.float64)
        return super().forward(batch)


def test_where_memory_runs_out_a_batch_is_predicted_in_parts(source, potential):
    asked = {"forces": True, "stress": True, "batch": 6}
    found = predict_dataset(Potential(Hungry()), dataset(source), **asked)
    expected = predict_dataset(potential, dataset(source), **asked)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-12, err_msg=name)
        else:
            assert np.array_equal(found[name], values), name


def test_a_file_without_the_labels_of_the_training_is_predicted(source, potential, tmp_path):
    out = predict_file(potential, source, tmp_path / "out.extxyz", labels=LabelOptions(energy="my_E", forces="my_F"))
    images = ase.io.read(out, ":")
    assert len(images) == 6
    assert all("REF_energy" not in image.info and "energy" in image.calc.results for image in images)
