"""Trainings on fields of the data: exact resume, no trace of units, what is written, and sentences for what cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest

from forgefield import Calculator, api
from forgefield.cli import main
from forgefield.data.options import LabelOptions
from forgefield.data.store.convert import convert
from forgefield.errors import ForgefieldError
from forgefield.report.analysis import predictions_from_npz
from tests.support.helpers import PROPERTIES, tiny_config, write_properties
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.train_many import train_only

ALL: dict[str, Any] = {
    "gap": {"loss": "mae"},
    "cohesion": {"reduce": "sum", "weight": 0.5, "schedule": {"to": 2.0}},
    "moduli": {"normalise": {"mean": [0.5, 14.0, 7.0], "scale": 3.0}},
    "site_charge": {"loss": "huber"},
}


def config(folder: Path, name: str = "further", task: Any = None, fields: Any = None, **changes: Any) -> dict[str, Any]:
    if not (folder / "frames.extxyz").exists():
        write_properties(folder / "frames.extxyz", 14)
    data = {"labels": {"fields": PROPERTIES if fields is None else fields}, **changes.pop("data", {})}
    made = tiny_config(folder, name=name, data=data, **changes)
    made["task"] = ALL if task is None else task
    return made


def predictions(run: Path, split: str = "val") -> dict[str, np.ndarray]:
    with np.load(run / "predictions" / f"{split}.npz") as stored:
        return {name: stored[name] for name in stored.files}


@pytest.mark.parametrize("energy", [{}, {"energy": {}, "forces": {}}], ids=["alone", "beside an energy"])
def test_interrupted_run_equals_uninterrupted_run(energy, tmp_path, monkeypatch):
    given = {"training": {"checkpoint": {"every_steps": 2}}, "callbacks": [END]}
    straight = train_only(config(tmp_path, "straight", {**energy, **ALL}, **given)).path
    broken = interrupted_run(config(tmp_path, "broken", {**energy, **ALL}, **given), [3, 8], monkeypatch)
    assert_same_run(straight, broken)


@pytest.mark.parametrize("name", ["gap", "cohesion", "moduli", "site_charge"])
def test_the_unit_of_a_label_changes_nothing_but_the_unit_of_predictions(name, tmp_path):
    task = {name: {"reduce": "sum"} if name == "cohesion" else {}}
    runs = {}
    for factor in (1.0, 230.6):
        fields = {name: {**PROPERTIES[name], "factor": factor}}
        made = config(tmp_path, f"factor{factor:g}", task, fields, training={"precision": "float64"})
        runs[factor] = api.train(made)
    one, other = (predictions(run.path)[f"{name}_pred"] for run in runs.values())
    np.testing.assert_allclose(other, 230.6 * one, rtol=1e-7)
    rows = [run.metrics()[-1] for run in runs.values()]
    assert rows[0]["val/loss"] == pytest.approx(rows[1]["val/loss"], rel=1e-7)
    assert 230.6 * rows[0][f"val/{name}_mae"] == pytest.approx(rows[1][f"val/{name}_mae"], rel=1e-7)


def test_all_that_a_run_writes_has_the_targets_in_their_units(tmp_path, capsys):
    made = config(tmp_path, task={"energy": {}, "forces": {}, **ALL}, trainer={"max_epochs": 2})
    made["trainer"]["enable_progress_bar"] = True
    made["training"]["monitor"] = "val/gap_mae"
    run = api.train(made)
    said = capsys.readouterr().out
    assert "val gap" in said
    assert "kcal/mol" in said
    last = run.metrics()[-1]
    found = predictions(run.path)
    for name in ALL:
        error = np.abs(found[f"{name}_pred"] - found[f"{name}_ref"])
        best = min(run.metrics(), key=lambda row: row["val/gap_mae"])
        assert best[f"val/{name}_mae"] == pytest.approx(np.nanmean(error), rel=1e-6)
        assert f"train/{name}_rmse" in last
    page = (run.path / "report.html").read_text()
    assert "gap MAE, validation" in page
    assert "parity" not in page or "cohesion, predicted against reference" in page
    assert predictions_from_npz(run.path / "predictions" / "val.npz").extra_outputs.keys() == ALL.keys()
    heads = json.loads((run.path / "run.json").read_text())["model"]["predicts"]["heads"]
    assert (heads["moduli"]["scale"], heads["moduli"]["shift"][0]) == (3.0, [0.5, 14.0, 7.0])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Any:
    return api.train(config(tmp_path_factory.mktemp("trained"), task=ALL))


def test_test_measures_and_predict_writes_fields(trained, tmp_path, capsys):
    source = write_properties(tmp_path / "other.extxyz", 5, seed=9)
    assert main(["test", str(trained.path), "--data", str(source)]) == 0
    said = capsys.readouterr().out
    assert "gap" in said
    assert "energy" not in said
    errors = json.loads((trained.path / "test.json").read_text())["errors"]
    assert errors.keys() == {f"{name}_{kind}" for name in ALL for kind in ("mae", "rmse")}
    assert (trained.path / "parity-test.png").exists()
    for suffix in ("extxyz", "traj"):
        assert main(["predict", str(trained.path), str(source), "-o", str(tmp_path / f"out.{suffix}")]) == 0
        written, given = ase.io.read(tmp_path / f"out.{suffix}", ":"), ase.io.read(source, ":")
        gaps = [atoms.info["gap"] for atoms, was in zip(written, given) if "gap" in was.info]
        labels = [was.info["gap"] for was in given if "gap" in was.info]
        assert np.abs(np.subtract(gaps, labels)).mean() == pytest.approx(errors["gap_mae"], rel=1e-5)
        assert written[0].info["REF_gap"] == pytest.approx(given[0].info["gap"])
        assert np.shape(written[0].info["moduli"]) == (3,)
        charges = written[0].arrays if suffix == "extxyz" else written[0].info
        assert len(charges["site_charge"]) == len(written[0])
        assert written[0].calc is None


def test_a_model_without_energy_is_not_a_calculator(trained, capsys):
    with pytest.raises(ForgefieldError, match="predicts cohesion, gap, moduli, site_charge and no energy"):
        Calculator(trained)
    assert main(["check", str(trained.path), "--frames", "1"]) == 0
    assert "All 9 checks passed" in capsys.readouterr().out


def test_a_calculator_gives_extra_outputs_next_to_energy(tmp_path):
    run = train_only(config(tmp_path, task={"energy": {}, "site_charge": {}, "gap": {}}, trainer={"max_epochs": 1}))
    atoms = ase.io.read(tmp_path / "frames.extxyz")
    atoms.calc = Calculator(run)
    atoms.get_forces()
    assert atoms.calc.results["site_charge"].shape == (len(atoms),)
    assert float(atoms.calc.get_property("gap", atoms)) == float(atoms.calc.results["gap"])


def test_fields_that_a_store_holds_are_targets_without_more_settings(tmp_path):
    made = config(tmp_path, task={"gap": {}})
    source = made["data"]["train"]
    convert([source], tmp_path / "store", labels=LabelOptions(fields=PROPERTIES))
    made["data"] |= {"train": str(tmp_path / "store"), "labels": {}}
    run = train_only(made)
    assert "val/gap_mae" in run.metrics()[-1]
    assert "gap_mae" in api.test(run, source)
    made["task"] = {"gab": {}}
    with pytest.raises(ForgefieldError, match=r"task\.gab: the data has no field .*gap.*Did you mean 'gap'"):
        api.train(made, fresh=True)


def test_a_changed_target_is_refused_on_resume_and_an_unchanged_one_is_not(tmp_path, capsys):
    train_only(config(tmp_path))
    train_only(config(tmp_path))
    assert "is complete" in capsys.readouterr().out
    changed = {**ALL, "gap": {"loss": "mse"}}
    with pytest.raises(ForgefieldError, match=r"task\.gap\.loss"):
        api.train(config(tmp_path, task=changed))


def constant(path: Path) -> Path:
    frames = ase.io.read(write_properties(path, 14), ":")
    for atoms in frames:
        atoms.info |= {"gap": 0.1 + 0.2, "cohesion": 0.7 * len(atoms)}
        atoms.arrays["site_charge"] = np.where(atoms.symbols == "Au", 0.1, 0.2)
    ase.io.write(path, frames, format="extxyz")
    return path


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"gap": {}}, "all training frames have the same value"),
        ({"cohesion": {"reduce": "sum"}}, "the composition determines the value"),
        ({"site_charge": {}}, "the species of an atom determines the value"),
    ],
)
def test_a_label_without_spread_is_refused(task, why, tmp_path):
    constant(tmp_path / "frames.extxyz")
    name = next(iter(task))
    with pytest.raises(ForgefieldError, match=rf"task\.{name}\.normalise=auto: {why}, so the scale would be zero"):
        api.train(config(tmp_path, task=task))


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (
            {"site_charge": {"reduce": "sum"}},
            r"task\.site_charge\.reduce does not apply: site_charge has a value for every atom",
        ),
        ({"gap": {"normalise": {"mean": [1, 2], "scale": 1}}}, r"mean does not have the shape of the field, \[\]"),
        ({"site_charge": {"normalise": {"mean": {"Cu": 1}, "scale": 1}}}, r"but the species are Cu, Au"),
        ({"atomic_energy": {}}, r"task\.atomic_energy: models have an output of that name"),
        ({"gap": {"weight": 0}}, "every weight is zero"),
    ],
)
def test_invalid_targets_are_refused(task, sentence, tmp_path):
    fields = {**PROPERTIES, "atomic_energy": {"key": "gap"}}
    with pytest.raises(ForgefieldError, match=sentence):
        api.train(config(tmp_path, task=task, fields=fields))


def test_a_target_that_no_training_frame_has_is_refused(tmp_path):
    frames = ase.io.read(write_properties(tmp_path / "frames.extxyz", 14), ":")
    frames[3].info["rare"] = 1.0
    ase.io.write(tmp_path / "frames.extxyz", frames, format="extxyz")
    made = config(
        tmp_path, task={"gap": {}, "rare": {}}, fields={**PROPERTIES, "rare": {}}, data={"val": {"indices": [3, 4]}}
    )
    with pytest.raises(ForgefieldError, match=r"task\.rare is set, but no training frame has rare; remove task\.rare"):
        api.train(made)


# ---- classes


def with_classes(path: Path, n: int, seed: int = 0) -> Path:
    """`kind` 1, 2 or 5 by the share of gold; `rich` 0 or 1; of atoms `site`, 0 for copper and 1 for gold."""
    frames = ase.io.read(write_properties(path, n, seed), ":")
    for number, atoms in enumerate(frames):
        gold = (atoms.symbols == "Au").mean()
        atoms.info["rich"] = int(gold > 0.45)
        if number % 5:
            atoms.info["kind"] = 1 if gold < 0.4 else 2 if gold < 0.6 else 5
        atoms.arrays["site"] = (atoms.symbols == "Au").astype(int)
    ase.io.write(path, frames, format="extxyz")
    return path


CLASSES: dict[str, Any] = {"kind": {"classes": "auto"}, "rich": {"classes": 2}, "site": {"classes": [0, 1]}}
CLASS_FIELDS = {"kind": {}, "rich": {}, "site": "atom", "gap": {}}


def test_classes_are_learnt_measured_and_written(tmp_path, capsys):
    with_classes(tmp_path / "frames.extxyz", 40)
    task = {**CLASSES, "gap": {}}
    made = config(tmp_path, task=task, fields=CLASS_FIELDS, data={"val": 10}, trainer={"max_epochs": 25})
    run = api.train(made)
    said = capsys.readouterr().out
    assert "AUROC" in said
    first, last = run.metrics()[0], run.metrics()[-1]
    assert last["val/site_accuracy"] == 1.0
    assert last["val/kind_cross_entropy"] < 0.7 * first["val/kind_cross_entropy"]
    assert "accuracy, validation" in (run.path / "report.html").read_text()
    errors = api.test(run, with_classes(tmp_path / "test.extxyz", 20, seed=4))
    found = predictions(run.path, "test")
    labelled = ~np.isnan(found["kind_ref"])
    assert errors["kind_accuracy"] == np.mean((found["kind_pred"] == found["kind_ref"])[labelled])
    assert errors["rich_auroc"] > 0.8
    np.testing.assert_allclose(found["site_prob"].sum(1), 1.0)
    api.predict(run, tmp_path / "test.extxyz", tmp_path / "out.extxyz")
    written = ase.io.read(tmp_path / "out.extxyz", ":")
    assert {atoms.info["kind"] for atoms in written} <= {1, 2, 5}
    assert written[0].info["kind_prob"].shape == (3,)
    assert written[0].arrays["site"].tolist() == (written[0].symbols == "Au").tolist()


def test_classes_are_learnt_alike_by_every_way_to_take_a_step(tmp_path):
    with_classes(tmp_path / "frames.extxyz", 14)
    task = {**CLASSES, "forces": {}}
    given = {"task": task, "fields": CLASS_FIELDS, "trainer": {"max_epochs": 1}}
    given["model"] = {"num_layers": 1, "l_max": 0}
    ways = {"eager": {}, "script": {"engine": "script"}, "tangent": {"derivative": "tangent"}}
    rows = {}
    for name, way in ways.items():
        training = {"precision": "float64", "engine": "eager", **way}
        (rows[name],) = train_only(config(tmp_path, name, **given, training=training)).metrics()
    for name in ways:
        assert rows[name] == pytest.approx(rows["eager"], rel=1e-9), name


def test_interrupted_run_of_classes_equals_uninterrupted_run(tmp_path, monkeypatch):
    with_classes(tmp_path / "frames.extxyz", 14)
    given = {"task": CLASSES, "fields": CLASS_FIELDS, "callbacks": [END]}
    given["training"] = {"checkpoint": {"every_steps": 2}}
    straight = train_only(config(tmp_path, "straight", **given)).path
    assert_same_run(straight, interrupted_run(config(tmp_path, "broken", **given), [3, 8], monkeypatch))


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"kind": {"classes": 3}}, r"frame \d+: its kind is 5, but task\.kind\.classes has 0, 1, 2; correct the label"),
        ({"kind": {"classes": [1, 2]}}, r"its kind is 5, but task\.kind\.classes has 1, 2"),
        ({"same": {"classes": "auto"}}, r"all training frames have the label 1, so there is nothing to classify"),
        ({"moduli": {"classes": 3}}, r"a class is one number, but moduli has the shape \[3\]"),
        (
            {"kind": {"classes": 1}},
            r"'task\.kind\.classes' must be a number above 1, a list of different labels, or auto",
        ),
        ({"kind": {"classes": 3, "loss": "mae"}}, r"'task\.kind\.loss' does not apply to classes"),
        ({"kind": {"classes": 3, "reduce": "sum"}}, r"'task\.kind\.reduce' does not apply to classes"),
        ({"kind": {"classes": 3, "normalise": {"mean": 0, "scale": 1}}}, r"normalise' does not apply to classes"),
    ],
)
def test_invalid_classes_are_refused(task, sentence, tmp_path):
    frames = ase.io.read(with_classes(tmp_path / "frames.extxyz", 14), ":")
    for atoms in frames:
        atoms.info["same"] = 1
    ase.io.write(tmp_path / "frames.extxyz", frames, format="extxyz")
    with pytest.raises(ForgefieldError, match=sentence):
        api.train(config(tmp_path, task=task, fields={**CLASS_FIELDS, "same": {}, "moduli": {"shape": [3]}}))


def test_a_class_without_training_frame_must_be_listed(tmp_path):
    frames = ase.io.read(with_classes(tmp_path / "frames.extxyz", 14), ":")
    frames[3].info["kind"] = 9
    ase.io.write(tmp_path / "frames.extxyz", frames, format="extxyz")
    made = config(tmp_path, task={"kind": {"classes": "auto"}}, fields=CLASS_FIELDS, trainer={"max_epochs": 1})
    made["data"] |= {"val": {"indices": [3]}, "test": None}
    with pytest.raises(
        ForgefieldError, match=r"its kind is 9, which is not the label of any training frame"
    ) as refused:
        api.train(made)
    listed = re.search(r"list all classes: task\.kind\.classes=(\[.*\])", str(refused.value))
    assert listed is not None
    run = train_only({**made, "task": {"kind": {"classes": json.loads(listed.group(1))}}})
    assert run.info["model"]["predicts"]["heads"]["kind"]["classes"][-1] == 9.0


def test_what_is_the_better_the_larger_it_is_cannot_be_watched(tmp_path):
    with_classes(tmp_path / "frames.extxyz", 14)
    made = config(tmp_path, task=CLASSES, fields=CLASS_FIELDS, training={"monitor": "val/kind_accuracy"})
    with pytest.raises(ForgefieldError, match=r"use val/kind_cross_entropy or val/loss"):
        api.train(made)
