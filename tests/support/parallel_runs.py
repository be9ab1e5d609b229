"""Configs and comparisons for runs of the same training on different numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import tiny_config

FRAMES_A_STEP = 4


def make_config(folder: Path, name: str, world_size: int, **changes: Any) -> dict[str, Any]:
    config = tiny_config(folder, name=name, **changes)
    config["data"] = {**config["data"], "val": 0, **changes.get("data", {}), "train": str(folder / "frames.extxyz")}
    config["data"]["batch"] = {"frames": FRAMES_A_STEP // world_size}
    config["training"] = {
        "precision": "float64",
        "optimizer": "sgd",
        "lr": 1.0,
        "ema": None,
        "tensorboard": 0,
        **changes.get("training", {}),
    }
    return config


def assert_same_rows(a: Path, b: Path) -> None:
    rows_a, rows_b = ([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (a, b))
    assert len(rows_a) == len(rows_b) > 0
    for row_a, row_b in zip(rows_a, rows_b):
        assert row_a.keys() == row_b.keys()
        for name, value in row_a.items():
            assert row_b[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
