"""`training.ensemble`: members equal models that are trained alone, also after kill -9, and the run is used like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
import yaml
from ase import Atoms

import forgefield
from forgefield.data.splits import bootstrap_rows
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from tests.support.emt_run import kill_when, start_command
from tests.support.helpers import emt_frames, tiny_config, write_emt
from tests.support.resuming import assert_same_run
from tests.support.train_many import train_only

SIZE = 2


def ensemble_config(folder: Path, ensemble: object = SIZE, **changes) -> dict:
    training = {"ensemble": ensemble, "checkpoint": {"every_steps": 2}, **changes.pop("training", {})}
    return tiny_config(folder, training=training, **changes)


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("ensemble")
    test = write_emt(folder / "test.extxyz", 6, seed=5)
    return forgefield.train(ensemble_config(folder, data={"test": str(test)}))


def test_each_member_is_the_model_trained_alone_with_its_seed(ensemble, tmp_path) -> None:
    assert list(ensemble.members) == ["seed-3", "seed-4"]
    config = tiny_config(
        tmp_path,
        seed=4,
        data={"split_seed": 3, "test": str(ensemble.config.data.test)},
        training={"checkpoint": {"every_steps": 2}},
    )
    alone = forgefield.train(config)
    assert_same_run(alone.path, ensemble.member_path("seed-4"))
    assert alone.read_uncertainty().sha256 == Run(ensemble.member_path("seed-4")).read_uncertainty().sha256


def test_members_of_a_bootstrap_are_trained_on_frames_drawn_with_their_seeds(tmp_path) -> None:
    run = forgefield.train(ensemble_config(tmp_path, {"size": 2, "bootstrap": True}))
    config = tiny_config(tmp_path, name="alone", seed=4, data={"split_seed": 3, "bootstrap": True})
    config["training"]["checkpoint"] = {"every_steps": 2}
    assert_same_run(train_only(config).path, run.member_path("seed-4"))
    drawn = [dict(Run(run.member_path(name)).info["data"])["frames"] for name in run.members]
    assert all("different, data.bootstrap) to train" in text and text.startswith("10 (") for text in drawn)


def test_a_training_that_is_killed_twice_ends_as_an_uninterrupted_one(ensemble, tmp_path) -> None:
    test = write_emt(tmp_path / "test.extxyz", 6, seed=5)
    config = ensemble_config(tmp_path, data={"test": str(test)})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    place = tmp_path / "runs/tiny"
    for reached in (
        lambda: any(place.glob("members/seed-4/checkpoints/step-*")),
        lambda: (place / "checkpoints/best.safetensors").exists(),
    ):
        kill_when(start_command(tmp_path, "train", "config.yaml"), reached)
    run = forgefield.train(config)
    for name in ensemble.members:
        assert_same_run(run.member_path(name), ensemble.member_path(name))
    for which in ("best", "last"):
        assert run.read_weights(which).sha256 == ensemble.read_weights(which).sha256
    assert run.info["uncertainty_scales"] == ensemble.info["uncertainty_scales"]
    errors = [json.loads((path / "test.json").read_text())["errors"] for path in (run.path, ensemble.path)]
    assert errors[0] == errors[1]
    assert (run.path / "report.html").exists()


def test_members_trained_side_by_side_are_the_same(ensemble, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    test = write_emt(tmp_path / "test.extxyz", 6, seed=5)
    run = forgefield.train(ensemble_config(tmp_path, {"size": SIZE, "together": 2}, data={"test": str(test)}))
    assert run.read_weights("last").sha256 == ensemble.read_weights("last").sha256
    assert run.info["uncertainty_scales"] == ensemble.info["uncertainty_scales"]


def test_a_larger_ensemble_trains_the_new_members_only(ensemble, tmp_path) -> None:
    shutil.copytree(ensemble.path, tmp_path / "runs/tiny")
    folder = ensemble.path.parent.parent
    config = ensemble_config(folder, 3, data={"test": str(ensemble.config.data.test)}, out=str(tmp_path / "runs"))
    run = forgefield.train(config)
    assert list(run.members) == ["seed-3", "seed-4", "seed-5"]
    for name in ensemble.members:
        before, after = ((each.member_path(name) / "log.txt").read_text() for each in (ensemble, run))
        assert "is complete" in after.removeprefix(before)
        assert "Result" not in after.removeprefix(before)
        assert_same_run(run.member_path(name), ensemble.member_path(name))
    assert len(forgefield.load(run).members) == 3


def structure() -> Atoms:
    atoms = emt_frames(1, seed=9)[0]
    atoms.calc = None
    return atoms


def test_predictions_are_means_and_scaled_deviations_of_the_members(ensemble) -> None:
    atoms = structure()
    forces = []
    for name in ensemble.members:
        atoms.calc = forgefield.Calculator(ensemble.member_path(name))
        forces.append(atoms.get_forces())
    atoms.calc = forgefield.Calculator(ensemble)
    assert np.allclose(atoms.get_forces(), np.mean(forces, 0), atol=1e-12)
    scale = ensemble.info["uncertainty_scales"]["forces"]
    expected = scale * np.std(forces, 0, ddof=1)
    assert np.allclose(atoms.calc.results["forces_uncertainty"], expected, rtol=1e-10, atol=1e-12)


def test_68_percent_of_the_validation_errors_are_smaller_than_one_deviation(ensemble) -> None:
    found = ensemble.predictions("val")
    error = np.abs(found["forces_pred"] - found["forces_ref"])
    assert (error <= found["forces_uncertainty"]).mean() == pytest.approx(0.683, abs=0.01)


def test_the_run_is_used_like_any_other(ensemble, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    ase.io.write("new.extxyz", [structure()])
    package = forgefield.export(ensemble, "model.ff")
    forgefield.predict(ensemble, "new.extxyz", "out.extxyz", uncertainty="forces", model_devi="model_devi.out")
    predicted = ase.io.read("out.extxyz")
    assert predicted.arrays["forces_uncertainty"].shape == (len(predicted), 3)
    assert np.loadtxt("model_devi.out").shape == (8,)
    for source in (str(package), str(ensemble.path)):
        atoms = structure()
        atoms.calc = forgefield.Calculator(source, dtype="float64")
        assert atoms.get_potential_energy() == pytest.approx(predicted.get_potential_energy(), abs=1e-4)
        assert atoms.calc.results["energy_uncertainty"] == pytest.approx(predicted.info["energy_uncertainty"], rel=1e-2)
    errors = forgefield.test(ensemble, ensemble.config.data.test, uncertainty="forces")
    assert {"energy_mae", "forces_nll", "forces_miscalibration", "forces_coverage"} <= set(errors)
    result = forgefield.md(ensemble, structure(), "md.extxyz", temperature=100, ps=0.005, every=5)
    assert result.trajectories[0].status == "finished"
    before = ensemble.info["uncertainty_scales"]
    forgefield.uncertainty(ensemble)
    assert ensemble.info["uncertainty_scales"] == before
    chosen = forgefield.select(ensemble, emt_frames(12, seed=8), 3)
    assert len(chosen.indices) == 3
    atoms = chosen.frames[0].copy()
    atoms.calc = forgefield.Calculator(ensemble)
    atoms.get_forces()
    largest = np.linalg.norm(atoms.calc.results["forces_uncertainty"], axis=1).max()
    assert chosen.frames[0].info["forces_uncertainty_max"] == pytest.approx(largest, rel=1e-4)
    page = (ensemble.path / "report.html").read_text()
    assert "Members" in page
    assert "Forces: calibration" in page


@pytest.mark.parametrize(
    ("ensemble_value", "message"),
    [
        (1, "2 or more"),
        ({"bootstrap": True}, "needs a size"),
        ({"size": 2, "boostrap": True}, "Did you mean 'bootstrap'"),
        ({"size": 2, "bootstrap": 1}, "true or false"),
        ({"size": 2, "together": 0}, "a positive number"),
    ],
)
def test_wrong_options_are_refused(tmp_path, ensemble_value, message) -> None:
    with pytest.raises(ForgefieldError, match=message):
        forgefield.train(ensemble_config(tmp_path, ensemble_value))


def test_a_single_model_and_an_ensemble_do_not_share_a_folder(ensemble, tmp_path) -> None:
    config = tiny_config(ensemble.path.parent.parent)
    with pytest.raises(ForgefieldError, match="is an ensemble"):
        forgefield.train(config)
    train_only(tiny_config(tmp_path))
    with pytest.raises(ForgefieldError, match="is a single model"):
        forgefield.train(ensemble_config(tmp_path))


@pytest.mark.parametrize("to", ["torchscript", "mliap"])
def test_what_takes_one_model_names_the_members(ensemble, tmp_path, to) -> None:
    with pytest.raises(ForgefieldError, match="name one of its members"):
        forgefield.export(ensemble, tmp_path / "model.pt", to=to)


def test_a_bootstrap_keeps_every_species_and_single_atoms() -> None:
    frames = [
        *emt_frames(12, seed=1, symbols=("Cu",)),
        *emt_frames(1, seed=2, symbols=("Au",)),
        Atoms("Cu"),
        Atoms("Au"),
    ]
    table = forgefield_table(frames[:13])
    for seed in range(20):
        rows = bootstrap_rows(table, seed)
        assert len(rows) == 13
        assert 12 in rows
        assert np.array_equal(rows, bootstrap_rows(table, seed))
    assert len({tuple(bootstrap_rows(table, seed)) for seed in range(20)}) > 15
    rows = bootstrap_rows(forgefield_table(frames), 0)
    assert len(rows) == 15
    assert (rows == 13).sum() == (rows == 14).sum() == 1


def forgefield_table(frames: list[Atoms]) -> FrameTable:
    from forgefield.data.frame import check_frame
    from forgefield.inference.ase import frame_of_atoms

    return FrameTable.from_frames([check_frame(frame_of_atoms(atoms)) for atoms in frames])
