"""Law 1: W ranks with b frames each take the steps of one rank with W * b frames, whatever the loss and the labels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ase.io
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.config.loading import load_config
from forgefield.data.module import read_data
from forgefield.data.sampling.order import epoch_permutation
from forgefield.models.building import build_model
from forgefield.models.resolving import resolve_model
from forgefield.tasks.task import Task
from tests.support.helpers import emt_frames
from tests.support.launching import average, ranks, weights, write_config
from tests.support.parallel_runs import FRAMES_A_STEP, assert_same_rows, make_config
from tests.support.train_many import train_only

LOSSES: dict[str, dict[str, Any]] = {
    "energy": {"energy": {}},
    "total energy": {"energy": {"per_atom": False, "weight": 0.01}},
    "forces": {"forces": {}},
    "stress": {"energy": {}, "stress": {"weight": 100.0}},
    "all three": {"energy": {}, "forces": {"weight": 10.0}, "stress": {"weight": 5.0}},
    "mae": {"energy": {"loss": "mae"}, "forces": {"loss": "mae"}},
    "huber": {"energy": {"loss": "huber", "huber_delta": 0.1}, "forces": {"loss": "huber", "huber_delta": 0.3}},
    "as in DeePMD-kit": {"energy": {"per_atom": "root"}, "virial": {"weight": 0.1, "per_atom": "root"}},
    "by species": {"energy": {}, "forces": {"species_weights": {"Cu": 3.0, "Au": 0.25}}},
    "one species only": {"forces": {"species_weights": {"Au": 0.0}}},
    "two batches a step": {"energy": {}, "forces": {"weight": 10.0}, "stress": {"weight": 5.0}},
    "muon": {"energy": {}, "forces": {}},
}
TRAINING: dict[str, dict[str, Any]] = {
    "two batches a step": {"accumulate": 2},
    "muon": {"optimizer": {"name": "Muon", "adamw_eps": 1e-3}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """10 frames of 4 or 8 atoms, some without energy, some without forces, some without stress, with different weights."""
    path = tmp_path_factory.mktemp("equality")
    frames = emt_frames(18, seed=11)
    for number, atoms in enumerate(frames):
        missing = {1: ("energy",), 2: ("forces",), 5: ("stress", "forces"), 6: ("energy", "stress")}.get(number % 8, ())
        known = {name: value for name, value in atoms.calc.results.items() if name not in missing}
        atoms.calc = SinglePointCalculator(atoms, **known)
        atoms.info["config_weight"] = 0.5 + number % 3
    ase.io.write(path / "frames.extxyz", frames[:10], format="extxyz")
    ase.io.write(path / "val.extxyz", frames[10:], format="extxyz")
    return path


def one_step(folder: Path, loss: str, world_size: int, strategy: str | None) -> dict[str, Any]:
    """Plain gradient descent with learning rate 1: the weights move by exactly the gradient."""
    trainer = {"max_steps": 1, "max_epochs": -1, "enable_progress_bar": False, "accelerator": "cpu"}
    if strategy is not None:
        trainer["strategy"] = strategy
    name = f"{loss.replace(' ', '-')}-{world_size}-{strategy or 'serial'}"
    return make_config(folder, name, world_size, task=LOSSES[loss], trainer=trainer, training=TRAINING.get(loss, {}))


@pytest.fixture(scope="module")
def gradients(folder) -> dict[str, torch.Tensor]:
    """The weights after one step, of every loss, in one process."""
    return {loss: weights(train_only(one_step(folder, loss, 1, None)).path) for loss in LOSSES}


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "simple_ddp"), (4, "simple_ddp"), (2, "ddp")])
def test_gradient_is_that_of_one_process(world_size, strategy, folder, gradients):
    configs = [one_step(folder, loss, world_size, strategy) for loss in LOSSES]
    path = write_config(folder / f"steps-{world_size}-{strategy}.yaml", configs)
    done = ranks(world_size, "tests.support.train_many", str(path), folder=folder, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    distances = {
        loss: float((weights(folder / "runs" / config["name"]) - gradients[loss]).abs().max())
        for loss, config in zip(LOSSES, configs)
    }
    assert max(distances.values()) < 1e-12, distances


WAYS = {
    "script": {"engine": "script"},
    "tangent": {"derivative": "tangent"},
    "parts": {"memory": {"parts": 2}},
    "auto": {"engine": "auto"},
}


@pytest.mark.parametrize("strategy", ["simple_ddp"])
def test_other_engines_give_the_gradient_of_one_process_too(strategy, folder, gradients):
    loss = next(iter(LOSSES))
    configs = [one_step(folder, loss, 2, strategy) for _ in WAYS]
    for config, (name, way) in zip(configs, WAYS.items()):
        config["name"] = f"{name}-{strategy}"
        config["training"] = {**config["training"], **way}
    path = write_config(folder / f"engines-{strategy}.yaml", configs)
    done = ranks(2, "tests.support.train_many", str(path), folder=folder, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for config in configs:
        assert float((weights(folder / "runs" / config["name"]) - gradients[loss]).abs().max()) < 1e-11, config["name"]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mean_of_the_means_of_ranks_is_another_gradient(loss, folder):
    """So the frames of these tests can tell a right average from the usual wrong one."""
    config = load_config(one_step(folder, loss, 1, None))
    data = read_data(config.data, seed=config.seed)
    task = Task(config.task, data.species.symbols)
    resolved = resolve_model(
        config.model, species=data.species.symbols, cutoff=config.data.cutoff, statistics=data.statistics
    )
    potential = build_model(resolved, precision="float64", seed=config.seed).train()
    rows = epoch_permutation(len(data.train), config.seed, 0)[:FRAMES_A_STEP]

    def gradient(rows) -> torch.Tensor:
        batch = data.train.batch(rows)
        outputs = potential(batch, forces=task.needs_forces, stress=task.needs_stress)
        total = task.loss(outputs, batch).total
        found = torch.autograd.grad(total, list(potential.parameters()), allow_unused=True)
        return torch.cat([g.reshape(-1) for g in found if g is not None])

    whole = gradient(rows)
    mean_of_means = (gradient(rows[:2]) + gradient(rows[2:])) / 2
    assert float((whole - mean_of_means).norm() / whole.norm()) > 1e-3


def training(folder: Path, name: str, world_size: int, val: Any) -> dict[str, Any]:
    """Two epochs with everything that accumulates: momentum, average, clipping, schedule, several rows of metrics."""
    return make_config(
        folder,
        name,
        world_size,
        task=copy.deepcopy(LOSSES["all three"]),
        data={"val": val, "eval_batch": 1},
        trainer={"max_epochs": 2, "enable_progress_bar": False, "accelerator": "cpu"},
        training={
            "optimizer": {"name": "sgd", "momentum": 0.9},
            "lr": 1e-4,
            "ema": 0.9,
            "clip_norm": 1.0,
            "max_errors": True,
            "scheduler": {"name": "plateau", "patience": 0, "factor": 0.5, "threshold": 0.2},
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "strategy"), [(2, "ddp"), (4, "simple_ddp")])
def test_whole_trainings_and_their_metrics_are_those_of_one_process(world_size, strategy, folder):
    """Validation sets of fewer frames than ranks, as many, more, and a multiple; each frame counts once."""
    sizes: tuple[Any, ...] = (1, 3, 4, 5, 8) if world_size == 4 else (1, 2, 5)
    val: dict[Any, Any] = {n: write_first(folder, n) for n in sizes}
    if world_size == 2:
        val["sets"] = {"few": val[1], "many": val[5]}
        sizes = (*sizes, "sets")
    configs = [training(folder, f"val-{n}-{world_size}", world_size, val[n]) for n in sizes]
    for config in configs:
        config["trainer"]["strategy"] = strategy
    path = write_config(folder / f"trainings-{world_size}.yaml", configs)
    done = ranks(world_size, "tests.support.train_many", str(path), folder=folder, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for n in sizes:
        serial = train_only(training(folder, f"val-{n}-serial-{world_size}", 1, val[n])).path
        parallel = folder / "runs" / f"val-{n}-{world_size}"
        assert_same_rows(serial, parallel)
        assert float((weights(serial) - weights(parallel)).abs().max()) < 1e-12
        assert float((average(serial) - average(parallel)).abs().max()) < 1e-12


def write_first(folder: Path, n: int) -> str:
    path = folder / f"val-{n}.extxyz"
    ase.io.write(path, ase.io.read(folder / "val.extxyz", f":{n}"), format="extxyz")
    return str(path)
