"""`key=value` with every verb, hints that lead to the right place, and one sentence where a package is missing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import ase.io
import pytest

from forgefield import api, evaluation
from forgefield.cli import main
from forgefield.cli.completion import config_keys
from forgefield.config.checking import schema_keys, trainer_keys
from forgefield.config.peer_terms import KEYS
from forgefield.models.registry import registered_class
from tests.support.helpers import tiny_config, write_emt


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    return api.train(tiny_config(folder, trainer={"max_epochs": 1}))


@pytest.fixture
def frames(tmp_path):
    return write_emt(tmp_path / "new.extxyz", 3, seed=8)


def test_test_takes_batches_and_test_sets(run, frames, capsys, monkeypatch):
    monkeypatch.setattr("forgefield.api.predictions.write_report", lambda path: None)
    monkeypatch.setattr(evaluation, "write_parity_png", lambda path, name: None)
    assert main(["test", str(run.path), "data.batch.frames=1", f"data.test={{hot: {frames}}}"]) == 0
    assert "test hot" in capsys.readouterr().out
    assert (run.path / "test-hot.json").exists()
    assert main(["test", str(run.path), "--data", str(frames), "data.test=x.xyz"]) == 2
    assert "--data and data.test both" in capsys.readouterr().err


def test_predict_takes_the_size_of_batches_and_refuses_to_overwrite(run, frames, tmp_path, capsys):
    out = tmp_path / "out.extxyz"
    words = ["predict", str(run.path), str(frames), "-o", str(out)]
    assert main([*words, "data.batch.frames=1"]) == 0
    assert len(ase.io.read(out, ":")) == 3
    before = out.read_bytes()
    assert main(words) == 2
    assert "exists already; --force" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main([*words, "--force"]) == 0
    assert main([*words[:3], "-o", str(frames), "--overwrite"]) == 2
    assert "is one of the files to predict" in capsys.readouterr().err


def test_data_verbs_take_settings_anywhere(frames, tmp_path, capsys):
    assert main(["data", "info", str(frames), "data.units.energy=kcal/mol", "data.cutoff=4"]) == 0
    with_setting = capsys.readouterr().out
    assert main(["data", "info", str(frames), "--energy-unit", "kcal/mol", "--cutoff", "4"]) == 0
    assert capsys.readouterr().out == with_setting
    assert main(["data", "convert", "data.labels.stress=none", str(frames), str(tmp_path / "out.extxyz")]) == 0
    assert "stress" not in ase.io.read(tmp_path / "out.extxyz").calc.results


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["test", "RUN", "training.lr=1"], "'training.lr' does not apply to test"),
        (
            ["predict", "RUN", "FILE", "-o", "x.xyz", "trainer.max_epochs=1"],
            "'trainer.max_epochs' does not apply to predict",
        ),
        (["check", "RUN", "training.lr=1"], "'training.lr' does not apply to check"),
        (["report", "RUN", "training.lr=1"], "'training.lr=1': forgefield report takes no settings"),
        (["export", "RUN", "--to", "deepmd", "-o", "x.dp", "seed=1"], "'seed=1': forgefield export takes no settings"),
        (["data", "info", "FILE", "training.lr=1"], "'training.lr' does not apply to data info"),
        (["data", "info", "FILE", "data.unit.energy=eV"], "Did you mean 'data.units.energy'?"),
        (["train", "--restart", "x.yaml"], "run the same command again"),
        (["train", "--log-path", "x"], "-l FILE"),
        (["train", "--r_max", "5"], "data.cutoff=VALUE"),
        (["train", "--E0s", "average"], "data.reference_energies=VALUE"),
        (["train", "--frsh"], "Did you mean '--fresh'?"),
        (["train", "CONFIG", "model.r_max=5"], "Did you mean 'data.cutoff'?"),
        (["train", "CONFIG", "data.r_max=5"], "Did you mean 'data.cutoff'?"),
        (["train", "CONFIG", "training.model_dtype=float64"], "Did you mean 'training.precision'?"),
        (["train", "CONFIG", "type_names=[H]"], "Did you mean 'data.species'?"),
        (["train", "CONFIG", "training.decay_steps=5000"], "Did you mean 'training.scheduler'?"),
        (["train", "CONFIG", "start_pref_f=1000"], "Did you mean 'task.forces.weight'?"),
        (["train", "CONFIG", "data.systems=water"], "Did you mean 'data.train'?"),
        (["train", "CONFIG", "training.start_swa=100"], "Did you mean 'training.swa.start'?"),
    ],
)
def test_what_does_not_apply_is_refused_by_name_with_the_right_hint(words, message, run, frames, tmp_path, capsys):
    config = tmp_path / "my.yaml"
    config.write_text(f"data: {{train: {frames}}}\nmodel: {{name: nequip}}\n")
    places = {"RUN": str(run.path), "FILE": str(frames), "CONFIG": str(config)}
    assert main([places.get(word, word) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("Did you mean") <= 1


def test_a_missing_package_is_one_clear_error_with_the_command(frames, tmp_path):
    """In a process of its own, in which the package cannot be imported."""
    config = tmp_path / "my.yaml"
    config.write_text(
        f"data: {{train: {frames}, val: 1, cutoff: 3.5}}\nmodel: {{name: nequip, preset: S}}\n"
        "trainer: {max_epochs: 1, accelerator: cpu, logger: {name: lightning.pytorch.loggers.WandbLogger}}\n"
    )
    script = "import sys; sys.modules['wandb'] = None; from forgefield.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "train", str(config), f"out={tmp_path}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install wandb" in done.stderr


def test_every_hint_for_a_term_of_another_program_names_a_setting_that_exists():
    grid = {f"data.points.energies.{key}" for key in ("levels", "spacing", "first")}  # keys of a mapping
    settings = {*schema_keys(), *config_keys(), *grid, *(f"trainer.{key}" for key in trainer_keys())}
    assert {key for key in KEYS.values() if not key.startswith("model.")} <= settings
    models = ("nequip", "allegro", "deeppot", "mace")
    options = {f"model.{entry.name}" for name in models for entry in fields(registered_class(name).Options)}
    assert {key for key in KEYS.values() if key.startswith("model.")} - options <= {
        "model.activation"
    }  # of LDOS networks
