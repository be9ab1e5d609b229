"""Several test sets: named in the config or given one after the other, each keeps its results and is in the report."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from forgefield import api, evaluation
from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.inference.predict import predict_file
from forgefield.report.analysis import predictions_from_npz
from forgefield.training.run.summary import end_summary
from tests.support.helpers import tiny_config, write_emt


def stored(run, name):
    return json.loads((run.path / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for name, seed, n in (("cold", 11, 4), ("hot", 12, 3)):
        write_emt(folder / f"{name}.extxyz", n, seed=seed)
    for place in ("a", "b"):
        (folder / place).mkdir()
        write_emt(folder / place / "same.extxyz", 3, seed=ord(place))
    return folder


@pytest.fixture
def no_figures(monkeypatch):
    """Reports take most of the time of a test; here only the files with numbers matter."""
    monkeypatch.setattr("forgefield.api.predictions.write_report", lambda path: None)
    monkeypatch.setattr(evaluation, "write_parity_png", lambda path, name: None)


@pytest.fixture(scope="module")
def named(folder):
    test = {"300K": str(folder / "cold.extxyz"), "600K": [str(folder / "hot.extxyz"), str(folder / "cold.extxyz")]}
    return api.train(tiny_config(folder, name="named", data={"test": test}))


@pytest.fixture(scope="module")
def plain_run(folder):
    return api.train(tiny_config(folder, name="plain"))


def test_the_result_panel_names_every_set_in_full(tmp_path):
    errors = {"energy_mae": 1.0, "energy_rmse": 2.0, "forces_mae": 3.0, "forces_rmse": 4.0}
    results = {"val": errors, "test-cold": errors, "test-hot": errors}
    for width in (80, 200):
        console = Console(width=width, file=io.StringIO())
        end_summary(console, tmp_path, results, [])
        shown = console.file.getvalue()
        assert all(name in shown for name in ("validation", "test cold", "test hot", "meV/atom"))
        assert "\u2026" not in shown  # nothing is cut off


def test_each_named_set_has_results_of_its_own(named, folder, no_figures):
    assert not (named.path / "test.json").exists()
    for name, files, n in (("300K", ["cold"], 4), ("600K", ["hot", "cold"], 7)):
        result = stored(named, f"test-{name}")
        assert result["frames"] == n
        again = api.test(named, [str(folder / f"{file}.extxyz") for file in files])
        assert result["errors"] == pytest.approx(again, rel=1e-6)
    log = (named.path / "log.txt").read_text()
    assert "test 300K" in log
    assert "test 600K" in log


def test_all_sets_are_in_the_report(named):
    page = (named.path / "report.html").read_text()
    for words in ("test 300K", "test 600K", "Test 300K · 4 frames", "Test 600K · 7 frames", "Validation · "):
        assert words in page
    assert "Not in this run folder" not in page


def test_worst_frames_are_named_by_file_and_index(named, folder):
    found = predictions_from_npz(named.path / "predictions" / "test-600K.npz")
    origins = [found.origin(i) for i in range(7)]
    assert [index for _, index in origins] == [0, 1, 2, 0, 1, 2, 3]
    assert ["hot" in file for file, _ in origins] == [True] * 3 + [False] * 4
    assert "hot.extxyz" in (named.path / "report.html").read_text()


def test_the_command_without_data_tests_every_named_set(named, folder, capsys, no_figures):
    before = {name: stored(named, f"test-{name}")["errors"] for name in ("300K", "600K")}
    assert main(["test", str(named.path)]) == 0
    shown = capsys.readouterr().out
    assert "test 300K" in shown
    assert "test 600K" in shown
    assert {name: stored(named, f"test-{name}")["errors"] for name in before} == {
        name: pytest.approx(errors, rel=1e-6) for name, errors in before.items()
    }
    assert main(["test", str(named.path), "--which", "last"]) == 0
    assert stored(named, "test-300K")["weights"] == "best"
    assert stored(named, "test-300K-last")["weights"] == "last"


def test_results_on_other_files_of_the_same_name_are_kept(plain_run, folder, no_figures):
    run = plain_run
    first = api.test(run, str(folder / "a" / "same.extxyz"))
    second = api.test(run, str(folder / "b" / "same.extxyz"))
    files = [str(folder / name) for name in ("hot.extxyz", "cold.extxyz")]
    third = api.test(run, files)
    assert stored(run, "test")["errors"] == first
    assert stored(run, "test-same")["errors"] == second
    assert stored(run, "test-hot")["errors"] == third
    assert stored(run, "test-hot")["source"] == files
    fourth = api.test(run, str(folder / "b" / "same.extxyz"), which="last")
    assert stored(run, "test-same-last")["errors"] == fourth
    again = api.test(run, str(folder / "a" / "same.extxyz"))
    assert again == first
    assert sorted(path.stem for path in run.path.glob("test*.json")) == [
        "test",
        "test-hot",
        "test-same",
        "test-same-last",
    ]


def test_results_of_an_earlier_version_are_read_and_kept(plain_run, folder):
    path = plain_run.path / "test.json"
    for result in plain_run.path.glob("test-*.json"):
        result.unlink()
    old = {
        "source": "elsewhere.extxyz",
        "weights": "best",
        "frames": 2,
        "errors": {"energy_mae": 1.0, "forces_mae": 2.0},
    }
    path.write_text(json.dumps(old))
    api.test(plain_run, str(folder / "cold.extxyz"))
    page = (plain_run.path / "report.html").read_text()
    assert "elsewhere.extxyz" in page
    assert "cold.extxyz" in page
    assert json.loads(path.read_text()) == old
    assert stored(plain_run, "test-cold")["frames"] == 4


def test_the_files_of_a_test_are_a_list(named, folder):
    assert stored(named, "test-300K")["source"] == str(folder / "cold.extxyz")
    assert stored(named, "test-600K")["source"] == [str(folder / "hot.extxyz"), str(folder / "cold.extxyz")]
    assert "[&#x27;" not in (named.path / "report.html").read_text()


def test_test_and_data_info_read_what_predict_wrote(plain_run, folder, tmp_path, capsys, no_figures):
    source, out = folder / "cold.extxyz", tmp_path / "predicted.extxyz"
    predict_file(plain_run.load_potential(), source, out)
    expected, found = api.test(plain_run, str(source)), api.test(plain_run, str(out))
    assert found == pytest.approx(expected, rel=1e-6)
    assert found["energy_mae"] > 0
    assert main(["data", "info", str(out)]) == 0
    assert "4 of 4 frames" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"a b": "x.xyz"}, "'a b' cannot be the name of a test set"),
        ({"a": 0.1}, r"'data\.test\.a' must be a file, folder, pattern or list of them"),
        ({}, r"'data\.test' must be a file, or files by name"),
        ({"index": "x"}, r"or \{indices: file-or-list\}"),
    ],
)
def test_what_cannot_be_a_test_set_is_refused(test, message):
    with pytest.raises(ForgefieldError, match=message):
        load_config({"name": "x", "data": {"train": "a.xyz", "test": test}})


def test_paths_of_named_sets_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config({"name": "x", "data": {"train": "a.xyz", "test": {"hot": "b.xyz", "all": ["b.xyz", "c.xyz"]}}})
    assert config.data.test["hot"] == str(tmp_path / "b.xyz")
    assert list(config.data.test["all"]) == [str(tmp_path / name) for name in ("b.xyz", "c.xyz")]


def test_a_test_set_must_not_hold_training_frames(folder):
    config = tiny_config(folder, name="leak")
    config["data"]["test"] = {"hot": str(folder / "hot.extxyz"), "known": config["data"]["train"]}
    with pytest.raises(ForgefieldError, match=r"is in data\.train and in data\.test\.known"):
        api.train(config)


def test_predictions_without_origins_are_read(tmp_path):
    np.savez(tmp_path / "old.npz", n_atoms=np.array([2, 3]), energy_pred=np.zeros(2), energy_ref=np.ones(2))
    assert predictions_from_npz(tmp_path / "old.npz").origin(1) == ("", 1)
