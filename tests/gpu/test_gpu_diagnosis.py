"""Diagnosis on a GPU: a captured step is skipped on the device as an eager one is by the host, and perturbed alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.diagnosis.records import read_records
from tests.support.helpers import emt_frames, tiny_config
from tests.support.launching import average, final_state, weights
from tests.support.train_many import train_only

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LOSS = "tests.support.planted_defects.root_loss"


def trained(folder, name: str, callbacks: list, **training):
    task = {"energy": {"loss": LOSS}, "forces": {}}
    config = tiny_config(folder, name=name, task=task, callbacks=callbacks)
    config["data"]["val"] = 0
    config["trainer"] = {"max_epochs": 3, "enable_progress_bar": False, "accelerator": "cuda", "devices": 1}
    config["training"] = {**config["training"], "engine": "eager", "derivative": "double", **training}
    return train_only(config).path


@pytest.mark.parametrize("callbacks", [[], [{"name": "sam", "rho": 0.01}]])
def test_a_captured_step_is_left_out_as_an_eager_one(callbacks, tmp_path, monkeypatch):
    """`graphs` tells the fused optimiser on the device and reads what happened two steps later; eager waits and takes the
    gradients away. Weights, average, counts and names agree."""
    labels = np.sort([atoms.get_potential_energy() / len(atoms) for atoms in emt_frames(14, 0)])
    monkeypatch.setenv("ROOT_ABOVE", str(labels[-2:].mean()))
    watching = [*callbacks, {"name": "gradient_check", "policy": "skip"}, "loss_spike", "autocorrelation", "throughput"]
    eager = trained(tmp_path, "eager", watching)
    captured = trained(tmp_path, "captured", watching, engine="graphs", graphs={"compiled": False})
    for of in (weights, average):
        assert float((of(eager) - of(captured)).abs().max()) < 1e-5
    steps = {float(state["step"]) for state in final_state(captured)["optimizer_states"][0]["state"].values()}
    assert steps == {18.0}
    found, expected = (read_records(run)["gradient_check"] for run in (captured, eager))
    assert found["bad"] == expected["bad"] == 3
    assert [event["step"] for event in found["events"]] == [event["step"] for event in expected["events"]]
    assert [event["frames"] for event in found["events"]] == [event["frames"] for event in expected["events"]]
    assert read_records(captured)["throughput"]["rows"]["memory_mb"][-1] > 0


def test_the_helper_looks_at_captured_steps(tmp_path):
    run = trained(
        tmp_path, "helped", [{"name": "training_helper", "every": 4}], engine="graphs", graphs={"compiled": False}
    )
    assert read_records(run)["training_helper"]["looks"] >= 4
