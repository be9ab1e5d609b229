"""Weights that change in the course of a training: exact ends, shapes, places, and the loss that is reported meanwhile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forgefield.errors import ForgefieldError
from forgefield.tasks.options import ScheduleOptions, TargetOptions, TaskOptions
from forgefield.tasks.schedules import StepState, WeightSchedule
from forgefield.tasks.task import Task
from tests.support.helpers import tiny_config
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.train_many import train_only


def at(step: int, steps: int = 11, **more) -> StepState:
    return StepState(**{"step": step, "steps": steps, "epoch": 0, "epochs": 1, **more})


@given(
    st.sampled_from(["linear", "cosine", "sigmoid"]),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
    st.integers(2, 10**6),
    st.floats(1e-300, 1e300),
    st.floats(0, 1),
)
def test_first_and_last_step_have_exactly_the_first_and_the_last_value(kind, first, last, steps, slope, centre):
    schedule = WeightSchedule(first, kind, last, slope=slope, centre=centre)
    values = [schedule.value(at(step, steps)) for step in (0, steps - 1, steps + 5)]
    assert values == [first, last, last]


@given(
    st.sampled_from(["linear", "cosine", "sigmoid"]),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.integers(1, 60),
    st.integers(0, 80),
    st.one_of(st.none(), st.integers(1, 80)),
    st.floats(1e-300, 1e300),
    st.floats(0, 1),
)
def test_weights_are_monotonic_between_their_ends_wherever_a_schedule_begins(
    kind, first, last, steps, begin, length, slope, centre
):
    """Also where it begins or ends after the end of the training."""
    end = None if length is None else begin + length
    schedule = WeightSchedule(first, kind, last, begin=begin, end=end, slope=slope, centre=centre)
    values = [schedule.value(at(step, steps)) for step in range(steps + 2)]
    assert values == sorted(values, reverse=first > last)
    assert all(min(first, last) <= value <= max(first, last) for value in values)
    assert all(value == first for value in values[:begin])


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(-1, 100))
def test_a_weight_that_follows_the_learning_rate_stays_between_its_ends(first, last, ratio):
    """Some schedulers raise the rate above its first value, which would make a weight negative."""
    value = WeightSchedule(first, "lr", last).value(at(3, lr_ratio=ratio))
    assert min(first, last) <= value <= max(first, last)


def test_a_steep_sigmoid_is_a_step_and_a_flat_one_a_line():
    steep, flat = (WeightSchedule(0.0, "sigmoid", 1.0, slope=slope) for slope in (5000.0, 1e-12))
    assert [steep.value(at(step)) for step in range(11)] == [0, 0, 0, 0, 0, 0.5, 1, 1, 1, 1, 1]
    assert [flat.value(at(step)) for step in range(11)] == pytest.approx([step / 10 for step in range(11)])


def test_shapes_are_those_of_their_formulas():
    for kind, formula in (
        ("linear", lambda x: x),
        ("cosine", lambda x: (1 - math.cos(math.pi * x)) / 2),
        ("sigmoid", lambda x: 1 / (1 + math.exp(-14.5 * (x - 0.5)))),
    ):
        found = [WeightSchedule(10.0, kind, 1.0).value(at(step)) for step in range(11)]
        expected = [10.0 - 9.0 * formula(step / 10) for step in range(11)]
        assert found == pytest.approx(expected, rel=1e-2 if kind == "sigmoid" else 1e-12)


def test_a_schedule_begins_and_ends_at_the_configured_steps_or_epochs():
    schedule = WeightSchedule(1.0, "linear", 3.0, unit="epoch", begin=2, end=4)
    assert [schedule.value(at(0, epoch=e, epochs=9)) for e in range(6)] == [1.0, 1.0, 1.0, 2.0, 3.0, 3.0]
    steps = WeightSchedule(1.0, "step", [5.0, 0.5], at=(3, 6))
    assert [steps.value(at(step)) for step in (0, 2, 3, 5, 6, 10)] == [1.0, 1.0, 5.0, 5.0, 0.5, 0.5]


def test_a_weight_can_follow_the_learning_rate():
    schedule = WeightSchedule(1000.0, "lr", 1.0)
    assert schedule.value(at(0)) == 1000.0
    assert schedule.value(at(5, lr_ratio=0.5)) == pytest.approx(1.0 + 999.0 * 0.5)
    assert schedule.value(at(5, lr_ratio=0.0)) == 1.0


def test_weights_change_in_place_and_the_reported_loss_keeps_its_meaning():
    options = TaskOptions(
        energy=TargetOptions(weight=2.0), forces=TargetOptions(weight=10.0, schedule=ScheduleOptions(to=1.0))
    )
    task = Task(options, ("H",))
    live = task.weights_on(torch.device("cpu"))
    sums, counts = torch.tensor([3.0, 4.0]).double(), torch.tensor([1.0, 2.0]).double()
    reported = task.report(sums, counts)
    assert reported == 2.0 * 3.0 + 1.0 * 2.0
    task.follow(at(5))
    assert live.tolist() == [2.0, 5.5]
    assert task.weights_on(torch.device("cpu")) is live
    assert float(task.combine(sums, counts)) == 6.0 + 5.5 * 2.0
    assert task.report(sums, counts) == reported


def scheduled(folder, name: str, kind: str | None, epochs: int) -> dict:
    forces = {"weight": 20.0} | (
        {"schedule": {"kind": kind, "to": 0.5, **({"end": 12} if kind == "linear" else {})}} if kind else {}
    )
    config = tiny_config(folder, name=name, task={"energy": {"weight": 1.0}, "forces": forces})
    config["training"] = {**config["training"], "scheduler": {"name": "ExponentialLR", "gamma": 0.5}}
    config["trainer"] = {**config["trainer"], "max_epochs": epochs}
    return config


@pytest.mark.parametrize("kind", ["linear", "lr"])
def test_a_training_with_a_schedule_resumes_as_if_it_had_not_stopped(kind, tmp_path, monkeypatch):
    """Broken off in the middle of the schedule, and of an epoch."""
    config = {"callbacks": [END]} | scheduled(tmp_path, "whole", kind, 3)
    config["training"]["checkpoint"] = {"every_steps": 2}
    straight = train_only(config)
    assert_same_run(straight.path, interrupted_run({**config, "name": "again"}, [7], monkeypatch))
    whole = straight.load_potential("last").state_dict()
    plain = train_only(scheduled(tmp_path, "plain", None, 3)).load_potential("last").state_dict()
    assert any(not torch.equal(whole[name], plain[name]) for name in whole)


@pytest.mark.parametrize(
    "schedule",
    [
        {"to": 0.5, "end": 15},
        {"to": 0.5, "end": 3, "unit": "epoch"},
        {"kind": "step", "at": [4, 20], "to": [1, 2]},
        {"to": 10.0, "begin": 20},
        {"to": 10.0, "begin": 14},
        {"kind": "sigmoid", "to": 10.0, "begin": 2, "unit": "epoch"},
    ],
)
def test_a_schedule_longer_than_the_training_is_refused(schedule, tmp_path):
    """Of 15 steps in 3 epochs."""
    config = scheduled(tmp_path, "longer", None, 3)
    config["task"]["forces"] = {"schedule": schedule}
    where = next(name for name in ("at", "end", "begin") if name in schedule)
    with pytest.raises(ForgefieldError, match=rf"task\.forces\.schedule\.{where} is (step|epoch) \d+, and the last"):
        train_only(config)


def test_a_schedule_to_the_end_of_an_endless_training_is_refused(tmp_path):
    config = scheduled(tmp_path, "endless", "cosine", -1)
    config["trainer"]["max_time"] = "00:00:01:00"
    with pytest.raises(
        ForgefieldError, match="task.forces.schedule ends with the training, which has no limit of steps"
    ):
        train_only(config)


def test_epochs_end_where_the_number_of_steps_ends_the_training(tmp_path):
    """A limit of 10 steps is 2 epochs of 5, whatever `max_epochs` allows: a schedule to epoch 2 would not be completed."""
    config = scheduled(tmp_path, "short", None, 100)
    config["trainer"]["max_steps"] = 10
    config["task"]["forces"] = {"schedule": {"to": 0.5, "end": 2, "unit": "epoch"}}
    with pytest.raises(ForgefieldError, match="the last epoch of this training is 1 "):
        train_only(config)
