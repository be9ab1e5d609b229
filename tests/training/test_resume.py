"""Law 2: a run that was interrupted and continued ends bit for bit as one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import Callback

from forgefield.api import load_run, run_exists, train
from forgefield.errors import ForgefieldError
from forgefield.training.run.checkpoint import list_checkpoints
from forgefield.training.run.folder import config_of_run
from forgefield.training.run.signals import REQUEUE
from tests.support.helpers import tiny_config
from tests.support.interrupting import Interrupted
from tests.support.launching import write_config
from tests.support.resuming import END, assert_same_run, interrupted_run, resumed_at
from tests.support.train_many import train_only
from tests.support.warm import ROOT, run_warm

VARIANTS = {
    "epoch checkpoints": {"training": {"checkpoint": {"every_epochs": 1}}},
    "checkpoints by time": {"training": {"checkpoint": {"every_seconds": 1e-6}}},
    "checkpoints inside an epoch": {"training": {"checkpoint": {"every_epochs": None, "every_steps": 2}, "ema": 0.9}},
    "no average": {"training": {"ema": None, "checkpoint": {"every_steps": 3}}},
    "plateau scheduler": {
        "training": {
            "scheduler": {"name": "plateau", "patience": 0, "factor": 0.5, "threshold": 0.5},
            "checkpoint": {"every_steps": 2},
        }
    },
    "step scheduler": {
        "training": {
            "scheduler": {"name": "CosineAnnealingLR", "T_max": 13, "interval": "step"},
            "checkpoint": {"every_steps": 2},
        }
    },
    "accumulation and clipping": {
        "training": {"accumulate": 2, "clip_norm": 0.1, "optimizer": {"name": "sgd", "momentum": 0.9}, "lr": 1e-3},
        "trainer": {"max_epochs": 4, "enable_progress_bar": False, "accelerator": "cpu"},
    },
    "validation inside the epoch": {
        "trainer": {"max_epochs": 3, "val_check_interval": 2, "enable_progress_bar": False, "accelerator": "cpu"},
        "training": {"checkpoint": {"every_steps": 1, "keep": 3}},
    },
    "validation by steps across epochs": {
        "trainer": {
            "max_epochs": 3,
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "enable_progress_bar": False,
            "accelerator": "cpu",
        },
        "training": {"checkpoint": {"every_steps": 2}},
    },
    "several validations within one accumulation": {
        "trainer": {"max_epochs": 4, "val_check_interval": 1, "enable_progress_bar": False, "accelerator": "cpu"},
        "training": {"accumulate": 2, "checkpoint": {"every_steps": 1}},
    },
    "batches by atoms, epochs of different length": {
        "data": {"batch": {"atoms": 18}},
        "training": {
            "scheduler": {"name": "CosineAnnealingLR", "interval": "step"},
            "checkpoint": {"every_steps": 2},
        },
        "trainer": {"max_epochs": 5, "enable_progress_bar": False, "accelerator": "cpu"},
    },
    "weighted draws, prepared ahead": {
        "data": {"sampling": {"rule": "uniform", "frames": 7}, "workers": 2},
        "training": {"checkpoint": {"every_steps": 1}},
    },
    "no validation": {"data": {"val": 0}, "training": {"checkpoint": {"every_steps": 2}}},
    "rare validation, early stopping": {
        "trainer": {
            "max_epochs": 6,
            "check_val_every_n_epoch": 2,
            "enable_progress_bar": False,
            "accelerator": "cpu",
        },
        "training": {"early_stopping": {"patience": 1, "min_delta": 1e9}, "checkpoint": {"every_steps": 2}},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_interrupted_run_equals_uninterrupted_run(variant, tmp_path, monkeypatch):
    changes = {"callbacks": [END], **VARIANTS[variant]}
    config = tiny_config(tmp_path, **changes)
    config["training"] = {**tiny_config(tmp_path)["training"], **changes.get("training", {})}
    config["callbacks"] = [END, "tests.support.interrupting.CountsBatchStarts"]
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"}).path
    again = interrupted_run({**config, "name": "again"}, [3, 7], monkeypatch)
    assert_same_run(straight, again)


def run_command(config: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """`forgefield train CONFIG` in a process of its own."""
    words = ("forgefield", "train", str(config))
    return run_warm(*words, folder=folder, environ={**os.environ, **environment})


def start_command(config: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """The same, from nothing: a new interpreter that imports everything, and orders its sets in its own way."""
    return subprocess.run(
        [sys.executable, "-m", "forgefield", "train", str(config)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_killed_with_signal_9_and_continued_by_the_same_command(tmp_path):
    """Real processes, real kill -9, in the middle of an epoch and of a later one."""
    changes = {"callbacks": [END], "training": {"ema": 0.9, "tensorboard": 0, "checkpoint": {"every_steps": 2}}}
    config = write_config(tmp_path / "again.yaml", tiny_config(tmp_path, **changes, name="again"))
    for step, start in (("4", start_command), ("8", run_command)):
        killed = start(config, tmp_path, END_AT=step, END_HOW="kill")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    continued = start_command(config, tmp_path)
    assert continued.returncode == 0, continued.stderr
    assert resumed_at(continued.stdout) in (4, 6)
    straight = train_only(tiny_config(tmp_path, **changes, name="straight"))
    assert_same_run(straight.path, tmp_path / "runs" / "again")


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(tmp_path):
    """Three kills in one run: inside the temporary file, before it is renamed, and right after."""
    changes = {
        "callbacks": ["tests.support.interrupting.KilledWhileWriting"],
        "training": {"ema": 0.9, "tensorboard": 0, "checkpoint": {"every_steps": 2}},
    }
    config = write_config(tmp_path / "again.yaml", tiny_config(tmp_path, **changes, name="again"))
    for step, when in (("4", "half"), ("6", "whole"), ("8", "renamed")):
        killed = run_command(config, tmp_path, KILL_STEP=step, KILL_WHEN=when)
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        left = [path.name for path in (tmp_path / "runs" / "again" / "checkpoints").glob("*.ckpt")]
        assert (f"step-{int(step):08d}.ckpt" in left) == (when == "renamed")
    continued = run_command(config, tmp_path)
    assert "Resuming run again at step 8" in continued.stdout, continued.stdout + continued.stderr
    straight = train_only(tiny_config(tmp_path, **changes, name="straight"))
    assert_same_run(straight.path, tmp_path / "runs" / "again")


def test_frames_that_are_kept_on_the_device_train_to_the_same_bits(tmp_path, monkeypatch):
    """And a run may be resumed with frames kept elsewhere."""
    config = tiny_config(tmp_path, callbacks=[END])
    config["training"]["checkpoint"] = {"every_steps": 2}
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"}).path
    for name, first in (("kept", "device"), ("again", "memory")):
        other = {"device": "memory", "memory": "device"}[first]
        monkeypatch.setenv("END_HOW", "raise")
        monkeypatch.setenv("END_AT", "7")
        with pytest.raises(Interrupted):
            train_only({**config, "name": name}, f"data.keep={first}")
        monkeypatch.setenv("END_AT", "-1")
        assert_same_run(straight, train_only({**config, "name": name}, f"data.keep={other}").path)


def test_sigterm_saves_and_stops_and_nothing_is_lost(tmp_path):
    changes = {"callbacks": [END], "training": {"ema": 0.9, "tensorboard": 0, "checkpoint": {}}}  # none is due before
    config = write_config(tmp_path / "again.yaml", tiny_config(tmp_path, **changes, name="again"))
    stopped = run_command(config, tmp_path, END_AT="7", END_HOW="term")
    assert stopped.returncode == REQUEUE, stopped.stderr
    assert "Stopped after step 7: SIGTERM was received. Run the same command to resume." in stopped.stdout
    continued = run_command(config, tmp_path)
    assert "Resuming run again at step 7" in continued.stdout
    straight = train_only(tiny_config(tmp_path, **changes, name="straight"))
    assert_same_run(straight.path, tmp_path / "runs" / "again")


def test_max_time_saves_and_stops_cleanly(tmp_path, capsys):
    config = tiny_config(tmp_path)
    config["trainer"] = {**config["trainer"], "max_epochs": 100000, "max_time": {"seconds": 1}}
    config["training"]["engine"] = "eager"  # so long a training would be worth compiling
    run = train_only(config)
    assert run.info["status"] == "stopped"
    assert "trainer.max_time is over" in capsys.readouterr().out
    steps = int(list_checkpoints(run.checkpoints)[0].stem.split("-")[1])
    assert steps > 0
    config["trainer"]["max_time"] = {"seconds": 2}
    train_only(config)
    assert int(list_checkpoints(run.checkpoints)[0].stem.split("-")[1]) > steps


def test_more_epochs_later_equal_more_epochs_at_once(tmp_path):
    config = tiny_config(tmp_path)
    config["trainer"]["max_epochs"] = 2
    train_only({**config, "name": "again"})
    longer = {**config, "trainer": {**config["trainer"], "max_epochs": 4}}
    assert_same_run(train_only({**longer, "name": "straight"}).path, train_only({**longer, "name": "again"}).path)


@pytest.mark.parametrize("val", [4, 0])
def test_more_steps_later_pick_the_same_best_model_as_more_steps_at_once(val, tmp_path):
    """`max_steps` cuts an epoch short; the half epoch must neither be judged nor lost."""
    config = tiny_config(tmp_path)
    config["data"]["val"] = val
    limits = {**config["trainer"], "max_epochs": -1}
    train_only({**config, "name": "again", "trainer": {**limits, "max_steps": 8}})
    longer = {**config, "trainer": {**limits, "max_steps": 17}}
    assert_same_run(train_only({**longer, "name": "straight"}).path, train_only({**longer, "name": "again"}).path)


def test_patience_is_taken_from_the_present_config(tmp_path):
    config = tiny_config(tmp_path)
    config["trainer"]["max_epochs"] = 30
    stops = {"patience": 1, "min_delta": 1e9}
    run = train_only({**config, "training": {**config["training"], "early_stopping": stops}})
    assert len(run.metrics()) == 2
    run = train_only({**config, "training": {**config["training"], "early_stopping": {**stops, "patience": 4}}})
    assert len(run.metrics()) == 5


def test_settings_of_a_run_that_never_took_a_step_can_be_corrected(tmp_path):
    config = tiny_config(tmp_path)
    with pytest.raises(ForgefieldError, match="weight_decy"):
        train_only({**config, "training": {**config["training"], "optimizer": {"name": "adam", "weight_decy": 1.0}}})
    train_only({**config, "training": {**config["training"], "optimizer": {"name": "adam", "weight_decay": 1.0}}})


def test_a_measurement_that_was_interrupted_is_made_up_for(tmp_path):
    config = tiny_config(tmp_path)
    config["data"]["test"] = 2
    run = train(config)
    (run.path / "test.json").unlink()
    (run.path / "report.html").unlink()
    train(config)
    assert (run.path / "test.json").exists()
    assert (run.path / "report.html").exists()


def test_overfit_batches_can_be_resumed(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, callbacks=[END])
    config["trainer"].update(overfit_batches=2, max_epochs=6)
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"}).path
    assert_same_run(straight, interrupted_run({**config, "name": "again"}, [5], monkeypatch))


def test_sigterm_before_the_first_step_is_not_taken_for_success(tmp_path):
    config = write_config(tmp_path / "early.yaml", tiny_config(tmp_path, callbacks=[END], name="early"))
    stopped = run_command(config, tmp_path, END_HOW="term at start")
    assert stopped.returncode == REQUEUE, stopped.stdout + stopped.stderr
    assert "SIGTERM was received" in stopped.stdout


LOSS = {"energy": {"loss": "tests.support.signal_on_import.squared"}}


def test_a_stop_signal_while_data_is_read_ends_before_the_first_step(tmp_path):
    config = write_config(tmp_path / "early.yaml", tiny_config(tmp_path, task=LOSS, name="early"))
    stopped = run_command(config, tmp_path, SIGNAL_ON_IMPORT="SIGUSR1")
    assert stopped.returncode == REQUEUE, stopped.stdout + stopped.stderr
    assert "Stopped before the first step: SIGUSR1 was received. Run the same command to resume." in stopped.stdout
    assert run_command(config, tmp_path).returncode == 0


def test_ctrl_c_while_data_is_read_ends_at_once(tmp_path):
    config = write_config(tmp_path / "early.yaml", tiny_config(tmp_path, task=LOSS, name="early"))
    ended = run_command(config, tmp_path, SIGNAL_ON_IMPORT="SIGINT")
    assert ended.returncode == 130, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_fresh_does_not_take_a_folder_from_a_living_process(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, callbacks=["tests.training.test_resume.TrainsTheSameRun"])
    train_only(config)
    monkeypatch.setenv("NESTED_CONFIG", yaml.safe_dump(config))
    monkeypatch.setenv("NESTED_FRESH", "1")
    monkeypatch.setattr(TrainsTheSameRun, "refused", 0)
    train_only(config, "trainer.max_epochs=4")
    assert TrainsTheSameRun.refused == 1


def test_a_complete_run_is_not_trained_again_and_fresh_keeps_the_old_one(tmp_path, capsys):
    config = tiny_config(tmp_path)
    run = train_only(config)
    before = (run.path / "metrics.csv").read_bytes()
    train_only(config)
    assert "is complete (15 steps)" in capsys.readouterr().out
    assert (run.path / "metrics.csv").read_bytes() == before
    train_only(config, fresh=True)
    kept = run.path.with_name("tiny.before-1")
    assert (kept / "metrics.csv").read_bytes() == before
    assert (run.path / "metrics.csv").read_bytes() == before  # same seed, same training


def test_run_exists_and_load_run(tmp_path):
    config = tiny_config(tmp_path)
    assert not run_exists("tiny", out=tmp_path / "runs")
    train_only(config)
    assert run_exists("tiny", out=tmp_path / "runs")
    run = load_run("tiny", out=tmp_path / "runs")
    assert [row["epoch"] for row in run.metrics()] == [0, 1, 2]
    assert run.species == ("Cu", "Au")
    with pytest.raises(ForgefieldError, match="no run 'tniy'.*tiny"):
        load_run("tniy", out=tmp_path / "runs")


def test_changed_meaning_is_refused_with_a_diff_and_changed_limits_are_not(tmp_path, capsys):
    config = tiny_config(tmp_path)
    train_only(config)
    with pytest.raises(ForgefieldError, match=r"training\.lr.*0\.01.*0\.02"):
        train_only(config, "training.lr=0.02")
    train_only(config, "trainer.max_epochs=4")
    assert "trainer.max_epochs" in capsys.readouterr().out


def test_changed_data_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    train_only(config)
    path = Path(config["data"]["train"])
    lines = path.read_text().splitlines(keepends=True)
    words = lines[2].split()
    lines[2] = lines[2].replace(words[1], f"{float(words[1]) + 1e-3:.8f}", 1)
    path.write_text("".join(lines))
    with pytest.raises(ForgefieldError, match="has changed since it was started"):
        train_only(config, "trainer.max_epochs=4")


def test_two_processes_cannot_train_in_one_folder(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, callbacks=["tests.training.test_resume.TrainsTheSameRun"])
    monkeypatch.setenv("NESTED_CONFIG", yaml.safe_dump(config))
    monkeypatch.setattr(TrainsTheSameRun, "refused", 0)
    train_only(config)
    assert TrainsTheSameRun.refused == 1


class TrainsTheSameRun(Callback):
    refused = 0

    def on_train_start(self, trainer, pl_module) -> None:
        if "NESTED_CONFIG" not in os.environ:
            return
        with pytest.raises(ForgefieldError, match="Another process is training"):
            train(yaml.safe_load(os.environ["NESTED_CONFIG"]), fresh="NESTED_FRESH" in os.environ)
        TrainsTheSameRun.refused += 1


def test_a_run_folder_resumes_with_the_settings_it_was_made_with(tmp_path):
    changes = {"callbacks": [END], "training": {"ema": 0.9, "tensorboard": 0, "checkpoint": {"every_steps": 2}}}
    config = write_config(tmp_path / "again.yaml", tiny_config(tmp_path, **changes, name="again"))
    words = ("forgefield", "train", str(config), "training.lr=0.02", "data.batch.frames=3")
    killed = run_warm(*words, folder=tmp_path, environ={**os.environ, "END_AT": "3", "END_HOW": "kill"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = ("forgefield", "train", str(tmp_path / "runs" / "again"), "--trust-code")  # it names a user's callback
    resumed = run_warm(*again, folder=tmp_path, environ=os.environ)
    assert resumed.returncode == 0, resumed.stderr
    straight = train_only(tiny_config(tmp_path, **changes, name="straight"), *words[3:])
    assert_same_run(straight.path, tmp_path / "runs" / "again")


def test_a_run_folder_is_trained_longer_and_not_under_another_name(tmp_path):
    run = train_only(tiny_config(tmp_path), "training.lr=0.02")
    settings = config_of_run(run, ["trainer.max_epochs=4"])
    assert (settings.training.lr, settings.trainer["max_epochs"]) == (0.02, 4)
    assert (Path(settings.out), settings.name) == (run.path.parent, run.name)
    with pytest.raises(ForgefieldError, match=r"config.yaml --name NAME"):
        config_of_run(run, ["name=other"])
