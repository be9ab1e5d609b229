"""`forgefield convert-config`: the config that it writes is the same run as the input."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from forgefield.cli import main
from forgefield.config.loading import load_config
from tests.support.deepmd_inputs import WATER, changed

INPUTS: dict[str, dict[str, Any]] = {
    "water": WATER,
    "huber, auto batches, wsd": changed(
        {
            "loss": {"use_huber": True, "huber_delta": [0.01, 0.02, 0.03], "start_pref_v": 0.1, "limit_pref_v": 1},
            "training.training_data.batch_size": "auto:256",
            "training.training_data.sys_probs": [0.25, 0.75],
            "learning_rate": {"type": "wsd", "start_lr": 1e-3, "stop_lr": 1e-6, "warmup_ratio": 0.05},
            "optimizer": {"type": "AdamW", "weight_decay": 1e-3},
            "training.enable_ema": True,
            "training.tensorboard": True,
            "training.profiling": True,
        }
    ),
    "no validation, mae, frame parameters": changed(
        {
            "loss": {"loss_func": "mae"},
            "training.validation_data": ...,
            "model.fitting_net.numb_fparam": 2,
            "training.training_data.batch_size": [1, 2],
        }
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the data beside it."""
    for name in ("data_0", "data_1", "data_3"):
        (tmp_path / "data" / name / "set.000").mkdir(parents=True)
        (tmp_path / "data" / name / "type.raw").write_text("0 1 1\n")
        (tmp_path / "data" / name / "type_map.raw").write_text("O H\n")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def resolved(file: str | Path) -> dict[str, Any]:
    return asdict(load_config(file))


@pytest.mark.parametrize("name", INPUTS)
def test_training_from_the_config_is_training_from_the_input(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("input.json").write_text(json.dumps(INPUTS[name]))
    assert main(["convert-config", "input.json"]) == 0
    shown = capsys.readouterr().out
    assert main(["convert-config", "input.json", "-o", "water.yaml"]) == 0
    assert "forgefield train water.yaml" in capsys.readouterr().out
    assert Path("water.yaml").read_text() == shown
    assert resolved("water.yaml") == resolved("input.json")


def test_relative_paths_stay_where_they_mean_the_same_and_become_absolute_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("input.json").write_text(json.dumps(WATER))
    main(["convert-config", "input.json", "-o", "here.yaml"])
    assert yaml.safe_load(Path("here.yaml").read_text())["data"]["val"] == "../data/data_3"
    (folder / "deeper" / "still").mkdir(parents=True)
    main(["convert-config", "input.json", "-o", "deeper/still/there.yaml"])
    expected = resolved("input.json")
    monkeypatch.chdir(folder / "deeper" / "still")
    assert resolved("there.yaml") == expected


def test_comments_explain_settings_and_translated_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("input.json").write_text(json.dumps(WATER))
    main(["convert-config", "input.json"])
    text = capsys.readouterr().out
    assert text.startswith("# The run of input.json, an input of DeePMD-kit; written by `forgefield convert-config`.\n")
    assert "#   training.stat_file: " in text
    assert "lr: 0.001  # Learning rate." in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.json"], "config file gone.json not found"),
        (["own.yaml"], "own.yaml is not an input of DeePMD-kit"),
        (
            ["mace.yaml"],
            "mace.yaml is a config of MACE, which is not converted; write one for its data with `forgefield init a.xyz`",
        ),
        (["input.json", "-o", "out.json"], "a config ends in .yaml"),
        (["input.json", "-o", "own.yaml"], "own.yaml exists already; --force overwrites it"),
        (["input.json", "-o", "nowhere/out.yaml"], "there is no folder nowhere"),
        (["bad.json"], "unknown key 'training.numbsteps'. Did you mean 'numb_steps'?"),
    ],
)
def test_refusals(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("input.json").write_text(json.dumps(WATER))
    Path("bad.json").write_text(json.dumps(changed({"training.numbsteps": 5})))
    Path("own.yaml").write_text("data: {train: a.xyz}\n")
    Path("mace.yaml").write_text("train_file: a.xyz\nr_max: 5.0\n")
    assert main(["convert-config", *words]) == 2
    assert said in capsys.readouterr().err
