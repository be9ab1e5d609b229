"""Losses of single steps reach TensorBoard in order, once, whenever they arrive on the host."""

from __future__ import annotations

import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import forgefield
from tests.support.helpers import tiny_config
from tests.support.train_many import train_only


def test_every_requested_step_is_logged_once_also_before_a_stop(tmp_path):
    config = tiny_config(tmp_path)
    config["training"]["tensorboard"] = 1
    config["trainer"] |= {"log_every_n_steps": 2, "max_epochs": -1, "max_steps": 7}
    run = train_only(config)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for name in ("step/loss", "step/lr"):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [2, 4, 6]
        assert all(math.isfinite(scalar.value) for scalar in scalars)
        assert [scalar.wall_time for scalar in scalars] == sorted(scalar.wall_time for scalar in scalars)


def test_histograms_of_weights_and_gradients_reach_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path)
    config["training"]["tensorboard"] = 2
    config["trainer"]["logger"] = {"name": "lightning.pytorch.loggers.WandbLogger", "offline": True}
    trained = dict(forgefield.load(train_only(config)).named_parameters())
    summary = dict(wandb.run.summary)
    wandb.finish()
    kept = {name: value for name, value in summary.items() if name.startswith("weights/")}
    counts = {name.removeprefix("weights/"): sum(value["values"]) for name, value in kept.items()}
    assert counts == {name: weight.numel() for name, weight in trained.items()}
    assert summary["gradients/model.readout.weights.0"]["_type"] == "histogram"
