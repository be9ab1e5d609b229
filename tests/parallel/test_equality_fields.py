"""Law 1 for targets that are fields: of frames and atoms, intensive and extensive, missing here and there, on any ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ase.io
import pytest
import torch

from tests.support.helpers import PROPERTIES, property_frames
from tests.support.launching import average, ranks, weights, write_config
from tests.support.parallel_runs import FRAMES_A_STEP, assert_same_rows, make_config
from tests.support.train_many import train_only

TASKS: dict[str, dict[str, Any]] = {
    "one value": {"gap": {}},
    "all fields": {
        "gap": {"loss": "mae"},
        "cohesion": {"reduce": "sum", "weight": 0.3},
        "moduli": {},
        "site_charge": {},
    },
    "whole sums": {"cohesion": {"reduce": "sum", "per_atom": False, "loss": "huber"}, "site_charge": {"weight": 2.0}},
    "classes": {"rich": {"classes": 2}, "site": {"classes": "auto", "weight": 0.5}, "gap": {}},
    "beside forces": {"energy": {}, "forces": {"weight": 3.0}, "site_charge": {}, "gap": {}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """10 frames of 4 or 8 atoms; every field is missing in some, and frames have different weights."""
    path = tmp_path_factory.mktemp("equality")
    frames = property_frames(16, seed=11)
    for number, atoms in enumerate(frames):
        atoms.info["config_weight"] = 0.5 + number % 3
        gold = atoms.symbols == "Au"
        atoms.arrays["site"] = gold.astype(int)
        if number % 4:
            atoms.info["rich"] = int(gold.mean() > 0.4)
    ase.io.write(path / "frames.extxyz", frames[:10], format="extxyz")
    ase.io.write(path / "val.extxyz", frames[10:], format="extxyz")
    return path


def one_step(folder: Path, task: str, world_size: int, strategy: str | None) -> dict[str, Any]:
    """Plain gradient descent with learning rate 1: the weights move by exactly the gradient."""
    trainer = {"max_steps": 1, "max_epochs": -1, "enable_progress_bar": False, "accelerator": "cpu"}
    if strategy is not None:
        trainer["strategy"] = strategy
    name = f"{task.replace(' ', '-')}-{world_size}-{strategy or 'serial'}"
    return with_task(make_config(folder, name, world_size, trainer=trainer), task)


def with_task(config: dict[str, Any], task: str) -> dict[str, Any]:
    config["task"] = copy.deepcopy(TASKS[task])
    config["data"]["labels"] = {"fields": {**PROPERTIES, "rich": {}, "site": "atom"}}
    return config


@pytest.fixture(scope="module")
def gradients(folder) -> dict[str, torch.Tensor]:
    """The weights after one step, of every task, in one process."""
    return {task: weights(train_only(one_step(folder, task, 1, None)).path) for task in TASKS}


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "ddp"), (4, "simple_ddp")])
def test_gradient_is_that_of_one_process(world_size, strategy, folder, gradients):
    configs = [one_step(folder, task, world_size, strategy) for task in TASKS]
    path = write_config(folder / f"steps-{world_size}-{strategy}.yaml", configs)
    done = ranks(world_size, "tests.support.train_many", str(path), folder=folder, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    distances = {
        task: float((weights(folder / "runs" / config["name"]) - gradients[task]).abs().max())
        for task, config in zip(TASKS, configs)
    }
    assert max(distances.values()) < 1e-12, distances


@pytest.mark.parametrize("way", [{"derivative": "tangent"}, {"engine": "script"}, {"memory": {"parts": 2}}], ids=str)
def test_other_ways_to_take_a_step_give_the_same_gradient(way, folder, gradients):
    config = one_step(folder, "beside forces", 1, None)
    config["name"] = "-".join(map(str, way.values())).translate(str.maketrans("", "", "{}': "))
    config["training"] = {**config["training"], **way}
    assert float((weights(train_only(config).path) - gradients["beside forces"]).abs().max()) < 1e-11


def training(folder: Path, task: str, name: str, world_size: int) -> dict[str, Any]:
    config = make_config(
        folder,
        name,
        world_size,
        trainer={"max_epochs": 2, "enable_progress_bar": False, "accelerator": "cpu"},
        training={"optimizer": {"name": "sgd", "momentum": 0.9}, "lr": 1e-3, "ema": 0.9, "clip_norm": 1.0},
    )
    config["data"] |= {"val": str(folder / "val.extxyz"), "eval_batch": 1}
    return with_task(config, task)


@pytest.mark.parametrize("task", ["all fields", "classes"])
def test_a_training_and_its_metrics_are_those_of_one_process(task, folder):
    """Six frames of validation on four ranks: each counts once."""
    assert FRAMES_A_STEP == 4
    config = training(folder, task, f"four-{task[:3]}", 4)
    path = write_config(folder / f"training-{task[:3]}.yaml", [config])
    done = ranks(4, "tests.support.train_many", str(path), folder=folder, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    serial, parallel = (
        train_only(training(folder, task, f"serial-{task[:3]}", 1)).path,
        folder / "runs" / config["name"],
    )
    assert_same_rows(serial, parallel)
    assert float((weights(serial) - weights(parallel)).abs().max()) < 1e-12
    assert float((average(serial) - average(parallel)).abs().max()) < 1e-12
