"""`training.precision`: what is accepted, what it does to a training, when a schedule changes it, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from forgefield.api import load_run
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.ops.products import product
from forgefield.training.precision import TOLERANCES, Precision
from tests.support.helpers import tiny_config
from tests.support.interrupting import Interrupted
from tests.support.structures import make_batch, make_frame, make_potential
from tests.support.train_many import train_only

CPU = torch.device("cpu")
LATE = {"start": "bf16-mixed", "finish": "float32", "finish_epochs": 1}


class Layered(nn.Module):
    """A user's own model that makes its products by `product`, and notes for every training step whether they were lowered."""

    lowered: list[bool] = []

    def __init__(self, species, cutoff: float) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 8))
        self.second = nn.Parameter(torch.randn(8, 1))

    def forward(self, batch):
        lengths = batch["edge_vectors"].norm(dim=1, keepdim=True)
        hidden = product((lengths / self.cutoff).to(self.first.dtype), self.first)
        if self.training:
            self.lowered.append(not torch.equal(hidden, (lengths / self.cutoff).to(self.first.dtype) @ self.first))
        pair = (torch.tanh(hidden) @ self.second).double().squeeze(1) * (1 - lengths.squeeze(1) / self.cutoff) ** 2
        return torch.zeros(len(batch["species"]), dtype=torch.float64).index_add(0, batch["edge_index"][1], pair)


class Plain(Layered):
    """The same by torch's own products."""

    def forward(self, batch):
        lengths = batch["edge_vectors"].norm(dim=1, keepdim=True)
        pair = (torch.tanh((lengths / self.cutoff).float() @ self.first) @ self.second).double().squeeze(1)
        return torch.zeros(len(batch["species"]), dtype=torch.float64).index_add(0, batch["edge_index"][1], pair)


def config_of(folder, precision, *, model: str | None = None, **more) -> dict:
    config = tiny_config(folder, **more)
    config["training"] = {"engine": "eager", "derivative": "double", **config["training"], "precision": precision}
    if model is not None:
        config["model"] = {"name": f"tests.training.test_precision.{model}"}
    return config


# ---- settings


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        (
            "bf16",
            r"'training.precision' must be float64, float32, tf32, bf16-mixed, fp16-mixed or a schedule, not 'bf16'",
        ),
        ("flaot32", r"Did you mean 'float32'\?"),
        (32, r"not 32"),
        ({"start": "tf32", "finish": "float32"}, r"needs one of finish_epochs and finish_steps"),
        ({"start": "tf32", "finish_epochs": 1, "finish_steps": 1}, r"needs one of finish_epochs and finish_steps"),
        ({"start": "tf32", "finish_epoch": 3}, r"no key 'finish_epoch'.*Did you mean 'finish_epochs'\?"),
        ({"finish": "float32", "finish_epochs": 3}, r"'training.precision.start' must be float32, tf32.*not None"),
        ({"start": "tf23", "finish_epochs": 3}, r"'training.precision.start'.*Did you mean 'tf32'\?"),
        ({"start": "float32", "finish": "float64", "finish_epochs": 3}, r"'training.precision.finish'.*not 'float64'"),
        ({"start": "float32", "finish_epochs": 3}, r"'training.precision.finish' must be different from start"),
        (
            {"start": "tf32", "finish_epochs": 0},
            r"'training.precision.finish_epochs' must be a positive whole number, not 0",
        ),
        (
            {"start": "tf32", "finish_steps": 1.5},
            r"'training.precision.finish_steps' must be a positive whole number, not 1.5",
        ),
    ],
)
def test_settings_without_meaning_are_refused(precision, sentence, tmp_path):
    with pytest.raises(ForgefieldError, match=sentence):
        load_config(config_of(tmp_path, precision))


@pytest.mark.parametrize("name", TOLERANCES)
def test_every_name_is_accepted_and_weights_have_enough_precision(name, tmp_path):
    precision = Precision(load_config(config_of(tmp_path, name)).training.precision)
    assert precision.weights == ("float64" if name == "float64" else "float32")
    assert precision.at(epoch=9, epochs=10, step=99, steps=100) == name
    assert name in precision.describe()


def test_a_schedule_counts_from_the_end():
    by_epochs = Precision({"start": "tf32", "finish_epochs": 3})
    names = [by_epochs.at(epoch=epoch, epochs=10, step=7 * epoch, steps=70) for epoch in range(10)]
    assert names == ["tf32"] * 7 + ["float32"] * 3
    by_steps = Precision({"start": "bf16-mixed", "finish": "tf32", "finish_steps": 2})
    names = [by_steps.at(epoch=0, epochs=1, step=step, steps=5) for step in range(5)]
    assert names == ["bf16-mixed"] * 3 + ["tf32"] * 2
    assert by_steps.names == ("bf16-mixed", "tf32")
    assert by_epochs.describe().startswith("tf32, the last 3 epochs float32")


@pytest.mark.parametrize(
    ("setting", "limits", "sentence"),
    [
        ({"start": "tf32", "finish_epochs": 3}, {"epochs": 3, "steps": -1}, "tf32 would never be used"),
        ({"start": "tf32", "finish_epochs": 3}, {"epochs": -1, "steps": -1}, "set trainer.max_epochs"),
        ({"start": "tf32", "finish_epochs": 3}, {"epochs": 9, "steps": 50}, "use finish_steps instead"),
        (
            {"start": "tf32", "finish_steps": 3},
            {"epochs": -1, "steps": -1},
            "set trainer.max_epochs or trainer.max_steps",
        ),
        ({"start": "tf32", "finish_steps": 50}, {"epochs": None, "steps": 50}, "tf32 would never be used"),
        ({"start": "tf32", "finish_steps": 3}, {"epochs": 2, "steps": -1}, None),
        ({"start": "tf32", "finish_epochs": 3}, {"epochs": 9, "steps": -1}, None),
        ("tf32", {"epochs": -1, "steps": -1}, None),
    ],
)
def test_a_schedule_needs_an_end_to_count_from(setting, limits, sentence):
    if sentence is None:
        Precision(setting).require_end(**limits)
        return
    with pytest.raises(ForgefieldError, match=sentence):
        Precision(setting).require_end(**limits)


@pytest.mark.parametrize("setting", ["tf32", {"start": "tf32", "finish_epochs": 1}])
def test_tf32_is_refused_on_a_cpu_before_the_run_begins(setting, tmp_path):
    with pytest.raises(ForgefieldError, match="tf32 needs an NVIDIA GPU.*a CPU; use float32"):
        train_only(config_of(tmp_path, setting))
    for name in TOLERANCES.keys() - {"tf32"}:
        Precision(name).require_device(CPU)


def test_lightnings_own_setting_points_to_forgefields(tmp_path):
    for theirs, ours in (("bf16-mixed", "bf16-mixed"), ("16-mixed", "fp16-mixed"), (64, "float64")):
        config = config_of(tmp_path, "float32")
        config["trainer"]["precision"] = theirs
        with pytest.raises(ForgefieldError, match=f"use training.precision={ours}, with which geometry"):
            train_only(config)


# ---- what it does


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_torchs_setting_is_as_asked_inside_and_as_it_was_outside(before):
    setting = torch.backends.cuda.matmul
    was = setting.fp32_precision
    try:
        setting.fp32_precision = before
        for name, inside in (("tf32", True), ("float32", False), ("bf16-mixed", False)):
            precision = Precision(name)
            with pytest.raises(ZeroDivisionError), precision.applied(name):
                assert (setting.fp32_precision == "tf32") == inside
                raise ZeroDivisionError
            assert setting.fp32_precision == before
    finally:
        torch.set_float32_matmul_precision("highest")
        setting.fp32_precision = was


@pytest.mark.parametrize(("name", "bound"), [("float32", 3e-6), ("fp16-mixed", 4e-3), ("bf16-mixed", 3e-2)])
def test_energies_and_forces_have_the_error_of_the_precision(name, bound):
    batch = make_batch(make_frame(12, seed=1))
    exact, low = (
        make_potential(precision=weights, num_features=16, energy_shifts={"H": 0.0, "O": 0.0}).eval()
        for weights in ("float64", "float32")
    )
    with Precision(name).applied(name):
        found = low(batch)
    for key, value in exact(batch).items():
        error = float((found[key] - value).norm() / value.norm())
        assert found[key].dtype == torch.float64
        assert bound / 300 < error < bound


def test_a_mixed_training_learns_with_weights_and_optimiser_in_float32(tmp_path):
    losses = {}
    for name in ("float32", "fp16-mixed", "bf16-mixed"):
        config = config_of(tmp_path, name)
        config["trainer"] = {**config["trainer"], "max_epochs": 5, "limit_val_batches": 1}
        run = train_only({**config, "name": name})
        losses[name] = [row["train/loss"] for row in run.metrics()]
        info = json.loads((run.path / "run.json").read_text())
        assert (info["precision"], info["training_precision"]) == ("float32", name)
        assert {p.dtype for p in load_run(run.path).load_potential().parameters()} == {torch.float32}
        assert losses[name][-1] < 0.8 * losses[name][0]
    exact = torch.tensor(losses["float32"])
    errors = {name: float((torch.tensor(losses[name]) / exact - 1).abs().max()) for name in losses}
    assert 0 == errors["float32"] < errors["fp16-mixed"] < errors["bf16-mixed"] < 0.05


def test_a_schedule_changes_at_its_epoch_also_across_a_resume(tmp_path, monkeypatch):
    """Five steps an epoch: two epochs lowered, the last one not; validation is never lowered."""
    config = config_of(tmp_path, LATE, model="Layered", callbacks=["tests.support.interrupting.EndAt"])
    monkeypatch.setattr(Layered, "lowered", [])
    whole = train_only({**config, "name": "whole"})
    assert Layered.lowered == [True] * 10 + [False] * 5
    monkeypatch.setattr(Layered, "lowered", [])
    monkeypatch.setenv("END_HOW", "raise")
    config["training"]["checkpoint"] = {"every_steps": 1}
    for step in (3, 11):
        monkeypatch.setenv("END_AT", str(step))
        with pytest.raises(Interrupted):
            train_only(config)
    monkeypatch.setenv("END_AT", "-1")
    parts = train_only(config)
    assert Layered.lowered == [True] * (10 + 1) + [False] * (5 + 1)  # the step of a crash is made again
    assert parts.metrics()[-1] == whole.metrics()[-1]


def test_validation_is_made_in_the_precision_of_the_weights(tmp_path):
    """What is validated is what is deployed: a training of no effect has the same validation in every precision."""
    rows = [
        train_only(
            {**config_of(tmp_path, name, training={"lr": 1e-30, "ema": None, "tensorboard": 0}), "name": name}
        ).metrics()[0]
        for name in ("float32", "bf16-mixed")
    ]
    assert rows[0]["val/loss"] == rows[1]["val/loss"]
    assert rows[0]["train/loss"] != rows[1]["train/loss"]


def test_a_user_model_that_a_precision_would_not_touch_is_refused(tmp_path):
    message = "bf16-mixed has no effect on this model.*forgefield.ops.products.product.*torch.autocast"
    with pytest.raises(ForgefieldError, match=message):
        train_only(config_of(tmp_path, "bf16-mixed", model="Plain"))
    train_only({**config_of(tmp_path, "float32", model="Plain"), "name": "plain"})
