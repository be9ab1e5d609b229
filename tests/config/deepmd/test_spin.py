"""Inputs with spins (DeepSPIN of the PyTorch backend): what the config says, and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from forgefield.config.deepmd import translation
from forgefield.config.loading import load_config
from forgefield.data.module import read_data
from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.training.problem.model_options import build_task, requested_task, resolved_model
from tests.support.deepmd_systems import DESCRIPTOR, write_system

LOSS = {
    f"{end}_pref_{name}": weight
    for name, weight in (("e", 0.5), ("fr", 2.0), ("fm", 3.0))
    for end in ("start", "limit")
}


def written_input(folder, **spin):
    """An input with spins of oxygen, whose virtual atoms are up to 1.26 A from their atoms, and its data."""
    system, rng = write_system(folder / "a", 3, 1), np.random.default_rng(0)
    for name, length in (("spin", 4.2), ("force_mag", 0.1)):
        vectors = rng.normal(size=(3, 6, 3))
        np.save(system / "set.000" / f"{name}.npy", length * vectors / np.linalg.norm(vectors, axis=2, keepdims=True))
    content = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {**DESCRIPTOR, "sel": [20, 40]},
            "fitting_net": {"neuron": [6]},
            "spin": {"use_spin": ["O"], "virtual_scale": [0.3], **spin},
        },
        "learning_rate": {"start_lr": 1e-3, "stop_lr": 1e-5},
        "loss": {"type": "ener_spin", **LOSS},
        "training": {"training_data": {"systems": [str(system)], "batch_size": 1}, "numb_steps": 2},
    }
    path = folder / "input.json"
    path.write_text(json.dumps(content))
    return path


def config_of(path):
    return translation(json.loads(path.read_text()), path).config


def test_neighbour_lists_reach_the_virtual_atoms_of_the_longest_spin(tmp_path):
    config = config_of(written_input(tmp_path))
    assert config["model"]["spin"] == {"use_spin": [True, False], "virtual_scale": [0.3, 0.0], "rcut": 3.0}
    assert config["model"]["descriptor"]["env_protection"] == 0.01
    assert config["data"]["cutoff"] == pytest.approx(3.0 + 1.4)  # a tenth more than 1.26, rounded up
    assert config["callbacks"][0]["columns"]["rmse_fm"] == "force_mag_rmse"


def test_magnetic_forces_are_averaged_over_atoms_with_a_spin(tmp_path):
    """DeePMD-kit's formula (masked_force_mag): the mean of the squared errors over components of magnetic atoms alone."""
    config = load_config(written_input(tmp_path), ["data.cache=false"])
    data = read_data(config.data, 0)
    resolved = resolved_model(config, data)
    task, potential = (
        build_task(requested_task(config, data), resolved),
        build_model(resolved, precision="float64", seed=0),
    )
    batch = data.train.batch([0])
    outputs = potential.eval()(batch)
    loss = task.loss(outputs, batch)
    oxygen = (batch["species"] == 0).numpy()
    labels = np.load(tmp_path / "a" / "set.000" / "force_mag.npy")[0]
    off = outputs["force_mag"].numpy() - labels
    assert np.abs(outputs["force_mag"].numpy()[oxygen]).max() > 1e-6
    number = task.names.index("force_mag")
    assert float(loss.sums[number] / loss.counts[number]) == pytest.approx((off[oxygen] ** 2).mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("spin", "message"),
    [
        ({"use_spin": ["Ni"]}, "'model.spin.use_spin' must be true or false for each of O, H"),
        ({"virtual_scale": [0.3, 0.1, 0.2]}, "'model.spin.virtual_scale' must be a positive number"),
        ({"spin_norm": [1.2], "virtual_len": [0.4]}, "are of DeePMD-kit's TensorFlow"),
        ({"scheme": "native"}, "'model.spin.scheme' must be one of deepspin, not 'native'"),
    ],
)
def test_other_spins_are_refused(tmp_path, spin, message):
    with pytest.raises(ForgefieldError, match=re.escape(message)):
        config_of(written_input(tmp_path, **spin))


def test_a_loss_of_spins_needs_a_model_of_spins(tmp_path):
    path = written_input(tmp_path)
    content = json.loads(path.read_text())
    del content["model"]["spin"]
    path.write_text(json.dumps(content))
    with pytest.raises(ForgefieldError, match=r"'loss.type' is 'ener_spin', but the model has no section 'spin'"):
        config_of(path)
