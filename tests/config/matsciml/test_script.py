"""Training scripts of Open MatSciML become configs, and nothing in them is executed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ase.io import write

from forgefield.cli import main
from forgefield.config.converting import convert_input
from forgefield.config.loading import load_config
from forgefield.config.matsciml import matsciml_translation
from forgefield.errors import ForgefieldError
from tests.support.helpers import emt_frames

SCRIPT = """
import pytorch_lightning as pl
from matsciml.datasets.transforms import PeriodicPropertiesTransform, PointCloudToGraphTransform
from matsciml.lightning import callbacks as cb
from matsciml.lightning.data_utils import MatSciMLDataModule
from matsciml.models import TensorNet
from matsciml.models.base import ForceRegressionTask

open("executed", "w").close()
pl.seed_everything(1616)
sizes = {"element_types": elements(), "units": 8, "nblocks": 1, "num_rbf": 4}
task = ForceRegressionTask(
    encoder_class=TensorNet, encoder_kwargs={**sizes},
    task_keys=["energy", "force"], lr=1e-3, weight_decay=0.01,
    normalize_kwargs={"energy_mean": -357.6, "energy_std": 0.55},
    task_loss_scaling={"energy": 1.0, "force": 10.0},
    scheduler_kwargs={"ExponentialLR": {"gamma": 0.9}},
)
dm = MatSciMLDataModule("LiPSDataset", train_path="train.extxyz", val_split=0.25, batch_size=2, num_workers=4,
    dset_kwargs={"transforms": [PeriodicPropertiesTransform(4.0, True), PointCloudToGraphTransform("pyg")]})

def main():
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=0.5, callbacks=[
        cb.GradientCheckCallback(), cb.ExponentialMovingAverageCallback(decay=0.9),
        cb.LossScalingScheduler(LinearScalingSchedule("force", 10.0, 1.0, step_frequency="step"))])
    trainer.fit(task, datamodule=dm)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "lips.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_translated_and_trained_but_never_executed(file, tmp_path, capsys):
    translated = matsciml_translation(file)
    assert translated.config == {
        "name": "lips",
        "seed": 1616,
        "data": {"train": "train.extxyz", "val": 0.25, "test": None, "batch": {"frames": 2}, "cutoff": 4.0},
        "model": {
            "name": "tensornet",
            "num_features": 8,
            "num_layers": 1,
            "num_rbf": 4,
            "self_loops": False,
            "envelope": "cosine",
        },
        "task": {
            "energy": {"weight": 1.0},
            "forces": {"weight": 10.0, "schedule": {"kind": "linear", "to": 1.0, "unit": "step"}},
        },
        "training": {
            "lr": 1e-3,
            "optimizer": {"name": "AdamW", "weight_decay": 0.01},
            "scheduler": {"name": "ExponentialLR", "gamma": 0.9},
            "ema": 0.9,
            "clip_norm": 0.5,
        },
        "trainer": {"max_epochs": 1, "accelerator": "cpu"},
        "callbacks": ["gradient_check"],
    }
    assert "data.adaptive_cutoff" in translated.notes["transforms.PeriodicPropertiesTransform.adaptive_cutoff"]
    assert "element_types" in translated.notes["ForceRegressionTask.encoder_kwargs"]
    write("train.extxyz", emt_frames(8, seed=1), format="extxyz")
    converted = tmp_path / "lips.yaml"
    convert_input(file, converted)
    assert load_config(converted).training == load_config(file).training
    assert (
        main(["train", str(file), "training.engine=eager", "training.tensorboard=0", "training.uncertainty=false"]) == 0
    )
    assert (tmp_path / "runs" / "lips" / "run.json").exists()
    assert "MatSciMLDataModule.dataset: files are recognised" in capsys.readouterr().out
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("TensorNet,", "FAENet,", "'ForceRegressionTask.encoder_class' is FAENet, which is not translated"),
        ("lr=1e-3", "lr=rate()", "must be a number"),
        ("lr=1e-3", "lr=2 * base", "is the expression 2 * base, which is not evaluated"),
        ("weight_decay", "weight_decai", "unknown key 'ForceRegressionTask.weight_decai'. Did you mean 'weight_decay'"),
        ('"force": 10.0', '"stress": 10.0', "names stress, which is not a target"),
        ('PointCloudToGraphTransform("pyg")', "AtomicSuperNodes(3)", "the transform AtomicSuperNodes has no counterpart"),
        ("cb.GradientCheckCallback()", "cb.Timer()", "the callback Timer has no counterpart"),
        ("MatSciMLDataModule(", "MatSciMLDataModule.from_devset(", "from_devset"),
        ("max_epochs=1", "overfit_batches=3", "forgefield check --overfit CONFIG"),
        ("pl.seed", "pl..seed", "line 10: this is not valid Python"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_name(file, old, new, message):
    assert old in SCRIPT
    file.write_text(SCRIPT.replace(old, new))
    with pytest.raises(ForgefieldError) as caught:
        load_config(file)
    assert message in str(caught.value)


def test_properties_classes_and_noise(file):
    text = SCRIPT.replace("ForceRegressionTask", "ScalarRegressionTask").replace('["energy", "force"]', '["band_gap"]')
    text = text.replace('"energy_mean": -357.6, "energy_std"', '"band_gap_mean": 1.5, "band_gap_std"')
    text = text.replace('task_loss_scaling={"energy": 1.0, "force": 10.0},', "").replace(
        '"force", 10.0', '"band_gap", 2'
    )
    file.write_text(text)
    config = load_config(file)
    assert config.data.labels.fields.keys() == {"band_gap"}
    target = matsciml_translation(file).config["task"]["band_gap"]
    assert target["normalise"] == {"mean": 1.5, "scale": 0.55}
    assert target["weight"] == 2
    denoise = text.replace("ScalarRegressionTask", "NodeDenoisingTask").replace('task_keys=["band_gap"], ', "")
    denoise = denoise.replace('PointCloudToGraphTransform("pyg")', "NoisyPositions(0.2)").replace(
        '"band_gap", 2', '"denoise", 1'
    )
    file.write_text(denoise)
    assert matsciml_translation(file).config["task"]["denoise"]["sigma"] == 0.2
