"""The callbacks in runs of ours: by name in a config, with averages, metrics, engines, and across a resume."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

from forgefield.diagnosis.records import FOLDER, findings_of, read_records
from forgefield.errors import ForgefieldError
from forgefield.training.run.checkpoint import list_checkpoints, load_checkpoint
from forgefield.training.trainer import CALLBACKS
from tests.support.helpers import emt_frames, tiny_config
from tests.support.interrupting import Interrupted
from tests.support.resuming import assert_same_run
from tests.support.train_many import train_only

PLANTED = "tests.support.planted_defects"
WATCHING = [
    {"name": "training_helper", "every": 4},
    {"name": "autocorrelation", "window": 8, "every": 3},
    {"name": "loss_spike", "window": 8},
    {"name": "throughput", "every": 5},
    "gradient_check",
    "energy",
]


def last_state(run) -> dict:
    return load_checkpoint(list_checkpoints(run.path / "checkpoints")[0])


def energies_per_atom() -> np.ndarray:
    return np.array([atoms.get_potential_energy() / len(atoms) for atoms in emt_frames(14, 0)])


def test_looking_changes_nothing_and_leaves_records(tmp_path):
    plain = train_only(tiny_config(tmp_path))
    watched = train_only({**tiny_config(tmp_path), "name": "watched", "callbacks": WATCHING})
    assert (plain.path / "metrics.csv").read_bytes() == (watched.path / "metrics.csv").read_bytes()
    weights = [last_state(run)["state_dict"] for run in (plain, watched)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    records = read_records(watched.path)
    assert records.keys() == {
        "training_helper", "autocorrelation", "loss_spike", "throughput", "gradient_check", "energy"
    }  # fmt: skip
    assert [finding for record in records.values() for finding in findings_of(record)] == []
    assert records["gradient_check"]["checked"] == 15
    assert records["throughput"]["rows"]["step"] == [5, 10, 15]
    assert all(value > 0 for value in records["throughput"]["rows"]["atoms_per_second"])
    assert "note" in records["energy"] or records["energy"]["kwh"] >= 0


def test_names_and_arguments_are_checked(tmp_path):
    with pytest.raises(ForgefieldError, match="Did you mean 'gradient_check'"):
        train_only({**tiny_config(tmp_path), "callbacks": ["gradient_chek"]})
    with pytest.raises(ForgefieldError, match="has no option 'polcy'. Did you mean 'policy'"):
        train_only({**tiny_config(tmp_path), "callbacks": [{"name": "gradient_check", "polcy": "skip"}]})
    with pytest.raises(ForgefieldError, match=r"training\.swa=\{start: 0\.75\}"):
        swa = {"name": "lightning.pytorch.callbacks.StochasticWeightAveraging", "swa_lrs": 0.01}
        train_only({**tiny_config(tmp_path), "callbacks": [swa]})
    assert set(CALLBACKS) >= {"gradient_check", "forward_nan", "sam"}


def test_a_frame_with_a_bad_gradient_is_left_out_and_named(tmp_path, monkeypatch):
    """Nothing is NaN, the frame is named, and the counts of optimiser and average say what happened."""
    monkeypatch.setenv("ROOT_ABOVE", str(np.sort(energies_per_atom())[-2:].mean()))
    worst = int(energies_per_atom().argmax())
    config = tiny_config(tmp_path, task={"energy": {"loss": f"{PLANTED}.root_loss"}})
    config["data"]["val"] = 0
    config["data"]["batch"] = {"frames": 2}
    config["callbacks"] = [{"name": "gradient_check", "policy": "skip"}]
    run = train_only(config)
    record = read_records(run.path)["gradient_check"]
    assert record["bad"] == 3  # once an epoch
    assert all(
        f"frame {worst} (" in event["frames"][0] and "frames.extxyz" in event["frames"][0] for event in record["events"]
    )
    state = last_state(run)
    assert {float(entry["step"]) for entry in state["optimizer_states"][0]["state"].values()} == {21.0 - 3.0}
    assert state["forgefield"]["ema"]["updates"] == 21
    rows = list(csv.DictReader((run.path / "metrics.csv").open()))
    assert all(np.isfinite(float(row["train/energy_mae"])) for row in rows)
    with pytest.raises(ForgefieldError, match=rf"the gradient holds NaN in .* from frame {worst} "):
        train_only({**config, "name": "stops", "callbacks": ["gradient_check"]})


def test_a_resumed_run_finds_what_an_uninterrupted_one_finds(tmp_path, monkeypatch):
    """With skipped steps, a rollback, averages and all that is remembered; the records are the same files."""
    monkeypatch.setenv("ROOT_ABOVE", str(np.sort(energies_per_atom())[-2:].mean()))
    monkeypatch.setenv("DISTURB_AT", "11")
    monkeypatch.setenv("DISTURB", "300")
    watching = [
        f"{PLANTED}.Disturb",
        {"name": "sam", "rho": 1e-3},
        {"name": "gradient_check", "policy": "skip", "norms_every": 2},
        {"name": "loss_spike", "window": 12, "rollback": True, "snapshot_every": 2, "factor": 10.0},
        {"name": "training_helper", "every": 3},
        {"name": "autocorrelation", "window": 8, "every": 2},
        {"name": "throughput", "every": 5},
        "tests.support.interrupting.EndAt",
    ]
    task = {"energy": {"loss": f"{PLANTED}.root_loss"}, "forces": {}}
    config = tiny_config(tmp_path, task=task, callbacks=watching)
    config["training"] = {**config["training"], "checkpoint": {"every_steps": 3}, "lr": 1e-3}
    config["data"]["val"] = 2
    monkeypatch.setenv("END_HOW", "raise")
    whole = train_only({**config, "name": "whole"}).path
    for step in (5, 13):
        monkeypatch.setenv("END_AT", str(step))
        with pytest.raises(Interrupted):
            train_only({**config, "name": "parts"})
    monkeypatch.setenv("END_AT", "-1")
    parts = train_only({**config, "name": "parts"}).path
    assert_same_run(whole, parts)
    spikes = read_records(whole)["loss_spike"]["spikes"]
    assert [spike["step"] for spike in spikes] == [12]
    assert spikes[0]["action"] == "rolled back"
    for name in ("gradient_check", "loss_spike", "training_helper", "autocorrelation"):
        file = f"{FOLDER}/{name}.json"
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), name


def test_a_module_is_named_although_the_step_is_traced(tmp_path, monkeypatch):
    """The script engine calls no module; the batch is evaluated again, eagerly."""
    monkeypatch.setenv("DISTURB_AT", "2")
    monkeypatch.setenv("DISTURB", "nan")
    monkeypatch.setenv("TRIED", str(tmp_path / "tried.txt"))
    config = tiny_config(tmp_path, callbacks=[f"{PLANTED}.Disturb", f"{PLANTED}.TriesAlways", "forward_nan"])
    config["training"]["engine"] = "script"
    config["model"] = {"name": "nequip", "num_layers": 1, "l_max": 0, "num_features": 2, "radial_mlp_width": 2}
    with pytest.raises(ForgefieldError, match=r"step 3: .*module potential\.model.* its weights are no longer finite"):
        train_only(config)
    assert (
        "the step of engine script is compiled or captured and does not call modules"
        in (tmp_path / "tried.txt").read_text()
    )


def test_an_engine_is_accepted_where_the_loss_has_no_gradient_for_moved_labels(tmp_path, monkeypatch):
    """The comparison before the first step moves labels up, to where this loss gives NaN; both engines agree."""
    monkeypatch.setenv("ROOT_ABOVE", str(np.sort(energies_per_atom())[-2:].mean()))
    config = tiny_config(tmp_path, task={"energy": {"loss": f"{PLANTED}.root_loss"}})
    config["model"] = {"name": "nequip", "num_layers": 1, "l_max": 0, "num_features": 2, "radial_mlp_width": 2}
    config["data"]["val"] = 0
    config["callbacks"] = [{"name": "gradient_check", "policy": "skip"}]
    config["trainer"] = {**config["trainer"], "max_epochs": 1}
    runs = [
        train_only({**config, "name": name, "training": {**config["training"], "engine": name}})
        for name in ("eager", "script")
    ]
    states = [last_state(run)["state_dict"] for run in runs]
    assert all(float((states[0][name] - states[1][name]).abs().max()) < 1e-5 for name in states[0])
    found, expected = (read_records(run.path)["gradient_check"] for run in reversed(runs))
    assert found["events"] == expected["events"]
    assert found["bad"] == 1
    assert "compared on labels shifted by -1 of the usual amount" in (runs[1].path / "log.txt").read_text()


def test_averages_of_the_last_part_are_plain_means(tmp_path, monkeypatch):
    """SWA: the mean of the weights at the end of each epoch from half of the training on; also across a resume."""
    config = tiny_config(tmp_path, callbacks=["tests.support.interrupting.EndAt"])
    config["trainer"]["max_epochs"] = 6
    config["training"] = {
        "lr": 0.01,
        "tensorboard": 0,
        "ema": None,
        "swa": {"start": 0.5},
        "checkpoint": {"keep": 9, "every_epochs": 1},
    }
    run = train_only(config)
    states = [load_checkpoint(path) for path in list_checkpoints(run.path / "checkpoints")]
    by_step = {state["global_step"]: state["state_dict"] for state in states}
    average = states[0]["forgefield"]["ema"]["average"]
    for name, value in average.items():
        mean = sum(by_step[step][f"potential.{name}"].double() for step in (20, 25, 30)) / 3
        assert torch.allclose(value.double(), mean, rtol=1e-5, atol=1e-7)
    monkeypatch.setenv("END_HOW", "raise")
    monkeypatch.setenv("END_AT", "22")
    with pytest.raises(Interrupted):
        train_only({**config, "name": "parts"})
    monkeypatch.setenv("END_AT", "-1")
    assert_same_run(run.path, train_only({**config, "name": "parts"}).path)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"swa": {"start": 0.5}}, r"set training\.ema=null"),
        ({"ema": None, "swa": {"start": 0.0}}, r"training\.swa\.start"),
        ({"ema": None, "swa": {"start": 1000}}, "ends at step 15"),
    ],
)
def test_invalid_averages_are_refused(training, words, tmp_path):
    with pytest.raises(ForgefieldError, match=words):
        train_only(tiny_config(tmp_path, training=training))
