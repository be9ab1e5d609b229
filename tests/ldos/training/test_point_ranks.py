"""Law 1 for points: two processes take the steps of one, terms on snapshots included, and measure the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.launching import average, ranks, weights, write_config
from tests.support.snapshots import point_config
from tests.support.train_many import train_only


def config(folder: Path, name: str, world_size: int, keep: str) -> dict:
    task = {
        "ldos": {"loss": "huber", "level_weights": [1, 1, 2, 1, 0.5, 1, 1]},
        "dos": {"every": 4},
        "electrons": {"every": 5},
        "band_energy": {"every": 3, "weight": 0.1},
        "observables": {"metrics": ["band_energy", "density", "fermi_energy", "dos", "electrons"]},
    }
    made = point_config(folder, name=name, task=task)
    made["data"]["batch"] = {"points": 14 // world_size}
    made["data"]["points"] = {**made["data"]["points"], "keep": keep}
    made["training"] = {**made["training"], "precision": "float64", "clip_norm": 0.5}
    return made


def test_two_processes_train_and_measure_as_one(tmp_path):
    places = ("memory", "disk")
    path = write_config(tmp_path / "two.yaml", [config(tmp_path, f"two-{keep}", 2, keep) for keep in places])
    done = ranks(2, "tests.support.train_many", str(path), folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for keep in places:
        alone, together = train_only(config(tmp_path, f"one-{keep}", 1, keep)), tmp_path / "runs" / f"two-{keep}"
        assert float((weights(alone.path) - weights(together)).abs().max()) < 1e-12
        assert float((average(alone.path) - average(together)).abs().max()) < 1e-12
        rows = [json.loads(line) for line in (together / "metrics.jsonl").read_text().splitlines()]
        for mine, other in zip(alone.metrics(), rows, strict=True):
            assert mine.keys() == other.keys()
            for key, value in mine.items():
                assert value == pytest.approx(other[key], rel=1e-9, abs=1e-9), key


def test_what_was_saved_on_two_processes_resumes_with_one_and_sees_the_rest_once(tmp_path):
    """Stopped by its number of steps in the middle of an epoch; the order of points is that of one process."""
    made = config(tmp_path, "again", 2, "memory")
    made["trainer"] = {**made["trainer"], "max_epochs": -1, "max_steps": 5}
    path = write_config(tmp_path / "two.yaml", made)
    done = ranks(2, "tests.support.train_many", str(path), folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    alone = config(tmp_path, "again", 1, "memory")
    alone["trainer"] = {**made["trainer"], "max_steps": 12}
    again = train_only(alone)
    straight = train_only({**alone, "name": "straight"})
    torch.testing.assert_close(weights(again.path), weights(straight.path), rtol=0, atol=1e-12)
