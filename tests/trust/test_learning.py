"""The learning loop: killed at any stage it ends as an uninterrupted one and computes no label twice; labellers may fail."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
import yaml
from ase.build import bulk
from ase.calculators.emt import EMT

import forgefield
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from forgefield.trust.loop.explore import explore
from forgefield.trust.loop.label import label_structures
from forgefield.trust.loop.options import LabelOptions, LoopOptions, load_loop
from forgefield.trust.loop.together import BatchExplorer, Walk, _temperatures
from forgefield.trust.structures import read_structures
from tests.support.emt_run import emt_run, kill_when, start_command
from tests.support.labelling import copper_structures, label_command


def write_loop(folder: Path, **changes) -> Path:
    """A loop of one iteration that takes seconds; all explored structures are candidates."""
    frames = []
    for seed in range(6):
        atoms = bulk("Cu", a=3.7, cubic=True)
        atoms.symbols[seed % 4] = "Au"
        atoms.rattle(0.05, seed=seed)
        frames.append(atoms)
    ase.io.write(folder / "starts.extxyz", frames)
    training = {
        "data": {"val": 2, "cutoff": 3.5, "batch": {"frames": 2}, "cache": False},
        "model": {"name": "nequip", "num_layers": 1, "l_max": 1, "num_features": 4, "radial_mlp_width": 8},
        "task": {"energy": {}, "forces": {}},
        "training": {"lr": 0.01, "tensorboard": 0},
        "trainer": {"max_epochs": 3, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(training))
    loop = {
        "config": "train.yaml",
        "iterations": 1,
        "explore": {
            "structures": "starts.extxyz",
            "starts": 2,
            "temperatures": [300, 600],
            "ps": 0.05,
            "timestep": 5,
            "every": 2,
            "threshold": 1e-9,
            "limit": 1e9,
        },
        "select": {"frames": 4},
        "label": {"calculator": "tests.support.labelling.CountingEMT"},
    }
    for key, value in changes.items():
        loop[key] = {**loop[key], **value} if isinstance(value, dict) else value
    (folder / "loop.yaml").write_text(yaml.safe_dump(loop))
    return folder / "loop.yaml"


def outcome(folder: Path) -> tuple:
    """Everything that a loop ends with, except for times."""
    history = json.loads((folder / "learning/loop/history.json").read_text())["history"]
    for record in history:
        record.pop("seconds_exploring", None)
        record.pop("seconds_training", None)
    weights = [Run(path).read_weights("best").sha256 for path in sorted((folder / "learning/loop/runs").iterdir())]
    labels = [path.read_text() for path in sorted((folder / "learning/loop").glob("iteration-*/labelled.extxyz"))]
    return history, weights, labels


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A loop that was not interrupted: its folder and its outcome."""
    folder, before = tmp_path_factory.mktemp("loop"), Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LABEL_LOG", str(folder / "labels.txt"))
        forgefield.learn(write_loop(folder))
    assert Path.cwd() == before
    return folder, outcome(folder)


def test_a_loop_trains_a_model_for_each_iteration_and_writes_its_history(uninterrupted):
    folder, (history, weights, _) = uninterrupted
    assert [record["labelled"] for record in history] == [6, 4]
    assert len(set(weights)) == 2
    for frame in ase.io.read(folder / "learning/loop/iteration-01/labelled.extxyz", index=":"):
        energy, forces = frame.get_potential_energy(), frame.get_forces()
        frame.calc = EMT()
        assert energy == frame.get_potential_energy()
        assert np.array_equal(forces, frame.get_forces())
    page = (folder / "learning/loop/learning.html").read_text()
    assert "Uncertainty of explored structures" in page
    assert "Errors: force MAE" in page


@pytest.mark.parametrize("stage", ["first labels", "training", "exploring", "labels"])
def test_a_loop_that_was_killed_ends_as_an_uninterrupted_one(uninterrupted, tmp_path, monkeypatch, stage):
    _, expected = uninterrupted
    loop = write_loop(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABEL_LOG", str(tmp_path / "labels.txt"))
    place = tmp_path / "learning/loop"
    at_label = {"first labels": 3, "labels": 8}.get(stage)
    if at_label is not None:
        monkeypatch.setenv("KILL_AT_LABEL", str(at_label))
        process = start_command(tmp_path, "learn", loop.name, "--device", "cpu")
        assert process.wait() == -signal.SIGKILL, process.printed()
        monkeypatch.delenv("KILL_AT_LABEL")
        assert len((tmp_path / "labels.txt").read_text().splitlines()) == at_label - 1
    else:
        reached = {
            "training": place / "runs/iteration-00/run.json",
            "exploring": place / "iteration-01/explore/0000.json",
        }
        kill_when(start_command(tmp_path, "learn", loop.name, "--device", "cpu"), reached[stage].exists)
    result = forgefield.learn(loop)
    assert outcome(tmp_path) == expected
    lines = (tmp_path / "labels.txt").read_text().splitlines()
    assert len(lines) == len(set(lines)) == result.labels == 10


def test_structures_that_cannot_be_labelled_are_set_aside_and_reported(tmp_path, monkeypatch):
    loop = write_loop(tmp_path, iterations=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABEL_LOG", str(tmp_path / "labels.txt"))
    monkeypatch.setenv("FAIL_GOLD", "1")
    messages = []
    result = forgefield.learn(loop, notify=messages.append)
    assert len(result.history[0]["failed"]) == 2
    assert result.history[0]["labelled"] == 4
    assert any("structure 0 has no label: RuntimeError: self-consistency was not reached" in text for text in messages)
    assert "self-consistency was not reached" in (result.folder / "learning.html").read_text()


def test_a_loop_ends_when_no_structure_exceeds_the_threshold(tmp_path, monkeypatch):
    loop = write_loop(tmp_path, explore={"threshold": 1e6, "limit": None}, iterations=5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABEL_LOG", str(tmp_path / "labels.txt"))
    result = forgefield.learn(loop)
    assert result.converged
    assert result.run.name == "iteration-00"
    assert "converged, 6 labels" in repr(result)
    with pytest.raises(ForgefieldError, match="was started with seed 0, now it is 1"):
        forgefield.learn(loop, "seed=1")


# ---- commands


def test_commands_label_in_jobs_and_are_not_repeated(tmp_path, monkeypatch):
    options = LabelOptions(command=label_command(), frames_per_job=3)
    frames, messages = copper_structures(5, gold=(1,)), []
    labelled, failed = label_structures(frames, options, tmp_path / "labels", notify=messages.append)
    assert list(failed) == [1]
    assert "exit code 1" in failed[1]
    for atoms, frame in zip(labelled, [frames[i] for i in (0, 2, 3, 4)], strict=True):
        frame.calc = EMT()
        assert atoms.get_potential_energy() == pytest.approx(frame.get_potential_energy(), abs=1e-6)
    # Labels that were written but not collected, as after kill -9, are collected and not computed again.
    for path in (tmp_path / "labels").glob("*.extxyz"):
        path.unlink()
    again, _ = label_structures(frames, options, tmp_path / "labels", notify=messages.append)
    assert [atoms.get_potential_energy() for atoms in again] == [atoms.get_potential_energy() for atoms in labelled]
    computed = [path.read_text() for path in sorted((tmp_path / "labels").glob("job-*/computed.txt"))]
    assert computed == ["0\n2\n", "3\n4\n"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"explore": {"temprature": [1]}}, "unknown key 'explore.temprature'. Did you mean 'temperatures'"),
        ({"explore": {"temperatures": [-300]}}, "'explore.temperatures' must be a positive number"),
        ({"label": {"command": "run {input} {output}"}}, "needs either a calculator or a command"),
        ({"label": {"calculator": None, "command": "run.sh"}}, "a command with {input} and {output}"),
        ({"label": {"sbatch": ["--time=1"]}}, "'label.sbatch' applies to label.command"),
        ({"explore": {"limit": 1e-12}}, "larger than explore.threshold"),
        ({"start": "best"}, "'start' must be weights or scratch"),
    ],
    ids=["key", "temperature", "both", "placeholders", "sbatch", "limit", "choice"],
)
def test_wrong_options_are_refused_with_their_place(tmp_path, changes, message):
    path = write_loop(tmp_path, **changes)
    with pytest.raises(ForgefieldError) as error:
        load_loop(path)
    assert message in str(error.value)
    assert f"{path}, line" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "tests.support.own_model.Pairs"}}, "does not define its last layer"),
        ({"task": {"forces": {"direct": True}}}, "the model predicts no energy"),
        ({"task": {"energy": {}, "forces": {"direct": True}}}, "use explore.measure: energy"),
    ],
    ids=["last layer", "energy", "direct forces"],
)
def test_models_without_uncertainties_are_refused_before_anything_is_labelled_or_trained(tmp_path, changes, message):
    loop = write_loop(tmp_path, out=str(tmp_path / "learning"))
    training = yaml.safe_load((tmp_path / "train.yaml").read_text()) | changes
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(training))
    with pytest.raises(ForgefieldError, match=message) as error:
        forgefield.learn(loop)
    assert "train.yaml: " in str(error.value)
    assert not (tmp_path / "learning").exists()


def test_labels_with_too_large_forces_are_set_aside(tmp_path):
    frames = copper_structures(2)
    frames[1].positions[1] = frames[1].positions[0] + [1.0, 0, 0]
    options = LabelOptions(calculator="ase.calculators.emt.EMT", max_force=10.0)
    labelled, failed = label_structures(frames, options, tmp_path / "labels", notify=lambda text: None)
    assert len(labelled) == 1
    assert "eV/A, above label.max_force" in failed[1]


def test_a_calculator_that_always_fails_stops_the_loop(tmp_path, monkeypatch):
    loop = write_loop(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABEL_LOG", raising=False)  # which the calculator needs
    with pytest.raises(ForgefieldError, match="none of 6 structures could be labelled. The first reason: KeyError"):
        forgefield.learn(loop)
    assert not os.path.exists("learning/loop/runs")


def test_a_loop_may_train_ensembles_whose_deviations_are_the_uncertainty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABEL_LOG", str(tmp_path / "labels.txt"))
    loop = write_loop(tmp_path, explore={"starts": 1, "temperatures": [300]}, select={"frames": 2})
    config = yaml.safe_load((tmp_path / "train.yaml").read_text())
    config["training"]["ensemble"] = 2
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    learning = forgefield.learn(loop)
    assert list(learning.run.members) == ["seed-0", "seed-1"]
    candidate = ase.io.read("learning/loop/iteration-01/explore/0000.extxyz")
    first = Run(Path("learning/loop/runs/iteration-00"))
    candidate.calc = forgefield.Calculator(first)
    candidate.get_forces()
    deviation = np.linalg.norm(candidate.calc.results["forces_uncertainty"], axis=1).max()
    assert candidate.info["uncertainty"] == pytest.approx(deviation, rel=1e-5)
    # each member continues from the weights of the same member of the iteration before
    for name in learning.run.members:
        record = Run(learning.run.member_path(name)).info["initial_model"]
        assert record["folder"] == str(first.member_path(name).absolute())


@pytest.fixture
def torch_sim():
    return pytest.importorskip("torch_sim")


def test_a_loop_explores_in_batches_with_torch_sim(torch_sim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABEL_LOG", str(tmp_path / "labels.txt"))
    loop = write_loop(tmp_path, explore={"engine": "torch-sim", "together": 3}, select={"frames": 2})
    learning = forgefield.learn(loop)
    folder = Path("learning/loop/iteration-01/explore")
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert [record["temperature"] for record in records] == [300, 600, 300, 600]
    assert {record["status"] for record in records} == {"finished"}
    assert all(record["candidates"] == 5 for record in records)  # 10 steps of 5 fs, every second one
    first = Run(Path("learning/loop/runs/iteration-00"))
    for candidate in ase.io.read(folder / "0003.extxyz", index=":"):
        energy, forces = candidate.get_potential_energy(), candidate.get_forces()
        candidate.calc = forgefield.Calculator(first, uncertainty="forces")
        assert candidate.get_potential_energy() == pytest.approx(energy, abs=1e-5)
        assert np.allclose(candidate.get_forces(), forces, atol=1e-4)
        candidate.calc.calculate(candidate, ["forces_uncertainty"])
        value = np.linalg.norm(candidate.calc.results["forces_uncertainty"], axis=1).max()
        assert candidate.info["uncertainty"] == pytest.approx(value, rel=1e-3)
    assert learning.history[1]["simulations"] == 4
    # a batch of which one record is missing is repeated with the same random numbers
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "0001.json").unlink()
    records = explore(first, read_structures("starts.extxyz"), load_loop(loop), 1, folder, device="cpu", notify=print)
    assert len(records) == 4
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_batched_dynamics_have_the_temperatures_that_were_asked_for(torch_sim, tmp_path, monkeypatch):
    monkeypatch.setattr("forgefield.trust.loop.together.FRICTION_STEPS", 10)
    run, options = emt_run(tmp_path), LoopOptions(seed=1)
    atoms = bulk("Cu", cubic=True) * (2, 2, 2)
    walks = [Walk(atoms.copy(), temperature, 0) for temperature in (200.0, 800.0)]
    options.explore.measure, options.explore.threshold, options.explore.ps = "energy", 1e9, 1.0
    explorer = BatchExplorer.__new__(BatchExplorer)
    explorer.torch_sim, explorer.device = torch_sim, torch.device("cpu")
    from forgefield.torchsim import Model

    explorer.model = Model(run, device="cpu", compute_stress=False)
    torch.manual_seed(0)
    state = explorer._begin(torch_sim.initialize_state([atoms] * 2, torch.device("cpu"), torch.float64), walks, 2.0)
    step, seen = explorer._step(walks, 2.0), []
    for number in range(150):
        state = step(state)
        if number >= 30:
            seen.append(_temperatures(state, 2, state.system_idx.numpy()))
    # the friction decorrelates kinetic energies within 10 steps; 3 * 32 degrees of freedom
    assert np.mean(seen, 0) == pytest.approx([200, 800], rel=0.12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "torch-sim", "pressures": [0.0]}, "the cells are kept"),
        ({"engine": "torch-sim", "thermostat": "bussi"}, "langevin with explore.engine"),
        ({"together": 4}, "applies to explore.engine: torch-sim"),
    ],
)
def test_options_that_torch_sim_does_not_have_are_refused(tmp_path, changes, message):
    with pytest.raises(ForgefieldError, match=message):
        load_loop(write_loop(tmp_path, explore=changes))
