"""Runs that are interrupted and resumed, and the comparison of two runs bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from forgefield.training.run.checkpoint import list_checkpoints, load_checkpoint
from tests.support.interrupting import Interrupted
from tests.support.train_many import train_only

END = "tests.support.interrupting.EndAt"


def leaves(value, path=""):
    """Every number, string and tensor inside nested containers, with its place."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, EMA, optimiser, schedulers, random state, loops and metrics are equal to the last bit."""
    last_a, last_b = list_checkpoints(a / "checkpoints")[0], list_checkpoints(b / "checkpoints")[0]
    assert last_a.name == last_b.name
    first, second = dict(leaves(load_checkpoint(last_a))), dict(leaves(load_checkpoint(last_b)))
    assert first.keys() == second.keys()
    for place, value in first.items():
        if "val_loop" in place:
            continue  # Lightning's own tally of validation restarts; nothing reads it when training starts at a batch
        same = torch.equal(value, second[place]) if isinstance(value, torch.Tensor) else value == second[place]
        assert same, f"{place}: {value} != {second[place]}"
    for name in ("metrics.csv", "metrics.jsonl", "checkpoints/best.safetensors", "checkpoints/last.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def resumed_at(output: str) -> int:
    """The step at which a command resumed. Checkpoints are written in the background: a kill may come before the newest."""
    match = re.search(r"Resuming run \S+ at step (\d+)", output)
    assert match is not None, output
    return int(match[1])


def interrupted_run(config: dict, steps: list[int], monkeypatch) -> Path:
    """Train, crash at each of the steps, continue each time by the same call."""
    monkeypatch.setenv("END_HOW", "raise")
    for step in steps:
        monkeypatch.setenv("END_AT", str(step))
        with pytest.raises(Interrupted):
            train_only(config)
    monkeypatch.setenv("END_AT", "-1")
    return train_only(config).path
