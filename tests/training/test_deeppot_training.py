"""Deep Potential from data to use: systems of DeePMD-kit, its input file, resume, ranks, parameters, bad input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch
from ase.calculators.emt import EMT

from forgefield import Calculator, train
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from tests.support.helpers import emt_frames, tiny_config
from tests.support.launching import ranks, weights
from tests.support.train_many import train_only

DESCRIPTOR = {"type": "se_e2_a", "neuron": [4, 8], "axis_neuron": 3, "rcut_smth": 1.0, "seed": 1}
FITTING = {"neuron": [8, 8], "resnet_dt": True, "seed": 1}


def write_system(folder: Path, n: int, seed: int, types: tuple[str, ...] = ("Cu", "Au")) -> Path:
    """A DeePMD system of 8 atoms: EMT energies, forces, virials."""
    frames = [atoms for atoms in emt_frames(8 * n, seed) if len(atoms) == 8][:n]
    for atoms in frames:  # one formula: half of each
        atoms.symbols[:] = [types[0]] * 4 + [types[1]] * 4
    place = folder / "set.000"
    place.mkdir(parents=True)
    (folder / "type.raw").write_text("\n".join(["0"] * 4 + ["1"] * 4))
    (folder / "type_map.raw").write_text("\n".join(types))
    rows: dict[str, list[np.ndarray]] = {"coord": [], "box": [], "energy": [], "force": [], "virial": []}
    for atoms in frames:
        atoms.calc = EMT()
        rows["coord"].append(atoms.positions.reshape(-1))
        rows["box"].append(atoms.cell.array.reshape(-1))
        rows["energy"].append(np.array([atoms.get_potential_energy()]))
        rows["force"].append(atoms.get_forces().reshape(-1))
        rows["virial"].append((-atoms.get_stress(voigt=False) * atoms.get_volume()).reshape(-1))
    for name, values in rows.items():
        np.save(place / f"{name}.npy", np.stack(values))
    return folder


def deepmd_input(folder: Path, **changes: Any) -> Path:
    for name, n, seed in (("a", 6, 1), ("b", 4, 2), ("val", 3, 3)):
        if not (folder / name).exists():
            write_system(folder / name, n, seed)
    training = {
        "training_data": {"systems": [str(folder / "a"), str(folder / "b")], "batch_size": 2},
        "validation_data": {"systems": [str(folder / "val")]},
        "numb_steps": 12,
        "disp_freq": 4,
        "save_freq": 4,
        "seed": 1,
    }
    loss = {"type": "ener", "start_pref_e": 0.1, "limit_pref_e": 1, "start_pref_f": 100, "limit_pref_f": 1}
    content = {
        "_comment": "small",
        "model": {"type_map": ["Cu", "Au"], "descriptor": {**DESCRIPTOR, "rcut": 3.5}, "fitting_net": FITTING},
        "learning_rate": {"type": "exp", "decay_steps": 4, "start_lr": 0.005, "stop_lr": 1e-5},
        "loss": loss,
        "training": training,
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        content[section] = {**content[section], name: value}
    path = folder / "input.json"
    path.write_text(json.dumps(content))
    return path


def test_an_input_of_deepmd_kit_trains_writes_its_curve_and_resumes_exactly(tmp_path):
    """Virials are trained as well; half of the training and the rest is the whole, to the last bit."""
    prefactors = {"start_pref_v": 0.02, "limit_pref_v": 0.1}
    loss = {
        "type": "ener",
        "start_pref_e": 0.1,
        "limit_pref_e": 1,
        "start_pref_f": 100,
        "limit_pref_f": 1,
        **prefactors,
    }
    file = deepmd_input(tmp_path, loss__start_pref_v=0.02, loss__limit_pref_v=0.1)
    assert json.loads(file.read_text())["loss"] == loss
    whole = train(file, f"out={tmp_path}/whole", "training.scheduler.T_max=12")
    train_only(file, f"out={tmp_path}/again", "training.scheduler.T_max=12", "trainer.max_steps=8")
    again = train_only(file, f"out={tmp_path}/again", "training.scheduler.T_max=12")
    a, b = (run.load_potential("last").state_dict() for run in (whole, again))
    assert all(torch.equal(a[name], b[name]) for name in a)
    curves = [(run.path / "lcurve.out").read_bytes() for run in (whole, again)]
    assert curves[0] == curves[1]
    header, *rows = [line for line in curves[0].decode().splitlines() if not line.startswith("# nan")]
    assert header.split()[1:] == [
        *("step", "rmse_val", "rmse_trn", "rmse_e_val", "rmse_e_trn"),
        *("rmse_f_val", "rmse_f_trn", "rmse_v_val", "rmse_v_trn", "lr"),
    ]
    assert [int(row.split()[0]) for row in rows] == [4, 8, 12]
    metrics = whole.metrics()
    assert metrics[-1]["val/forces_rmse"] < metrics[0]["val/forces_rmse"]
    assert float(rows[-1].split()[7]) == pytest.approx(metrics[-1]["val/virial_rmse"] / 1000, rel=1e-2)


def test_an_input_killed_with_signal_9_resumes_exactly(tmp_path):
    file = deepmd_input(tmp_path, training__numb_steps=150, training__disp_freq=30, training__save_freq=10)
    train_only(file, f"out={tmp_path}/whole", "training.engine=eager")
    command = [
        sys.executable,
        "-m",
        "forgefield",
        "train",
        str(file),
        f"out={tmp_path}/killed",
        "training.engine=eager",
    ]
    checkpoints = tmp_path / "killed" / "input" / "checkpoints"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not any(checkpoints.glob("step-*[4-9]0.ckpt")) and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    train_only(file, f"out={tmp_path}/killed", "training.engine=eager")
    for name in ("lcurve.out", "metrics.csv", "checkpoints/last.safetensors"):
        whole, again = ((tmp_path / out / "input" / name).read_bytes() for out in ("whole", "killed"))
        assert whole == again, name


def test_two_ranks_train_an_input_as_one_does(tmp_path):
    file = deepmd_input(tmp_path, training__numb_steps=3)
    train_only(file, f"out={tmp_path}/one", "data.batch={frames: 2}")
    done = ranks(2, "forgefield", "train", str(file), f"out={tmp_path}/two", "data.batch={frames: 1}", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (weights(tmp_path / name / "input") for name in ("one", "two"))
    assert float((one - two).abs().max()) < 1e-9


def test_parameters_of_frames_reach_the_network_in_training_prediction_and_calculator(tmp_path):
    """Labels that depend on a parameter of the frame, which nothing else in the frame tells."""
    frames = emt_frames(24, seed=5)
    for number, atoms in enumerate(frames):
        atoms.info["fparam"] = float(number % 2)
        atoms.calc.results["energy"] += 0.8 * len(atoms) * (number % 2)
    ase.io.write(tmp_path / "frames.extxyz", frames, format="extxyz")
    model = {"name": "deeppot", "descriptor": DESCRIPTOR, "fitting_net": {**FITTING, "numb_fparam": 1}}
    config = tiny_config(tmp_path, task={"energy": {}, "forces": {"weight": 0.1}}) | {"model": model}
    config["data"] |= {"labels": {"fields": {"fparam": {"shape": [1]}}}, "batch": {"frames": 5}}
    config["training"] |= {"lr": 0.02, "ema": None}
    config["trainer"] |= {"max_epochs": 30}
    run = train_only(config)
    assert run.metrics()[-1]["val/energy_mae"] < 200  # without the parameter at least half of 800 meV/atom
    atoms = frames[0].copy()
    atoms.calc = Calculator(run)
    with pytest.raises(ForgefieldError, match=r"atoms.info\['fparam'\]"):
        del atoms.info["fparam"]
        atoms.get_potential_energy()
    energies = []
    for value in (0.0, 1.0):
        atoms.info["fparam"] = value
        energies.append(atoms.get_potential_energy() / len(atoms))
    assert energies[1] - energies[0] == pytest.approx(0.8, abs=0.4)


def test_a_validation_frame_without_a_parameter_is_refused(tmp_path):
    for name, last in (("train", None), ("val", 2)):
        frames = emt_frames(3, seed=5)
        for number, atoms in enumerate(frames):
            if number != last:
                atoms.info["fparam"] = 1.0
        ase.io.write(tmp_path / f"{name}.extxyz", frames, format="extxyz")
    model = {"name": "deeppot", "descriptor": DESCRIPTOR, "fitting_net": {**FITTING, "numb_fparam": 1}}
    config = tiny_config(tmp_path) | {"model": model}
    config["data"] |= {name: str(tmp_path / f"{name}.extxyz") for name in ("train", "val")}
    config["data"] |= {"labels": {"fields": {"fparam": {"shape": [1]}}}}
    with pytest.raises(
        ForgefieldError, match=r"needs fparam as an input, but .*val.extxyz, frame 2 of data.val does not have it"
    ):
        train_only(config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model__descriptor": {**DESCRIPTOR, "rcut": 3.5, "sel": [3, 60]}}, "needs at least"),
        ({"model__type_map": ["Cu", "Ag"]}, "Au"),
    ],
)
def test_a_mismatch_with_the_data_is_reported_before_training(changes, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = deepmd_input(tmp_path, **changes)
    assert main(["train", str(file)]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "runs" / "input").exists()
