"""A trained encoder for a new task: what is taken over, what is frozen, how fast parts learn, and changes of low rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ase.io
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from forgefield.training.optim.trainable import add_low_rank, merged_state
from forgefield.training.problem.transfer import _energy_terms
from forgefield.training.run.checkpoint import list_checkpoints, load_checkpoint
from tests.support.deeppots import make_deeppot
from tests.support.helpers import PROPERTIES, property_frames, tiny_config, write_properties
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.structures import make_batch, make_frame, make_potential
from tests.support.train_many import train_only

STEPS = {"trainer": {"max_steps": 4}}


def config(folder: Path, name: str, task: Any, start: str | None = None, **changes: Any) -> dict[str, Any]:
    if not (folder / "frames.extxyz").exists():
        write_properties(folder / "frames.extxyz", 14)
    made = tiny_config(folder, name=name, **{**STEPS, **changes})
    made["data"]["labels"] = {"fields": PROPERTIES}
    made["task"] = task
    made["training"] |= {"precision": "float64", "engine": "eager"}
    if start is not None:
        made["model"] = {"from": start, **changes.get("model", {})}
        made["data"].pop("cutoff")
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a run that learnt noise and the gap."""
    path = tmp_path_factory.mktemp("transfer")
    train_only(config(path, "first", {"denoise": {}, "gap": {}}))
    return path


def test_an_encoder_is_taken_over_and_heads_follow_the_task(folder, capsys):
    still = {"lr": 1e-30, "ema": None}
    task = {"gap": {}, "moduli": {}, "energy": {}}
    run = train_only(config(folder, "next", task, "first", training=still))
    said = capsys.readouterr().out
    assert "Reused: the encoder, the head of gap. New: a head for moduli. New: an energy" in said
    assert "Removed: denoise" in said
    before, after = (train_only(config(folder, "first", {"denoise": {}, "gap": {}})), run)
    old, new = (made.load_potential("last").state_dict() for made in (before, after))
    taken = [name for name in new if name in old and "energy_s" not in name]
    assert len(taken) > 15
    assert all(torch.equal(old[name], new[name]) for name in taken)
    assert any("of_moduli" in name for name in new.keys() - old.keys())
    assert {name for name in old.keys() - new.keys() if "of_denoise" not in name} == set()
    assert new["model.energy_scales"].tolist() == pytest.approx([run.info["statistics"]["forces_rms"]] * 2)
    assert run.info["model"]["predicts"]["energy"]


def test_a_head_of_another_shape_is_new(folder, capsys):
    wide = {"heads": {"gap": {"hidden": [8]}}}
    made = config(folder, "wide", {"gap": {}}, "first", model=wide)
    run = train_only(made)
    assert "New: a head for gap. Removed: denoise" in capsys.readouterr().out
    assert run.heads["gap"]["hidden"] == [8]
    with pytest.raises(ForgefieldError, match=r"model\.heads\.gab: the task has no target of that name"):
        train_only(config(folder, "wrong", {"gap": {}}, "first", model={"heads": {"gab": {}}}))


def test_a_changed_task_resumes_exactly_after_an_interruption(folder, monkeypatch):
    given = {
        "training": {
            "checkpoint": {"every_steps": 2},
            "freeze": ["model.type_embedding"],
            "lr_groups": {"model.*": 0.1, "heads": 2.0},
            "lora": {"rank": 2, "alpha": 8.0},
            "weighting": "uncertainty",
        },
        "callbacks": [END],
        "trainer": {"max_epochs": 2},
    }
    task = {"gap": {}, "moduli": {}}
    straight = train_only(config(folder, "straight", task, "first", **given)).path
    assert_same_run(straight, interrupted_run(config(folder, "broken", task, "first", **given), [3, 8], monkeypatch))


def test_what_is_frozen_stays_and_is_not_in_the_optimiser(folder):
    made = config(folder, "frozen", {"gap": {}, "cohesion": {}}, "first", training={"freeze": ["model.*"], "ema": 0.9})
    run = train_only(made)
    old = train_only(config(folder, "first", {"denoise": {}, "gap": {}})).load_potential("last").state_dict()
    new = run.load_potential("last").state_dict()
    for name in new:
        same = name in old and torch.equal(old[name], new[name])
        assert same == (name.startswith("model.") or (name.endswith((".shift", ".scale")) and "of_gap" in name)), name
    state = load_checkpoint(list_checkpoints(run.path / "checkpoints")[0])
    n_heads = sum(1 for name in new if ".weights." in name and "heads." in name)
    assert len(state["optimizer_states"][0]["param_groups"][0]["params"]) == 2 * n_heads


def test_a_step_of_a_group_is_its_factor_times_the_step_of_the_rest(folder):
    def moved(name: str, **training: Any) -> dict[str, torch.Tensor]:
        plain = {"optimizer": "sgd", "lr": 1e-3, "ema": None, **training}
        made = config(folder, name, {"gap": {}, "moduli": {}}, training=plain, trainer={"max_steps": 1})
        made["training"]["engine"] = training.get("engine", "eager")
        return train_only(made).load_potential("last").state_dict()

    start = moved("still", lr=1e-30)
    plain = moved("plain")
    grouped = moved("grouped", lr_groups={"heads.of_gap": 3.0, "model.*": 0.25})
    frozen = moved("part", freeze=["model.layers.0.*"], engine="script")
    for name in start:
        factor = 3.0 if "of_gap" in name else 0.25 if name.startswith("model.") else 1.0
        torch.testing.assert_close(
            grouped[name] - start[name], factor * (plain[name] - start[name]), rtol=1e-6, atol=1e-15
        )
        expected = start if name.startswith("model.layers.0.") else plain
        torch.testing.assert_close(frozen[name], expected[name], rtol=1e-9, atol=1e-14)
        assert not name.startswith("model.layers.0.") or torch.equal(frozen[name], start[name]), name


def test_groups_follow_a_schedule_with_their_factors(folder):
    scheduler = {"name": "exp", "stop_lr": 1e-5, "smooth": True}
    training = {"lr": 1e-2, "scheduler": scheduler, "lr_groups": {"model.*": 0.1}}
    run = train_only(config(folder, "rates", {"gap": {}, "energy": {}}, training=training, trainer={"max_steps": 6}))
    state = load_checkpoint(list_checkpoints(run.path / "checkpoints")[0])
    rates = [group["lr"] for group in state["optimizer_states"][0]["param_groups"]]
    assert rates == pytest.approx([1e-5, 1e-6])
    cosine = {"name": "cosine", "eta_min": 1e-6}
    made = config(folder, "floor", {"gap": {}, "energy": {}}, training={**training, "scheduler": cosine})
    with pytest.raises(ForgefieldError, match=r"eta_min is one rate for all parameters.*cosine_to"):
        train_only(made)


@pytest.mark.parametrize(
    ("make", "targets"), [(make_potential, ["model.layers.*"]), (make_deeppot, None)], ids=["nequip", "deeppot"]
)
def test_changes_of_low_rank_start_at_nothing_and_merge_into_the_matrices(make, targets):
    plain, changed = make(), make()
    batch = make_batch(make_frame(5), make_frame(3, seed=1))
    names = add_low_rank(changed, rank=2, alpha=4.0, targets=targets)
    assert names
    if make is make_deeppot:  # stacks of biases are no matrices
        assert all(name.endswith(".w") for name in names)
        assert any(plain.get_parameter(name).dim() == 3 for name in names)
    assert all(torch.equal(a, b) for a, b in zip(plain(batch).values(), changed(batch).values()))
    trained = [name for name, parameter in changed.named_parameters() if parameter.requires_grad]
    assert not any(name.endswith("original") for name in trained)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if name.endswith(".up"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    state = merged_state(changed)
    assert state.keys() == plain.state_dict().keys()
    changed_outputs = changed(batch)
    assert not torch.equal(changed_outputs["energy"], plain(batch)["energy"])
    plain.load_state_dict(state)
    for key, value in plain(batch).items():
        torch.testing.assert_close(value, changed_outputs[key], rtol=1e-12, atol=1e-12)


def test_what_a_run_with_low_rank_changes_writes_is_a_plain_model(folder):
    run = train_only(config(folder, "lora", {"gap": {}}, "first", training={"lora": {"rank": 2}, "ema": 0.9}))
    old = Run(folder / "runs" / "first").load_potential("best").state_dict()
    new = run.load_potential("last").state_dict()
    state = load_checkpoint(list_checkpoints(run.path / "checkpoints")[0])["forgefield"]["ema"]["average"]
    down = {name: tensor for name, tensor in state.items() if name.endswith(".down")}
    for name, tensor in down.items():
        owner, _, matrix = name.removesuffix(".0.down").rpartition(".parametrizations.")
        up = state[name.removesuffix("down") + "up"]
        change = new[f"{owner}.{matrix}"] - old[f"{owner}.{matrix}"].to(up)
        torch.testing.assert_close(change, tensor @ up, rtol=1e-9, atol=1e-13)
        assert float(change.abs().max()) > 1e-6
    assert down


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"freeze": ["modle.*"]}, r"training\.freeze: no trained parameter of the model matches 'modle\.\*'"),
        ({"freeze": ["*"]}, r"training\.freeze matches every parameter"),
        ({"lr_groups": {"head": 2.0}}, r"training\.lr_groups: no trained parameter .* matches 'head'.*heads"),
        (
            {"lr_groups": {"model.*": 0.0}},
            r"a positive factor of training\.lr; to exclude parameters from the training, use",
        ),
        (
            {"lr_groups": {"*": 0.5, "model.*": 0.1}},
            r"training\.lr_groups\.model\.\*: everything that it matches is matched",
        ),
        ({"lora": {"rank": 2}}, r"'training\.lora' changes the matrices of a trained model"),
        ({"weighting": "softadpat"}, r"training\.weighting: unknown name 'softadpat'\. Did you mean 'softadapt'"),
        ({"weighting": {"name": "softadapt", "evry": 2}}, r"Did you mean 'every'"),
        ({"weighting": {"name": "softadapt", "every": 0}}, r"training\.weighting\.every is 0"),
        ({"weighting": "uncertainty"}, r"training\.weighting balances several targets, but the task has only one"),
    ],
)
def test_invalid_settings_are_refused(training, sentence, folder):
    with pytest.raises(ForgefieldError, match=sentence):
        train_only(config(folder, "refused", {"gap": {}}, training=training), fresh=True)


def test_low_rank_changes_of_what_is_not_a_matrix_are_refused(folder):
    made = config(folder, "no-lora", {"gap": {}}, "first", training={"lora": {"rank": 2, "targets": ["model.layer.*"]}})
    with pytest.raises(ForgefieldError, match=r"no weight matrix of the model that is larger than rank 2 matches"):
        train_only(made)
    made = config(folder, "no-fit", {"gap": {}}, "first", model={"shifts": "fit"})
    with pytest.raises(ForgefieldError, match=r"model\.shifts=fit fits shifts of energies, but the task has no energy"):
        train_only(made)


def test_a_deep_potential_that_gains_an_energy_has_its_shifts_fitted(folder, capsys):
    model = {
        "name": "deeppot",
        "descriptor": {"type": "se_e2_a", "neuron": [4, 8], "axis_neuron": 2},
        "fitting_net": {"neuron": [6]},
    }
    train_only(config(folder, "gap-alone", {"gap": {}}) | {"model": model})
    frames = property_frames(14, 0)
    for atoms in frames:
        atoms.calc.results["energy"] -= 20.0 * len(atoms)
    ase.io.write(folder / "lower.extxyz", frames, format="extxyz")
    still, lower = {"lr": 1e-30, "ema": None}, {"train": str(folder / "lower.extxyz")}
    run = train_only(config(folder, "gained", {"gap": {}, "energy": {}}, "gap-alone", training=still, data=lower))
    assert "Energy shifts fitted to 10 training frames" in capsys.readouterr().out
    record, shifts = run.info["initial_model"]["fitted_shifts"], run.info["model"]["out_bias"]
    assert record["rms_before"] > 10.0
    assert record["rms_after"] < 1.0
    assert run.load_potential("last").model.out_bias.tolist() == shifts == record["after"]
    with pytest.raises(ForgefieldError, match=r"not supported for models with branches"):
        _energy_terms({"name": "deeppot", "branches": {"wet": {}, "dry": {}}}, {}, None, None)
