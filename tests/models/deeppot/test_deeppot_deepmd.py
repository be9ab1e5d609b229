"""Models there and back: predictions of deepmd-kit itself, where it is found (FORGEFIELD_DEEPMD_PYTHON may name its Python)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.models import Potential, build_model, resolve_model
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.models.deeppot.importer import read_deepmd
from forgefield.models.deeppot.options import DeepPotOptions
from forgefield.models.deeppot.short_range import PairTable, complete_short_range
from forgefield.models.deeppot.statistics import environment_statistics
from forgefield.models.edges import edge_vectors
from forgefield.ops.graph import edge_graph
from tests.support.deepmd_program import ask, deepmd_python

SPECIES = ("O", "H")
NUMBERS = {"O": 8, "H": 1}
CUTOFF = 4.0


pytestmark = pytest.mark.skipif(deepmd_python() is None, reason="deepmd-kit is not installed")


def make_system(folder: Path, name: str, *, periodic: bool = True, seed: int = 0, n: int = 14, **more: int) -> str:
    """Two frames of one composition, in deepmd-kit's arrays; more: number of values of fparam and aparam."""
    rng = np.random.default_rng(seed)
    atype = np.array([i % 3 != 0 for i in range(n)], dtype=int)
    points: list[np.ndarray] = []
    while len(points) < 2 * n:
        frame = points[len(points) // n * n :]
        point = rng.uniform(0, 5.0, 3)
        if all(np.linalg.norm(point - other) > 0.9 for other in frame):
            points.append(point)
    arrays = {"coord": np.reshape(points, (2, n, 3)), "atype": np.stack([atype, atype])}
    if periodic:
        arrays["box"] = np.stack([(np.eye(3) * 5.5 + rng.uniform(-0.3, 0.3, (3, 3))).ravel() for _ in range(2)])
    arrays["energy"] = rng.normal(size=2) - 30
    arrays |= {key: rng.normal(size=(2, count) if key == "fparam" else (2, n, count)) for key, count in more.items()}
    path = folder / f"{name}.npz"
    np.savez(path, **arrays)
    return str(path)


def batch_of(path: str) -> dict[str, torch.Tensor]:
    given = np.load(path)
    frames = []
    for i, coord in enumerate(given["coord"]):
        cell = given["box"][i].reshape(3, 3) if "box" in given else np.zeros((3, 3))
        numbers = np.array([NUMBERS[SPECIES[t]] for t in given["atype"][i]])
        energy = float(given["energy"][i])
        frames.append(Frame(coord, numbers, cell, np.full(3, "box" in given), energy=energy, forces=None, stress=None))
    batch = batch_from_frames(frames, SpeciesTable(SPECIES), CUTOFF)
    for name in ("fparam", "aparam"):
        if name in given:
            batch[name] = torch.tensor(
                given[name] if name == "fparam" else given[name].reshape(-1, given[name].shape[2])
            )
    return batch


def assert_same_predictions(potential: Potential, frames: str, results: str, tolerance: float) -> None:
    batch, expected = batch_of(frames), np.load(results)
    found = potential.eval()(batch, stress="box" in np.load(frames))
    for name in ("energy", "atomic_energy", "forces"):
        value = expected[name].reshape(found[name].shape)
        np.testing.assert_allclose(found[name].numpy(), value, atol=tolerance, rtol=tolerance, err_msg=name)
    if "stress" in found:
        volume = torch.linalg.det(batch["cell"]).abs().view(-1, 1, 1)
        virial = -(found["stress"] * volume).numpy()
        theirs = expected["virial"].reshape(-1, 3, 3)
        np.testing.assert_allclose(virial, 0.5 * (theirs + theirs.transpose(0, 2, 1)), atol=10 * tolerance)


def load(path: str | Path) -> Potential:
    imported = read_deepmd(path)
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    return potential


BASE = {"sel": [12, 20], "rcut": CUTOFF, "rcut_smth": 1.0, "neuron": [4, 8, 16], "precision": "float64"}
CASES: dict[str, dict[str, Any]] = {
    "one side": {"descriptor": {"axis_neuron": 3, "type_one_side": True}},
    "both sides": {"descriptor": {"axis_neuron": 4, "type_one_side": False, "resnet_dt": True, "neuron": [3, 3, 6]}},
    "no mean": {"descriptor": {"set_davg_zero": True, "type_one_side": False, "activation_function": "gelu"}},
    "excluded": {"descriptor": {"exclude_types": [[0, 1]], "type_one_side": False, "env_protection": 0.02}},
    "excluded one side": {"descriptor": {"exclude_types": [[0, 0]], "type_one_side": True, "neuron": [2, 4, 7]}},
    "excluded in the model": {"model": {"pair_exclude_types": [[1, 1]], "atom_exclude_types": [0]}},
    "single": {"descriptor": {"precision": "float32"}, "fitting": {"precision": "float32"}, "tolerance": 2e-5},
    "parameters": {"fitting": {"numb_fparam": 2, "numb_aparam": 3}, "frames": {"fparam": 2, "aparam": 3}},
    "isolated": {"descriptor": {"set_davg_zero": True}, "fitting": {"atom_ener": [-1.0, None], "neuron": [5, 10]}},
    "open": {"frames": {"periodic": False}, "fitting": {"resnet_dt": False, "activation_function": "silut:2.0"}},
    "radial": {"descriptor": {"type": "se_e2_r", "neuron": [3, 6, 6]}},
    "radial, excluded": {"descriptor": {"type": "se_e2_r", "exclude_types": [[0, 1]], "resnet_dt": True}},
    "radial, excluded in the model": {"descriptor": {"type": "se_e2_r"}, "model": {"pair_exclude_types": [[0, 0]]}},
    "attention": {"descriptor": {"type": "se_atten", "sel": 40, "attn_layer": 2, "attn": 8, "tebd_dim": 4}},
    "attention, smooth": {
        "descriptor": {"type": "se_atten", "sel": 40, "attn_layer": 1, "attn": 8, "smooth_type_embedding": True},
        "fitting": {"numb_fparam": 2},
        "frames": {"fparam": 2},
    },
    "attention, stripped": {"descriptor": {"type": "se_atten_v2", "sel": 40, "attn_layer": 1, "attn": 8}},
    "three-body": {"descriptor": {"type": "se_e3_tebd", "sel": 40, "neuron": [2, 4], "use_tebd_bias": True}},
    "layers": {
        "descriptor": {
            "type": "dpa2",
            "precision": "float64",
            "repinit": {
                "rcut": CUTOFF,
                "rcut_smth": 1.0,
                "nsel": 40,
                "use_three_body": True,
                "tebd_input_mode": "strip",
            },
            "repformer": {"rcut": 3.0, "rcut_smth": 1.0, "nsel": 30, "nlayers": 2, "update_style": "res_residual"},
            "add_tebd_to_repinit_out": True,
        }
    },
}
for _i, _name in enumerate(("tanh", "relu", "softplus", "sigmoid", "relu6", "silu", "linear", "none")):
    _wide = {"activation_function": _name, "neuron": [[6], [1, 2, 4], [5, 5, 5]][_i % 3], "axis_neuron": 2}
    CASES[f"activation {_name}"] = {"descriptor": _wide, "fitting": {"activation_function": _name, "neuron": [7, 7]}}


def params_of(case: dict[str, Any], seed: int) -> dict[str, Any]:
    of_case = case.get("descriptor", {})
    base = {} if of_case.get("type") == "dpa2" else BASE
    descriptor = {"type": "se_e2_a", "seed": seed, **base, **of_case}
    if descriptor["type"] not in ("se_e2_r", "se_e3_tebd", "dpa2"):
        descriptor.setdefault("axis_neuron", 4)
    if descriptor["type"] == "se_e2_a":
        descriptor.setdefault("type_one_side", True)
    fitting = {"neuron": [9, 9, 9], "precision": "float64", "seed": seed, **case.get("fitting", {})}
    return {"type_map": list(SPECIES), "descriptor": descriptor, "fitting_net": fitting, **case.get("model", {})}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Every case, made and evaluated by deepmd-kit in one process."""
    folder = tmp_path_factory.mktemp("deepmd")
    jobs = {}
    for seed, (name, case) in enumerate(CASES.items()):
        frames = make_system(folder, f"frames{seed}", seed=seed, **case.get("frames", {}))
        suffix = "dp" if seed % 2 else "yaml"
        files = {"model": str(folder / f"model{seed}.{suffix}"), "results": str(folder / f"results{seed}.npz")}
        files["checkpoint"] = str(folder / f"model{seed}.pt")
        jobs[name] = {"params": params_of(case, seed + 1), "seed": seed, "frames": frames, **files}
    ask("make", {"cases": list(jobs.values())}, folder)
    return jobs


@pytest.mark.parametrize("name", CASES)
def test_models_of_deepmd_kit_predict_here_what_they_predict_there(made, name):
    assert_same_predictions(
        load(made[name]["model"]), made[name]["frames"], made[name]["results"], CASES[name].get("tolerance", 1e-10)
    )


CHECKPOINTS = ["one side", "both sides", "parameters", "radial", "single", "attention", "attention, stripped"]
CHECKPOINTS += ["three-body", "layers"]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_of_deepmd_kit_are_read_like_its_models(made, name):
    model, checkpoint = load(made[name]["model"]), load(made[name]["checkpoint"])
    first, second = model.state_dict(), checkpoint.state_dict()
    assert set(first) == set(second)
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=0)
    assert_same_predictions(
        checkpoint, made[name]["frames"], made[name]["results"], CASES[name].get("tolerance", 1e-10)
    )


def test_what_is_written_here_predicts_there_the_same(made, tmp_path):
    cases = []
    for number, job in enumerate(made.values()):
        path = tmp_path / f"back{number}.{'yaml' if number % 2 else 'dp'}"
        write_deepmd(load(job["model"]), path)
        cases.append({"model": str(path), "frames": job["frames"], "results": str(tmp_path / f"back{number}.npz")})
    ask("evaluate", {"cases": cases}, tmp_path)
    for case, (name, job) in zip(cases, made.items()):
        first, again = np.load(job["results"]), np.load(case["results"])
        tolerance = CASES[name].get("tolerance", 1e-10)
        for key in ("energy", "forces"):
            np.testing.assert_allclose(again[key], first[key], atol=tolerance, rtol=tolerance, err_msg=f"{name}: {key}")


NO_ROOM = {
    "one side": {"type": "se_e2_a", "axis_neuron": 3, "type_one_side": True},
    "both sides": {"type": "se_e2_a", "axis_neuron": 2, "resnet_dt": True, "exclude_types": [[0, 1]]},
    "radial": {"type": "se_e2_r", "type_one_side": True},
}


def test_models_without_sel_get_room_there_and_predict_the_same(tmp_path):
    frames = make_system(tmp_path, "frames", seed=5)
    cases, potentials = [], []
    for number, descriptor in enumerate(NO_ROOM.values()):
        columns = 1 if descriptor["type"] == "se_e2_r" else 4
        numbers = {"davg": [[0.1, 0, 0, 0][:columns], [0.2, 0, 0, 0][:columns]], "neighbour_norm": 11.0}
        numbers["dstd"] = [[0.15, *[0.08] * 3][:columns], [0.12, *[0.07] * 3][:columns]]
        given = {"descriptor": {**descriptor, **numbers, "neuron": [4, 8]}, "fitting_net": {"neuron": [6, 6]}}
        resolved = resolve_model({"name": "deeppot", **given, "out_bias": [-3.0, -1.0]}, species=SPECIES, cutoff=CUTOFF)
        potentials.append(build_model(resolved, precision="float64", seed=number))
        path = tmp_path / f"model{number}.dp"
        write_deepmd(potentials[-1], path, sel=[14, 25])
        cases.append({"model": str(path), "frames": frames, "results": str(tmp_path / f"results{number}.npz")})
    ask("evaluate", {"cases": cases}, tmp_path)
    for case, potential in zip(cases, potentials):
        assert_same_predictions(potential, frames, case["results"], 1e-10)
        assert_same_predictions(load(case["model"]), frames, case["results"], 1e-10)


@pytest.mark.parametrize(
    "more", [{}, {"exclude_types": [[0, 1]]}, {"type": "se_e2_r"}, {"set_davg_zero": True}], ids=str
)
def test_statistics_of_rows_and_energies_are_those_of_deepmd_kit(tmp_path, more):
    frames, results = make_system(tmp_path, "frames", seed=9), str(tmp_path / "results.npz")
    params = params_of({"descriptor": more}, 1)
    ask("statistics", {"params": params, "frames": frames, "results": results}, tmp_path)
    expected = np.load(results)
    descriptor = {key: value for key, value in params["descriptor"].items() if key != "rcut"}
    model = {"name": "deeppot", "descriptor": descriptor, "fitting_net": params["fitting_net"]}
    found = environment_statistics(model, [batch_of(frames)], species=SPECIES, cutoff=CUTOFF)
    resolved = resolve_model(model, species=SPECIES, cutoff=CUTOFF, statistics={"environment": found})
    for key in ("davg", "dstd"):
        np.testing.assert_allclose(resolved["descriptor"][key], expected[key], rtol=1e-10)
    np.testing.assert_allclose(resolved["out_bias"], expected["out_bias"], rtol=1e-10)


@pytest.mark.parametrize("n_rows", [30, 100], ids=["table ends before the cutoff", "table ends beyond it"])
def test_a_pair_table_takes_over_at_short_range_as_there(tmp_path, n_rows):
    """There a table needs a descriptor of its other family; what is compared is table and weight on top of its energies."""
    distances = 0.05 + 0.05 * np.arange(n_rows)
    columns = [np.exp(-k * distances) * 20 / distances for k in (1.0, 1.5, 2.0)]
    np.savetxt(tmp_path / "table.txt", np.stack([distances, *columns], 1))
    frames = make_system(tmp_path, "frames", seed=3)
    short = {"use_srtab": str(tmp_path / "table.txt"), "sw_rmin": 0.8, "sw_rmax": 1.6}
    descriptor = {
        "type": "dpa1",
        "sel": 60,
        "rcut": CUTOFF,
        "rcut_smth": 1.0,
        "neuron": [4],
        "axis_neuron": 2,
        "attn_layer": 0,
    }
    descriptor["seed"] = 1
    params = {"type_map": list(SPECIES), "descriptor": descriptor, "fitting_net": {"neuron": [5], "seed": 1}}
    cases = [
        {
            "params": {**params, **more},
            "seed": 0,
            "bias": 0.0,
            "frames": frames,
            "results": str(tmp_path / f"{name}.npz"),
        }
        for name, more in (("mixed", short), ("network", {}))
    ]
    ask("make", {"cases": cases}, tmp_path)
    mixed, network = (np.load(case["results"])["atomic_energy"].ravel() for case in cases)

    batch = batch_of(frames)
    options = DeepPotOptions(**short)
    table = PairTable(replace(options, **complete_short_range(options, SPECIES, CUTOFF)), 2, CUTOFF)
    graph, species = edge_graph(batch), batch["species"]
    lengths = torch.linalg.vector_norm(edge_vectors(batch), dim=1)
    kinds = species[graph.destination] * 2 + species[graph.source]
    energies, weights = (value.numpy() for value in table(lengths, kinds, graph, None))
    assert weights.max() > 0
    assert weights.min() < 1
    np.testing.assert_allclose((1 - weights) * network + weights * energies, mixed, rtol=1e-9)
