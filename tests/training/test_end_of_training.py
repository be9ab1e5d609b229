"""What happens after the last step is as safe as the steps: whatever interrupts it, the same command completes the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from forgefield.api import Run
from forgefield.errors import ForgefieldError
from forgefield.training.run.checkpoint import list_checkpoints
from forgefield.weights import read_weights
from tests.support.helpers import tiny_config
from tests.support.resuming import assert_same_run
from tests.support.train_many import train_only
from tests.support.warm import run_warm

LIMITS = {
    "epochs": ({"max_epochs": 2}, {}),
    "steps inside the first epoch": ({"max_epochs": -1, "max_steps": 3}, {}),
    "early stopping": ({"max_epochs": 30}, {"early_stopping": {"patience": 1, "min_delta": 1e9}}),
}
WRITTEN_AT_THE_END = ("val.npz", "test.npz", "test.json", "report.html")


def config_of(folder: Path, name: str, trainer: dict, training: dict | None = None) -> dict:
    config = tiny_config(folder, name=name)
    config["data"]["test"] = 2
    config["trainer"].update(trainer)
    config["training"].update(training or {})
    return config


def command(folder: Path, config: dict, **environ: str) -> subprocess.CompletedProcess[str]:
    return _process(folder, config, "forgefield", "train", **environ)


def training_alone(folder: Path, config: dict, **environ: str) -> subprocess.CompletedProcess[str]:
    """Without the evaluation and the report that follow it."""
    return _process(folder, config, "tests.support.train_many", **environ)


def _process(folder: Path, config: dict, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = folder / f"{config['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    environ = {**os.environ, "FAIL_HOW": "kill", **environ}
    return run_warm("tests.support.failing_files", *words, str(path), folder=folder, environ=environ)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run of two epochs that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    done = command(folder, config_of(folder, "straight", {"max_epochs": 2}))
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "straight"


def assert_same_results(a: Path, b: Path) -> None:
    assert_same_run(a, b)
    first, second = (json.loads((path / "test.json").read_text()) for path in (a, b))
    assert first.pop("date")
    assert second.pop("date")
    assert first == second
    assert (b / "report.html").exists()
    for split in ("val", "test"):
        first, second = (np.load(path / "predictions" / f"{split}.npz") for path in (a, b))
        assert set(first.files) == set(second.files)
        for name in first.files:
            np.testing.assert_array_equal(first[name], second[name])
    assert Run(a).info["measured"] == Run(b).info["measured"]
    assert not list(b.rglob(".*partial*"))


@pytest.mark.parametrize("limits", LIMITS)
def test_killed_between_the_last_files_of_a_training_the_same_command_completes_it(limits, tmp_path):
    """A run that stopped early must not be trained further: that it has ended is part of its last checkpoint."""
    straight = config_of(tmp_path, "straight", *LIMITS[limits])
    assert training_alone(tmp_path, straight).returncode == 0
    last = list_checkpoints(tmp_path / "runs" / "straight" / "checkpoints")[0].name
    finished = "run.json:4"
    for number, name in enumerate((last, "last.safetensors", finished)):
        config = config_of(tmp_path, f"killed-{number}", *LIMITS[limits])
        killed = training_alone(tmp_path, config, FAIL_BEFORE=name)
        assert killed.returncode == -signal.SIGKILL, (name, killed.stderr)
        again = training_alone(tmp_path, config)
        assert again.returncode == 0, (name, again.stdout, again.stderr)
        run = Run(tmp_path / "runs" / config["name"])
        assert run.info["status"] == "finished"
        assert_same_run(tmp_path / "runs" / "straight", run.path)


@pytest.mark.slow
def test_killed_between_all_files_of_the_evaluation_the_same_command_completes_it(straight, tmp_path):
    config = config_of(tmp_path, "killed", {"max_epochs": 2})
    for name in ("last.safetensors", *WRITTEN_AT_THE_END):
        killed = command(tmp_path, config, FAIL_BEFORE=name)
        assert killed.returncode == -signal.SIGKILL, (name, killed.stderr)
    done = command(tmp_path, config)
    assert done.returncode == 0, done.stderr
    assert_same_results(straight, tmp_path / "runs" / "killed")


def test_a_disk_that_is_full_at_the_end_is_one_clear_error_and_the_same_command_completes_the_run(straight, tmp_path):
    config = config_of(tmp_path, "full", {"max_epochs": 2})
    for name in ("last.safetensors", "val.npz"):
        full = command(tmp_path, config, FAIL_BEFORE=name, FAIL_HOW="full")
        assert full.returncode == 2, full.stderr
        assert "No space left on device" in full.stderr
        assert "Traceback" not in full.stderr
    done = command(tmp_path, config)
    assert done.returncode == 0, done.stderr
    assert_same_results(straight, tmp_path / "runs" / "full")


def test_a_finished_run_that_is_extended_and_killed_gets_results_of_its_new_weights(straight, tmp_path):
    assert command(tmp_path, config_of(tmp_path, "extended", {"max_epochs": 1})).returncode == 0
    results = tmp_path / "runs" / "extended" / "test.json"
    before = json.loads(results.read_text())
    extended = config_of(tmp_path, "extended", {"max_epochs": 2})
    # The longer config is stored before the first step, when the checkpoint is still that of the shorter training.
    for name in ("metrics.csv", "val.npz"):
        killed = command(tmp_path, extended, FAIL_BEFORE=name)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert json.loads(results.read_text()) == before
    assert command(tmp_path, extended).returncode == 0
    assert json.loads(results.read_text())["errors"] != before["errors"]
    assert_same_results(straight, tmp_path / "runs" / "extended")


@pytest.mark.parametrize("harm", ["missing", "damaged", "of an earlier step"])
def test_last_weights_are_written_again_from_the_last_checkpoint(harm, tmp_path, capsys):
    config = config_of(tmp_path, "tiny", {"max_epochs": 2})
    run = train_only(config)
    path = run.weights_path("last")
    content = path.read_bytes()
    assert read_weights(path).about["step"] == int(list_checkpoints(run.checkpoints)[0].stem.split("-")[1])
    if harm == "missing":
        path.unlink()
    elif harm == "damaged":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        path.write_bytes(
            train_only({**config, "name": "other"}, "trainer.max_epochs=1").weights_path("last").read_bytes()
        )
    train_only(config)
    assert path.read_bytes() == content
    capsys.readouterr()
    train_only(config)
    assert "is complete (8 steps); raise trainer.max_epochs to train longer" in capsys.readouterr().out


def test_best_weights_that_are_lost_are_not_replaced_by_others(tmp_path):
    config = config_of(tmp_path, "tiny", {"max_epochs": 2})
    run = train_only(config)
    run.weights_path("best").unlink()
    with pytest.raises(ForgefieldError, match="best.safetensors is missing and cannot be restored"):
        train_only(config)
