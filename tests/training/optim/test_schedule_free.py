"""Schedule-free optimisers: the numbers of the package, and exact resume with a sequence of schedulers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.training.optim.averages import ScheduleFreeAverage
from forgefield.training.optim.optimisers import build_optimiser, rescale_learning_rates
from tests.support.helpers import tiny_config
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.train_many import train_only

NUMBERS = json.loads((Path(__file__).parents[2] / "fixtures/schedulefree/numbers.json").read_text())


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))


def walk(module: Weights, optimiser: torch.optim.Optimizer, steps: range) -> None:
    """The steps of tests/fixtures/schedulefree/make_numbers.py."""
    matrix = torch.arange(9, dtype=torch.float64).reshape(3, 3).sin()
    for step in steps:
        if step == 20:
            optimiser.param_groups[0]["lr"] *= 0.5
        optimiser.zero_grad()
        ((matrix @ module.weights - 1) ** 4).sum().backward()
        optimiser.step()


@pytest.mark.parametrize("case", NUMBERS, ids=lambda case: f"{case['name']}-{case['options']['lr']}")
def test_weights_and_averages_are_those_of_the_package(case):
    module = Weights()
    options = {key: value for key, value in case["options"].items() if key != "lr"}
    optimiser = build_optimiser({"name": case["name"].lower(), **options}, [module.weights], lr=case["options"]["lr"])
    average = ScheduleFreeAverage(module)
    average.bind(optimiser)
    walk(module, optimiser, range(30))
    y = module.weights.detach().clone()
    assert y.tolist() == pytest.approx(case["y"], rel=1e-12)
    with average.applied():
        assert module.weights.tolist() == pytest.approx(case["x"], rel=1e-12)
    assert torch.equal(module.weights, y)


def test_learning_rates_scaled_in_a_checkpoint_leave_the_shares_of_the_average_as_they_are():
    """A run that resumes with all rates halved averages as one that had half the rates from the start."""
    ends = []
    for first, ratio in ((0.1, 0.5), (0.05, 1.0)):
        module = Weights()
        optimiser = build_optimiser("AdamWScheduleFree", [module.weights], lr=first)
        walk(module, optimiser, range(3))
        state = optimiser.state_dict()
        rescale_learning_rates({"optimizer_states": [state], "lr_schedulers": []}, ratio)
        ends.append([state["param_groups"][0]["lr"], *(state["state"][0][key] for key in ("lr_max", "weight_sum"))])
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    """Also with a sequence of schedulers by step, interrupted before and after the change from one to the other."""
    warm_up = {"name": "LinearLR", "start_factor": 0.1, "total_iters": 5}
    scheduler = {"name": "SequentialLR", "interval": "step", "milestones": [5]}
    config = tiny_config(
        tmp_path,
        training={
            "ema": None,
            "optimizer": "AdamWScheduleFree",
            "scheduler": {**scheduler, "schedulers": [warm_up, {"name": "ExponentialLR", "gamma": 0.9}]},
            "checkpoint": {"every_steps": 2},
        },
        callbacks=[END, "tests.support.interrupting.CountsBatchStarts"],
    )
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"})
    again = interrupted_run({**config, "name": "again"}, [3, 7], monkeypatch)
    assert_same_run(straight.path, again)
    losses = [row["val/loss"] for row in straight.metrics() if row.get("val/loss") is not None]
    assert losses[-1] < losses[0]


def test_a_second_average_is_refused(tmp_path):
    config = tiny_config(tmp_path, training={"optimizer": {"name": "adamwschedulefree"}})
    with pytest.raises(ForgefieldError, match=r"set training\.ema=null"):
        train_only(config)
