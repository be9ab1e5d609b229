"""Trainings on vectors, tensors, direct forces and noise, with dropout: exact in every engine, on any ranks, after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch

from forgefield import Calculator, api
from forgefield.config.loading import load_config
from forgefield.data.batch import Noise
from forgefield.data.dataset import GraphDataset
from forgefield.data.module import read_data
from forgefield.errors import ForgefieldError
from tests.support.helpers import emt_frames, property_frames, tiny_config
from tests.support.launching import ranks, weights, write_config
from tests.support.parallel_runs import make_config
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.train_many import train_only

FIELDS = {
    "dipole": {"shape": [3], "unit": "e A"},
    "alpha": {"shape": [3, 3]},
    "pull": {"shape": [3], "per": "atom"},
    "gap": {},
}
TASK: dict[str, Any] = {
    "dipole": {"kind": "vector", "reduce": "sum"},
    "alpha": {"kind": "symmetric"},
    "pull": {"kind": "vector", "loss": "mae"},
    "gap": {"reduce": "attention"},
    "denoise": {"sigma": 0.08},
}
HEADS = {"gap": {"hidden": [8, 8], "norm": "layer", "residual": True, "dropout": 0.3}}


def turning_frames(n: int, seed: int = 0) -> list[ase.Atoms]:
    """`dipole`: sum of charges times moves towards neighbours; `alpha`: by the cell; `pull`: of atoms, along their forces."""
    frames = property_frames(n, seed)
    for number, atoms in enumerate(frames):
        charge = np.where(atoms.symbols == "Au", -0.4, 0.3)
        forces = atoms.get_forces()
        if number % 3:
            atoms.info["dipole"] = charge @ forces
        metric = atoms.cell.array.T @ atoms.cell.array
        atoms.info["alpha"] = metric / len(atoms)
        atoms.arrays["pull"] = 0.1 * forces
        atoms.info["config_weight"] = 0.5 + number % 3
    return frames


def config(folder: Path, name: str, task: Any = TASK, **changes: Any) -> dict[str, Any]:
    if not (folder / "frames.extxyz").exists():
        ase.io.write(folder / "frames.extxyz", turning_frames(14), format="extxyz")
    data = {"labels": {"fields": FIELDS}, **changes.pop("data", {})}
    made = tiny_config(folder, name=name, data=data, **changes)
    made["task"] = task
    if "gap" in task:
        made["model"] = {**made["model"], "heads": HEADS}
    return made


def test_interrupted_run_equals_uninterrupted_run(tmp_path, monkeypatch):
    given = {"training": {"checkpoint": {"every_steps": 2}}, "callbacks": [END]}
    straight = train_only(config(tmp_path, "straight", **given)).path
    broken = interrupted_run(config(tmp_path, "broken", **given), [3, 8], monkeypatch)
    assert_same_run(straight, broken)


def test_every_way_to_take_a_step_gives_the_same_training(tmp_path):
    task = {**TASK, "energy": {}, "forces": {"direct": True}, "stress": {}}
    ways: list[dict[str, Any]] = [
        {"engine": "eager"},
        {"engine": "script"},
        {"engine": "eager", "derivative": "tangent"},
        {"engine": "eager", "memory": {"parts": 2}},
    ]
    given = {"trainer": {"max_epochs": 1}, "data": {"batch": {"frames": 5}}, "model": {"num_layers": 1}}
    runs = [
        train_only(config(tmp_path, f"way{number}", task, training={"precision": "float64", **way}, **given))
        for number, way in enumerate(ways)
    ]
    for run, way in zip(runs[1:], ways[1:]):
        assert run.metrics()[0] == pytest.approx(runs[0].metrics()[0], rel=1e-8), way


def test_gradient_of_two_ranks_is_that_of_one(tmp_path):
    ase.io.write(tmp_path / "frames.extxyz", turning_frames(10, seed=11), format="extxyz")

    def one_step(name: str, world_size: int) -> dict[str, Any]:
        trainer = {"max_steps": 2, "max_epochs": -1, "enable_progress_bar": False, "accelerator": "cpu"}
        made = make_config(tmp_path, name, world_size, trainer=trainer)
        made["task"], made["data"]["labels"] = {**TASK, "energy": {}}, {"fields": FIELDS}
        made["training"]["lr"] = 1e-2
        made["model"] = {**made["model"], "heads": HEADS}
        return made

    serial = weights(train_only(one_step("serial", 1)).path)
    path = write_config(tmp_path / "two.yaml", [one_step("two", 2)])
    done = ranks(2, "tests.support.train_many", str(path), folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert float((weights(tmp_path / "runs" / "two") - serial).abs().max()) < 1e-12


def test_vectors_and_tensors_are_learnt_and_written(tmp_path):
    task = {"alpha": {"kind": "symmetric"}, "pull": {"kind": "vector"}}
    run = train_only(config(tmp_path, "learnt", task, trainer={"max_epochs": 16}, training={"lr": 0.02}))
    rows = run.metrics()
    assert rows[-1]["val/alpha_rmse"] < 0.8 * rows[0]["val/alpha_rmse"]
    frames = ase.io.read(tmp_path / "frames.extxyz", ":")
    spread = float(np.sqrt(np.mean(np.concatenate([a.arrays["pull"] for a in frames]) ** 2)))
    assert rows[-1]["val/pull_rmse"] < 0.6 * spread
    api.predict(run, tmp_path / "frames.extxyz", tmp_path / "out.extxyz")
    written = ase.io.read(tmp_path / "out.extxyz")
    assert np.shape(written.info["alpha"]) == (3, 3)
    assert written.arrays["pull"].shape == (len(written), 3)


@pytest.mark.parametrize("energy", [{}, {"energy": {}}], ids=["alone", "beside an energy"])
def test_direct_forces_are_those_of_a_head_and_reported_as_such(energy, tmp_path, capsys):
    task = {**energy, "forces": {"direct": True}}
    run = train_only(config(tmp_path, "direct", task, trainer={"max_epochs": 8}, training={"lr": 0.02}))
    assert "not conservative" in capsys.readouterr().out.replace("\n", " ")
    rows = run.metrics()
    assert rows[-1]["val/forces_mae"] < 0.8 * rows[0]["val/forces_mae"]
    if not energy:
        assert api.test(run, tmp_path / "frames.extxyz").keys() >= {"forces_mae", "forces_rmse"}
    atoms = ase.io.read(tmp_path / "frames.extxyz")
    with pytest.warns(UserWarning, match="not the derivative of an energy"):
        atoms.calc = Calculator(run)
    forces = atoms.get_forces()
    np.testing.assert_allclose(forces.sum(0), 0.0, atol=1e-10)
    assert ("energy" in atoms.calc.results) == bool(energy)
    api.predict(run, tmp_path / "frames.extxyz", tmp_path / "out.extxyz")
    np.testing.assert_allclose(ase.io.read(tmp_path / "out.extxyz").get_forces(), forces, atol=1e-6)


# ---- noise


def noise_config(folder: Path, name: str = "noise", **changes: Any) -> dict[str, Any]:
    return config(folder, name, {"denoise": {"sigma": 0.05}}, trainer={"max_epochs": 12}, **changes)


def test_noise_is_learnt_without_any_label_and_starts_a_training(tmp_path):
    frames = emt_frames(14, 0)
    for atoms in frames:
        atoms.calc = None
        atoms.positions = atoms.get_scaled_positions(wrap=False).round(2) @ atoms.cell.array
    ase.io.write(tmp_path / "frames.extxyz", frames, format="extxyz")
    made = noise_config(tmp_path)
    made["data"]["labels"] = {}
    made["data"]["reference_energies"] = "none"
    rows = api.train(made).metrics()
    assert rows[-1]["val/denoise_rmse"] < 0.05 * 0.95
    assert rows[0].keys() == rows[-1].keys()


def dataset(folder: Path) -> GraphDataset:
    made = read_data(load_config(config(folder, "data")).data, seed=3)
    return made.train


def test_moves_follow_the_place_in_an_epoch_and_edges_follow_moves(tmp_path):
    data = dataset(tmp_path)
    before = data.batch(np.arange(4))["positions"].clone()
    noise, places = Noise(0.1, seed=5, share=0.6), np.array([4, 9, 2, 7])
    batch = data.noised_training_batch(np.arange(4), noise, 1, places)
    again = data.noised_training_batch(np.arange(4)[::-1].copy(), noise, 1, places[::-1].copy())
    is_moved = ~batch["denoise"].isnan().any(1)
    assert 0 < int(is_moved.sum()) < len(is_moved)
    np.testing.assert_array_equal(again["n_atoms"].numpy()[::-1], batch["n_atoms"].numpy())
    for i in range(4):
        mine, other = batch["frame"] == i, again["frame"] == 3 - i
        torch.testing.assert_close(batch["denoise"][mine], again["denoise"][other], equal_nan=True, rtol=0, atol=0)
        assert bool(batch["energy"][i].isnan()) == bool(is_moved[mine][0])
    torch.testing.assert_close(batch["positions"], before + batch["denoise"].nan_to_num())
    source, destination = batch["edge_index"]
    cells = batch["cell"][batch["frame"][destination]]
    vectors = batch["positions"][source] - batch["positions"][destination]
    lengths = (vectors + (batch["edge_shift"].unsqueeze(2) * cells).sum(1)).norm(dim=1)
    assert float(lengths.max()) <= data.cutoff
    assert batch["edge_index"].shape[1] != data.batch(np.arange(4))["edge_index"].shape[1]
    assert torch.equal(data.batch(np.arange(4))["positions"], before)
    other = data.noised_training_batch(np.arange(4), noise, 2, places)
    assert not torch.equal(other["positions"], batch["positions"])


def test_an_evaluation_moves_copies_always_alike(tmp_path):
    data = dataset(tmp_path)
    noise = Noise(0.1, seed=5, share=0.5, fixed=True)
    one, other = (
        data.noised_evaluation_batch(np.array([1, 2]), noise),
        data.noised_evaluation_batch(np.array([2]), noise),
    )
    assert one["energy"].isnan().tolist() == [False, False, True, True]
    assert torch.equal(one["denoise"][one["frame"] == 3], other["denoise"][other["frame"] == 1])
    assert bool(one["denoise"][one["frame"] < 2].isnan().all())


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"gap": {"kind": "vector"}}, r"task\.gap\.kind=vector: gap has the shape \[\], but a vector has \[3\]"),
        ({"alpha": {"kind": "vector"}}, r"alpha has the shape \[3, 3\], but a vector has \[3\]"),
        (
            {"skew": {"kind": "symmetric"}},
            r"task\.skew\.kind=symmetric: labels of data\.train differ from their transposes",
        ),
        ({"dipole": {"kind": "vector", "reduce": "max"}}, r"'task\.dipole\.reduce' must be sum or mean for a vector"),
        (
            {"dipole": {"kind": "vector", "normalise": {"mean": 1.0, "scale": 1.0}}},
            r"'task\.dipole\.normalise\.mean' must be 0, the mean of an equivariant vector",
        ),
        ({"dipole": {"kind": "vektor"}}, r"'task\.dipole\.kind' must be values, vector.* Did you mean 'vector'"),
        ({"energy": {"direct": True}}, r"'task\.energy\.direct' does not apply to energy"),
        ({"forces": {"net_zero": True}}, r"'task\.forces\.net_zero' applies to direct forces"),
        ({"denoise": {"sigma": 0}}, r"'task\.denoise\.sigma' must be a positive length"),
        ({"denoise": {"share": 1.5}}, r"'task\.denoise\.share' must be a share of the frames"),
        ({"denoise": {"sgima": 0.1}}, r"Did you mean 'task\.denoise\.sigma'"),
    ],
)
def test_invalid_targets_are_refused(task, sentence, tmp_path):
    frames = turning_frames(14)
    for atoms in frames:
        atoms.info["skew"] = np.arange(9.0).reshape(3, 3)
    ase.io.write(tmp_path / "frames.extxyz", frames, format="extxyz")
    made = config(tmp_path, "refused", task)
    made["data"]["labels"] = {"fields": {**FIELDS, "skew": {"shape": [3, 3]}}}
    made["model"].pop("heads", None)
    with pytest.raises(ForgefieldError, match=sentence):
        train_only(made)
