"""No key of a NequIP config is ignored: a changed value changes the training, is noted under its key, or is refused."""

import copy
import importlib.util
from pathlib import Path

import pytest

from forgefield.config.nequip import nequip_translation
from forgefield.config.nequip.loss import EV_PER_A3_TO_GPA
from forgefield.config.nequip.resolving import resolved
from forgefield.config.sources import read_yaml
from forgefield.errors import ForgefieldError
from forgefield.physics import units

EXAMPLES = Path(__file__).parent / "every_key.yaml"
SECTIONS = ("run", "data", "trainer", "training_module")


def peer_examples():
    """Configs of an installed NequIP, which needs not be importable."""
    spec = importlib.util.find_spec("nequip")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations]
    return [file for folder in folders for file in folder.glob("utils/unittests/*.yaml")]


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif value is not None:
        yield path


def dotted(path):
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def changed(values, path):
    result = copy.deepcopy(values)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    if isinstance(old, (bool, str)):
        inner[path[-1]] = not old if isinstance(old, bool) else old + "x"
    else:
        inner[path[-1]] = ["x"] if isinstance(old, list) else old * 2 + 1
    return result


def ignored_keys(values, file):
    """Keys whose value is neither used, nor noted, nor refused."""
    before = nequip_translation(values, file)
    for path in leaves({name: values[name] for name in SECTIONS}):
        key = dotted(path)
        if any(key == noted or key.startswith((noted + ".", noted + "[")) for noted in before.notes):
            continue
        try:
            after = nequip_translation(changed(values, path), file)
        except ForgefieldError:
            continue
        if (after.config, after.notes) == (before.config, before.notes):
            yield key


@pytest.mark.parametrize("file", [EXAMPLES, *peer_examples()], ids=lambda file: file.name)
def test_no_key_of_a_config_is_ignored(file, monkeypatch):
    monkeypatch.setenv("TEST_VAL_TWO", "2")
    values = resolved(read_yaml(file), file)
    replace_toy_data(values)
    assert list(ignored_keys(values, file)) == []


def replace_toy_data(values):
    """Frames that NequIP computes when it starts are refused as a whole; give a file instead."""
    split = values["data"].get("split_dataset")
    if isinstance(split, dict) and split.get("dataset", {}).get("_target_", "").endswith("EMTTestDataset"):
        kept = {"transforms": split["dataset"]["transforms"]}
        split["dataset"] = {"_target_": "nequip.data.dataset.ASEDataset", "file_path": "emt.xyz", **kept}


def test_keys_that_nothing_refers_to_are_noted():
    content = read_yaml(EXAMPLES)
    notes = nequip_translation({**content, "left_over": 3}, EXAMPLES).notes
    assert "nothing in the file refers to it" in notes["left_over"]
    assert "cutoff_radius" not in notes


def test_toy_data_are_refused_with_the_way_to_write_them_to_a_file():
    content = read_yaml(EXAMPLES)
    content["data"]["split_dataset"]["dataset"] = {"_target_": "nequip.data.dataset.EMTTestDataset", "num_frames": 5}
    with pytest.raises(ForgefieldError, match="EMTTestDataset, which NequIP computes"):
        nequip_translation(content, EXAMPLES)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("data", "split_dataset", "train"), 0.9, "add up to 1.2; they must add up to 1"),
        (("data", "stats_manager", "type_names"), ["hydrogen"], "'training_module.model.type_names' is"),
        (
            ("training_module", "model", "avg_num_neighbors"),
            "training_data_stats:num_neighbors_mean",
            "counts all neighbours",
        ),
        (("trainer", "strategy"), "fsdp", "'trainer.strategy' is not translated"),
        (("trainer", "callbacks", 1, "mode"), "max", "'trainer.callbacks[1].mode' is 'max'"),
        (("trainer", "callbacks", 1, "every"), 3, "unknown key 'trainer.callbacks[1].every'"),
        (("training_module", "model", "pair_potential", "chemical_species"), ["O", "H"], "but the types are"),
    ],
)
def test_contradictions_are_refused_by_name(keys, value, message):
    content = resolved(read_yaml(EXAMPLES), EXAMPLES)
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    with pytest.raises(ForgefieldError) as caught:
        nequip_translation(content, EXAMPLES)
    assert message in str(caught.value)


def test_values_by_type_name_are_values_by_element():
    config = nequip_translation(read_yaml(EXAMPLES), EXAMPLES).config
    assert config["data"]["species"] == ["H", "O"]
    assert config["model"]["per_edge_type_cutoff"] == {"H": 2.0, "O": {"H": 3.0, "O": 4.0}}
    assert config["model"]["avg_num_neighbours"] == {"H": 10.0, "O": 12.0}
    assert config["model"]["energy_scales"] == {"H": 1.0, "O": 2.0}
    assert config["data"]["reference_energies"] == {"H": -13.6, "O": -430.0}
    assert config["training"]["monitor_weights"] == pytest.approx(
        {
            "energy_mae": 0.25e-3,
            "forces_rmse/H": 0.375e-3,
            "forces_rmse/O": 0.125e-3,
            "stress_mae": 0.25 / EV_PER_A3_TO_GPA,
        }
    )


def test_the_factor_of_stress_is_that_of_the_metrics():
    assert pytest.approx(units.EV_PER_A3_TO_GPA, rel=1e-14) == EV_PER_A3_TO_GPA
