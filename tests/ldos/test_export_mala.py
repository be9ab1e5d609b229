"""LDOS networks as archives of MALA: the same predictions when they are read again, by Forgefield and by MALA itself."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from forgefield import api
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.ldos.importer import read_mala
from tests.support.helpers import SHARED_DATA
from tests.support.snapshots import point_config, write_snapshot
from tests.support.train_many import train_only

BE = SHARED_DATA / "be2_ldos"


def exported(tmp_path: Path, **changes) -> tuple[Path, Path]:
    """A trained run and its archive."""
    for number in range(3):
        inputs = write_snapshot(tmp_path, f"s{number}", seed=number + 1)
        values = np.load(inputs)
        values[..., 5] = 7.0  # a constant descriptor
        np.save(inputs, values)
    config = point_config(tmp_path, **changes)
    config["trainer"]["max_epochs"] = 1
    run = train_only(config)
    assert main(["export", str(run.path), "--to", "mala", "-o", str(tmp_path / "be.zip")]) == 0
    return run.path, tmp_path / "be.zip"


@pytest.mark.parametrize(
    ("model", "points"),
    [
        ({"hidden": [8], "activation": "silu"}, {}),
        (
            {"hidden": [8, 5], "activation": ["leakyrelu", "tanh"], "output_activation": "relu"},
            {"outputs": "feature-wise-minmax"},
        ),
        ({"hidden": [6], "activation": "softplus"}, {"inputs": "minmax", "outputs": "standard"}),
    ],
)
def test_what_is_read_again_predicts_the_same(model, points, tmp_path):
    windows = [{"first": -4.0, "spacing": 2.0, "levels": 4}, {"first": 2.0, "spacing": 2.0, "levels": 4}]
    data = {"points": {"energies": windows, "scaling": points}}
    run, archive = exported(tmp_path, model={"name": "ldos", **model}, data=data)
    found = read_mala(archive)
    assert found.resolved["activation"] == model["activation"]
    assert found.resolved["output_activation"] == model.get("output_activation")
    assert found.points["energies"] == windows
    again = api.load(api.import_mala(archive, out=tmp_path / "again"))
    inputs = torch.from_numpy(np.load(tmp_path / "s2.in.npy")[..., 3:].reshape(60, -1))
    inputs[:, 2] = 7.5
    with torch.no_grad():
        ours, theirs = api.load(run)(inputs), again(inputs)
    assert float((ours - theirs).abs().max()) <= 2e-7 * float(ours.abs().max())


@pytest.mark.parametrize("descriptors", [
    {"type": "bispectrum", "twojmax": 2, "cutoff": 3.5, "switch": False},
    {"type": "gaussian", "cutoff": 3.0, "sigma": 0.4},
])  # fmt: skip
def test_settings_of_descriptors_are_stored(descriptors, tmp_path):
    for number in range(3):
        inputs = write_snapshot(tmp_path, f"s{number}", seed=number + 1)
        values = np.load(inputs)
        np.save(inputs, values[..., : 3 + (5 if descriptors["type"] == "bispectrum" else 1)])
    config = point_config(tmp_path, data={"points": {"energies": {"first": -4.0, "spacing": 2.0, "levels": 7}}})
    config["data"]["points"]["descriptors"] = descriptors
    config["trainer"]["max_epochs"] = 1
    run = train_only(config)
    api.export(run.path, tmp_path / "be.zip", to="mala")
    assert read_mala(tmp_path / "be.zip").points["descriptors"] == descriptors


def test_what_mala_does_not_have_is_refused(tmp_path):
    config = point_config(tmp_path, name="double")
    config["training"]["precision"], config["trainer"]["max_epochs"] = "float64", 1
    run = train_only(config)
    with pytest.raises(ForgefieldError, match="MALA computes in float32"):
        api.export(run.path, tmp_path / "be.zip", to="mala")
    with pytest.raises(ForgefieldError, match=r"MALA reads archives that end in \.zip"):
        api.export(run.path, tmp_path / "be.ff", to="mala")


PREDICTED_BY_MALA = """
import sys, numpy, mala
data, folder = sys.argv[1:3]
params, network, handler, tester = mala.Tester.load_run("be", path=folder)
handler.clear_data()
handler.add_snapshot("Be_snapshot2.in.npy", data, "Be_snapshot2.out.npy", data, "te",
                     calculation_output_file=f"{data}/Be_snapshot2.info.json")
handler.prepare_data(reparametrize_scaler=False)
numpy.save(f"{folder}/predicted.npy", tester.predict_targets(0)[1])
"""


@pytest.mark.skipif("FORGEFIELD_MALA_PYTHON" not in os.environ, reason="$FORGEFIELD_MALA_PYTHON names no interpreter")
@pytest.mark.skipif(not BE.is_dir(), reason="shared data is not there")
def test_mala_loads_it_and_predicts_the_same(tmp_path):
    points = {"energies": {"first": -5.0, "spacing": 2.5, "levels": 11}}
    data = {"train": str(BE / "Be_snapshot0.in.npy"), "val": str(BE / "Be_snapshot1.in.npy"), "points": points}
    config = point_config(tmp_path, data=data | {"batch": {"points": 486}})
    config["trainer"]["max_epochs"] = 1
    run = train_only(config)
    api.export(run.path, tmp_path / "be.zip", to="mala")
    with zipfile.ZipFile(tmp_path / "be.zip") as archive:
        assert "be.params.json" in archive.namelist()
    subprocess.run(
        [os.environ["FORGEFIELD_MALA_PYTHON"], "-c", PREDICTED_BY_MALA, str(BE), str(tmp_path)],
        check=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    theirs = np.load(tmp_path / "predicted.npy")
    inputs = np.load(BE / "Be_snapshot2.in.npy")[..., 3:].reshape(-1, 91)
    with torch.no_grad():
        ours = api.load(run)(torch.from_numpy(inputs)).double().numpy()
    assert np.abs(ours - theirs).max() < 2e-6 * np.abs(theirs).max()
