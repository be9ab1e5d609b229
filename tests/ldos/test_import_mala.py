"""Models of MALA as runs of ours: the same predictions, used, tested and trained further; nothing in a file is executed."""

from __future__ import annotations

import io
import os
import pickle
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
from tests.support import mala_archive as mala
from tests.support.helpers import SHARED_DATA
from tests.support.snapshots import point_config
from tests.support.train_many import train_only

SIZES = [6, 9, 8, 7]
BE = SHARED_DATA / "be2_ldos"


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(40, 6)) * [1.0, 5.0, 0.2, 1.0, 30.0, 1.0] + [0, 3, 0, -1, 400, 0]
    return inputs.astype(np.float32), rng.random((40, 7)).astype(np.float32) * 0.1


def archive(path: Path, kinds=("feature-wise-standard", "minmax"), network=None, info=mala.INFO, **changes):
    torch.manual_seed(3)
    network = mala.layers(SIZES) if network is None else network
    scalers = [mala.scaler(kind, values) for kind, values in zip(kinds, data())]
    return mala.write(path, network, mala.parameters(SIZES, **changes), scalers, info), network, scalers


@pytest.mark.parametrize(
    "kinds",
    [
        ("feature-wise-standard", "minmax"),
        ("standard", "feature-wise-minmax"),
        ("minmax", "standard"),
        ("feature-wise-minmax", "feature-wise-standard"),
        ("None", "None"),
    ],
)
def test_an_imported_network_predicts_what_it_did(kinds, tmp_path):
    path, network, scalers = archive(tmp_path / "be.zip", kinds)
    model = api.load(api.import_mala(path, out=tmp_path / "runs"))
    inputs, _ = data(seed=1)
    theirs = mala.predicted(network, scalers, inputs)
    with torch.no_grad():
        ours = model(torch.from_numpy(inputs)).numpy()
    assert np.abs(ours - theirs).max() < 1e-6 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("activations", "included", "modules", "expected"),
    [
        ("ReLU", False, (torch.nn.ReLU, False), ("relu", None)),
        (["Tanh", "Tanh"], True, (torch.nn.Tanh, False), ("tanh", None)),
        (["ReLU"], True, (torch.nn.ReLU, True), ("relu", "relu")),  # one for all, before 1.3.1
        (["ReLU", "Tanh", "SiLU"], True, (torch.nn.ReLU, True), (["relu", "tanh"], "silu")),
    ],
)
def test_activations_are_those_of_the_layers(activations, included, modules, expected, tmp_path):
    changes = {"network__layer_activations": activations, "network__layer_activations_include_output_layer": included}
    path, _, _ = archive(tmp_path / "be.zip", network=mala.layers(SIZES, *modules), **changes)
    resolved = read_mala(path).resolved
    assert (resolved["activation"], resolved["output_activation"]) == expected


def test_additional_information_of_a_model_is_stored(tmp_path):
    changes = {
        "targets__ldos_gridsize": [4, 4],
        "targets__ldos_gridspacing_ev": [1.0, 2.0],
        "targets__ldos_gridoffset_ev": [-4, -1],
        "targets__restrict_targets": None,
        "descriptors__descriptor_type": "AtomicDensity",
    }
    found = read_mala(archive(tmp_path / "be.zip", **changes)[0])
    points = found.resolved["points"]
    assert points["descriptors"] == {"type": "gaussian", "cutoff": 3.0}
    assert [w["levels"] for w in points["energies"]["segments"]] == [3, 4]
    assert (found.negative, found.species) == ("keep", ["Be"])
    weights = {"descriptors__bispectrum_element_weights": [0.5]}
    assert read_mala(archive(tmp_path / "w.zip", **weights)[0]).points["descriptors"]["element_weights"] == {"Be": 0.5}
    assert read_mala(archive(tmp_path / "ace.zip", descriptors__descriptor_type="ACE")[0]).points["descriptors"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network__nn_type": "transformer"}, "feed-forward"),
        ({"targets__target_type": "DOS"}, "predicts DOS"),
        ({"network__layer_activations": ["ReLU", None, "ReLU"]}, "an activation after every hidden layer"),
        ({"network__layer_activations": "Hardswish"}, "Hardswish; supported are"),
        ({"network__layer_sizes": [6, 9, 9, 7]}, "parameters say"),
        ({"network": mala.layers(SIZES, torch.nn.PReLU)}, "has weights, which is not supported"),
    ],
)
def test_what_has_no_counterpart_is_refused(changes, words, tmp_path):
    with pytest.raises(ForgefieldError, match=words):
        read_mala(archive(tmp_path / "be.zip", **changes)[0])


class _Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_an_archive_is_executed(tmp_path):
    good, _, _ = archive(tmp_path / "good.zip")
    with zipfile.ZipFile(good) as source:
        files = {name: source.read(name) for name in source.namelist()}
    harm = io.BytesIO()
    torch.save({"layers.0.weight": _Harm(tmp_path / "done")}, harm, _use_new_zipfile_serialization=False)
    pickled = {k: v for k, v in files.items() if "iscaler" not in k} | {
        "be.iscaler.pkl": pickle.dumps(_Harm(tmp_path / "done"))
    }
    for name, content, words in (
        ("weights", {**files, "be.v2.network.pth": harm.getvalue()}, "not a file of weights"),
        ("scaler", pickled, "a pickle of an old version"),
        ("nothing", {"readme.txt": b""}, "contains no NAME.params.json"),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as target:
            for file, bytes_ in content.items():
                target.writestr(file, bytes_)
        with pytest.raises(ForgefieldError, match=words):
            read_mala(tmp_path / f"{name}.zip")
    assert not (tmp_path / "done").exists()


def test_an_imported_run_is_tested_and_fine_tuned_from_its_weights_and_scaling(tmp_path):
    path, _, _ = archive(tmp_path / "be.zip", targets__restrict_targets=None)
    config = point_config(tmp_path, model={"from": "be"})
    assert main(["import", "mala", str(path), "--out", config["out"]]) == 0
    errors = api.test(Path(config["out"]) / "be", config["data"]["val"])
    config["training"] |= {"lr": 1e-12, "ema": None}
    run = train_only(config)
    assert run.metrics()[0]["val/ldos_rmse"] == pytest.approx(errors["ldos_rmse"], rel=1e-5)
    kept = run.info["model"]["points"]
    assert kept["inputs"] == api.load_run("be", out=config["out"]).info["model"]["points"]["inputs"]
    assert kept["descriptors"]["type"] == "bispectrum"
    trained = train_only({**config, "name": "more", "training": {**config["training"], "lr": 0.01}})
    assert trained.metrics()[-1]["val/ldos_rmse"] < 0.8 * errors["ldos_rmse"]
    with pytest.raises(ForgefieldError, match="is part of the network"):
        train_only({**config, "name": "other", "model": {"from": "be", "hidden": [5]}})


TRAINED_BY_MALA = """
import sys, numpy, mala
data, out = sys.argv[1:3]
p = mala.Parameters()
p.manual_seed, p.verbosity = 7, 0
p.network.layer_activations = "ReLU"
p.data.input_rescaling_type, p.data.output_rescaling_type = "feature-wise-standard", "minmax"
p.targets.ldos_gridsize, p.targets.ldos_gridspacing_ev, p.targets.ldos_gridoffset_ev = 11, 2.5, -5
p.running.max_number_epochs, p.running.mini_batch_size, p.running.learning_rate = 2, 486, 1e-3
h = mala.DataHandler(p)
for n, part in ((0, "tr"), (1, "va")):
    h.add_snapshot(f"Be_snapshot{n}.in.npy", data, f"Be_snapshot{n}.out.npy", data, part)
h.prepare_data()
p.network.layer_sizes = [h.input_dimension, 32, 24, h.output_dimension]
t = mala.Trainer(p, mala.Network(p), h)
t.train_network()
t.save_run("be", path=out, additional_calculation_data=f"{data}/Be_snapshot0.info.json")
params, network, handler, tester = mala.Tester.load_run("be", path=out)
handler.clear_data()
handler.add_snapshot("Be_snapshot2.in.npy", data, "Be_snapshot2.out.npy", data, "te",
                     calculation_output_file=f"{data}/Be_snapshot2.info.json")
handler.prepare_data(reparametrize_scaler=False)
numpy.save(f"{out}/predicted.npy", tester.predict_targets(0)[1])
"""


@pytest.mark.skipif("FORGEFIELD_MALA_PYTHON" not in os.environ, reason="$FORGEFIELD_MALA_PYTHON names no interpreter")
@pytest.mark.skipif(not BE.is_dir(), reason="shared data is not there")
def test_a_model_that_mala_trained_gives_what_mala_gives(tmp_path):
    subprocess.run(
        [os.environ["FORGEFIELD_MALA_PYTHON"], "-c", TRAINED_BY_MALA, str(BE), str(tmp_path)],
        check=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    theirs = np.load(tmp_path / "predicted.npy")
    model = api.load(api.import_mala(tmp_path / "be.zip", out=tmp_path / "runs"))
    inputs = np.load(BE / "Be_snapshot2.in.npy")[..., 3:].reshape(-1, 91)
    with torch.no_grad():
        ours = model(torch.from_numpy(inputs)).double().numpy()
    assert np.abs(ours - theirs).max() < 1e-6 * np.abs(theirs).max()
