"""Law 2 for points: interrupted and continued, on other blocks or another number of steps, a run ends bit for bit the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.interrupting import Interrupted
from tests.support.launching import write_config
from tests.support.resuming import END, assert_same_run, resumed_at
from tests.support.snapshots import point_config
from tests.support.train_many import train_only
from tests.support.warm import ROOT, run_warm

VARIANTS = {
    "checkpoints of epochs": {"training": {"checkpoint": {"every_epochs": 1}}},
    "inside epochs, by step": {
        "training": {
            "scheduler": {"name": "CosineAnnealingLR", "interval": "step"},
            "checkpoint": {"every_steps": 2},
            "clip_norm": 0.1,
        }
    },
    "plateau": {
        "training": {
            "ema": None,
            "scheduler": {"name": "plateau", "patience": 0, "factor": 0.5, "threshold": 0.9},
            "checkpoint": {"every_steps": 4},
            "monitor": "val/band_energy_mae",
        }
    },
    "streamed, terms on snapshots": {
        "data": {"points": {"energies": {"first": -4.0, "spacing": 2.0, "levels": 7}, "keep": "disk"}},
        "task": {
            "ldos": {"loss": "mae"},
            "band_energy": {"every": 3},
            "dos": {"every": 2},
            "observables": {"metrics": ["density"], "every": 2},
        },
        "training": {"checkpoint": {"every_steps": 4}, "scheduler": {"name": "ExponentialLR", "gamma": 0.5}},
    },
}


def merged(folder: Path, name: str, changes: dict, **more: object) -> dict:
    config = point_config(folder, **{**changes, **more})
    config["training"] = {**point_config(folder)["training"], **changes.get("training", {})}
    return {**config, "name": name, "callbacks": [END]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_interrupted_run_ends_as_one_that_was_not(variant, tmp_path, monkeypatch):
    changes = VARIANTS[variant]
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only(merged(tmp_path, "straight", changes)).path
    block = 2 if "inside" in variant else 4
    monkeypatch.setenv("END_HOW", "raise")
    for step in (block, 9 + block, 18):
        monkeypatch.setenv("END_AT", str(step))
        with pytest.raises(Interrupted):
            train_only(merged(tmp_path, "again", changes))
    monkeypatch.setenv("END_AT", "-1")
    assert_same_run(straight, train_only(merged(tmp_path, "again", changes)).path)


@pytest.mark.parametrize("precision", ["float32", {"start": "bf16-mixed", "finish_steps": 12}])
def test_blocks_change_nothing(precision, tmp_path, monkeypatch):
    """Nor where the precision changes within one: after step 15, the sixth of an epoch."""
    monkeypatch.setenv("END_AT", "-1")
    runs = []
    for size in (1, 4, 100):
        config = merged(tmp_path, f"block-{size}", {})
        config["training"] |= {"block": size, "precision": precision}
        runs.append(train_only(config).path)
    for run in runs[1:]:
        for name in ("metrics.csv", "checkpoints/best.safetensors", "checkpoints/last.safetensors"):
            assert (run / name).read_bytes() == (runs[0] / name).read_bytes()


def test_more_steps_later_equal_more_steps_at_once(tmp_path, monkeypatch):
    """`max_steps` falls within blocks and within an epoch."""
    monkeypatch.setenv("END_AT", "-1")
    limits = {"enable_progress_bar": False, "accelerator": "cpu", "max_epochs": -1}
    for steps in (6, 9, 14):
        again = train_only(merged(tmp_path, "again", {"trainer": {**limits, "max_steps": steps}}))
        assert again.info["steps"] == steps
    straight = train_only(merged(tmp_path, "straight", {"trainer": {**limits, "max_steps": 14}}))
    first, second = (path / "checkpoints" / "last.safetensors" for path in (straight.path, again.path))
    assert first.read_bytes() == second.read_bytes()
    assert (straight.path / "metrics.csv").read_bytes() == (again.path / "metrics.csv").read_bytes()


def test_killed_with_signal_9_and_continued_by_the_same_command(tmp_path):
    changes = {"training": {"checkpoint": {"every_steps": 4, "every_epochs": 1}}}
    config = write_config(tmp_path / "again.yaml", merged(tmp_path, "again", changes))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ("forgefield", "train", str(config))
    killed = run_warm(*command, folder=tmp_path, environ={**environ, "END_AT": "13", "END_HOW": "kill"}, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    continued = run_warm(*command, folder=tmp_path, environ={**environ, "END_AT": "-1"}, timeout=200)
    assert continued.returncode == 0, continued.stderr
    assert resumed_at(continued.stdout) in (8, 9)
    straight = train_only(merged(tmp_path, "straight", changes))
    assert_same_run(straight.path, tmp_path / "runs" / "again")
    assert (tmp_path / "runs" / "again" / "report.html").exists()
