"""Packages: one file in place of a run, with the same results, no code and no paths of the machine that trained the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.io import read

import forgefield
from forgefield import api
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.inference.packages import write_package
from forgefield.inference.uncertainty import has_uncertainty
from forgefield.models.importing import ImportRequest
from forgefield.runs import PackagedRun, Run
from forgefield.weights import read_weights, write_weights
from tests.fixtures.make_edition_1 import FINISHED
from tests.support.edition import unpack_edition


@pytest.fixture
def edition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(unpack_edition(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", FINISHED)
def test_a_package_has_the_weights_and_options_of_its_run(edition: Path, name: str) -> None:
    run, package = Run.open(name), Run.open(write_package(Run.open(name), "model.ff"))
    assert package.info["model"] == run.info["model"]
    assert (package.info.get("cutoff"), package.units) == (run.info.get("cutoff"), run.units)
    state = package.load_model().state_dict()
    for key, value in run.load_model().state_dict().items():
        assert torch.equal(state[key], value), key


def test_predictions_and_forces_in_ase_are_the_same_to_the_last_bit(edition: Path) -> None:
    write_package(Run.open("nequip"), "model.ff")
    forgefield.predict("nequip", "bare.extxyz", "run.extxyz")
    forgefield.predict("model.ff", "bare.extxyz", "package.extxyz")
    assert Path("run.extxyz").read_bytes() == Path("package.extxyz").read_bytes()
    forces = []
    for model in ("nequip", "model.ff"):
        atoms = read("bare.extxyz", 0)
        atoms.calc = forgefield.Calculator(model)
        forces.append(atoms.get_forces())
    np.testing.assert_array_equal(*forces)


def test_tests_unpack_it_and_report_the_same_errors(edition: Path) -> None:
    expected = json.loads(Path("runs/nequip/test.json").read_text())["errors"]
    write_package(Run.open("nequip"), "model.ff")
    errors = api.test("model.ff", "test.extxyz")
    assert errors == pytest.approx(expected, rel=1e-7)
    assert Path("runs/model/report.html").exists()
    assert api.test("model.ff", "test.extxyz") == errors  # the folder is reused


def test_check_takes_it_for_a_run(edition: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_package(Run.open("nequip"), "model.ff")
    outputs = []
    for model in ("nequip", "model.ff"):
        assert main(["check", model, "--data", "bare.extxyz", "--frames", "1"]) == 0
        outputs.append(capsys.readouterr().out.split("\n", 1))
    assert "the best model of model.ff" in outputs[1][0]
    assert outputs[0][1] == outputs[1][1]


def test_it_is_compared_by_the_errors_it_was_packaged_with(edition: Path) -> None:
    write_package(Run.open("nequip"), "model.ff")
    comparison = forgefield.compare("nequip", "model.ff")
    of_test = [data == "test" for data in comparison.errors.column("data")]
    errors = [comparison.errors.column(name) for name in ("nequip", "model.ff")]
    assert any(of_test)
    for run, package in zip(*([e for e, is_test in zip(column, of_test) if is_test] for column in errors)):
        assert run == package is not None
    assert not Path("runs/model").exists()


def test_a_folder_with_another_model_is_not_used_for_results(edition: Path) -> None:
    write_package(Run.open("nequip"), "allegro.ff")
    with pytest.raises(ForgefieldError, match="allegro exists and is not the model in allegro.ff"):
        api.test("allegro.ff", "test.extxyz")


def test_a_package_is_fine_tuned(edition: Path) -> None:
    write_package(Run.open("nequip"), "model.ff")
    settings = json.loads(Path("nequip.yaml").read_text())
    settings.update(name="further", model={"from": "model.ff"}, trainer={**settings["trainer"], "max_epochs": 1})
    run = forgefield.train(settings)
    assert run.info["model"]["name"] == "nequip"
    before, after = Run.open("model.ff").read_weights("best").state, run.read_weights("last").state
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_a_package_names_no_folder_of_the_machine_and_keeps_licence_and_errors(
    edition: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "nequip", "-o", "model.ff", "--licence", "CC-BY-4.0"]) == 0
    assert "wrote model.ff" in capsys.readouterr().out
    assert str(edition).encode() not in Path("model.ff").read_bytes()
    package = Run.open("model.ff")
    assert isinstance(package, PackagedRun)
    assert package.note["licence"] == "CC-BY-4.0"
    assert package.note["errors"]["test"]["errors"] == json.loads(Path("runs/nequip/test.json").read_text())["errors"]
    assert main(["export", "model.ff", "-o", "again.ff"]) == 0
    again = Run.open("again.ff")
    assert isinstance(again, PackagedRun)
    assert (again.note["licence"], again.note["errors"]) == (package.note["licence"], package.note["errors"])


def test_a_package_has_the_uncertainties_of_its_run(edition: Path) -> None:
    with pytest.raises(ForgefieldError, match="`forgefield uncertainty .*nequip` computes them"):
        forgefield.predict("nequip", "bare.extxyz", "none.extxyz", uncertainty="energy")
    write_package(Run.open("nequip"), "without.ff")
    with pytest.raises(ForgefieldError, match="forgefield export RUN -o without.ff` again"):
        forgefield.predict("without.ff", "bare.extxyz", "none.extxyz", uncertainty="energy")
    forgefield.uncertainty("nequip")
    write_package(Run.open("nequip"), "model.ff")
    write_package(Run.open("model.ff"), "again.ff")
    for model in ("nequip", "model.ff", "again.ff"):
        forgefield.predict(model, "bare.extxyz", f"{model}.extxyz", uncertainty="energy")
    assert Path("nequip.extxyz").read_bytes() == Path("model.ff.extxyz").read_bytes()
    assert Path("nequip.extxyz").read_bytes() == Path("again.ff.extxyz").read_bytes()
    assert read("model.ff.extxyz", 0).info["energy_uncertainty"] > 0
    assert Run.open("model.ff").read_weights("best").sha256 == Run.open("nequip").read_weights("best").sha256
    forgefield.load("model.ff")
    forgefield.test("model.ff", "test.extxyz", uncertainty="energy")
    assert has_uncertainty(Run.open("runs/model"))
    run = Run.open("nequip")
    write_weights(
        run.weights_path("last"), {name: 2 * tensor for name, tensor in run.read_weights("last").state.items()}, {}
    )
    write_package(run, "last.ff", which="last")
    assert Run.open("last.ff").read_uncertainty() is None  # they are those of the best weights


def test_a_model_without_last_layer_is_not_advised_to_compute_uncertainties(edition: Path) -> None:
    request = ImportRequest("ase.calculators.emt.EMT", species=["Cu", "Au"])
    run, _ = forgefield.import_model("ase", request)
    with pytest.raises(ForgefieldError, match=r"does not define the last layer .* forgefield\.Ensemble") as error:
        forgefield.Calculator(run.path, uncertainty="energy", trust_code=True)
    assert "forgefield uncertainty" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "nequip", "-o", "model.bin"], "model.bin: the name of a packaged model ends in .ff"),
        (["export", "nequip", "-o", "new.ff", "--sel", "20"], "--sel is an option of --to deepmd"),
        (["export", "nequip", "-o", "model.ff"], "model.ff exists already"),
        (["train", "model.ff"], "forgefield train CONFIG --finetune model.ff"),
        (["predict", "model.ff", "bare.extxyz", "-o", "out.extxyz", "--which", "last"], "contains the best weights"),
        (["predict", "weights.ff", "bare.extxyz", "-o", "out.extxyz"], "weights.ff is not a packaged model"),
        (["predict", "cut.ff", "bare.extxyz", "-o", "out.extxyz"], "cut.ff is damaged"),
        (["predict", "newer.ff", "bare.extxyz", "-o", "out.extxyz"], "Install a newer version of Forgefield"),
        (["predict", "none.ff", "bare.extxyz", "-o", "out.extxyz"], "There is no run 'none.ff'"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    edition: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    write_package(Run.open("nequip"), "model.ff")
    weights = read_weights(Path("model.ff"))
    write_weights(Path("weights.ff"), weights.state, {})
    write_weights(Path("newer.ff"), weights.state, {"package": {**weights.about["package"], "format_version": 99}})
    Path("cut.ff").write_bytes(Path("model.ff").read_bytes()[:-100])
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_package_of_a_users_model_needs_permission_to_import_it(edition: Path, tmp_path: Path) -> None:
    write_package(Run.open("nequip"), "model.ff")
    weights = read_weights(Path("model.ff"))
    note = weights.about["package"]
    note["info"]["model"] = {**note["info"]["model"], "name": "evil.Net"}
    (tmp_path / "evil.py").write_text("open('executed', 'w')")
    write_weights(Path("evil.ff"), weights.state, {"package": note})
    with pytest.raises(ForgefieldError, match="--trust-code"):
        forgefield.load("evil.ff")
    assert not Path("executed").exists()


def test_species_that_the_model_does_not_have_need_another_model(edition: Path) -> None:
    atoms = read("bare.extxyz", 0)
    atoms.symbols[0] = "Fe"
    atoms.write("iron.extxyz")
    atoms.calc = forgefield.Calculator("nequip")
    for attempt in (
        atoms.get_potential_energy,
        lambda: forgefield.predict("nequip", "iron.extxyz", "out.extxyz"),
        lambda: forgefield.test("nequip", "iron.extxyz"),
    ):
        with pytest.raises(ForgefieldError, match="train or fine-tune a model with frames that contain Fe"):
            attempt()
