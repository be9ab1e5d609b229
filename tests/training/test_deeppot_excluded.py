"""`atom_exclude_types` of DeePMD-kit's inputs: errors are averaged over the remaining atoms, as in DeePMD-kit 3.2.

The formulas are those of its `masked_atom_mean` and `masked_atom_num`; for models of both kinds trained by DeePMD-kit 3.2.0 the
metrics below equal its lcurve.out in every printed digit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forgefield.config.deepmd import translation
from forgefield.config.loading import load_config
from forgefield.data.module import read_data
from forgefield.models.building import build_model
from forgefield.training.problem.model_options import build_task, requested_task, resolved_model
from tests.support.deepmd_systems import write_input
from tests.support.helpers import SHARED_DATA

EXAMPLES = SHARED_DATA / "peer_configs" / "deepmd"


def excluding_hydrogen(folder: Path, kind: str) -> Path:
    path = write_input(folder, kind)
    content = json.loads(path.read_text())
    content["model"]["atom_exclude_types"] = [1]
    path.write_text(json.dumps(content))
    return path


def measured(path: Path) -> tuple[dict[str, float], dict[str, float], dict[str, Any], dict[str, Any]]:
    """Of an untrained model on one frame: mean squares of the loss, metrics, predictions and the batch, as arrays."""
    config = load_config(path, ["data.cache=false"])
    data = read_data(config.data, 0)
    options = requested_task(config, data)
    resolved = resolved_model(config, data)
    task, potential = build_task(options, resolved), build_model(resolved, precision="float64", seed=0)
    batch = data.train.batch([0])
    outputs = potential.eval()(batch)
    loss, metrics = task.loss(outputs, batch), task.error_metrics(data.species.symbols)
    metrics.update(outputs, batch)
    squares = dict(zip(task.names, (loss.sums / loss.counts).tolist()))
    arrays = ({name: value.detach().numpy() for name, value in values.items()} for values in (outputs, batch))
    return squares, metrics.compute(), *arrays


@pytest.mark.parametrize(
    ("kind", "of_atoms", "of_frames", "label"),
    [("dipole", "atomic_dipole", "dipole", "atomic_dipole"), ("dos", "atom_dos", "dos", "atom_dos")],
)
def test_means_are_over_the_remaining_atoms(tmp_path, kind, of_atoms, of_frames, label):
    squares, metrics, outputs, batch = measured(excluding_hydrogen(tmp_path, kind))
    oxygen = batch["species"] == 0
    labels = np.load(tmp_path / "a" / "set.000" / f"{label}.npy")[0].reshape(len(oxygen), -1)
    off = outputs[of_atoms] - labels
    assert 0 < oxygen.sum() < len(oxygen)
    assert np.all(outputs[of_atoms][~oxygen] == 0)
    assert squares[of_atoms] == pytest.approx((off[oxygen] ** 2).mean(), rel=1e-12)
    assert metrics[f"{of_atoms}_rmse"] == pytest.approx(np.sqrt((off[oxygen] ** 2).mean()), rel=1e-12)
    total = outputs[of_frames][0] - np.load(tmp_path / "a" / "set.000" / f"{of_frames}.npy")[0]
    assert squares[of_frames] == pytest.approx((total**2).mean(), rel=1e-12)
    expected = np.sqrt((total**2).mean()) / oxygen.sum()  # what lcurve.out shows
    assert metrics[f"{of_frames}_per_atom_rmse"] == pytest.approx(expected, rel=1e-12)


def test_selected_and_excluded_species_are_combined(tmp_path):
    path = excluding_hydrogen(tmp_path, "dipole")
    content = json.loads(path.read_text())
    content["model"]["fitting_net"]["sel_type"] = [0, 1]
    fields = translation(content, path).config["data"]["labels"]["fields"]
    assert fields["atomic_dipole"]["species"] == ["O"]


def test_an_energy_with_excluded_species_says_how_its_loss_differs(tmp_path):
    path = excluding_hydrogen(tmp_path, "dipole")
    content = json.loads(path.read_text())
    content["model"]["fitting_net"] = {"type": "ener", "neuron": [6]}
    content["loss"] = {"type": "ener"}
    assert "averages over all atoms" in translation(content, path).notes["model.atom_exclude_types"]
    del content["model"]["atom_exclude_types"]
    assert "model.atom_exclude_types" not in translation(content, path).notes


@pytest.mark.skipif(not EXAMPLES.exists(), reason="the inputs of DeePMD-kit's examples are not here")
@pytest.mark.parametrize(("kind", "label"), [("dipole", "dipole"), ("polar", "polarizability")])
def test_the_examples_of_deepmd_kit_train_oxygen_alone(kind, label):
    path = EXAMPLES / f"water_tensor_{kind}_{kind}_input_torch.json"
    fields = translation(json.loads(path.read_text()), path).config["data"]["labels"]["fields"]
    assert fields[f"atomic_{label}"]["species"] == ["O"]
