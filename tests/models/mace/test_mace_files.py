"""Files of mace-torch: imported runs, exported models, and files that are damaged or hold something else."""

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import forgefield
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.models.mace.exporter import constructor_arguments, mace_state, write_mace
from forgefield.models.mace.importer import read_mace
from forgefield.models.mace.weights import weight_table
from tests.support.mace_models import CASES, FOLDER, batch_of, import_case, load, reference, settings, write_module
from tests.support.structures import make_potential

MACE_PYTHON = os.environ.get("MACE_PYTHON")
"""Python of an environment with mace-torch 0.3.16."""


def atoms_of(case):
    from ase import Atoms

    stored = reference(case)
    keys = {"numbers": "numbers", "positions": "positions", "cell": "cell", "pbc": "pbc"}
    return [Atoms(**{name: stored[f"frame{i}/{key}"] for name, key in keys.items()}) for i in (0, 1)]


def test_an_imported_model_predicts_what_mace_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_module("residual", tmp_path)
    assert main(["import", "mace", "residual.model"]) == 0
    assert "species H C O, cutoff 4 A" in capsys.readouterr().out
    stored, start = reference("residual"), 0
    for number, atoms in enumerate(atoms_of("residual")):
        atoms.calc = forgefield.Calculator("residual")
        assert atoms.get_potential_energy() == pytest.approx(stored["energy"][number], abs=1e-10)
        np.testing.assert_allclose(atoms.get_forces(), stored["forces"][start : start + len(atoms)], atol=1e-10)
        start += len(atoms)


def test_several_heads_are_branches_and_one_can_be_imported_alone(tmp_path):
    path = write_module("density", tmp_path)
    both, one = load(read_mace(path)), load(read_mace(path, head="scan"))
    assert both.interface.branches == ("pbe", "scan")
    batch = batch_of("density")
    assert one(batch)["energy"][1].item() == pytest.approx(both(batch)["energy"][1].item(), rel=1e-13)
    with pytest.raises(ForgefieldError, match="none of them is 'scam'.*scan"):
        read_mace(path, head="scam")
    with pytest.raises(ForgefieldError, match="has one head"):
        read_mace(write_module("residual", tmp_path), head="scan")


def test_a_checkpoint_takes_its_options_from_json_or_from_a_module(tmp_path):
    stored = reference("reduced")
    state = {
        key.removeprefix("weight/"): torch.from_numpy(value)
        for key, value in stored.items()
        if key.startswith("weight/")
    }
    checkpoint = tmp_path / "MACE_run-1_epoch-3_swa.pt"
    torch.save({"model": state, "optimizer": {"state": {}}, "lr_scheduler": None}, checkpoint)
    with pytest.raises(ForgefieldError, match="contains only weights"):
        read_mace(checkpoint)
    module = write_module("reduced", tmp_path)
    options = checkpoint.with_suffix(".json")
    options.write_text(json.dumps(settings("reduced")))
    expected = load(import_case("reduced", tmp_path))(batch_of("reduced"))["energy"]
    for imported in (read_mace(checkpoint), read_mace(checkpoint, module)):
        torch.testing.assert_close(load(imported)(batch_of("reduced"))["energy"], expected, rtol=1e-12, atol=0)
    options.write_text(json.dumps(settings("reduced") | {"avg_num_neighbours": 3.0}))
    with pytest.raises(ForgefieldError, match="avg_num_neighbours is not an argument.*avg_num_neighbors"):
        read_mace(checkpoint)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"interaction_cls": "RealAgnosticAttResidualInteractionBlock"},
            "interaction_cls is RealAgnosticAtt.*not supported",
        ),
        ({"use_so3": True}, "use_so3, which is not supported"),
        ({"embedding_specs": {"charge": {}}}, "embedding_specs, which is not supported"),
        ({"gate": "relu"}, "gate is relu"),
        ({"distance_transform": "Exp"}, "distance_transform is Exp"),
        ({"readout_cls": "NonLinearDipoleReadoutBlock"}, "readout_cls is NonLinearDipole"),
        ({"max_ell": 2}, "numbers; with these options it needs"),
        ({"hidden_irreps": "4x0e"}, "with these options"),
        ({"heads": ["a", "b"]}, "2 heads and 3 elements"),
    ],
)
def test_options_that_are_not_supported_or_contradict_the_weights_are_refused_by_name(changes, words, tmp_path):
    options = tmp_path / "options.json"
    options.write_text(json.dumps(settings("residual") | changes))
    with pytest.raises(ForgefieldError, match=words):
        read_mace(FOLDER / "residual.npz", options)


def test_missing_and_unknown_weights_are_refused(tmp_path):
    stored = {key: value for key, value in reference("residual").items() if key.startswith("weight/")}
    options = tmp_path / "options.json"
    options.write_text(json.dumps(settings("residual")))
    without = {key: value for key, value in stored.items() if "readouts.1.linear_2.weight" not in key}
    np.savez(tmp_path / "less.npz", **without)
    np.savez(tmp_path / "more.npz", **stored, **{"weight/lora.A": np.ones(3)})
    with pytest.raises(ForgefieldError, match=r"does not contain the weights readouts\.1\.linear_2\.weight"):
        read_mace(tmp_path / "less.npz", options)
    with pytest.raises(ForgefieldError, match=r"lora\.A is not a weight"):
        read_mace(tmp_path / "more.npz", options)


class _Dangerous:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_damaged_and_foreign_files_are_refused_and_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = write_module("residual", tmp_path).read_bytes()
    Path("cut.model").write_bytes(content[: len(content) // 2])
    with pytest.raises(ForgefieldError, match="damaged or truncated"):
        read_mace("cut.model")
    Path("text.model").write_text("not a model")
    with pytest.raises(ForgefieldError, match="could not be read"):
        read_mace("text.model")
    torch.save({"weights": torch.ones(3)}, "other.pt")
    with pytest.raises(ForgefieldError, match="neither a module nor a checkpoint"):
        read_mace("other.pt")
    torch.save(torch.nn.Linear(2, 2), "linear.model")
    with pytest.raises(ForgefieldError, match="contains a Linear"):
        read_mace("linear.model")
    torch.save({"model": _Dangerous()}, "bad.pt")
    with pytest.raises(ForgefieldError):
        read_mace("bad.pt")
    with zipfile.ZipFile("bad.model", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Dangerous(), protocol=2))
    with pytest.raises(ForgefieldError):
        read_mace("bad.model")
    assert not Path("executed").exists()
    with pytest.raises(ForgefieldError, match="does not exist"):
        read_mace("nowhere.model")


def test_elements_that_the_model_does_not_know_are_refused(tmp_path, monkeypatch):
    from ase import Atoms

    monkeypatch.chdir(tmp_path)
    write_module("residual", tmp_path)
    main(["import", "mace", "residual.model"])
    atoms = Atoms("FeO", [[0, 0, 0], [0, 0, 1.6]], calculator=forgefield.Calculator("residual"))
    with pytest.raises(ForgefieldError, match="Fe"):
        atoms.get_potential_energy()


@pytest.mark.parametrize("case", CASES)
def test_exported_weights_are_those_that_were_imported(case, tmp_path):
    model, stored = load(import_case(case, tmp_path)).model, reference(case)
    state = mace_state(model)
    for weight in weight_table(model):
        original = torch.from_numpy(stored[f"weight/{weight.theirs}"])
        assert state[weight.theirs].shape == original.shape
        torch.testing.assert_close(weight.read(state[weight.theirs]), weight.read(original), rtol=0, atol=0)
    if case != "reduced":
        for key, value in stored.items():
            if "symmetric_contractions" in key and key.startswith("weight/") and not key.endswith("zeroed"):
                assert state[key.removeprefix("weight/")].shape == value.shape
    arguments = constructor_arguments(model)
    assert arguments["num_bessel"] == settings(case)["num_bessel"]
    assert arguments["avg_num_neighbors"] == settings(case)["avg_num_neighbors"]


def test_only_mace_models_are_exported(tmp_path):
    with pytest.raises(ForgefieldError, match="only a model with model.name=mace"):
        write_mace(make_potential(), tmp_path / "x.model")
    with pytest.raises(ForgefieldError, match=r"end in \.model"):
        write_mace(load(import_case("single", tmp_path)), tmp_path / "x.pt")


@pytest.mark.parametrize("case", [*CASES, "chebyshev"])
def test_an_exported_file_is_imported_as_the_same_model(case, tmp_path):
    potential, batch = load(import_case(case, tmp_path)), batch_of(case)
    again = read_mace(write_mace(potential, tmp_path / "x.model"))
    assert "exported by Forgefield" in again.origin
    expected, outputs = potential(batch), load(again)(batch)
    for key in ("energy", "forces"):
        torch.testing.assert_close(outputs[key], expected[key], rtol=1e-12, atol=1e-11)


def test_an_exported_file_with_other_content_is_refused(tmp_path):
    path = write_mace(load(import_case("single", tmp_path)), tmp_path / "x.model")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "y.model", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(b"num_polynomial_cutoff", b"num_polynomial_cutofg"))
    with pytest.raises(ForgefieldError, match=r"y\.model is not a model that this version of forgefield export wrote"):
        read_mace(tmp_path / "y.model")


@pytest.mark.skipif(MACE_PYTHON is None, reason="MACE_PYTHON does not name an environment with mace-torch")
@pytest.mark.parametrize("case", [*CASES, "chebyshev"])
def test_mace_predicts_the_same_with_an_exported_file(case, tmp_path):
    path = write_mace(load(import_case(case, tmp_path)), tmp_path / "x.model")
    script = Path(sys.modules["tests.support.mace_models"].__file__).with_name("mace_loads.py")
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONPATH": ""}
    command = [MACE_PYTHON, str(script), str(path), str(FOLDER / f"{case}.npz")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    differences = [
        float(line.split()[1]) for line in printed.splitlines() if line.startswith(("energy", "forces", "stress"))
    ]
    assert len(differences) == 3
    assert max(differences) < 1e-10
