"""Losses of single steps reach TensorBoard in order, once, whenever they arrive on the host."""

from __future__ import annotations

import math

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
