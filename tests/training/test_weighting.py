"""Weights of a loss over time: the callback in anybody's script, weights that find themselves, several tasks at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ase.io
import lightning as L
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.training.callbacks.loss_scaling import (
    LinearScalingSchedule,
    LossScalingScheduler,
    SigmoidScalingSchedule,
)
from forgefield.training.run.checkpoint import list_checkpoints, load_checkpoint
from forgefield.training.weighting import (
    SoftAdapt,
    SoftAdaptOptions,
    Uncertainty,
    UncertaintyOptions,
    weighting_options,
)
from tests.support.helpers import PROPERTIES, property_frames, tiny_config, write_properties
from tests.support.launching import ranks, weights, write_config
from tests.support.parallel_runs import make_config
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.train_many import train_only


class Plain(L.LightningModule):
    """A user's own module: a line through data, two terms in its loss."""

    def __init__(self, scaling: Any = None) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.task_loss_scaling = {"fit": 1.0, "small": 1.0} if scaling is None else scaling
        self.seen: list[tuple[int, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scaling = self.task_loss_scaling
        self.seen.append((self.trainer.global_step, scaling["fit"], scaling["small"]))
        return scaling["fit"] * (self.line(batch) - batch).square().mean() + scaling["small"] * self.line.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, *schedules: Any, module: Plain | None = None, start: str | None = None, **options: Any) -> Plain:
    module = module or Plain()
    given = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        **options,
    }
    trainer = L.Trainer(default_root_dir=folder, callbacks=[LossScalingScheduler(*schedules)], **given)
    loader = torch.utils.data.DataLoader(torch.rand(6, 1), batch_size=2)
    trainer.fit(module, loader, ckpt_path=start)
    trainer.save_checkpoint(folder / "end.ckpt")
    return module


def test_first_and_last_step_have_exactly_the_first_and_last_value_in_anybodys_script(tmp_path):
    schedules = (LinearScalingSchedule("fit", 2.0, 0.0, "step"), SigmoidScalingSchedule("small", 1.0, 10.0, 0.5))
    seen = fit(tmp_path, *schedules, max_epochs=3).seen
    assert [step for step, _, _ in seen] == list(range(9))
    assert [value for _, value, _ in seen] == pytest.approx([2.0 - 0.25 * step for step in range(9)])
    assert (seen[-1][1], seen[0][2], seen[-1][2]) == (0.0, 1.0, 10.0)
    assert seen[4][2] == pytest.approx(5.5)
    slope = -math.log(5e-7)
    plain = [1.0 + 9.0 / (1.0 + math.exp(-slope * (step / 8 - 0.5))) for step in range(9)]
    assert [value for _, _, value in seen] == pytest.approx(plain, abs=0.01)


def test_values_by_epoch_change_with_epochs_also_after_a_resume(tmp_path):
    whole = fit(tmp_path, LinearScalingSchedule("fit", 1.0, 3.0), max_epochs=3).seen
    assert [value for _, value, _ in whole] == [1.0] * 3 + [2.0] * 3 + [3.0] * 3
    schedule = LinearScalingSchedule("fit", 1.0, 9.0, "step")
    straight = fit(tmp_path, schedule, max_steps=9).seen

    class Stops(Plain):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = self.trainer.global_step >= 4

    begun = fit(tmp_path, schedule, module=Stops(), max_steps=9, min_steps=1).seen
    rest = fit(tmp_path, schedule, max_steps=9, start=str(tmp_path / "end.ckpt")).seen
    assert [*begun, *rest] == straight
    assert straight[-1][1] == 9.0
    by_epoch = fit(tmp_path, LinearScalingSchedule("fit", 1.0, 3.0), max_steps=8, max_epochs=-1).seen
    assert (by_epoch[0][1], by_epoch[-1][1]) == (1.0, 3.0)


@pytest.mark.parametrize("given", [{"beta": math.inf}, {"beta": math.nan}, {"every": 0}])
def test_options_of_weightings_are_finite(given):
    with pytest.raises(ForgefieldError, match="must be a (finite number|positive integer)"):
        weighting_options({"name": "softadapt", **given})
    with pytest.raises(ForgefieldError, match="must be a finite number"):
        weighting_options({"name": "uncertainty", "lr": math.inf})


@pytest.mark.parametrize("curvature", [5e-324, 1e-300, 5e-7, 1 - 2**-53])
def test_a_sigmoid_of_any_curvature_stays_between_its_ends(curvature):
    schedule = SigmoidScalingSchedule("fit", 1.0, 10.0, 0.99, curvature=curvature)
    values = [schedule.value(step, 101) for step in range(101)]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (1.0, 10.0)


def test_invalid_schedules_are_refused(tmp_path):
    linear = LinearScalingSchedule("fti", 1.0, 2.0)
    with pytest.raises(ForgefieldError, match="task_loss_scaling has no 'fti'. Did you mean 'fit'"):
        fit(tmp_path, linear, max_epochs=1)
    with pytest.raises(ForgefieldError, match="Plain has no mapping task_loss_scaling"):
        fit(tmp_path, linear, module=Plain(scaling=3.0), max_epochs=1)
    with pytest.raises(ForgefieldError, match="need a training with a limit"):
        fit(tmp_path, LinearScalingSchedule("fit", 1.0, 2.0), max_epochs=-1, max_time={"seconds": 1})
    with pytest.raises(ForgefieldError, match="two schedules for fit"):
        LossScalingScheduler(LinearScalingSchedule("fit", 1.0), LinearScalingSchedule("fit", 2.0))
    with pytest.raises(ForgefieldError, match="step or epoch, not 'batch'"):
        LinearScalingSchedule("fit", 1.0, 2.0, "batch")
    with pytest.raises(ForgefieldError, match="center_frac of the schedule of fit must be between"):
        SigmoidScalingSchedule("fit", 1.0, 2.0, 1.5)


# ---- ours


TASK: dict[str, Any] = {"gap": {"loss": "mae"}, "moduli": {"weight": 0.5}, "site_charge": {}}


class Doubles(LossScalingScheduler):
    def __init__(self) -> None:
        super().__init__(LinearScalingSchedule("gap", 1.0, 5.0, "step"))


def config(folder: Path, name: str, task: Any = TASK, **changes: Any) -> dict[str, Any]:
    if not (folder / "frames.extxyz").exists():
        write_properties(folder / "frames.extxyz", 14)
    made = tiny_config(folder, name=name, **changes)
    made["data"] |= {"labels": {"fields": PROPERTIES}}
    made["task"] = task
    made["training"] |= {"precision": "float64", "engine": made["training"].get("engine", "eager")}
    return made


def test_the_callback_does_what_a_schedule_of_the_config_does(tmp_path):
    scheduled = {**TASK, "gap": {"loss": "mae", "schedule": {"to": 5.0}}}
    by_config = train_only(config(tmp_path, "config", scheduled, trainer={"max_steps": 5}))
    callback = [f"{Doubles.__module__}.Doubles"]
    by_callback = train_only(config(tmp_path, "callback", trainer={"max_steps": 5}, callbacks=callback))
    one, other = (run.load_potential("last").state_dict() for run in (by_config, by_callback))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ForgefieldError, match=r"follows task\.gap\.schedule; leave one of the two out"):
        train_only(config(tmp_path, "both", scheduled, callbacks=callback))


WEIGHTINGS = ["uncertainty", {"name": "softadapt", "every": 2, "beta": 3.0}]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=["uncertainty", "softadapt"])
def test_self_adapting_weights_resume_exactly_and_leave_reports_alone(weighting, tmp_path, monkeypatch):
    training = {"weighting": weighting, "checkpoint": {"every_steps": 1}}
    given = {"training": training, "callbacks": [END]}
    straight = train_only(config(tmp_path, "straight", **given))
    assert_same_run(straight.path, interrupted_run(config(tmp_path, "broken", **given), [3, 8], monkeypatch))
    tensors = load_checkpoint(list_checkpoints(straight.path / "checkpoints")[0])
    if weighting == "uncertainty":
        assert float(tensors["state_dict"]["weighting.log_variances"].abs().min()) > 1e-3
    else:
        factors = tensors["forgefield"]["weighting"]["factors"]
        assert float(factors.sum()) == pytest.approx(3.0)
        assert float(factors.max()) > 1.05


def test_reported_losses_have_the_weights_of_the_task_whatever_is_minimised(tmp_path):
    """The weights of the model stay as they are, those of the loss do not."""
    ways = {
        "plain": None,
        "u": {"name": "uncertainty", "lr": 1e298},
        "s": {"name": "softadapt", "every": 1, "beta": 9.0},
    }
    given = {"trainer": {"max_epochs": 2}}
    runs = [
        train_only(config(tmp_path, name, training={"lr": 1e-300, "ema": None, "weighting": way}, **given))
        for name, way in ways.items()
    ]
    for run in runs[1:]:
        for expected, row in zip(runs[0].metrics(), run.metrics()):
            losses = {name: row[name] for name in ("train/loss", "val/loss")}
            assert losses == pytest.approx({name: expected[name] for name in losses}, rel=1e-13)


def test_self_adapting_weights_are_the_same_in_other_engines(tmp_path):
    small = {"num_layers": 1, "l_max": 0}
    given = {"trainer": {"max_steps": 4}, "model": small}
    runs = [
        train_only(config(tmp_path, e, training={"weighting": "uncertainty", "engine": e}, **given))
        for e in ("eager", "script")
    ]
    one, other = (run.load_potential("last").state_dict() for run in runs)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-7, atol=1e-9)


def test_uncertainty_follows_the_gradient_of_its_loss(tmp_path):
    training = {"weighting": {"name": "uncertainty", "lr": 0.5}, "optimizer": "sgd", "lr": 1e-2, "ema": None}
    made = config(tmp_path, "kendall", training=training, trainer={"max_steps": 1})
    run = train_only(made)
    state = load_checkpoint(list_checkpoints(run.path / "checkpoints")[0])
    sums, counts = state["forgefield"]["sums"][0]["train_loss"]
    weighted = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64) * sums / counts
    torch.testing.assert_close(state["state_dict"]["weighting.log_variances"], -0.5 * 1e-2 * (1.0 - weighted))


def test_softadapt_gives_most_to_what_falls_slowest():
    found = SoftAdapt(SoftAdaptOptions(beta=2.0), 3)
    ones = torch.ones(3, dtype=torch.float64)
    found._change(torch.stack([torch.tensor([1.0, 10.0, 5.0], dtype=torch.float64), ones]))
    assert torch.equal(found.factors, ones)
    found._change(
        torch.stack([torch.tensor([0.5, 9.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0]).double()])
    )
    slopes = torch.tensor([-0.5, -0.1, 0.0], dtype=torch.float64) / 0.6
    torch.testing.assert_close(found.factors, 3 * torch.softmax(2.0 * slopes, 0))


# ---- several tasks at once


def gradient(folder: Path, name: str, task: Any, world_size: int = 1, **training: Any) -> dict[str, Any]:
    trainer = {"max_steps": 1, "max_epochs": -1, "enable_progress_bar": False, "accelerator": "cpu"}
    made = make_config(folder, name, world_size, trainer=trainer)
    made["data"]["labels"], made["task"] = {"fields": PROPERTIES}, task
    made["training"] |= training
    return made


def test_the_loss_of_several_tasks_is_the_sum_of_separate_ones(tmp_path):
    """Losses and the gradients of the encoder, from the same first weights; every field is missing in some frames."""
    write_properties(tmp_path / "frames.extxyz", 10, seed=11)
    together = train_only(gradient(tmp_path, "together", TASK))
    alone = [train_only(gradient(tmp_path, f"alone-{name}", {name: TASK[name]})) for name in TASK]
    losses = [
        load_checkpoint(list_checkpoints(run.path / "checkpoints")[0])["forgefield"]["sums"][0]["train_loss"]
        for run in alone
    ]
    whole = load_checkpoint(list_checkpoints(together.path / "checkpoints")[0])["forgefield"]["sums"][0]["train_loss"]
    torch.testing.assert_close(whole, torch.cat(losses, 1), rtol=1e-13, atol=0)
    still = train_only(gradient(tmp_path, "still", TASK, lr=1e-300)).load_potential("last").state_dict()
    moved = together.load_potential("last").state_dict()
    parts = [run.load_potential("last").state_dict() for run in alone]
    for name in [name for name in moved if name.startswith("model.")]:
        total = sum(part[name] - still[name] for part in parts)
        torch.testing.assert_close(moved[name] - still[name], total, rtol=1e-9, atol=1e-12)


def test_two_ranks_find_the_same_weights_as_one(tmp_path):
    write_properties(tmp_path / "frames.extxyz", 10, seed=11)
    ways = {"u": {"weighting": "uncertainty"}, "s": {"weighting": {"name": "softadapt", "every": 1, "beta": 5.0}}}
    configs = []
    for name, way in ways.items():
        for world_size in (1, 2):
            made = gradient(tmp_path, f"{name}{world_size}", TASK, world_size, **way, lr=1e-2)
            made["trainer"]["max_steps"] = 4
            configs.append(made)
    serial = {made["name"][0]: weights(train_only(made).path) for made in configs[::2]}
    path = write_config(tmp_path / "two.yaml", configs[1::2])
    done = ranks(2, "tests.support.train_many", str(path), folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name, expected in serial.items():
        assert float((weights(tmp_path / "runs" / f"{name}2") - expected).abs().max()) < 1e-12, name


def test_sources_are_drawn_by_their_shares_whatever_they_are_labelled_for(tmp_path, capsys):
    """Two data sets with different labels, one drawn three times as often."""
    for name, keep in (("gaps", "gap"), ("charges", "site_charge")):
        frames = property_frames(12, seed=len(name))
        for atoms in frames:
            atoms.info = {key: value for key, value in atoms.info.items() if key == keep}
            atoms.arrays = {k: v for k, v in atoms.arrays.items() if k in ("numbers", "positions", keep)}
            atoms.calc = None
        ase.io.write(tmp_path / f"{name}.extxyz", frames, format="extxyz")
    made = config(tmp_path, "shares", {"gap": {}, "site_charge": {}})
    shares = [
        {"path": str(tmp_path / "gaps.extxyz"), "share": 3.0},
        {"path": str(tmp_path / "charges.extxyz"), "share": 1.0},
    ]
    fields = {name: PROPERTIES[name] for name in ("gap", "site_charge")}
    made["data"] |= {"train": shares, "reference_energies": "none", "labels": {"fields": fields}}
    run = train_only(made)
    said = capsys.readouterr().out
    assert "gaps.extxyz 75.0 %" in said
    assert "charges.extxyz 25.0 %" in said
    assert {"train/gap_mae", "train/site_charge_mae"} <= run.metrics()[-1].keys()


def test_a_variance_rests_where_no_frame_of_the_batch_has_the_label():
    weighting = Uncertainty(UncertaintyOptions(), 2)
    sums, counts = torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0])
    weighting.loss(sums.double(), counts.double(), torch.ones(2, dtype=torch.float64)).backward()
    assert weighting.log_variances.grad.tolist() == [0.5, 0.0]
