"""Configs and run folders that are wrong in unusual ways: one sentence that names the file, no traceback and no long wait."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forgefield.config.loading import load_config
from forgefield.data.reading import read_table
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from forgefield.untrusted.documents import load_yaml
from tests.support.helpers import write_properties

BASE = "data: {train: a.extxyz, cutoff: 4}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE + "defaults: 5\n", "defaults must be a list"),
        (BASE + "defaults: {a: 1}\n", "defaults must be a list"),
        (BASE + "defaults: [5]\n", "Unsupported type in defaults"),
        ("data: &a {train: *a}\n", "the alias in line 1 refers to itself"),
        ("data: &a [*a]\n", "refers to itself"),
        (BASE + "x: &x\n  <<: *x\n", "refers to itself"),
        (BASE + BOMB, "its aliases unfold to"),
        ("a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(2000)), "nested more than 100"),
        ("[" * 50_000, "nested"),
        (BASE + "name: !!int a\n", "invalid literal"),
        (BASE + "seed: -1\n", "line 2: 'seed' must be a whole number from 0 to 4294967295, not -1"),
        (BASE + "seed: 4294967296\n", "'seed' must be a whole number from 0"),
    ],
)
def test_configs(tmp_path, text, message):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ForgefieldError, match=message) as error:
        load_config(file)
    assert "my.yaml" in str(error.value)


def test_seeds_of_overrides():
    with pytest.raises(ForgefieldError, match=r"command line \('seed=-1'\)"):
        load_config(None, ["seed=-1"])
    with pytest.raises(ForgefieldError, match="split_seed"):
        load_config(None, ["data.split_seed=-3"])


def test_deeply_nested_json_inputs(tmp_path):
    (tmp_path / "input.json").write_text("[" * 50_000)
    with pytest.raises(ForgefieldError, match=r"input\.json: this is not valid JSON: it is nested too deeply"):
        load_config(tmp_path / "input.json")


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 100_000])
def test_the_fast_yaml_loader_does_not_overflow(text):
    """The loader written in C ends the process otherwise."""
    with pytest.raises(Exception, match="nested more than"):
        load_yaml(text)


def test_aliases_are_still_what_they_stand_for():
    assert load_yaml("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}


GOOD = {"model": {"name": "nequip", "species": ["Cu"]}, "species": ["Cu"], "cutoff": 4.0, "precision": "float64"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no 'model'"),
        ([], "it must contain a mapping"),
        ({**GOOD, "model": 5}, "'model' must be a mapping of options, not 5"),
        ({**GOOD, "model": None}, "has no 'model'"),
        ({**GOOD, "species": "Cu"}, "'species' must be a list"),
        ({**GOOD, "cutoff": "4"}, "'cutoff' must be a number"),
        ({**GOOD, "precision": 32}, "'precision' must be text"),
        ({key: value for key, value in GOOD.items() if key != "precision"}, "has no 'precision'"),
        ({**GOOD, "model": {**GOOD["model"], "num_layers": 10**11}}, r"'model\.num_layers' is 100000000000, too large"),
        (
            {**GOOD, "model": {**GOOD["model"], "num_features": 10**9}},
            r"'model\.num_features' is 1000000000, too large",
        ),
        ({**GOOD, "model": {**GOOD["model"], "predicts": 3}}, "must describe heads"),
        ({**GOOD, "model": {**GOOD["model"], "predicts": {"heads": {"a": 1}}}}, "must describe heads"),
    ],
)
def test_records_of_runs(tmp_path, content, message):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "run.json").write_text(json.dumps(content))
    run = Run.open(tmp_path)
    with pytest.raises(ForgefieldError, match=message) as error:
        run.load_model()
    assert "run.json" in str(error.value)


def test_a_config_of_a_run_that_is_a_bomb(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(GOOD))
    (tmp_path / "config.yaml").write_text(BOMB)
    with pytest.raises(ForgefieldError, match="unfold"):
        _ = Run.open(tmp_path).config


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o500)
    _refused(tmp_path, monkeypatch)


def test_a_cache_folder_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("not a folder")
    _refused(tmp_path, monkeypatch)


def _refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path / "cache"))
    data = write_properties(tmp_path / "a.extxyz", 2)
    with pytest.raises(ForgefieldError, match="set FORGEFIELD_CACHE to another folder"):
        read_table(str(data), lazy=True)
