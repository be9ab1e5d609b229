"""Energies, forces and parameter gradients equal those of Allegro 0.8.3 with the same weights."""

import json

import numpy as np
import pytest
import torch

from forgefield.data.frame import Frame
from forgefield.models import build_model
from forgefield.models.allegro.importer import arrange, read_allegro, weight_name
from tests.support.structures import SHARED, make_batch

FOLDER = SHARED / "nequip_reference"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="reference data is not here")


def relative_error(got: torch.Tensor, expected) -> float:
    expected = torch.as_tensor(expected).reshape(got.shape)
    return ((got.detach() - expected).abs().max() / expected.abs().max()).item()


def load(tmp_path, precision: str = "float64"):
    """The reference arrays, our model with their weights, its options, and the batch."""
    said = json.loads((FOLDER / "allegro_l2.json").read_text())
    same = ("l_max", "parity", "num_layers", "num_scalar_features", "num_tensor_features", "type_names", "r_max")
    same = (*same, "avg_num_neighbors", "model_dtype", "per_type_energy_scales", "per_type_energy_shifts")
    settings = {key: said[key] for key in same}
    settings["allegro_mlp_hidden_layers_depth"] = said["radial"]["mlp_depth"]
    settings["allegro_mlp_hidden_layers_width"] = said["radial"]["mlp_width"]
    embed = {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": said["radial"]["num_bessels"]}
    (tmp_path / "options.json").write_text(json.dumps({**settings, "radial_chemical_embed": embed}))
    imported = read_allegro(FOLDER / "allegro_l2.npz", options=tmp_path / "options.json")
    assert imported.precision == "float64"
    potential = build_model(imported.resolved, precision=precision, seed=0)
    potential.load_state_dict(imported.state)
    data = np.load(FOLDER / "allegro_l2.npz")
    structure = {key: data[key] for key in ("positions", "numbers", "cell", "pbc")}
    frame = Frame(**structure, energy=None, forces=None, stress=None)
    batch = make_batch(frame, cutoff=said["r_max"], species=tuple(said["type_names"]))
    return data, potential.train(), imported.resolved, batch


def test_outputs_and_parameter_gradients_equal_allegro(tmp_path):
    data, potential, resolved, batch = load(tmp_path)
    outputs = potential(batch)
    assert relative_error(outputs["energy"], data["energy"]) < 1e-12
    assert relative_error(outputs["atomic_energy"], data["atomic_energy"]) < 1e-12
    assert relative_error(outputs["forces"], data["forces"]) < 1e-9

    residual = outputs["forces"] - torch.from_numpy(data["force_target"])
    loss = residual.square().mean() + (outputs["energy"] / len(data["numbers"])).square().sum()
    assert loss.item() == pytest.approx(float(data["loss"]), rel=1e-10)
    loss.backward()
    parameters = dict(potential.model.named_parameters())
    checked = set()
    for key in (key for key in data.files if key.startswith("grad/")):
        ours = weight_name(key.removeprefix("grad/model.func."))
        expected = arrange(ours, torch.from_numpy(data[key]), resolved)
        assert relative_error(parameters[ours].grad, expected) < 1e-9, key
        checked.add(ours)
    assert checked == set(parameters)


def test_single_precision_agrees_to_single_precision(tmp_path):
    data, single, _, batch = load(tmp_path, precision="float32")
    outputs = single.eval()(batch)
    assert all(value.dtype is torch.float64 for value in outputs.values())
    assert relative_error(outputs["forces"], data["forces"]) < 1e-5
    assert relative_error(outputs["atomic_energy"], data["atomic_energy"]) < 1e-6
