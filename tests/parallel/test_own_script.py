"""The strategy in a Lightning script of one's own, where Lightning starts the processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.launching import clean_environment, start
from tests.support.warm import run_warm

SCRIPT = Path(__file__).parents[1] / "support" / "own_script.py"


def final_weights(done: subprocess.CompletedProcess[str]) -> torch.Tensor:
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("WEIGHTS"))
    values = json.loads(line.removeprefix("WEIGHTS"))
    return torch.cat([torch.tensor(value, dtype=torch.float64).reshape(-1) for value in values])


@pytest.mark.parametrize(("strategy", "accumulate"), [("small buckets", "3")])
def test_two_processes_train_as_one(strategy, accumulate, tmp_path):
    """Equal batches, so that the mean over ranks is the mean over frames; a parameter that nothing uses stays as it is."""
    words = ("tests.support.own_script", "1", "auto", accumulate)
    alone = final_weights(run_warm(*words, folder=tmp_path, environ=clean_environment()))
    together = final_weights(start([sys.executable, str(SCRIPT), "2", strategy, accumulate], tmp_path))
    assert float((alone - together).abs().max()) < 1e-14
    assert together[:2].tolist() == [1.0, 1.0]
