"""The descriptor dpa3: layouts of angles, numbers of neighbours, smoothness, and files that DeePMD-kit reads."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models import Potential, build_model, resolve_model
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.models.deeppot.importer import read_deepmd
from forgefield.models.resolving import model_statistics
from tests.support.structures import make_batch, make_frame

SPECIES, CUTOFF = ("H", "O"), 3.0
SMALL = {
    "type": "dpa3",
    "n_dim": 5,
    "e_dim": 4,
    "a_dim": 4,
    "nlayers": 2,
    "e_rcut_smth": 2.0,
    "e_sel": 60,
    "a_rcut": 2.4,
    "a_rcut_smth": 1.6,
    "a_sel": 40,
    "axis_neuron": 2,
    "smooth_edge_update": True,
    "update_residual": 0.5,
}
VARIANTS = {
    "fixed": {},
    "few angles": {"a_sel": 4},
    "any number": {"use_dynamic_sel": True, "a_compress_rate": 2, "a_compress_e_rate": 2, "max_angle_neighbours": 40},
    "one after the other": {"sequential_update": True, "exclude_types": [[0, 1]], "use_exp_switch": True},
    "without angles": {"update_angle": False, "update_style": "res_avg"},
}


def section(**options) -> dict:
    fitting = {"type": "ener", "neuron": [10, 10]}
    return {
        "name": "deeppot",
        "descriptor": {**SMALL, **options},
        "fitting_net": fitting,
        "out_bias": [-3.0, -7.0],
    }


def make(**options) -> Potential:
    resolved = resolve_model(section(**options), species=SPECIES, cutoff=CUTOFF)
    return build_model(resolved, precision="float64", seed=3).eval()


def pad(potential: Potential) -> None:
    """Let the descriptor arrange angles as it does where the host cannot read values."""
    potential.model.descriptor.may_wait_for = lambda tensor: False


@pytest.mark.parametrize("name", VARIANTS)
def test_padded_angles_give_the_same_results(name):
    potential, batch = make(**VARIANTS[name]), make_batch(make_frame(9, seed=1), make_frame(1), make_frame(4, seed=2))
    exact = potential(batch, stress=True)
    pad(potential)
    for key, value in potential(batch, stress=True).items():
        torch.testing.assert_close(value, exact[key], rtol=0, atol=1e-12)


def test_too_many_neighbours_are_an_error_or_nan_but_never_ignored():
    batch = make_batch(make_frame(9, seed=1))
    most = int(torch.bincount(batch["edge_index"][1]).max())
    with pytest.raises(ForgefieldError, match=f"room for 5 neighbours, but an atom has {most} within the cutoff"):
        make(e_sel=5, a_sel=5)(batch)
    potential = make(max_angle_neighbours=2)
    pad(potential)
    assert potential(batch)["energy"].isnan().all()


def test_numbers_of_neighbours_and_deviations_come_from_the_data():
    batch = make_batch(make_frame(9, seed=1), make_frame(7, seed=2))
    edges = batch["edge_index"][1]
    options = section(e_sel="auto:1.5", a_sel=None)
    facts = model_statistics(options, lambda: [batch], species=SPECIES, cutoff=CUTOFF)
    found = resolve_model(options, species=SPECIES, cutoff=CUTOFF, statistics=facts)["descriptor"]
    most = int(torch.bincount(edges).max())
    assert found["e_sel"] == 4 * np.ceil(1.5 * most / 4)
    assert 0 < found["a_sel"] < found["e_sel"]
    assert found["dstd"] == [[0.3] * 4] * 2
    measured = section(fix_stat_std=0.0)
    facts = model_statistics(measured, lambda: [batch], species=SPECIES, cutoff=CUTOFF)
    found = resolve_model(measured, species=SPECIES, cutoff=CUTOFF, statistics=facts)["descriptor"]
    assert all(0.01 <= value < 0.3 for row in found["dstd"] for value in row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a_rcut": 3.5}, r"a_rcut is 3.5; it must be at most data.cutoff=3"),
        ({"e_rcut_smth": 3.0}, "e_rcut_smth is 3; it must be positive and below"),
        ({"use_dynamic_sel": True, "smooth_edge_update": False}, "use_dynamic_sel needs smooth_edge_update: true"),
        ({"sequential_update": True, "update_style": "res_avg"}, "sequential_update needs"),
        ({"a_compress_rate": 3}, "a_dim=4 must be a multiple of it"),
        ({"axis_neuron": 5}, "axis_neuron is 5; it must be at most"),
        ({"a_sel": 70}, "a_sel is 70; it must be at most e_sel=60"),
        ({"e_sel": "many"}, "e_sel is 'many'; give a number, auto"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ForgefieldError, match=message):
        make(**options)


def change_across(potential: Potential, distance: float, step: float) -> float:
    """Largest change of energy and forces when an atom moves from inside to outside of a distance to another."""
    positions = np.array([[0, 0, 0], [1.1, 0.2, 0], [-0.3, 1.2, 0.4], [0, 0, 0]], dtype=float)
    results = []
    for r in (distance - step, distance + step):
        positions[3] = [0.6 * r, -0.8 * r, 0]
        frame = make_frame(4, periodic=False)
        frame = dataclasses.replace(frame, positions=positions.copy(), numbers=np.array([8, 1, 1, 1]))
        results.append(potential(make_batch(frame, cutoff=CUTOFF)))
    return max(float((results[0][key] - results[1][key]).abs().max()) for key in ("energy", "forces"))


@pytest.mark.parametrize("distance", [CUTOFF, SMALL["a_rcut"]])
def test_forces_are_smooth_where_neighbours_and_angles_leave(distance):
    potential = make(use_dynamic_sel=True)
    coarse, fine = (change_across(potential, distance, step) for step in (1e-2, 1e-4))
    assert 0 < fine < 0.02 * coarse
    rough = make(smooth_edge_update=False, e_sel=10, a_sel=10)
    assert change_across(rough, SMALL["a_rcut"], 1e-6) > 1e-4


ORACLE = """
import json, sys
import numpy as np, torch
torch.ops.load_library = lambda path: None
from deepmd.dpmodel.utils.serialization import load_dp_model
from deepmd.pt.model.model import BaseModel, get_model
model = BaseModel.deserialize(load_dp_model(sys.argv[1])["model"])
arrays = np.load(sys.argv[2])
found = model(*(torch.tensor(arrays[name]) for name in ("coord", "atype", "box")))
params = {"type_map": ["H", "O"], "descriptor": json.loads(sys.argv[4]), "fitting_net": {"neuron": [10, 10]}}
other = get_model(json.loads(json.dumps(params)))
other.load_state_dict(model.state_dict())
state = {f"model.Default.{key}": value for key, value in other.state_dict().items() if torch.is_tensor(value)}
state["_extra_state"] = {"model_params": params}
torch.save({"model": state}, sys.argv[3] + ".pt")
np.savez(sys.argv[3], **{name: found[name].detach().numpy() for name in ("energy", "force", "virial")})
"""


def deepmd_python() -> str | None:
    return sys.executable if importlib.util.find_spec("deepmd") else os.environ.get("FORGEFIELD_DEEPMD_PYTHON")


@pytest.mark.skipif(
    deepmd_python() is None, reason="no deepmd-kit; FORGEFIELD_DEEPMD_PYTHON names an interpreter with it"
)
@pytest.mark.parametrize("name", VARIANTS)
def test_deepmd_reads_what_is_exported_and_its_checkpoints_are_imported(name, tmp_path):
    potential, frame = make(**VARIANTS[name]), make_frame(9, seed=1)
    batch = make_batch(frame)
    arrays = {"coord": frame.positions[None], "box": frame.cell.reshape(1, 9), "atype": batch["species"].numpy()[None]}
    np.savez(tmp_path / "frame.npz", **arrays)
    file = write_deepmd(potential, tmp_path / "model.dp")
    inner = {
        key: value
        for key, value in {**SMALL, **VARIANTS[name]}.items()
        if key not in ("type", "exclude_types", "max_angle_neighbours")
    }
    settings = {"type": "dpa3", "repflow": {"e_rcut": CUTOFF, **inner}, "exclude_types": []}
    settings["exclude_types"] = VARIANTS[name].get("exclude_types", [])
    command = [str(deepmd_python()), "-c", ORACLE, str(file), str(tmp_path / "frame.npz"), str(tmp_path / "found")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, json.dumps(settings)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = np.load(tmp_path / "found.npz"), potential(batch, stress=True)
    assert np.allclose(theirs["energy"].ravel(), ours["energy"].numpy(), rtol=0, atol=1e-10)
    assert np.allclose(theirs["force"][0], ours["forces"].numpy(), rtol=0, atol=1e-9)
    imported = read_deepmd(tmp_path / "found.pt")
    again = build_model(imported.resolved, precision="float64", seed=0)
    again.load_state_dict(imported.state)
    assert np.allclose(again.eval()(batch)["energy"].numpy(), ours["energy"].numpy(), rtol=0, atol=1e-12)
