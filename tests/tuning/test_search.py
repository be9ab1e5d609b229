"""Searches with tiny trainings: best config, early ends, kill -9 and resume, failures, several workers, potentials."""

from __future__ import annotations

import csv
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgefield import api
from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from tests.support.helpers import emt_frames
from tests.support.resuming import assert_same_run, resumed_at
from tests.support.snapshots import point_config
from tests.support.warm import ROOT, run_warm

pytest.importorskip("optuna")

END = "tests.support.interrupting.EndAt"
SPACE = {"training.lr": {"log": [1e-4, 1e-2]}, "model.hidden": [[4], [8, 8]], "training.ema": [None, 0.9]}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """A config of two epochs of nine steps and its search."""
    tune = {"trials": 2, "monitor": "val/ldos_rmse", "pruner": "none", "space": SPACE, **changes.pop("tune", {})}
    training = {"tensorboard": 0, "block": 4, "checkpoint": {"every_steps": 4}}
    made = point_config(folder, training=training, trainer={"max_epochs": 2}, callbacks=[END])
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**made, "name": name, "tune": tune, **changes}))
    return path


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted search of two trials, started on the command line."""
    folder = tmp_path_factory.mktemp("search")
    os.environ["END_AT"] = "-1"
    assert main(["tune", str(write(folder, "straight"))]) == 0
    return folder, folder / "runs" / "straight-tune"


def test_the_best_of_all_trials_is_written_as_a_config(straight, capsys):
    folder, found = straight
    trials = rows(found)
    assert [row["state"] for row in trials] == ["complete", "complete"]
    best = min(trials, key=lambda row: float(row["val/ldos_rmse"]))
    measured = [row["val/ldos_rmse"] for row in Run(found / "trials" / best["folder"]).metrics()]
    assert float(best["val/ldos_rmse"]) == pytest.approx(min(measured), rel=1e-5)
    config = load_config(found / "best.yaml")
    assert (config.name, config.tune, config.training.monitor) == ("straight-best", None, "val/ldos_rmse")
    assert config.training.lr == pytest.approx(float(best["training.lr"]), rel=1e-3)
    assert str(config.model["hidden"]) == best["model.hidden"]
    assert (found / "tune.html").read_text().count("data:image/png") == 2  # two trials are too few for importances
    assert main(["tune", str(folder / "straight.yaml"), "--space", "training.ema=[null, 0.5]"]) == 2
    assert "another space (training.ema" in capsys.readouterr().err


def test_a_killed_search_resumes_the_interrupted_training(straight, capsys):
    """Killed in the middle of its second training; its result is that of an uninterrupted training."""
    folder, undisturbed = straight
    path = write(folder, "again")
    again = api.tune(path, trials=1)
    environ = {**os.environ, "END_AT": "13", "END_HOW": "kill", "PYTHONPATH": str(ROOT)}
    done = run_warm("forgefield", "tune", str(path), folder=folder, environ=environ)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert main(["tune", str(path)]) == 0
    assert "was abandoned by a process that died" in capsys.readouterr().out
    found = rows(again)
    assert [row["state"] for row in found] == ["complete", "failed", "complete"]
    assert [row["folder"] for row in found] == ["0000", "0001", "0001"]
    assert resumed_at((again / "trials" / "0001" / "log.txt").read_text()) in (4, 8)
    assert found[2]["val/ldos_rmse"] == rows(undisturbed)[1]["val/ldos_rmse"]
    assert_same_run(undisturbed / "trials" / "0001", again / "trials" / "0001")


def test_a_stopped_search_queues_its_training_and_hopeless_ones_end_early(tmp_path, monkeypatch):
    space = {"training.lr": [1e-2, 1e-9, 2e-9]}
    tune = {"trials": 9, "pruner": "median", "startup": 1, "warmup": 0, "sampler": "grid", "space": space}
    path = write(tmp_path, "points", tune=tune)
    for key, value in (("END_AT", "13"), ("END_HOW", "term"), ("END_ONCE", str(tmp_path / "once"))):
        monkeypatch.setenv(key, value)
    with pytest.raises(ForgefieldError, match="was stopped"):
        api.tune(path)
    folder = api.tune(path)
    found = [row for row in rows(folder) if row["state"] != "failed"]
    assert sorted(row["training.lr"] for row in found) == ["0.01", "1e-09", "2e-09"]
    ended = [row for row in found if row["state"] == "ended early"]
    assert ended
    assert len(Run(folder / "trials" / ended[0]["folder"]).metrics()) == 1


def test_two_workers_share_a_database(straight):
    folder, _ = straight
    path = write(folder, "shared", tune={"trials": 3, "storage": f"sqlite:///{folder}/shared.db"})
    api.tune(path, trials=1)
    environ = {**os.environ, "END_AT": "-1", "PYTHONPATH": str(ROOT)}
    with ThreadPoolExecutor(2) as pool:
        command = ("forgefield", "tune", str(path))
        calls = [pool.submit(run_warm, *command, folder=folder, environ=environ) for _ in range(2)]
        done = [call.result() for call in calls]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    values = {row["training.lr"] for row in rows(folder / "runs" / "shared-tune")}
    assert len(values) == 3


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_that_another_machine_lost_is_trained_here(straight, monkeypatch):
    from forgefield.tuning import search, study

    folder, _ = straight
    for module in (search, study):
        monkeypatch.setattr(module, "HEARTBEAT", 1)
    prepared = search.prepare(write(folder, "lost", tune={"trials": 1}), [])
    kept = prepared.open()
    lost = kept.ask()
    kept._storage.record_heartbeat(lost._trial_id)
    lost.set_user_attr("worker", {"host": "elsewhere", "pid": 1, "born": None})
    lost.set_user_attr("folder", "0000")
    said: list[str] = []
    trials = search.work(prepared, notify=said.append).trials
    assert [(trial.state.name, trial.user_attrs["folder"]) for trial in trials] == [
        ("FAIL", "0000"),
        ("COMPLETE", "0000"),
    ]
    assert "on other machines; waiting" in said[0]


def test_workers_are_started_and_their_exit_code_is_passed_on(capfd):
    from forgefield.tuning.search import run_workers

    assert run_workers(["--help"], 2) == 0
    assert capfd.readouterr().out.count("usage: forgefield tune") == 2
    assert run_workers(["--trails", "3"], 1) == 2


def test_settings_that_do_not_work_are_reported_and_end_the_search(tmp_path):
    with pytest.raises(ForgefieldError, match=r"training.lrr.*training.lr"):
        api.tune(write(tmp_path, "points"), space=["training.lrr=[1, 2]"])
    with pytest.raises(ForgefieldError, match=r"3 trials in a row failed.*not a metric of this run"):
        api.tune(write(tmp_path, "points", tune={"monitor": "val/los"}))
    with pytest.raises(ForgefieldError, match="one process on one device"):
        api.tune(write(tmp_path, "two", trainer={"devices": 2, "accelerator": "cpu"}))


def test_a_potential_is_searched_as_well_and_trainings_can_be_repeated(tmp_path):
    import ase.io

    ase.io.write(tmp_path / "cu.extxyz", emt_frames(4, seed=0))
    config = {
        "name": "cu",
        "out": str(tmp_path / "runs"),
        "data": {"train": str(tmp_path / "cu.extxyz"), "val": 1, "cutoff": 3.0, "batch": {"frames": 3}},
        "model": {"name": "nequip", "num_layers": 1, "l_max": 1, "num_features": 4},
        "training": {"tensorboard": 0, "engine": "eager"},
        "trainer": {"max_epochs": 1, "accelerator": "cpu"},
        "tune": {"trials": 1, "repeats": 2, "space": {"training.lr": [0.001, 0.01], "model.l_max": [0, 1]}},
    }
    folder = api.tune(config)
    row = rows(folder)[0]
    runs = [Run(folder / "trials" / name) for name in ("0000", "0000-1")]
    each = [run.metrics()[-1]["val/loss"] for run in runs]
    assert float(row["val/loss"]) == pytest.approx(sum(each) / 2, rel=1e-5)
    assert each[0] != each[1]
    assert runs[0].info["model"]["l_max"] == int(row["model.l_max"])


def test_without_optuna_the_error_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ForgefieldError, match=r"forgefield\[tune\]"):
        api.tune(write(tmp_path, "points"))
