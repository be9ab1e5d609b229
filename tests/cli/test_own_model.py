"""A user's own model, loss, optimiser and callback on the command line, in the working directory or beside the config."""

from __future__ import annotations

import os
from pathlib import Path

import ase.io
import pytest
import yaml

from tests.support.helpers import tiny_config
from tests.support.warm import run_warm

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self, stiffness: float) -> None:
        super().__init__()
        self.stiffness = torch.nn.Parameter(torch.tensor(stiffness))

    def forward(self, batch):
        # Smooth at the cutoff of 3.5 A.
        r2 = batch["edge_vectors"].square().sum(dim=1) / 3.5**2
        pairs = self.stiffness * (1 - r2.clamp(max=1)) ** 4
        zero = torch.zeros(len(batch["species"]), dtype=pairs.dtype)
        return zero.index_add(0, batch["edge_index"][1], pairs)
"""


def command(*words: str) -> str:
    """Output of `forgefield ...` in a process of its own whose search path does not hold the working directory."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run_warm("forgefield", *words, folder=Path.cwd(), environ=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PARTS = """
import lightning
import torch


def quartic(prediction, target):
    return (prediction - target) ** 4


class Slow(torch.optim.SGD):
    pass


class Announce(lightning.Callback):
    def on_fit_start(self, trainer, pl_module):
        print("announced by", __name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", [".", "configs"])
def test_user_parts_are_found_from_training_to_use(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path(place, "own_springs.py").write_text(MODEL)
    Path(place, "own_parts.py").write_text(PARTS)
    settings = {
        **tiny_config(tmp_path, trainer={"max_epochs": 1}, training={"optimizer": "own_parts.Slow", "lr": 1e-6}),
        "name": "own",
        "model": {"name": "own_springs.Net", "stiffness": 0.5},
        "task": {"energy": {}, "forces": {"loss": "own_parts.quartic"}},
        "callbacks": ["own_parts.Announce"],
    }
    Path("configs/my.yaml").write_text(yaml.safe_dump(settings))
    assert "announced by own_parts" in command("train", "configs/my.yaml")
    assert "complete" in command(
        "train", "configs/my.yaml"
    )  # the config names the code, so a resume needs no permission
    command("predict", "own", "frames.extxyz", "-o", "out.extxyz", "--trust-code")
    assert len(ase.io.read("out.extxyz", ":")) == 14
    assert "forces" in command("test", "own", "--data", "frames.extxyz", "--trust-code")
    assert "checks passed" in command("check", "own", "--frames", "1", "--trust-code")
