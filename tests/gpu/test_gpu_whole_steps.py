"""Steps that are captured with their updates, on a GPU: bit for bit the training by steps in parts, and exact resume."""

from __future__ import annotations

import pytest
import torch

from forgefield.training.engines.frame_steps import FrameSteps
from forgefield.training.frames_executor import FramesExecutor
from tests.support.helpers import tiny_config
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.train_many import train_only

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = {
    "one kernel": {"optimizer": {"name": "adamw", "weight_decay": 0.01}, "clip_norm": 0.5},
    "torch's updates": {"optimizer": "nadam", "clip_norm": 0.5},
    "float64": {"precision": "float64", "ema": None, "swa": {"start": 5}},
}


@pytest.mark.parametrize("case", CASES)
def test_whole_steps_are_those_in_parts_and_resume_exactly(case, tmp_path, monkeypatch):
    """With a learning rate that changes in every step, and batches of several sizes."""
    taken: list[int] = []
    run = FrameSteps.run
    monkeypatch.setattr(FrameSteps, "run", lambda self, batch: (taken.append(len(self._inputs)), run(self, batch))[1])

    def config(name: str) -> dict:
        made = tiny_config(tmp_path, name=name, callbacks=[END])
        made["data"]["batch"] = {"atoms": 12}
        schedule = {"name": "CosineAnnealingLR", "T_max": 13, "interval": "step"}
        made["training"] |= {"engine": "graphs", "graphs": {"compiled": False}, "scheduler": schedule, **CASES[case]}
        made["training"]["checkpoint"] = {"every_steps": 4}
        made["trainer"] |= {"accelerator": "gpu", "devices": 1}
        return made

    whole = train_only(config("whole")).path
    assert len(taken) > 8
    assert_same_run(whole, interrupted_run(config("again"), [7], monkeypatch))
    n_taken = len(taken)
    monkeypatch.setattr(FramesExecutor, "_whole_steps", lambda self: None)
    assert_same_run(whole, train_only(config("parts")).path)
    assert len(taken) == n_taken
