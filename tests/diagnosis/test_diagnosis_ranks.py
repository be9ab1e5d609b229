"""Diagnosis on two ranks: what one rank's batch does is seen by all, and they act alike; quick ways to try things out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forgefield.diagnosis.records import read_records
from tests.support.helpers import emt_frames, tiny_config, write_emt
from tests.support.launching import final_state, ranks, weights, write_config
from tests.support.train_many import train_only

PLANTED = "tests.support.planted_defects"


def config_of(folder: Path, name: str, world_size: int, **changes: Any) -> dict[str, Any]:
    config = tiny_config(folder, name=name, **changes)
    config["data"] = {**config["data"], "val": 0, "batch": {"frames": 4 // world_size}, **changes.get("data", {})}
    config["training"] = {**config["training"], "precision": "float64", **changes.get("training", {})}
    return config


def test_two_ranks_skip_go_back_and_perturb_as_one(tmp_path, monkeypatch):
    """One frame has a bad gradient, one step is disturbed, all of it with SAM: two ranks end as one with the larger batch."""
    write_emt(tmp_path / "frames.extxyz", 12)
    labels = np.sort([atoms.get_potential_energy() / len(atoms) for atoms in emt_frames(12, 0)])
    monkeypatch.setenv("ROOT_ABOVE", str(labels[-2:].mean()))
    monkeypatch.setenv("DISTURB_AT", "7")
    monkeypatch.setenv("DISTURB", "300")
    changes = {
        "task": {"energy": {"loss": f"{PLANTED}.root_loss"}},
        "training": {"lr": 1e-3, "ema": 0.9},
        "callbacks": [
            f"{PLANTED}.Disturb",
            {"name": "sam", "rho": 1e-3},
            {"name": "gradient_check", "policy": "skip"},
            {"name": "loss_spike", "window": 12, "rollback": True, "snapshot_every": 2, "factor": 10.0},
            {"name": "training_helper", "every": 2},
            {"name": "throughput", "every": 2},
        ],
    }
    train_only(config_of(tmp_path, "one", 1, **changes))
    together = [config_of(tmp_path, f"two-{s}", 2, **changes) for s in ("simple_ddp", "ddp")]
    for config, strategy in zip(together, ("simple_ddp", "ddp")):
        config["trainer"] = {**config["trainer"], "strategy": strategy}
    done = ranks(2, "tests.support.train_many", str(write_config(tmp_path / "two.yaml", together)), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = read_records(tmp_path / "runs" / "one")
    assert alone["gradient_check"]["bad"] >= 2
    assert [spike["action"] for spike in alone["loss_spike"]["spikes"]] == ["rolled back"]
    for config in together:
        run = tmp_path / "runs" / config["name"]
        assert float((weights(run) - weights(tmp_path / "runs" / "one")).abs().max()) < 1e-11
        both = read_records(run)
        for key in ("events", "bad"):
            assert both["gradient_check"][key] == alone["gradient_check"][key]
        assert [s["step"] for s in both["loss_spike"]["spikes"]] == [s["step"] for s in alone["loss_spike"]["spikes"]]


def test_quick_trainings_match_on_two_ranks(tmp_path):
    """fast_dev_run leaves no run; overfit_batches and devset take the same frames as one rank with the larger batch."""
    write_emt(tmp_path / "frames.extxyz", 12)
    few = {"overfit_batches": 1, "max_epochs": 4, "enable_progress_bar": False, "accelerator": "cpu"}
    train_only(config_of(tmp_path, "one", 1, trainer=few, data={"devset": 8}))
    configs = []
    for strategy in ("simple_ddp", "ddp"):
        configs.append(
            config_of(tmp_path, f"few-{strategy}", 2, trainer={**few, "strategy": strategy}, data={"devset": 8})
        )
        quick = {"fast_dev_run": 2, "strategy": strategy, "accelerator": "cpu", "enable_progress_bar": False}
        configs.append(config_of(tmp_path, f"quick-{strategy}", 2, trainer=quick, callbacks=["gradient_check"]))
    done = ranks(2, "tests.support.train_many", str(write_config(tmp_path / "few.yaml", configs)), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for strategy in ("simple_ddp", "ddp"):
        run = tmp_path / "runs" / f"few-{strategy}"
        assert final_state(run)["global_step"] == 4
        assert float((weights(run) - weights(tmp_path / "runs" / "one")).abs().max()) < 1e-11
        assert not (tmp_path / "runs" / f"quick-{strategy}").exists()
    assert "a quick test in" in done.stdout


def test_quick_trainings_match_with_a_traced_engine(tmp_path):
    small = {"name": "nequip", "num_layers": 1, "l_max": 0, "num_features": 2, "radial_mlp_width": 2}
    energy: dict[str, Any] = {"energy": {}}  # a trace without forces is a quarter of one with them
    few = {"overfit_batches": 1, "max_epochs": 3, "enable_progress_bar": False, "accelerator": "cpu"}
    made = []
    for engine in ("eager", "script"):
        changes = {"trainer": few, "data": {"devset": 8}, "training": {"engine": engine}, "model": small}
        made.append(train_only({**config_of(tmp_path, engine, 1, **changes), "task": energy}).path)
    assert float((weights(made[0]) - weights(made[1])).abs().max()) < 1e-9
    assert final_state(made[1])["global_step"] == 3
    quick = {"fast_dev_run": True, "enable_progress_bar": False, "accelerator": "cpu"}
    changes = {"trainer": quick, "training": {"engine": "script"}, "model": small}
    train_only({**config_of(tmp_path, "quick", 1, **changes), "task": energy})
    assert not (tmp_path / "runs" / "quick").exists()
