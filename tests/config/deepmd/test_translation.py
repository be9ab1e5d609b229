"""What the keys of a DeePMD-kit input become."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from forgefield.config.checking import unknown_key
from forgefield.config.deepmd import is_deepmd_input, translate
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.models.resolving import check_model
from forgefield.training.optim.optimisers import build_scheduler
from tests.support.deepmd_inputs import WATER, both, changed, translated

AUTO = {"bound": "lower", "by_source": True}


def test_the_water_example_as_a_whole() -> None:
    assert translated() == {
        "name": "input",
        "seed": 10,
        "data": {
            "species": ["O", "H"],
            "cutoff": 6.0,
            "reference_energies": "fit",
            "train": ["../data/data_0", "../data/data_1"],
            "batch": {"frames": 1},
            "val": "../data/data_3",
            "eval_batch": {"frames": 1},
        },
        "model": {
            "name": "deeppot",
            "descriptor": {
                "type": "se_e2_a",
                "sel": [46, 92],
                "rcut_smth": 0.5,
                "neuron": [25, 50, 100],
                "resnet_dt": False,
                "axis_neuron": 16,
                "type_one_side": True,
                "seed": 1,
            },
            "fitting_net": {"type": "ener", "neuron": [240, 240, 240], "resnet_dt": True, "seed": 1},
        },
        "task": {
            "energy": {"weight": 0.02, "schedule": {"kind": "lr", "to": 1.0}, "loss": "mse", "per_atom": "root"},
            "forces": {"weight": 1000.0, "schedule": {"kind": "lr", "to": 1.0}, "loss": "mse"},
        },
        "training": {
            "lr": 0.001,
            "scale_lr": "none",
            "scheduler": {"name": "exp", "decay_steps": 5000, "stop_lr": 3.51e-8},
            "optimizer": {"name": "adam"},
            "precision": "float64",
            "checkpoint": {"every_epochs": None, "every_steps": 10000, "keep": 5},
            "ema": None,
            "clip_norm": 5.0,
            "tensorboard": 0,
            "monitor": "val/forces_rmse",
        },
        "trainer": {"max_steps": 100000, "val_check_interval": 100, "check_val_every_n_epoch": None},
        "callbacks": [
            {"name": "forgefield.training.callbacks.lcurve.LearningCurve", "file": "lcurve.out", "every": 100}
        ],
    }


def test_the_input_is_left_as_it_was() -> None:
    before = json.dumps(WATER)
    translate(WATER, Path("input.json"))
    assert json.dumps(WATER) == before


CASES: list[tuple[dict[str, Any], str, Any]] = [
    # how long
    ({"training.numb_steps": ..., "training.stop_batch": 7}, "trainer.max_steps", 7),
    ({"training.numb_steps": ..., "training.num_step": 7}, "trainer.max_steps", 7),
    ({"training.numb_steps": 1e6}, "trainer.max_steps", 1000000),
    ({"training.numb_steps": ..., "training.num_epochs": 3}, "trainer.max_epochs", 3),
    # how much makes a batch
    ({"training.training_data.batch_size": 4}, "data.batch", {"frames": 4, "by_source": True}),
    ({"training.training_data.batch_size": [2, 2]}, "data.batch", {"frames": 2, "by_source": True}),
    ({"training.training_data.batch_size": [2, 3]}, "data.batch", {"by_source": [2, 3]}),
    ({"training.training_data.batch_size": "auto"}, "data.batch", {"atoms": 32, **AUTO}),
    ({"training.training_data.batch_size": ...}, "data.batch", {"atoms": 32, **AUTO}),
    ({"training.training_data.batch_size": "auto:512"}, "data.batch", {"atoms": 512, **AUTO}),
    (
        {"training.training_data.batch_size": "max:512"},
        "data.batch",
        {"atoms": 512, "oversized": "alone", "by_source": True},
    ),
    (
        {"training.training_data.batch_size": "filter:512"},
        "data.batch",
        {"atoms": 512, "oversized": "skip", "by_source": True},
    ),
    ({"training.training_data.batch_size": "mixed:8"}, "data.batch", {"frames": 8}),
    ({"training.training_data.batch_size": "mix:512"}, "data.batch", {"atoms": 512, "oversized": "alone"}),
    ({"training.validation_data.batch_size": "auto:64"}, "data.eval_batch", {"atoms": 64}),
    ({"training.validation_data.batch_size": [8, 4]}, "data.eval_batch", {"frames": 4}),
    # how often systems are drawn
    ({"training.training_data.auto_prob": "prob_uniform"}, "data.sampling", "uniform"),
    ({"training.training_data.auto_prob": "prob_sys_size"}, "data.sampling", None),
    (
        {"training.training_data.auto_prob_style": "prob_sys_size;0:1:0.2;1:2:0.8"},
        "data.sampling",
        "prob_sys_size;0:1:0.2;1:2:0.8",
    ),
    ({"training.training_data.sys_probs": [0.2, 0.8]}, "data.sampling", [0.2, 0.8]),
    ({"training.training_data.sys_weights": [0.2, -1]}, "data.sampling", [0.2, -1.0]),
    # validation
    ({"training.validation_data": ...}, "data.val", None),
    ({"training.validation_data": ...}, "trainer", {"max_steps": 100000}),
    ({"training.validation_data": ...}, "training.monitor", "train/forces_rmse"),
    ({"loss.start_pref_f": 0, "loss.limit_pref_f": 0}, "training.monitor", "val/energy_rmse"),
    ({"validating.full_validation": True}, "training.monitor", "val/energy_mae"),
    (
        {"validating.full_validation": True, "validating.validation_metric": "f:rmse"},
        "training.monitor",
        "val/forces_rmse",
    ),
    ({"validating.full_validation": True, "validating.full_val_start": 1}, "training.monitor", "val/forces_rmse"),
    # learning rate
    ({"learning_rate.stop_lr": ...}, "training.scheduler.stop_lr", 5e-8),
    (
        {"learning_rate.stop_lr": ..., "learning_rate.stop_lr_ratio": 0.1, "learning_rate.smooth": True},
        "training.scheduler",
        {"name": "exp", "decay_steps": 5000, "smooth": True, "stop_lr_ratio": 0.1},
    ),
    (
        {"learning_rate": {"type": "cosine", "start_lr": 0.01, "stop_lr": 1e-5, "warmup_steps": 10}},
        "training.scheduler",
        {"name": "cosine_to", "stop_lr": 1e-5, "warmup_steps": 10},
    ),
    (
        {"learning_rate": {"type": "wsd", "start_lr": 0.01, "decay_phase_ratio": 0.2, "warmup_ratio": 0.1}},
        "training.scheduler",
        {
            "name": "wsd",
            "decay_phase_ratio": 0.2,
            "decay_type": "inverse_linear",
            "stop_lr": 5e-8,
            "warmup_ratio": 0.1,
        },
    ),
    ({"learning_rate.scale_by_worker": "sqrt"}, "training.scale_lr", "sqrt"),
    ({"learning_rate.warmup_start_factor": 0.5}, "training.scheduler.warmup_start_factor", 0.5),
    # optimiser
    (
        {"optimizer": {"type": "Adam", "adam_beta1": 0.8, "weight_decay": 1e-5}},
        "training.optimizer",
        {"name": "adam", "betas": [0.8, 0.999], "weight_decay": 1e-5},
    ),
    (
        {"optimizer": {"type": "AdamW", "weight_decay": 0.01}},
        "training.optimizer",
        {"name": "adamw", "weight_decay": 0.01},
    ),
    # the run
    ({"training.seed": ...}, "seed", 0),
    ({"training.max_ckpt_keep": 9}, "training.checkpoint.keep", 9),
    ({"training.ckpt_keep_ratio": 0.35}, "training.checkpoint.keep", 4),
    ({"training.enable_ema": True}, "training.ema", 0.999),
    ({"training.enable_ema": True, "training.ema_decay": 0.9}, "training.ema", 0.9),
    ({"training.gradient_max_norm": 0}, "training.clip_norm", None),
    ({"training.tensorboard": True}, "training.tensorboard", 1),
    ({"training.tensorboard": True, "training.tensorboard_freq": 50}, "trainer.log_every_n_steps", 50),
    ({"training.enable_compile": True}, "training.engine", "compile"),
    ({"training.disp_training": False}, "callbacks", []),
    ({"training.disp_file": "curves/a.out"}, "callbacks.0.file", "curves/a.out"),
    ({"training.profiling": True, "training.profiling_file": "trace.json"}, "trainer.profiler.filename", "trace"),
    # the model
    ({"model.descriptor.type": "se_a"}, "model.descriptor.type", "se_e2_a"),
    ({"model.descriptor.axis_neuron": ..., "model.descriptor.n_axis_neuron": 8}, "model.descriptor.axis_neuron", 8),
    ({"model.fitting_net.neuron": ..., "model.fitting_net.n_neuron": [8]}, "model.fitting_net.neuron", [8]),
    ({"model.descriptor.sel": "auto:1.5"}, "model.descriptor.sel", None),
    ({"model.descriptor.rcut": ...}, "data.cutoff", 6.0),
    ({"model.pair_exclude_types": [[0, 1]]}, "model.pair_exclude_types", [[0, 1]]),
    ({"model.preset_out_bias": {"energy": [-1.5, 2]}}, "model.out_bias", [-1.5, 2.0]),
    ({"model.fitting_net.numb_fparam": 2}, "data.labels.fields", {"fparam": {"per": "frame", "shape": [2]}}),
    ({"model.fitting_net.numb_aparam": 1}, "data.labels.fields", {"aparam": {"per": "atom", "shape": [1]}}),
]


@pytest.mark.parametrize(("changes", "key", "value"), CASES, ids=[f"{i}-{case[1]}" for i, case in enumerate(CASES)])
def test_keys_become_settings(changes: dict[str, Any], key: str, value: Any) -> None:
    found: Any = translated(changes)
    for part in key.split("."):
        found = found[int(part)] if isinstance(found, list) else found.get(part)
    assert found == value


@pytest.mark.parametrize(
    ("descriptor", "fitting", "training", "parts"),
    [
        (None, None, "float64", (None, None)),
        ("float32", "single", "float32", (None, None)),
        ("default", "double", "float64", (None, None)),
        ("float32", "float64", "float64", ("float32", "float64")),
    ],
)
def test_precision_is_that_of_the_training_where_both_parts_agree(
    descriptor: str | None, fitting: str | None, training: str, parts: tuple[str | None, str | None]
) -> None:
    found = translated({"model.descriptor.precision": descriptor, "model.fitting_net.precision": fitting})
    assert found["training"]["precision"] == training
    assert tuple(found["model"][part].get("precision") for part in ("descriptor", "fitting_net")) == parts


SINGLE = {"model.descriptor.precision": "float32", "model.fitting_net.precision": "float32"}


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({"training.enable_tf32": True}, "tf32"),
        ({"training.mixed_precision": {"compute_prec": "bfloat16"}}, "bf16-mixed"),
        ({"training.mixed_precision": {"compute_prec": "float16", "output_prec": "float32"}}, "fp16-mixed"),
        ({"training.mixed_precision": {"output_prec": "float64"}}, "fp16-mixed"),
    ],
)
def test_faster_arithmetic(changes: dict[str, Any], precision: str) -> None:
    assert translated({**SINGLE, **changes})["training"]["precision"] == precision


def test_types_without_names_are_those_of_sel() -> None:
    config = translated({"model.type_map": ...})
    assert config["model"]["type_names"] == ["type_0", "type_1"]
    assert config["data"]["species"] == ["He", "Ne"]


def test_a_short_range_table_next_to_the_input_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tab.txt").write_text("0 0 0 0\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    table = {"model.use_srtab": "tab.txt", "model.smin_alpha": 0.1, "model.sw_rmin": 0.5, "model.sw_rmax": 1}
    model = translated(table, file=str(tmp_path / "input.json"))["model"]
    assert model["use_srtab"] == str(tmp_path / "tab.txt")
    assert (model["smin_alpha"], model["sw_rmin"], model["sw_rmax"]) == (0.1, 0.5, 1.0)


# --- the loss


def weights(start: float, limit: float) -> dict[str, Any]:
    return {"weight": start, "schedule": {"kind": "lr", "to": limit}}


ROOT, PER_ATOM = {"loss": "mse", "per_atom": "root"}, {"loss": "mse", "per_atom": True}


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        ({}, {"energy": {**weights(0.02, 1), **ROOT}, "forces": {**weights(1000, 1), "loss": "mse"}}),
        (
            {"start_pref_v": 0.02, "limit_pref_v": 0.02, "intensive_ener_virial": True},
            {
                "energy": {**weights(0.02, 1), **PER_ATOM},
                "forces": {**weights(1000, 1), "loss": "mse"},
                "virial": {"weight": 0.02, **PER_ATOM},
            },
        ),
        (
            {"loss_func": "mae", "start_pref_v": 1, "limit_pref_v": 2},
            {
                "energy": {**weights(0.02, 1), "loss": "mae", "per_atom": True},
                "forces": {**weights(1000, 1), "loss": "mae"},
                "virial": {**weights(1, 2), "loss": "mae", "per_atom": True},
            },
        ),
        (
            {"use_huber": True, "huber_delta": [0.1, 0.2, 0.3], "start_pref_v": 1, "limit_pref_v": 1},
            {
                "energy": {**weights(0.02, 1), "loss": "huber", "huber_delta": 0.1, "per_atom": True},
                "forces": {**weights(1000, 1), "loss": "huber", "huber_delta": 0.2},
                "virial": {"weight": 1.0, "loss": "huber", "huber_delta": 0.3, "per_atom": True},
            },
        ),
        ({"start_pref_e": 0, "limit_pref_e": 0}, {"forces": {**weights(1000, 1), "loss": "mse"}}),
        # Documented as a term that grows from nothing.
        (
            {"start_pref_e": 0, "limit_pref_f": 1000},
            {"energy": {**weights(0, 1), **ROOT}, "forces": {"weight": 1000.0, "loss": "mse"}},
        ),
    ],
)
def test_prefactors_become_weights_and_norms_per_atom(loss: dict[str, Any], task: dict[str, Any]) -> None:
    assert translated({"loss": loss})["task"] == task
    assert translated({"loss": {"type": "ener_hess", **loss}})["task"] == task


def test_a_missing_loss_is_the_default_one() -> None:
    assert translated({"loss": ...})["task"] == translated()["task"]


def test_curves_of_absolute_errors_are_labelled() -> None:
    curve = translated({"loss.loss_func": "mae"})["callbacks"][0]
    assert curve["errors"] == "mae"


def test_a_sum_of_a_network_and_a_table_is_a_model_with_a_table() -> None:
    network = {"descriptor": {"type": "se_atten", "sel": 40, "rcut": 4.0}, "fitting_net": {"neuron": [4]}}
    table = {"type": "pairtab", "tab_file": "d3.txt", "rcut": 9.0, "sel": 500}
    model = {"type": "linear_ener", "type_map": ["O", "H"], "weights": "sum", "models": [network, table]}
    config = translated({"model": model})
    assert config["data"]["cutoff"] == 9.0
    inside = {"type": "se_atten", "sel": 40, "rcut": 4.0}
    assert config["model"]["descriptor"] == {"type": "hybrid", "list": [inside]}
    assert Path(config["model"]["pair_table"]).name == "d3.txt"
    assert config["model"]["pair_table_cutoff"] == 9.0
    for change, said in (
        ({"weights": "mean"}, "'model.weights' is 'mean'"),
        ({"models": [table, table]}, "'model.models' has 0 networks and 2 tables"),
        ({"weights": [1, 1, 1]}, "'model.weights' must be sum, mean, or a list of 2 numbers"),
        ({"models": [network, {**network, "type_map": ["H", "O"]}]}, "is not that of 'model.type_map'"),
        ({"models": [{"type": "frozen", "model_file": "a.pb"}]}, "contains frozen models"),
    ):
        with pytest.raises(ForgefieldError, match=said):
            translated({"model": {**model, **change}})


def test_a_sum_of_networks_is_a_model_with_networks() -> None:
    far, near = (
        {"descriptor": {"type": "se_atten", "sel": 40, "rcut": rcut}, "fitting_net": {"neuron": [4]}}
        for rcut in (6.0, 4.0)
    )
    config = translated({"model": {"type": "linear_ener", "type_map": ["O", "H"], "models": [far, near]}})
    model = config["model"]
    assert config["data"]["cutoff"] == 6.0
    assert model["descriptor"] == {"type": "se_atten", "sel": 40}
    assert model["network_weight"] == 0.5
    inside = {"type": "hybrid", "list": [{"type": "se_atten", "sel": 40, "rcut": 4.0}]}
    assert model["networks"] == [{"descriptor": inside, "fitting_net": {"type": "ener", "neuron": [4]}, "weight": 0.5}]
    check_model(model)


# --- systems


def system(folder: Path, *, names: bool = True) -> Path:
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text("0 1 1\n")
    if names:
        (folder / "type_map.raw").write_text("O H\n")
    np.save(folder / "set.000" / "coord.npy", np.zeros((1, 9)))
    return folder


def train_of(systems: Any, file: Path, **more: Any) -> Any:
    data = {"systems": systems, "batch_size": 1, **more}
    return translate(changed({"training.training_data": data}), file)["data"]["train"]


def test_folders_are_searched_as_deepmd_kit_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "input.json"
    for name in ("plain/a", "plain/deep/b", "mixed/c", "nested/d", "nested/d/inner/e"):
        system(tmp_path / name)
    (tmp_path / "mixed" / "notes.xyz").write_text("not a structure that is meant\n")
    system(tmp_path / "nameless" / "f", names=False)
    system(tmp_path / "mixed" / "g", names=False)
    assert train_of("plain", file) == "plain"
    assert train_of("plain/a", file) == "plain/a"
    assert train_of(["plain", "nested"], file) == ["plain", "nested/d", "nested/d/inner/e"]
    assert train_of("nameless", file) == {"path": "nameless", "type_map": ["O", "H"]}
    assert train_of("mixed/", file) == ["mixed/c", {"path": "mixed/g", "type_map": ["O", "H"]}]
    assert train_of("plain", file, rglob_patterns=["deep/*"]) == "plain/deep/b"
    assert train_of(["gone", "water.h5#/a"], file) == ["gone", "water.h5#/a"]


def test_systems_are_found_next_to_the_input_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    system(tmp_path / "nameless" / "f", names=False)
    assert train_of("nameless", tmp_path / "input.json") == {"path": "nameless", "type_map": ["O", "H"]}


# --- older inputs


def test_input_of_version_1() -> None:
    data = {"systems": ["a", "b"], "set_prefix": "set", "batch_size": [4, 4], "auto_prob_style": "prob_uniform"}
    training = {**data, "stop_batch": 10000, "seed": 1, "numb_test": 10, "disp_freq": 100, "save_ckpt": "model.ckpt"}
    rate = {"type": "exp", "start_lr": 0.005, "decay_steps": 5000, "decay_rate": 0.95}
    found = translated({"training": {**training, "disp_training": True, "time_training": True}, "learning_rate": rate})
    assert found["data"]["train"] == ["a", "b"]
    assert found["data"]["batch"] == {"frames": 4, "by_source": True}
    assert found["data"]["sampling"] == "uniform"
    assert found["trainer"] == {"max_steps": 10000}
    assert found["training"]["scheduler"]["stop_lr"] == pytest.approx(0.005 * 0.95**2)
    assert "decay_rate" not in found["training"]["scheduler"]


def test_optimiser_and_warm_up_at_their_former_location() -> None:
    found = translated({"training.opt_type": "AdamW", "training.weight_decay": 0.1, "training.warmup_steps": 50})
    assert found["training"]["optimizer"] == {"name": "adamw", "weight_decay": 0.1}
    assert found["training"]["scheduler"]["warmup_steps"] == 50


# --- notes


def test_keys_without_an_effect_are_reported() -> None:
    notes = both({"training.save_ckpt": "ckpt/model", "optimizer": {"type": "AdamW"}}).notes
    assert set(notes) == {
        "model.data_stat_nbatch",
        "training.stat_file",
        "training.save_ckpt",
        "training.validation_data.numb_btch",
        "optimizer.weight_decay",
    }


def test_a_virial_without_labels_is_not_trained(tmp_path: Path) -> None:
    water = {"training.training_data.systems": [str(tmp_path)], "loss.start_pref_v": 0.02, "loss.limit_pref_v": 1}
    (tmp_path / "type.raw").write_text("0\n")
    result = both(water)
    assert "virial" not in result.config["task"]
    assert "virial.npy" in result.notes["loss.start_pref_v"]
    (tmp_path / "set.000").mkdir()
    (tmp_path / "set.000" / "virial.npy").touch()
    assert "virial" in both(water).config["task"]


def test_systems_of_both_training_and_validation_are_allowed_with_a_note() -> None:
    systems = {"training.validation_data.systems": ["../data/data_1", "../data/data_3"]}
    result = both(systems)
    assert result.config["data"]["overlap"] == "allow"
    assert result.notes["training.validation_data.systems"].startswith("../data/data_1: also in training_data, so")
    assert "overlap" not in translated()["data"]


# --- the page for users

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "from-deepmd.md").read_text(encoding="utf-8")


def test_settings_that_the_page_names_exist() -> None:
    named = set(
        re.findall(r"`((?:data|training|trainer|task|model)\.[a-z_.]+)[:`]", PAGE.partition("## What is better")[0])
    )
    rows = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("|")]
    ours = {key for key in named if any(f"`{key}" in row for row in rows)}
    assert len(ours) > 20
    assert [key for key in ours if unknown_key(key)] == []


def test_schedules_of_the_page_can_be_built() -> None:
    examples = re.findall(r"^(training: .*)$", PAGE, flags=re.MULTILINE)
    assert len(examples) == 3
    for text in examples:
        training = yaml.safe_load(text)["training"]
        optimiser = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=training["lr"])
        build_scheduler(training["scheduler"], optimiser, monitor="", validate_every=1, epochs=-1, steps=lambda: 1000)


# --- as a config file


def test_what_is_an_input_of_deepmd_kit() -> None:
    assert is_deepmd_input(WATER)
    assert is_deepmd_input({"model": {"model_dict": {}}, "training": {}})
    assert is_deepmd_input({"model": {"type": "linear_ener", "models": []}, "training": {}})
    assert is_deepmd_input({"nvnmd": {}, "training": {}})
    assert not is_deepmd_input({"model": {"name": "nequip"}, "training": {"lr": 1}})
    assert not is_deepmd_input(translated())
    assert not is_deepmd_input({"model": {"type_map": []}})
    assert not is_deepmd_input([])


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_an_input_loads_like_a_config_and_takes_overrides(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"input{suffix}"
    file.write_text(json.dumps(WATER) if suffix == ".json" else yaml.safe_dump(WATER, sort_keys=False))
    config = load_config(file, ["training.lr=1e-4", "++trainer.max_steps=5", "training.ema=0.9", "~task.forces"])
    assert (config.name, config.training.lr, config.trainer["max_steps"], config.training.ema) == (
        "input",
        1e-4,
        5,
        0.9,
    )
    assert config.training.scheduler["stop_lr"] == 3.51e-8
    assert config.task.forces is None
    assert config.task.energy.weight == 0.02
    assert config.model["descriptor"]["sel"] == [46, 92]
    assert config.data.val == str(Path.cwd() / "../data/data_3")
    loaded = load_config(file)
    assert load_config(loaded) == loaded
