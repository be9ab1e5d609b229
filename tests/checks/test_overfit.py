"""`forgefield check --overfit`: a model that can learn a batch passes, and the target that does not go down is named."""

from __future__ import annotations

import pytest
import yaml

from forgefield.bench.step import bare_step
from forgefield.checks.overfit import OverfitResult, TargetResult, curve, overfit_config
from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.training.engines.engine import Engine
from tests.support.deepmd_systems import several_input
from tests.support.helpers import PROPERTIES, tiny_config, write_properties


def config_file(folder, **changes) -> str:
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(tiny_config(folder, **changes)))
    return str(path)


def test_a_batch_that_is_learnt_passes(tmp_path, capsys):
    assert (
        main(["check", "--overfit", config_file(tmp_path), "--goal", "0.5", "--steps", "120", "data.batch.frames=1"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "The model can learn this batch." in printed
    assert printed.count("ok ") == 2
    assert "*" in printed
    assert "meV/atom" in printed


def test_a_target_that_does_not_go_down_is_named(tmp_path, capsys):
    task = {"energy": {}, "forces": {"weight": 0.0}}
    words = ["--goal", "0.3", "--steps", "60", "data.batch.frames=1"]
    assert main(["check", "--overfit", config_file(tmp_path, task=task), *words]) == 1
    printed = capsys.readouterr().out
    assert "forces" in printed.partition("The error of ")[2].partition(" does not decrease to 30%")[0]
    assert "FAILED" in printed


def test_branches_are_learnt_together(tmp_path, capsys):
    assert main(["check", "--overfit", str(several_input(tmp_path)), "--steps", "1", "data.batch.frames=9"]) == 1
    printed = capsys.readouterr().out
    assert all(f"{name}      FAILED" in printed for name in ("wet.energy", "wet.forces", "dry.energy"))


def test_heads_with_dropout_are_trained(tmp_path):
    made = tiny_config(tmp_path, task={"gap": {}})
    made["data"] |= {"train": str(write_properties(tmp_path / "p.extxyz", 12)), "labels": {"fields": PROPERTIES}}
    made["model"]["heads"] = {"gap": {"hidden": [8], "dropout": 0.2}}
    config = load_config(made)
    losses = overfit_config(config, steps=2, goal=0.01).losses
    assert len(losses) == 2
    step = bare_step(config)
    step.run(Engine(step.function("double")), step.first_batch())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--overfit", "--frames", "3"], "--frames cannot be combined with --overfit"),
        (["--steps", "3"], "--steps needs --overfit"),
        (["--overfit", "--goal", "2"], "--goal between 0 and 1"),
    ],
)
def test_options_that_do_not_go_together(words, said, tmp_path, capsys):
    assert main(["check", config_file(tmp_path), *words]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_is_left_is_of_the_first_error():
    assert TargetResult("energy", 100.0, 4.0, 50.0, "meV/atom").remaining == pytest.approx(0.04)
    assert TargetResult("energy", 1e-9, 1.0, 500.0, "meV/atom").remaining == pytest.approx(0.02)
    assert not OverfitResult(0.05).passed


def test_the_curve_goes_from_its_largest_to_its_smallest():
    lines = curve([10.0 ** (-i / 10) for i in range(50)], width=25, height=5)
    assert lines[0].startswith(" 1.0e+00") or lines[0].startswith(" 8.9e-01")
    assert lines[0].index("*") < lines[4].index("*")
