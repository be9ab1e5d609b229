"""Fitting networks beside the energy, from DeePMD-kit's inputs and ours: training, statistics, losses, curves, files, use."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
import torch

from forgefield import Calculator, api, load, train
from forgefield.config.deepmd import translation
from forgefield.config.loading import load_config
from forgefield.data.batch import batch_shapes
from forgefield.data.module import read_data
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.models.deeppot.importer import read_deepmd
from forgefield.models.resolving import extra_outputs_of
from forgefield.runs import Run
from forgefield.tasks.task import Task
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.step import StepFunction
from tests.support.deepmd_systems import COLUMNS, FITTINGS, LOSSES, N_DOS, write_input, write_system
from tests.support.engine_cases import difference
from tests.support.train_many import train_only


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An input of every kind, trained."""
    folder = tmp_path_factory.mktemp("outputs")
    for kind in FITTINGS:
        train_only(load_config(write_input(folder, kind), [f"out={folder}/runs"]))
    return folder


def run_of(place: Path, kind: str) -> Run:
    return Run.open(str(place / "runs" / kind), out=str(place / "runs"))


def frames_of(place: Path, kind: str, rows: list[int]) -> dict[str, torch.Tensor]:
    """Frames of the second training system, as a batch."""
    config = load_config(place / f"{kind}.json", [f"data.train={place}/b", "data.val=null"])
    data = read_data(config.data, 0)
    return data.train.batch(rows)


def loss_of(place: Path, kind: str, rows: list[int]) -> float:
    """With the weights of a learning rate at 0.4 of its start."""
    run = run_of(place, kind)
    batch = frames_of(place, kind, rows)
    section = translation(json.loads((place / f"{kind}.json").read_text()), place / f"{kind}.json").config["task"]
    options = load_config(place / f"{kind}.json").task
    task = Task(options, run.species, extra_outputs_of(run.info["model"]))
    outputs = run.load_potential("last").train()(batch)
    sums, counts = task.sums(outputs, batch)
    weights = []
    for name in task.names:
        first = section[name]["weight"]
        last = section[name].get("schedule", {"to": first})["to"]
        weights.append(last + 0.4 * (first - last))
    return float(task.combine(sums, counts, torch.tensor(weights, dtype=torch.float64)).detach())


def labels_of(place: Path, name: str, system: str = "b") -> np.ndarray:
    return np.load(place / system / "set.000" / f"{name}.npy")


def compositions(place: Path) -> tuple[np.ndarray, list[str]]:
    rows = [
        np.repeat([np.bincount(np.loadtxt(place / s / "type.raw", dtype=int))], n, 0) for s, n in (("a", 5), ("b", 4))
    ]
    return np.concatenate(rows).astype(float), ["a", "b"]


# ---- what is trained


@pytest.mark.parametrize("kind", FITTINGS)
def test_curves_have_the_columns_of_deepmd_kit(kind, place):
    header, _, *rows = (place / "runs" / kind / "lcurve.out").read_text().splitlines()
    columns = [f"{name}_{split}" for name in COLUMNS[kind] for split in ("val", "trn")]
    assert header.split() == ["#", "step", *columns, "lr"]
    assert [int(row.split()[0]) for row in rows] == [3, 6]
    values = dict(zip(columns, map(float, rows[-1].split()[1:])))
    assert all(value > 0 for value in values.values())
    if kind == "intensive":
        assert values["mse_val"] == pytest.approx(values["rmse_val"] ** 2, rel=0.02)


def test_statistics_are_those_of_the_labels(place):
    counts, systems = compositions(place)
    both = {name: np.concatenate([labels_of(place, name, s) for s in systems]) for name in ("gap", "polarizability")}
    fitting = {kind: run_of(place, kind).info["model"]["fitting_net"] for kind in FITTINGS}
    shares = counts / counts.sum(1, keepdims=True)
    bias = np.linalg.lstsq(shares, both["gap"], rcond=None)[0]
    assert np.allclose(fitting["intensive"]["out_bias"], bias)
    assert np.allclose(fitting["intensive"]["out_std"][1], (both["gap"] - shares @ bias).std(0))
    per_atom = both["gap"] / counts.sum(1, keepdims=True)
    assert np.allclose(fitting["extensive"]["out_bias"], per_atom.mean(0))
    assert np.allclose(fitting["extensive"]["out_std"], per_atom.std(0))
    tensors = np.linalg.lstsq(counts, both["polarizability"], rcond=None)[0].reshape(2, 3, 3)
    assert np.allclose(fitting["polar"]["out_bias"], tensors.trace(axis1=1, axis2=2) / 3)
    atoms = [labels_of(place, "atom_dos", s).reshape(-1, N_DOS) for s in systems]
    types = np.concatenate([np.tile(np.loadtxt(place / s / "type.raw", dtype=int), n) for s, n in (("a", 5), ("b", 4))])
    means = [np.concatenate(atoms)[types == kind].mean(0) for kind in (0, 1)]
    assert np.allclose(fitting["dos"]["out_bias"], means)


def test_losses_are_the_formulas(place):
    rows = [0, 2]
    outputs = {kind: run_of(place, kind).load_potential("last")(frames_of(place, kind, rows)) for kind in FITTINGS}
    outputs = {
        kind: {k: v.detach().numpy().reshape(2, -1) for k, v in found.items()} for kind, found in outputs.items()
    }

    def error(kind: str, name: str) -> np.ndarray:
        return outputs[kind][name] - labels_of(place, name)[rows]

    dipole = (error("dipole", "dipole") ** 2).mean() + 2 * (error("dipole", "atomic_dipole") ** 2).mean()
    assert loss_of(place, "dipole", rows) == pytest.approx(dipole, rel=1e-12)
    polar = 0.5 * (error("polar", "polarizability") ** 2).mean()
    assert loss_of(place, "polar", rows) == pytest.approx(polar, rel=1e-12)
    whole, atoms = error("dos", "dos"), error("dos", "atom_dos").reshape(-1, N_DOS)
    dos = (whole**2).mean() + 0.5 * (whole.cumsum(1) ** 2).mean()
    dos += (0.5 + 0.4 * 2.5) * (atoms**2).mean() + 2 * (atoms.cumsum(1) ** 2).mean()
    assert loss_of(place, "dos", rows) == pytest.approx(dos, rel=1e-12)
    scale = np.array(run_of(place, "intensive").info["model"]["fitting_net"]["out_std"][0])
    gap = np.abs(error("intensive", "gap") / scale)
    smooth = np.where(gap < 0.7, 0.5 * gap**2 / 0.7, gap - 0.35)
    assert loss_of(place, "intensive", rows) == pytest.approx(2 * smooth.mean(), rel=1e-12)
    scale = np.array(run_of(place, "extensive").info["model"]["fitting_net"]["out_std"][0])
    gap = error("extensive", "gap") / 7 / scale
    assert loss_of(place, "extensive", rows) == pytest.approx(2 * (gap**2).mean(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["polar", "dos", "intensive"])
def test_a_traced_step_equals_an_eager_one(kind, place):
    run = run_of(place, kind)
    task = Task(load_config(place / f"{kind}.json").task, run.species, extra_outputs_of(run.info["model"]))
    config = load_config(place / f"{kind}.json")
    data = read_data(config.data, 0)
    shapes = batch_shapes(data.train.fields)
    function = StepFunction(run.load_potential("last").train(), task, task.error_metrics(run.species), shapes=shapes)
    traced, eager = ScriptEngine(function), Engine(function)
    for rows in ([0, 6, 3], [8]):
        assert difference(traced, eager, data.train.batch(rows)) < 1e-9, rows


def test_an_interrupted_run_resumes_exactly(place, tmp_path):
    kind = "dos"
    file = place / f"{kind}.json"
    train_only(load_config(file, [f"out={tmp_path}", "++trainer.max_steps=3", "training.scheduler.T_max=6"]))
    train_only(load_config(file, [f"out={tmp_path}", "++trainer.max_steps=6", "training.scheduler.T_max=6"]))
    for name in ("lcurve.out", "checkpoints/last.safetensors"):
        assert (tmp_path / kind / name).read_bytes() == (place / "runs" / kind / name).read_bytes(), name


# ---- what is used


@pytest.mark.parametrize("kind", FITTINGS)
def test_files_of_deepmd_kit_hold_the_whole_model(kind, place, tmp_path):
    potential = run_of(place, kind).load_potential("last")
    found = read_deepmd(write_deepmd(potential, tmp_path / f"{kind}.dp"))
    again = build_model(found.resolved, precision=found.precision, seed=5)
    again.load_state_dict(found.state)
    batch = frames_of(place, kind, [0, 1])
    for name, values in again.eval()(batch).items():
        assert torch.equal(values, potential(batch)[name]), name


def own_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Dipoles of oxygen atoms alone, from a config of ours."""
    if not (folder / "a").exists():
        write_system(folder / "a", 5, 1)
    descriptor = {"type": "se_e2_a", "neuron": [3, 6], "axis_neuron": 2}
    config = {
        "name": "own",
        "out": str(folder / "runs"),
        "data": {
            "train": str(folder / "a"),
            "val": 1,
            "cutoff": 3.0,
            "species": ["O", "H"],
            "labels": {"fields": {"dipole": {"shape": [3], "unit": "e*A"}}},
        },
        "model": {"name": "deeppot", "descriptor": descriptor, "fitting_net": {"type": "dipole", "neuron": [6], "sel_type": 0}},
        "task": {"dipole": {"loss": "mae"}},
        "training": {"precision": "float64"},
        "trainer": {"max_epochs": 1, "enable_progress_bar": False},
    }  # fmt: skip
    for key, value in changes.items():
        *sections, name = key.split("__")
        inner: Any = config
        for section in sections:
            inner = inner[section]
        inner[name] = value
    return config


def test_a_forgefield_config_trains_tests_predicts_and_calculates(tmp_path, capsys):
    run = train(own_config(tmp_path))
    assert "dipole" in capsys.readouterr().out
    errors = api.test(run.path, data=str(tmp_path / "a"))
    assert errors["dipole_per_atom_mae"] == pytest.approx(errors["dipole_mae"] / 6)
    write_system(tmp_path / "other", 1, 3)
    atoms = ase.io.read(api.predict(run.path, str(tmp_path / "other"), tmp_path / "out.extxyz"))
    assert [bool(row.any()) for row in atoms.arrays["atomic_dipole"]] == [True] * 2 + [False] * 4
    dipole = atoms.get_dipole_moment()  # ASE reads what it knows as a result
    assert np.allclose(atoms.arrays["atomic_dipole"].sum(0), dipole)
    turned = atoms.copy()
    turned.rotate(90, "z", rotate_cell=True)
    turned.calc = Calculator(run.path)
    assert np.allclose(turned.get_dipole_moment(), [-dipole[1], dipole[0], dipole[2]])
    assert load(run.path).model.unseen == (1,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": {"energy": {}}}, "predicts dipole, atomic_dipole and no energy; write task: {dipole: {}}"),
        ({"task": {"gap": {}}, "data__labels__fields__gap": {"shape": [2]}}, "task.gap: the fitting network of this model"),
        ({"task__dipole__normalise": "none"}, "task.dipole.normalise does not apply: it is part of the model; leave it out"),
        ({"task__dipole__reduce": "mean"}, "task.dipole.reduce does not apply"),
        ({"model__heads": {"dipole": {}}}, "model.heads.dipole"),
        ({"model__out_bias": [1.0, 2.0]}, "model.out_bias does not apply: model.fitting_net.type is dipole"),
        ({"model__fitting_net__sel_type": [2]}, "it contains indices of species, from 0 to 1"),
        ({"model__descriptor": {"type": "se_e2_r"}}, "needs directions, but the descriptor has none"),
        ({"data__labels__fields__dipole": {"shape": [1, 3]}}, "the model predicts a value of shape [3] for each frame"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(changes, said, tmp_path):
    with pytest.raises(ForgefieldError) as error:
        train_only(own_config(tmp_path, **changes))
    assert said in str(error.value)


def test_a_model_that_starts_from_such_a_run_is_checked_alike(tmp_path):
    first = train_only(own_config(tmp_path))
    start: dict[str, Any] = {"name": "next", "model": {"from": str(first.path)}, "data__cutoff": None}
    assert train_only(own_config(tmp_path, **start)).info["model"]["predicts"] == first.info["model"]["predicts"]
    refused = [
        (
            {"model__heads": {"dipole": {}}},
            "model.heads does not apply: the fitting network of this model predicts dipole",
        ),
        ({"task": {"energy": {}}}, "predicts dipole, atomic_dipole and no energy; write task: {dipole: {}}"),
        ({"task": None}, "predicts dipole, atomic_dipole and no energy; write task: {dipole: {}}"),
        ({"task__dipole__normalise": "none"}, "task.dipole.normalise does not apply"),
        ({"task__dipole__reduce": "mean"}, "task.dipole.reduce does not apply"),
    ]
    for changes, said in refused:
        start |= {"name": "refused", "model": {"from": str(first.path)}}
        with pytest.raises(ForgefieldError) as error:
            train_only(own_config(tmp_path, **start, **changes))
        assert said in str(error.value)


# ---- there


def deepmd_python() -> str | None:
    return sys.executable if importlib.util.find_spec("deepmd") else os.environ.get("FORGEFIELD_DEEPMD_PYTHON")


@pytest.mark.skipif(
    deepmd_python() is None, reason="no deepmd-kit; FORGEFIELD_DEEPMD_PYTHON names an interpreter with it"
)
def test_statistics_predictions_and_losses_are_those_of_deepmd_kit(place, tmp_path):
    cases = []
    for kind in FITTINGS:
        model = write_deepmd(run_of(place, kind).load_potential("last"), tmp_path / f"{kind}.dp")
        case = {"input": str(place / f"{kind}.json"), "model": str(model), "batches": [[1], [0, 2]]}
        cases.append(
            case | {name: str(tmp_path / f"{kind}.{end}") for name, end in (("checkpoint", "pt"), ("results", "npz"))}
        )
    (tmp_path / "job.json").write_text(json.dumps(cases))
    script = Path(__file__).parents[1] / "support" / "deepmd_outputs_oracle.py"
    done = subprocess.run(
        [str(deepmd_python()), str(script), str(tmp_path / "job.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for kind, case in zip(FITTINGS, cases):
        there, run = dict(np.load(case["results"])), run_of(place, kind)
        _compare_statistics(kind, run.info["model"]["fitting_net"], there)
        checkpoint = read_deepmd(case["checkpoint"])
        again = build_model(checkpoint.resolved, precision="float64", seed=0)
        again.load_state_dict(checkpoint.state)
        batch = frames_of(place, kind, [0, 1, 2, 3])
        for potential in (run.load_potential("last"), again.eval()):
            for name, values in potential(batch).items():
                if name.endswith("cdf"):
                    continue
                theirs = there[_name_there(kind, name)]
                assert np.allclose(values.detach().numpy().ravel(), theirs.ravel(), rtol=1e-10, atol=1e-12), (
                    kind,
                    name,
                )
        assert loss_of(place, kind, [1]) == pytest.approx(float(there["loss_1"]), rel=1e-10), kind
        both = loss_of(place, kind, [0, 2]) * (2 if LOSSES[kind]["type"] == "property" else 1)  # they add frames up
        assert both == pytest.approx(float(there["loss_2"]), rel=1e-10), kind
        assert set(COLUMNS[kind]) == {
            k[5:-2] for k in there if k.startswith("more_") and k.endswith("_1") and "l2" not in k
        }


def _name_there(kind: str, name: str) -> str:
    if kind in ("dipole", "polar"):
        return f"pred_{kind}" if name.startswith("atomic") else f"pred_global_{kind}"
    return f"pred_{name}"


def _compare_statistics(kind: str, fitting: dict[str, Any], there: dict[str, np.ndarray]) -> None:
    if kind == "polar":
        theirs = there["stat_out_bias"].reshape(2, 3, 3).trace(axis1=1, axis2=2) / 3
        assert np.allclose(fitting["out_bias"], theirs, rtol=1e-9)
    elif kind != "dipole":
        assert np.allclose(fitting["out_bias"], there["stat_out_bias"], rtol=1e-9)
    if "out_std" in fitting:
        assert np.allclose(fitting["out_std"], there["stat_out_std"], rtol=1e-9)
