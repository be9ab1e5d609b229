"""Steps that are captured with their updates: the same training as by steps in parts, bit for bit.

On a CPU what is captured is executed in every step; captured graphs themselves are in `tests/gpu/test_gpu_whole_steps.py`.
"""

from __future__ import annotations

import pytest

from forgefield.training.engines import choose
from forgefield.training.engines.frame_steps import FrameSteps
from forgefield.training.frames_executor import FramesExecutor
from tests.support.helpers import tiny_config
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.train_many import train_only

OPTIONS = {
    "clip_norm": 0.5,
    "scheduler": {"name": "CosineAnnealingLR", "T_max": 13, "interval": "step"},
    "optimizer": {"name": "adamw", "weight_decay": 0.01},
    "checkpoint": {"every_steps": 4},
    "kernels": {"edges": False},  # C code, which only the eager engine uses in resumed runs
}


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """Sizes of the batches of whole steps."""
    monkeypatch.setattr(choose, "engine_refusal", lambda name, device: None)
    sizes: list[int] = []
    run = FrameSteps.run

    def counted(self, batch):
        sizes.append(len(batch["n_atoms"]))
        return run(self, batch)

    monkeypatch.setattr(FrameSteps, "run", counted)
    return sizes


def config(folder, name, **training):
    made = tiny_config(folder, name=name, callbacks=[END])
    made["training"] |= {"engine": "graphs", "graphs": {"compiled": False}, **OPTIONS, **training}
    return made


def test_whole_steps_are_those_in_parts_and_resume_exactly(taken, tmp_path, monkeypatch):
    whole = train_only(config(tmp_path, "whole")).path
    assert taken == [2] * 14  # all but the first, in which the optimiser creates its state
    assert_same_run(whole, interrupted_run(config(tmp_path, "again"), [7], monkeypatch))
    taken.clear()
    monkeypatch.setattr(FramesExecutor, "_whole_steps", lambda self: None)
    assert_same_run(whole, train_only(config(tmp_path, "parts")).path)
    assert taken == []


@pytest.mark.parametrize(
    "training",
    [{"tensorboard": 2}, {"accumulate": 2}, {"memory": {"parts": 2}}, {"weighting": {"name": "softadapt"}}],
    ids=str,
)
def test_steps_are_taken_in_parts_where_something_is_done_between_gradient_and_update(training, taken, tmp_path):
    made = config(tmp_path, "parts", **training)
    made["trainer"]["max_epochs"] = 1
    train_only(made)
    assert taken == []
