"""The translated loss is DeePMD-kit's: against its formulas written down, and against itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from forgefield.config.checking import typed_config
from forgefield.config.sources import Sources
from forgefield.tasks.task import Task
from tests.support.deepmd_inputs import translated

ATOMS = 5
LOSSES: dict[str, dict[str, Any]] = {
    "mse": {},
    "mse, intensive": {"intensive_ener_virial": True},
    "mae": {"loss_func": "mae"},
    "huber": {"use_huber": True, "huber_delta": [0.02, 0.3, 0.1]},
    "huber, one delta": {"use_huber": True, "huber_delta": 0.1, "intensive_ener_virial": True},
}
PREFACTORS = {
    "start_pref_e": 0.02,
    "limit_pref_e": 1,
    "start_pref_f": 1000,
    "limit_pref_f": 2,
    "start_pref_v": 0.1,
    "limit_pref_v": 3,
}
VOLUME = 64.0
PROGRESS = (1.0, 0.37, 0.0)
"""The learning rate as a share of the first one."""


def example() -> dict[str, np.ndarray]:
    """Two frames of five atoms: what was predicted and what is right."""
    random = np.random.default_rng(5)
    shapes = {"energy": (2,), "forces": (2, ATOMS, 3), "virial": (2, 3, 3)}
    names = [
        (name, shape)
        for target, shape in shapes.items()
        for name, shape in ((target, shape), (f"{target}_label", shape))
    ]
    return {name: random.normal(scale=0.3, size=shape) for name, shape in names}


def our_loss(loss: dict[str, Any], progress: float) -> float:
    """What our task makes of the example, with the weights of that moment."""
    task = translated({"loss": {**PREFACTORS, **loss}})["task"]
    for target in task.values():
        schedule = target.pop("schedule")
        assert schedule["kind"] == "lr"
        target["weight"] = schedule["to"] + (target["weight"] - schedule["to"]) * progress
    config = typed_config({"task": task}, Sources())
    arrays = {name: torch.from_numpy(values) for name, values in example().items()}
    batch = {
        "energy": arrays["energy_label"],
        "forces": arrays["forces_label"].reshape(-1, 3),
        "stress": -arrays["virial_label"] / VOLUME,
        "cell": 4.0 * torch.eye(3, dtype=torch.float64).expand(2, 3, 3),
        "weight": torch.ones(2, dtype=torch.float64),
        "n_atoms": torch.full((2,), ATOMS),
        "frame": torch.repeat_interleave(torch.arange(2), ATOMS),
        "species": torch.zeros(2 * ATOMS, dtype=torch.int64),
    }
    outputs = {
        "energy": arrays["energy"],
        "forces": arrays["forces"].reshape(-1, 3),
        "stress": -arrays["virial"] / VOLUME,
    }
    return float(Task(config.task, ("O",)).loss(outputs, batch).total)


def huber(error: np.ndarray, delta: float) -> np.ndarray:
    return np.where(abs(error) <= delta, error**2 / 2, delta * (abs(error) - delta / 2))


def written_down(loss: dict[str, Any], progress: float) -> float:
    found = example()
    energy, forces, virial = (found[name] - found[f"{name}_label"] for name in ("energy", "forces", "virial"))
    weights = [limit + (start - limit) * progress for start, limit in ((0.02, 1), (1000, 2), (0.1, 3))]
    if loss.get("use_huber"):
        delta = loss["huber_delta"]
        deltas = [delta] * 3 if isinstance(delta, float) else delta
        errors = [huber(e, d) for e, d in zip((energy / ATOMS, forces, virial / ATOMS), deltas)]
    elif loss.get("loss_func") == "mae":
        errors = [abs(energy) / ATOMS, abs(forces), abs(virial) / ATOMS]
    else:
        norm = ATOMS**2 if loss.get("intensive_ener_virial") else ATOMS
        errors = [energy**2 / norm, forces**2, virial**2 / norm]
    return float(sum(weight * error.mean() for weight, error in zip(weights, errors)))


@pytest.mark.parametrize("progress", PROGRESS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_the_formula(name: str, progress: float) -> None:
    assert our_loss(LOSSES[name], progress) == pytest.approx(written_down(LOSSES[name], progress), rel=1e-13)


SCRIPT = """
import json, sys
import torch
from deepmd.pt.loss.ener import EnergyStdLoss
torch.set_default_device("cpu")
found = json.load(sys.stdin)
arrays = {name: torch.tensor(values, dtype=torch.float64) for name, values in found["example"].items()}
label = {"energy": arrays["energy_label"][:, None], "force": arrays["forces_label"], "virial": arrays["virial_label"]}
label |= {"find_energy": 1.0, "find_force": 1.0, "find_virial": 1.0}
predicted = {"energy": arrays["energy"][:, None], "force": arrays["forces"], "virial": arrays["virial"]}
values = []
for loss, progress in found["cases"]:
    function = EnergyStdLoss(starter_learning_rate=0.001, **loss)
    input_dict = {"atype": torch.zeros(2, 5, dtype=torch.int64)}
    _, value, _ = function(input_dict, lambda atype: dict(predicted), label, 5, learning_rate=0.001 * progress)
    values.append(float(value))
print(json.dumps(values))
"""


def test_the_loss_is_that_of_deepmd_kit() -> None:
    named = os.environ.get("FORGEFIELD_DEEPMD_PYTHON")
    if named is None and importlib.util.find_spec("deepmd") is None:
        pytest.skip("deepmd-kit is not installed; FORGEFIELD_DEEPMD_PYTHON may name an interpreter that has it")
    cases = [({**PREFACTORS, **loss}, progress) for loss in LOSSES.values() for progress in PROGRESS]
    arrays = {name: values.tolist() for name, values in example().items()}
    answer = subprocess.run(
        [named or sys.executable, "-c", SCRIPT],
        input=json.dumps({"example": arrays, "cases": cases}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    ours = [our_loss(loss, progress) for loss in LOSSES.values() for progress in PROGRESS]
    assert ours == pytest.approx(json.loads(answer.stdout), rel=1e-12)
