"""Training from the model of another run: its weights, its options, its species; shifts fitted where asked; exact resume."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch
import yaml
from ase.calculators.singlepoint import SinglePointCalculator
from lightning.pytorch.callbacks import Callback

from forgefield.api import load
from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.runs import Run
from forgefield.training.problem.initial_model import InitialModel
from forgefield.training.problem.initial_options import SourceModel, require_same_options
from tests.support.deepmd_program import ask, deepmd_python
from tests.support.deeppots import make_deeppot
from tests.support.helpers import emt_frames, tiny_config
from tests.support.interrupting import Interrupted
from tests.support.launching import ranks, weights, write_config
from tests.support.nequip_checkpoints import checkpoint, trained_elsewhere
from tests.support.resuming import END, assert_same_run
from tests.support.structures import make_frame
from tests.support.train_many import train_only

DEEPPOT = {
    "name": "deeppot",
    "descriptor": {"type": "se_e2_a", "neuron": [4, 8], "axis_neuron": 2, "rcut_smth": 1.0, "sel": [30, 40]},
    "fitting_net": {"neuron": [6, 6]},
}
SHORT = {"max_epochs": 1, "enable_progress_bar": False, "accelerator": "cpu"}
SHIFTS = {"nequip": "model.energy_shifts", "deeppot": "model.out_bias"}


class Remember(Callback):
    """What a training has in hand before its first step."""

    state: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor]

    def on_train_start(self, trainer, pl_module) -> None:
        Remember.state = {key: value.clone() for key, value in pl_module.potential.state_dict().items()}
        average = {} if pl_module.ema is None else pl_module.ema.average
        Remember.average = {key: value.clone() for key, value in average.items()}


REMEMBER = f"{__name__}.{Remember.__name__}"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the trained runs `nequip` and `deeppot`, and `other.extxyz`: other energies, forces as before."""
    folder = tmp_path_factory.mktemp("initial")
    for name, changes in (("nequip", {}), ("deeppot", {"model": DEEPPOT})):
        config = tiny_config(folder, name=name, trainer=SHORT, **changes)
        config["model"] = changes.get("model", config["model"])
        train_only(config)
    frames = emt_frames(12, seed=5)
    for atoms in frames:
        results = dict(atoms.calc.results)
        results["energy"] += 1.7 * (atoms.symbols == "Cu").sum() - 0.4 * (atoms.symbols == "Au").sum()
        atoms.calc = SinglePointCalculator(atoms, **results)
    ase.io.write(folder / "other.extxyz", frames, format="extxyz")
    return folder


def extra_outputs(
    place: Path, folder: Path, source: str, *, data: dict[str, Any] | None = None, **changes: Any
) -> dict:
    """A config that trains `source` further on the other data. changes: of the model section, or `training`, `callbacks`."""
    config = tiny_config(place, name="further", out=str(folder / "runs"), trainer=SHORT)
    config["training"] |= changes.pop("training", {})
    config["callbacks"] = changes.pop("callbacks", [REMEMBER])
    config["model"] = {"from": str(place / "runs" / source), **changes}
    config["data"] = {"train": str(place / "other.extxyz"), "val": 2, "batch": {"frames": 2}, "cache": False}
    config["data"] |= data or {}
    return config


def state_of(place: Path, source: str, which: str = "best") -> dict[str, torch.Tensor]:
    return load(place / "runs" / source, which=which).state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *without: str) -> None:
    assert found.keys() == expected.keys()
    for key in expected.keys() - set(without):
        torch.testing.assert_close(found[key], expected[key].to(found[key].dtype), rtol=0, atol=0, msg=key)


@pytest.mark.parametrize(("source", "which"), [("nequip", "best"), ("nequip", "last"), ("deeppot", "best")])
def test_training_begins_with_the_weights_of_the_run_and_its_average_too(source, which, place, tmp_path):
    run = train_only(extra_outputs(place, tmp_path, source, which=which))
    expected = state_of(place, source, which)
    assert_equal(Remember.state, expected)
    assert_equal(Remember.average, {key: expected[key] for key in Remember.average})
    assert run.info["model"] == Run(place / "runs" / source).info["model"]
    assert run.cutoff == 3.5
    assert run.species == ("Cu", "Au")
    trained = run.load_potential("last").state_dict()
    assert any(not torch.equal(trained[key], expected[key]) for key in Remember.average)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_precision_may_be_another_one(precision, place, tmp_path):
    train_only(extra_outputs(place, tmp_path, "nequip", training={"precision": precision}))
    assert_equal(Remember.state, state_of(place, "nequip"))
    assert Remember.state["model.type_embedding"].dtype == getattr(torch, precision)


def energy_errors(potential: Any, frames: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Compositions, and label - prediction in eV, by the calculator and frame by frame."""
    from forgefield.inference.ase import Calculator

    calculator = Calculator(potential)
    counts, errors = [], []
    for atoms in frames:
        copy = atoms.copy()
        copy.calc = calculator
        counts.append([(atoms.symbols == symbol).sum() for symbol in potential.species])
        errors.append(atoms.calc.results["energy"] - copy.get_potential_energy())
    return np.array(counts, dtype=float), np.array(errors)


@pytest.mark.parametrize("source", ["nequip", "deeppot"])
def test_fitted_shifts_are_the_least_squares_solution_and_nothing_else_changes(source, place, tmp_path, capsys):
    name, data = SHIFTS[source], {"val": 0, "species": ["Au", "Cu"]}
    config = extra_outputs(place, tmp_path, source, shifts="fit", data=data, training={"precision": "float64"})
    config["model"]["from"] = source
    config["out"] = str(place / "runs")
    config["name"] = f"{source}-fitted"
    run = train_only(config)
    said = capsys.readouterr().out
    before = state_of(place, source)
    assert_equal(Remember.state, before, name)
    frames = ase.io.read(place / "other.extxyz", ":")
    first = load(place / "runs" / source).double()
    counts, errors = energy_errors(first, frames)
    change = np.linalg.solve(counts.T @ counts, counts.T @ errors)
    found = (Remember.state[name] - before[name]).numpy()
    np.testing.assert_allclose(found, change, atol=1e-5)
    first.load_state_dict(Remember.state)
    left = energy_errors(first, frames)[1]
    np.testing.assert_allclose(counts.T @ left, 0, atol=1e-4)
    rms = [1000 * np.sqrt(np.mean((values / counts.sum(1)) ** 2)) for values in (errors, left)]
    assert rms[1] < rms[0] / 3
    assert f"{rms[0]:.4g} before, {rms[1]:.4g} after, meV/atom" in said
    assert f"  Cu      {before[name][0]:>13.6f} {Remember.state[name][0]:>13.6f}" in said
    kept = run.info["model"]["out_bias"] if source == "deeppot" else list(run.info["model"]["energy_shifts"].values())
    np.testing.assert_allclose(kept, Remember.state[name].numpy(), rtol=0, atol=0)


def test_shifts_of_species_that_the_new_data_lacks_stay(place, tmp_path):
    frames = emt_frames(8, seed=9, symbols=("Cu",))
    ase.io.write(tmp_path / "copper.extxyz", frames, format="extxyz")
    run = train_only(
        extra_outputs(
            place, tmp_path, "nequip", shifts="fit", data={"train": str(tmp_path / "copper.extxyz"), "val": 0}
        )
    )
    assert run.species == ("Cu", "Au")
    before = state_of(place, "nequip")["model.energy_shifts"]
    assert Remember.state["model.energy_shifts"][1] == pytest.approx(float(before[1]), abs=1e-12)
    assert Remember.state["model.energy_shifts"][0] != before[0]


def test_species_in_another_order_train_the_same_model(place, tmp_path, capsys):
    plainly = train_only(extra_outputs(place, tmp_path, "deeppot") | {"name": "plainly"})
    reordered = train_only(
        extra_outputs(place, tmp_path, "deeppot", data={"species": ["Au", "Cu"]}) | {"name": "reordered"}
    )
    assert (
        "Species are those of run deeppot, in its order: Cu, Au (data.species has Au, Cu)." in capsys.readouterr().out
    )
    assert_same_run(plainly.path, reordered.path)


def test_species_that_the_model_does_not_know_are_refused(place, tmp_path):
    ase.io.write(tmp_path / "nickel.extxyz", emt_frames(6, seed=1, symbols=("Cu", "Ni")), format="extxyz")
    data = {"train": str(tmp_path / "nickel.extxyz")}
    with pytest.raises(
        ForgefieldError, match=r"contains Ni, which the model of run nequip does not support \(only Cu, Au\)"
    ):
        train_only(extra_outputs(place, tmp_path, "nequip", data=data))
    with pytest.raises(
        ForgefieldError, match=r"data.species names Ni, which the model of run nequip was not trained for"
    ):
        train_only(extra_outputs(place, tmp_path, "nequip", data={**data, "species": ["Cu", "Ni"]}))
    assert not (tmp_path / "runs" / "further").exists()


REFUSED = {
    "another cutoff": ({"data": {"cutoff": 4.0}}, r"data.cutoff is 4, but that of the model of run nequip is 3.5"),
    "the default cutoff": (
        {"data": {"cutoff": 5.0}},
        r"data.cutoff is 5, but that of the model of run nequip is 3.5",
    ),
    "adaptive": ({"data": {"adaptive_cutoff": 6.0}}, r"data.adaptive_cutoff is 6, .* is none"),
    "neighbours": ({"data": {"max_neighbours": 9}}, r"data.max_neighbours is 9, .* is none"),
    "energies": (
        {"data": {"reference_energies": {"Cu": -3.0, "Au": -3.0}}},
        r"data.reference_energies .* energy shifts",
    ),
    "another option": ({"num_layers": 3}, r"model.num_layers +2 -> 3"),
    "a preset": ({"preset": "S", "l_max": 1}, r"! model.num_features +\[4, 4\] -> \[128, 64\]"),
    "another model": ({"name": "allegro"}, r"model.name is allegro, but run nequip has a model of the type nequip"),
    "a misspelt option": ({"num_layer": 2}, r"model.num_layer is not an option.*num_layers"),
    "a misspelt choice": ({"shifts": "fitted"}, r"'model.shifts' must be keep or fit, not 'fitted'"),
    "other weights": ({"which": "first"}, r"'model.which' must be best or last"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_contradicts_the_model_is_refused(what, place, tmp_path):
    changes, message = REFUSED[what]
    with pytest.raises(ForgefieldError, match=message):
        train_only(extra_outputs(place, tmp_path, "nequip", **changes))
    assert not (tmp_path / "runs" / "further").exists()


def test_settings_that_agree_with_the_model_are_accepted(place, tmp_path):
    """As it was written then, as it was completed (`num_features`), or left to the data (null)."""
    model = tiny_config(place)["model"] | {"num_features": [4, 4], "parity": True, "energy_shifts": None}
    train_only(extra_outputs(place, tmp_path, "nequip", data={"cutoff": 3.5, "reference_energies": "auto"}, **model))
    assert_equal(Remember.state, state_of(place, "nequip"))


def test_a_config_of_init_is_fine_tuned(place, tmp_path, monkeypatch, capsys):
    """The model and the cutoff that `init` proposes are not a contradiction; what the user chose is."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(place / "frames.extxyz"), "-o", "new.yaml"]) == 0
    assert "preset: S" in (tmp_path / "new.yaml").read_text()
    words = ["train", "new.yaml", "--finetune", str(place / "runs" / "nequip"), "trainer.max_steps=1", "data.test=null"]
    assert "cutoff: 5.0" in (tmp_path / "new.yaml").read_text()
    assert main([*words, "data.cutoff=3"]) == 2
    assert "data.cutoff is" in (error := capsys.readouterr().err)
    assert "data.cutoff=null" in error
    assert main([*words, "data.cutoff=null", "model.preset=M"]) == 2
    assert "model.num_features" in capsys.readouterr().err
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The model is that of run nequip; model.preset and data.cutoff=5 of the config are not used." in said
    fine_tuned, first = Run(tmp_path / "runs" / "new"), Run(place / "runs" / "nequip")
    assert fine_tuned.info["model"]["num_features"] == first.info["model"]["num_features"]
    assert fine_tuned.info["model"]["cutoff"] == fine_tuned.config.data.cutoff == first.info["model"]["cutoff"]
    assert "preset" not in fine_tuned.config.model
    for unchanged in ([], ["data.cutoff=null"]):
        assert main([*words, *unchanged]) == 0
        assert "is complete" in capsys.readouterr().out


def test_options_that_number_species_are_compared_by_symbol(place, tmp_path):
    model = yaml.safe_load(yaml.safe_dump(DEEPPOT))
    data = {"species": ["Au", "Cu"]}
    with pytest.raises(ForgefieldError, match=r"model.descriptor.sel +\[30, 40\] -> \[30, 40\]"):
        train_only(extra_outputs(place, tmp_path, "deeppot", data=data, **model))
    model["descriptor"] |= {"sel": [40, 30], "seed": 7}
    train_only(extra_outputs(place, tmp_path, "deeppot", data=data, **model))


def test_a_run_cannot_start_from_itself_or_from_nothing(place, tmp_path):
    config = extra_outputs(place, tmp_path, "nequip") | {"name": "nequip", "out": str(place / "runs")}
    with pytest.raises(ForgefieldError, match=r"Run nequip cannot start from itself \(model.from\); .* name=NAME"):
        train_only(config, fresh=True)
    assert Run(place / "runs" / "nequip").info["status"] == "finished"
    with pytest.raises(ForgefieldError, match="There is no run 'nequp'.*nequip"):
        train_only(config | {"name": "new", "model": {"from": "nequp"}})


def test_a_config_without_a_run_needs_its_cutoff_and_check_takes_the_model_of_the_run(place, tmp_path, capsys):
    with pytest.raises(ForgefieldError, match="'data.cutoff' must be a number, not null"):
        load_config(tiny_config(place, data={"cutoff": None}))
    config = write_config(tmp_path / "further.yaml", extra_outputs(place, tmp_path, "nequip"))
    assert main(["check", str(config)]) == 0
    assert main(["check", str(config), "data.cutoff=4.5"]) == 2
    assert "data.cutoff is 4.5, but that of the model of run nequip is" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["nequip", "deeppot"])
def test_an_interrupted_training_resumes_without_the_first_run(source, place, tmp_path, monkeypatch):
    """The first run is gone after the first step: its weights cannot be loaded again."""
    shutil.copytree(place / "runs" / source, tmp_path / "runs" / "first")
    training = {"checkpoint": {"every_steps": 2}}
    config = extra_outputs(place, tmp_path, source, shifts="fit", training=training, callbacks=[END])
    config["model"]["from"] = "first"
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"}).path
    monkeypatch.setenv("END_HOW", "raise")
    monkeypatch.setenv("END_AT", "3")
    with pytest.raises(Interrupted):
        train_only({**config, "name": "again"})
    shutil.rmtree(tmp_path / "runs" / "first")
    monkeypatch.setenv("END_AT", "-1")
    again = train_only({**config, "name": "again"})
    assert_same_run(straight, again.path)
    assert again.info["model"] == Run(straight).info["model"]
    assert again.info["initial_model"]["run"] == "first"
    with pytest.raises(ForgefieldError, match=r"model.shifts +fit -> keep"):
        train_only({**config, "name": "again", "model": {"from": "first"}})


def test_runs_follow_one_another(place, tmp_path):
    """The third one is compared with the options of the first, which the second did not repeat."""
    second = train_only(extra_outputs(place, tmp_path, "nequip") | {"name": "second"})
    config = extra_outputs(place, tmp_path, "nequip", **tiny_config(place)["model"])
    config["model"]["from"] = "second"
    train_only(config)
    assert_equal(Remember.state, second.load_potential().state_dict())
    config["model"]["l_max"] = 2
    with pytest.raises(ForgefieldError, match=r"model.l_max +1 -> 2"):
        train_only(config | {"name": "third"})


def test_two_ranks_begin_and_step_as_one(place, tmp_path):
    trainer = {**SHORT, "max_steps": 1, "max_epochs": -1}
    configs = {}
    for n in (1, 2):
        training = {"precision": "float64", "optimizer": "sgd", "lr": 1.0, "ema": None}
        data = {"val": 0, "batch": {"frames": 4 // n}}
        config = extra_outputs(place, tmp_path, "nequip", shifts="fit", callbacks=[], training=training, data=data)
        configs[n] = config | {"name": f"on-{n}", "trainer": trainer}
    train_only(configs[1])
    done = ranks(2, "tests.support.train_many", str(write_config(tmp_path / "two.yaml", configs[2])), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Energy shifts fitted to 12 training frames") == 1
    one, two = (weights(tmp_path / "runs" / f"on-{n}") for n in (1, 2))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    assert Run(tmp_path / "runs" / "on-1").info["model"] == Run(tmp_path / "runs" / "on-2").info["model"]


def test_a_user_model_is_fine_tuned_but_may_have_no_shifts(place, tmp_path):
    config = tiny_config(place, name="own", out=str(tmp_path / "runs"), trainer=SHORT)
    config["model"] = {"name": "tests.support.own_model.Springs", "stiffness": 0.2}
    first = train_only(config)
    config = extra_outputs(place, tmp_path, "nequip", stiffness=0.2)
    config["model"]["from"] = "own"
    train_only(config, trust_code=True)
    assert_equal(Remember.state, first.load_potential().state_dict())
    with pytest.raises(ForgefieldError, match=r"model.stiffness +0.2 -> 0.3"):
        train_only(config | {"name": "other", "model": {"from": "own", "stiffness": 0.3}}, trust_code=True)
    with pytest.raises(ForgefieldError, match="Springs has no energy shift for each species"):
        train_only(config | {"name": "other", "model": {"from": "own", "shifts": "fit"}}, trust_code=True)


def test_neighbours_are_those_of_the_model(place, tmp_path):
    options = {"name": "nequip", "species": ["Au", "Cu"], "cutoff": 3.0, "adaptive_cutoff": 4.5, "max_neighbours": 9}
    initial = InitialModel(SourceModel("run first", {"name": "nequip"}, options), None, "keep")
    settled = initial.settle(load_config(extra_outputs(place, tmp_path, "nequip")), print)
    assert (settled.data.cutoff, settled.data.adaptive_cutoff, settled.data.max_neighbours) == (3.0, 4.5, 9)
    assert list(settled.data.species) == ["Au", "Cu"]


@pytest.mark.parametrize(
    ("given", "fits"), [(70, True), ([30, 40], True), ([70], True), (60, False), ([30, 30], False)]
)
def test_room_of_se_atten_is_for_neighbours_of_any_species(given, fits):
    options = {"name": "deeppot", "species": ["H", "O"], "descriptor": {"type": "se_atten", "sel": 70}}
    known = SourceModel("run first", options, options)
    model = {"from": "first", "descriptor": {"type": "se_atten", "sel": given}}
    with nullcontext() if fits else pytest.raises(ForgefieldError, match="model.descriptor.sel"):
        require_same_options(model, known, ["O", "H"])


# ---- the command


def test_parts_of_a_hybrid_are_compared_one_by_one():
    part = {"type": "se_e2_a", "sel": [10, 20], "neuron": [4], "exclude_types": [[0, 1]]}
    resolved = {"type": "hybrid", "list": [{**part, "rcut": 3.0, "davg": [[0.0] * 4] * 2}, {"type": "se_e2_r"}]}
    known = SourceModel("run a", {}, {"name": "deeppot", "species": ["H", "O"], "descriptor": resolved})

    def config(**changes: object) -> dict[str, object]:
        parts = [{**part, "sel": [20, 10], "seed": 3, **changes}, {"type": "se_e2_r"}]
        return {"descriptor": {"type": "hybrid", "list": parts}}

    require_same_options(config(), known, ["O", "H"])
    with pytest.raises(ForgefieldError, match=r"model.descriptor.list\[0\].neuron"):
        require_same_options(config(neuron=[8]), known, ["O", "H"])


def test_flags_of_the_command_are_equivalent(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = extra_outputs(place, tmp_path, "nequip")
    del config["model"]
    write_config(Path("my.yaml"), config)
    first = str(place / "runs" / "nequip")
    assert main(["train", "my.yaml", "--init-model", first, "--name", "as it is"]) == 0
    assert "Starting from the best weights of run nequip." in capsys.readouterr().out
    assert_equal(Remember.state, state_of(place, "nequip"))
    assert main(["train", "my.yaml", "--finetune", first, "--name", "fitted", "model.which=last"]) == 0
    assert "Energy shifts fitted to 10 training frames" in capsys.readouterr().out
    assert Run(tmp_path / "runs" / "fitted").config.model == {
        "from": first,
        "which": "last",
        "shifts": "fit",
        "name": "nequip",
    }
    assert main(["test", "runs/fitted", "--data", str(place / "frames.extxyz")]) == 0
    assert main(["train", "my.yaml", "--finetune", first, "--init-model", first]) == 2
    assert "not allowed with" in capsys.readouterr().err
    assert main(["train", "my.yaml", "--finetune", first, "model.shifts=keep"]) == 2
    assert "both set the initial model" in capsys.readouterr().err


def test_a_model_section_of_the_config_is_compared_not_ignored(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config(Path("my.yaml"), extra_outputs(place, tmp_path, "nequip") | {"model": tiny_config(place)["model"]})
    first = str(place / "runs" / "nequip")
    assert main(["train", "my.yaml", "--init-model", first, "model.l_max=2"]) == 2
    assert "model.l_max  1 -> 2" in capsys.readouterr().err
    assert main(["train", "my.yaml", "--init-model", first]) == 0
    config = load_config("my.yaml", [f"model={{from: {json.dumps(first)}}}"])
    assert config.model == {"from": first, "which": "best", "shifts": "keep"}


# ---- imported models


def labelled(frames: list[Frame], path: Path) -> list[Any]:
    """Random energies and forces for structures of H and O, as extxyz."""
    rng = np.random.default_rng(2)
    result = []
    for frame in frames:
        atoms = ase.Atoms(frame.numbers, frame.positions, cell=frame.cell, pbc=frame.pbc)
        forces = rng.standard_normal((len(atoms), 3))
        atoms.calc = SinglePointCalculator(atoms, energy=-20.0 * len(atoms) + rng.standard_normal(), forces=forces)
        result.append(atoms)
    ase.io.write(path, result, format="extxyz")
    return result


@pytest.fixture
def water(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    labelled([make_frame(5 + n % 3, seed=n, box=4.5) for n in range(8)], tmp_path / "water.extxyz")
    return tmp_path


def imported_config(folder: Path, **changes: Any) -> dict[str, Any]:
    config = tiny_config(folder, name="further", out="runs", trainer=SHORT, callbacks=[REMEMBER], **changes)
    config["data"] = {"train": "water.extxyz", "val": 2, "batch": {"frames": 2}, "cache": False}
    config["model"] = {"from": "theirs", "shifts": "fit"}
    return config


def test_an_imported_nequip_is_fine_tuned(water, capsys):
    potential, tensors = trained_elsewhere()
    torch.save(checkpoint(tensors), "best.ckpt")
    assert main(["import", "nequip", "best.ckpt", "--name", "theirs"]) == 0
    run = train_only(imported_config(water))
    assert_equal(Remember.state, potential.state_dict(), "model.energy_shifts")
    assert run.cutoff == 3.0
    with pytest.raises(
        ForgefieldError, match="Run theirs was imported and cannot be trained.*--init-model runs/theirs"
    ):
        train_only(imported_config(water) | {"name": "theirs", "model": {"name": "nequip"}})


def write_input(folder: Path, **descriptor: Any) -> Path:
    """An input of DeePMD-kit and its data, with the type map the other way round."""
    for number, n_atoms in enumerate((6, 7)):
        system = folder / f"system-{number}"
        (system / "set.000").mkdir(parents=True)
        frames = [make_frame(n_atoms, seed=20 * number + n, box=4.5) for n in range(5)]
        for frame in frames:
            frame.numbers[:] = np.resize([8, 1, 1], n_atoms)
        atoms = labelled(frames, folder / "unused.extxyz")
        columns = {
            "coord": [one.positions.ravel() for one in atoms],
            "box": [one.cell.array.ravel() for one in atoms],
            "energy": [one.calc.results["energy"] for one in atoms],
            "force": [one.calc.results["forces"].ravel() for one in atoms],
        }
        for name, values in columns.items():
            np.save(system / "set.000" / f"{name}.npy", np.array(values))
        (system / "type.raw").write_text("\n".join("1" if z == 8 else "0" for z in frames[0].numbers))
        (system / "type_map.raw").write_text("H\nO\n")
    part = {"precision": "float32", "seed": 5}
    model = {"type": "se_e2_a", "rcut": 3.0, "sel": [30, 40], "neuron": [4, 8, 16], "axis_neuron": 3, **part}
    content = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {**model, **descriptor},
            "fitting_net": {"neuron": [10, 10], **part},
            "data_bias_nsample": 5,
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4},
        "loss": {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 1, "limit_pref_f": 1},
        "training": {
            "training_data": {"systems": ["system-0"], "batch_size": 1},
            "validation_data": {"systems": ["system-1"]},
            "numb_steps": 3,
            "disp_freq": 3,
        },
    }
    path = folder / "input.json"
    path.write_text(json.dumps(content))
    return path


def test_an_input_of_deepmd_kit_fine_tunes_a_model_of_deepmd_kit(water, capsys):
    potential = make_deeppot(sel=[40, 30])  # of H, O
    write_deepmd(potential, water / "model.dp")
    assert main(["import", "deepmd", "model.dp", "--name", "theirs"]) == 0
    file = str(write_input(water))
    assert main(["train", file, "--finetune", "theirs", f"callbacks=[{REMEMBER}]", "trainer.accelerator=cpu"]) == 0
    said = capsys.readouterr().out
    assert said.count("model.data_bias_nsample: no effect") == 1
    assert "in its order: H, O (data.species has O, H)" in said
    assert "Energy shifts fitted to 5 training frames" in said
    assert_equal(Remember.state, potential.state_dict(), "model.out_bias")
    layers = [value for key, value in Remember.state.items() if ".networks." in key]
    assert layers
    assert {value.dtype for value in layers} == {torch.float32}  # as the input says, not as the file


def test_an_input_with_another_network_is_refused(water, capsys):
    write_deepmd(make_deeppot(sel=[40, 30]), water / "model.dp")
    assert main(["import", "deepmd", "model.dp", "--name", "theirs"]) == 0
    assert main(["train", str(write_input(water, neuron=[4, 8])), "--init-model", "theirs"]) == 2
    assert "model.descriptor.neuron  [4, 8, 16] -> [4, 8]" in capsys.readouterr().err


@pytest.mark.skipif(deepmd_python() is None, reason="deepmd-kit is not installed")
def test_fitted_shifts_are_those_of_deepmd_kit(water):
    write_deepmd(make_deeppot(sel=[40, 30]), water / "model.dp")
    assert main(["import", "deepmd", "model.dp", "--name", "theirs"]) == 0
    command = ["train", str(write_input(water)), "--finetune", "theirs", "trainer.accelerator=cpu"]
    assert main([*command, "training.precision=float64"]) == 0
    arrays = {name: np.load(f"system-0/set.000/{name}.npy") for name in ("coord", "box", "energy")}
    atype = np.tile(np.loadtxt("system-0/type.raw", dtype=int), (5, 1))
    np.savez("frames.npz", atype=atype, **arrays | {"coord": arrays["coord"].reshape(5, -1, 3)})
    ask("bias", {"model": "model.dp", "frames": "frames.npz", "results": "bias.npz"}, water)
    found = Run(water / "runs" / "input").info["model"]["out_bias"]
    np.testing.assert_allclose(found, np.load("bias.npz")["out_bias"], rtol=1e-12)
