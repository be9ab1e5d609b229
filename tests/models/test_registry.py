"""The model section: checked against the model it names, completed from data, enough to rebuild the model."""

import json
import sys

import pytest
import torch

from forgefield.config import components
from forgefield.config.loading import load_config
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.models import build_model, model_class, resolve_model
from forgefield.models.nequip.model import NequIP
from tests.support.structures import STATISTICS, make_batch, make_frame

OWN = "tests.support.own_model.Springs"


def resolve(options, **changes):
    known = {"species": ("H", "O"), "cutoff": 3.0, "statistics": STATISTICS}
    return resolve_model(options, **{**known, **changes}, trust=CONFIG)


def test_numbers_come_from_the_data_and_survive_json():
    resolved = resolve({"name": "nequip", "preset": "S", "num_layers": 3})
    assert json.loads(json.dumps(resolved)) == resolved
    assert resolved["avg_num_neighbours"] == 9.0
    assert resolved["energy_scales"] == 1.3
    assert resolved["energy_shifts"] == {"H": -13.6, "O": -75.0}
    assert resolved["num_layers"] == 3
    assert resolved["num_features"] == [128, 64]
    assert resolved["species"] == ["H", "O"]
    assert resolved["cutoff"] == 3.0


def test_a_model_is_rebuilt_from_its_resolved_options_alone():
    resolved = resolve(
        {"name": "nequip", "num_features": 4, "l_max": 1, "num_layers": 2, "zbl": {"polynomial_cutoff_p": 4}}
    )
    first = build_model(resolved, precision="float64", seed=1)
    second = build_model(json.loads(json.dumps(resolved)), precision="float64", seed=2)
    second.load_state_dict(first.state_dict())
    batch = make_batch(make_frame(5))
    assert torch.equal(first(batch)["energy"], second(batch)["energy"])


def test_a_resolved_section_resolves_to_itself():
    resolved = resolve({"name": "nequip", "preset": "M"})
    again = {key: value for key, value in resolved.items() if key not in ("species", "cutoff")}
    assert resolve(again, statistics=None) == resolved


def test_numbers_in_the_config_need_no_data():
    given = {"name": "nequip", "avg_num_neighbours": 10.0, "energy_shifts": 0.0}
    assert resolve(given, statistics=None)["energy_scales"] == 1.0
    with pytest.raises(ForgefieldError, match="model.energy_shifts"):
        resolve({"name": "nequip", "avg_num_neighbours": 10.0}, statistics=None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "nequip", "num_layer": 3}, ["model.num_layer ", "'num_layers'"]),
        ({"name": "nequip", "presets": "S"}, ["model.presets", "'preset'"]),
        ({"name": "neqip"}, ["model.name", "'nequip'"]),
        ({}, ["model.name", "nequip"]),
        ({"name": "nequip", "preset": "XXL"}, ["model.preset", "S, M, L, XL"]),
        ({"name": "nequip", "l_max": "two"}, ["model.l_max", "whole number"]),
        ({"name": "nequip", "parity": 1}, ["model.parity", "true or false"]),
        ({"name": "nequip", "num_features": [3, 0]}, ["model.num_features"]),
        ({"name": "nequip", "num_features": [3, 2, 1]}, ["model.num_features", "needs 2"]),
        ({"name": "nequip", "num_layers": 0}, ["model.num_layers", "at least 1"]),
        ({"name": "nequip", "polynomial_cutoff_p": 1}, ["model.polynomial_cutoff_p", "at least 2"]),
        ({"name": "nequip", "nonlinearity": "gates"}, ["model.nonlinearity", "gate"]),
        ({"name": "nequip", "energy_shifts": {"H": 1.0}}, ["model.energy_shifts", "H, O"]),
        ({"name": "nequip", "energy_scales": 0.0}, ["model.energy_scales", "positive"]),
        ({"name": "nequip", "per_edge_type_cutoff": {"Cu": 2.0}}, ["model.per_edge_type_cutoff.Cu", "H, O"]),
        ({"name": "nequip", "per_edge_type_cutoff": {"H": {"O": 9.0}}}, ["model.per_edge_type_cutoff.H.O", "cutoff=3"]),
        ({"name": "nequip", "zbl": {"p": 6}}, ["model.zbl.p", "polynomial_cutoff_p"]),
        ({"name": "nequip", "cutoff": 4.0}, ["model.cutoff", "data"]),
        ({"name": OWN, "stifness": 2.0}, ["model.stifness", "'stiffness'"]),
        ({"name": OWN}, ["model.stiffness", "missing"]),
        ({"name": "tests.support.own_model.Spring"}, ["model.name", "Spring"]),
        ({"name": "no_such_package.Model"}, ["model.name", "no_such_package"]),
        ({"name": "tests.support.own_model.NotAModel"}, ["model.name", "torch.nn.Module"]),
    ],
)
def test_errors_name_what_is_wrong(options, words):
    with pytest.raises(ForgefieldError) as caught:
        resolve(options)
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ForgefieldError, match="float32, float64"):
        build_model(resolve({"name": "nequip", "preset": "S"}), precision="half", seed=0)


def test_a_user_model_by_import_path():
    resolved = resolve({"name": OWN, "stiffness": 2.0})
    assert json.loads(json.dumps(resolved)) == resolved
    state = torch.random.get_rng_state()
    potential = build_model(resolved, precision="float64", seed=3, trust=CONFIG)
    assert torch.equal(state, torch.random.get_rng_state())
    assert potential.species == ("H", "O")
    assert potential.cutoff == 3.0
    assert potential.model.shifts == {"H": -13.6, "O": -75.0}
    assert potential.model.weight.dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32
    again = build_model(resolved, precision="float64", seed=3, trust=CONFIG)
    assert torch.equal(potential.model.weight, again.model.weight)
    assert potential(make_batch(make_frame(4)))["forces"].abs().max() > 0


def test_model_class_of_built_in_and_user_models():
    assert model_class("nequip") is NequIP
    assert model_class(OWN, trust=CONFIG).__name__ == "Springs"


def test_a_user_model_next_to_the_config_is_found_again_by_its_resolved_options(tmp_path, monkeypatch):
    configs = tmp_path / "configs"
    configs.mkdir()
    monkeypatch.chdir(tmp_path)
    (configs / "net_beside_config.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self, width=2):\n        super().__init__()\n"
    )
    (configs / "a.yaml").write_text("data: {train: a.xyz}\nmodel: {name: net_beside_config.Net}\n")
    config = load_config("configs/a.yaml")
    resolved = resolve(dict(config.model))
    assert resolved["module_folder"] == str(configs)
    # As in a process that has not loaded the config.
    monkeypatch.setattr(components, "_FOLDERS", [])
    monkeypatch.delitem(sys.modules, "net_beside_config")
    with pytest.raises(ForgefieldError, match="net_beside_config"):
        model_class("net_beside_config.Net", trust=CONFIG)
    assert type(build_model(resolved, precision="float32", seed=0, trust=CONFIG).model).__name__ == "Net"
    with pytest.raises(ForgefieldError, match=r"model\.module_folder cannot be set"):
        resolve({"name": "net_beside_config.Net", "module_folder": str(configs)})


def test_an_installed_model_needs_no_folder():
    assert "module_folder" not in resolve({"name": OWN, "stiffness": 2.0})


@pytest.mark.parametrize(("l_max", "features"), [(0, [128]), (1, [128, 64]), (3, [128, 64, 64, 64])])
def test_a_preset_follows_another_l_max(l_max, features):
    given = {"name": "nequip", "preset": "S", "l_max": l_max}
    statistics = {"mean_neighbours": 10.0, "forces_rms": 1.0, "reference_energies": {"H": 0.0, "O": 0.0}}
    resolved = resolve_model(given, species=("H", "O"), cutoff=4.0, statistics=statistics)
    assert resolved["num_features"] == features
