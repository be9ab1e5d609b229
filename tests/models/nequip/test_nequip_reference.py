"""Energies, forces, stress and parameter gradients equal those of NequIP 0.19.1 with the same weights."""

import json

import numpy as np
import pytest
import torch

from forgefield.data.frame import Frame
from forgefield.models import build_model
from forgefield.models.nequip.importer import read_nequip, weight_name
from tests.support.structures import SHARED, make_batch

FOLDER = SHARED / "nequip_reference"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="reference data is not here")
CASES = ["nequip_l2", "nequip_l2_parity"]


def relative_error(got: torch.Tensor, expected: np.ndarray) -> float:
    expected = torch.from_numpy(np.asarray(expected))
    return ((got.detach() - expected).abs().max() / expected.abs().max()).item()


def load(name: str, tmp_path):
    """The reference arrays, our model with their weights, and the batch."""
    said = json.loads((FOLDER / f"{name}.json").read_text())
    same = ("num_layers", "l_max", "parity", "num_features", "type_names", "r_max", "avg_num_neighbors", "model_dtype")
    settings = {key: said[key] for key in (*same, "per_type_energy_scales", "per_type_energy_shifts")}
    settings |= {"radial_mlp_depth": said["radial"]["depth"], "radial_mlp_width": said["radial"]["width"]}
    settings |= {key: said["radial"][key] for key in ("num_bessels", "polynomial_cutoff_p")}
    (tmp_path / "options.json").write_text(json.dumps(settings))
    imported = read_nequip(FOLDER / f"{name}.npz", options=tmp_path / "options.json")
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    data = np.load(FOLDER / f"{name}.npz")
    structure = {key: data[key] for key in ("positions", "numbers", "cell", "pbc")}
    frame = Frame(**structure, energy=None, forces=None, stress=None)
    return data, potential.train(), make_batch(frame, cutoff=said["r_max"], species=tuple(said["type_names"]))


@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_parameter_gradients_equal_nequip(name, by_pair, tmp_path, monkeypatch):
    data, potential, batch = load(name, tmp_path)
    if not by_pair:
        monkeypatch.setattr("forgefield.ops.graph._find_reverse", lambda *_: None)
    outputs = potential(batch, stress=bool(data["pbc"].all()))
    assert relative_error(outputs["energy"], data["energy"]) < 1e-12
    assert relative_error(outputs["atomic_energy"], data["atomic_energy"]) < 1e-12
    assert relative_error(outputs["forces"], data["forces"]) < 1e-9
    if "stress" in data.files:
        assert relative_error(outputs["stress"][0], data["stress"]) < 1e-9

    n_atoms = len(data["numbers"])
    residual = outputs["forces"] - torch.from_numpy(data["force_target"])
    loss = residual.square().mean() + (outputs["energy"] / n_atoms).square().sum()
    assert loss.item() == pytest.approx(float(data["loss"]), rel=1e-10)
    loss.backward()
    parameters = dict(potential.model.named_parameters())
    checked = set()
    for key in (key for key in data.files if key.startswith("grad/")):
        ours = weight_name(key.removeprefix("grad/model.func."))
        assert relative_error(parameters[ours].grad, data[key]) < 1e-9, key
        checked.add(ours)
    assert checked == set(parameters)


def test_single_precision_agrees_to_single_precision(tmp_path):
    data, exact, batch = load("nequip_l2", tmp_path)
    resolved = read_nequip(FOLDER / "nequip_l2.npz", options=tmp_path / "options.json").resolved
    single = build_model(resolved, precision="float32", seed=0)
    single.load_state_dict(exact.state_dict())
    outputs = single.eval()(batch)
    assert all(value.dtype is torch.float64 for value in outputs.values())
    assert relative_error(outputs["forces"], data["forces"]) < 1e-5
    assert relative_error(outputs["energy"], data["energy"]) < 1e-6
