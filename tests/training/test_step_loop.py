"""The short way to take a step is Lightning's, bit for bit, and is not taken where something needs Lightning's."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from forgefield.training.step_loop import ObservesSteps, StepLoop
from tests.support.helpers import tiny_config
from tests.support.resuming import assert_same_run
from tests.support.train_many import train_only


class Observes(ObservesSteps):
    """Records what the hooks of a step are called with."""

    calls: list[tuple] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.calls.append(("start", trainer.global_step, batch_idx, batch["frame_id"].tolist()))

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self.calls.append(("backward", loss.item()))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        squares = [p.grad.square().sum() for p in pl_module.parameters() if p.grad is not None]
        self.calls.append(("update", optimizer.param_groups[0]["lr"], torch.stack(squares).sum().item()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.calls.append(("end", trainer.global_step, batch_idx, outputs["loss"].item(), trainer.is_last_batch))


class Recorded(Callback):
    """The same as a callback of a user, for which Lightning takes the steps."""

    on_train_batch_start = Observes.on_train_batch_start
    on_before_backward = Observes.on_before_backward
    on_before_optimizer_step = Observes.on_before_optimizer_step
    on_train_batch_end = Observes.on_train_batch_end

    calls = Observes.calls


@pytest.fixture
def short_steps(monkeypatch) -> list[int]:
    """Indices of the batches whose step takes the short way."""
    taken: list[int] = []
    step = StepLoop._step

    def counted(self, module, batch, batch_idx):
        taken.append(batch_idx)
        return step(self, module, batch, batch_idx)

    monkeypatch.setattr(StepLoop, "_step", counted)
    return taken


def run(folder, name, callback, **training):
    Observes.calls.clear()
    config = tiny_config(folder, name=name, callbacks=[f"tests.training.test_step_loop.{callback}"])
    config["training"] = {**config["training"], "clip_norm": 1.0, **training}
    run = train_only(config)
    return run.path, list(Observes.calls)


def test_steps_metrics_checkpoints_and_what_callbacks_see_are_the_same(tmp_path, short_steps):
    options = {"scheduler": {"name": "CosineAnnealingLR", "T_max": 13, "interval": "step"}}
    short, seen = run(tmp_path, "short", "Observes", **options)
    assert short_steps == 3 * [0, 1, 2, 3, 4]
    short_steps.clear()
    long, expected = run(tmp_path, "long", "Recorded", **options)
    assert short_steps == []
    assert seen == expected
    assert len(seen) == 4 * 15
    assert_same_run(short, long)


@pytest.mark.parametrize(
    "training",
    [{"accumulate": 2}, {"optimizer": {"name": "LBFGS", "max_iter": 2}, "lr": 1e-4, "clip_norm": None}],
    ids=["accumulation", "several evaluations in a step"],
)
def test_steps_that_are_more_than_one_gradient_are_left_to_lightning(training, tmp_path, short_steps):
    run(tmp_path, "tiny", "Observes", **training)
    assert short_steps == []
