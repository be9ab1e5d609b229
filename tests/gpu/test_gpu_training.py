"""On a GPU: the same numbers as on a CPU, the same bits on repetition, and an exact resume. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from forgefield.api import train
from forgefield.config.loading import load_config
from forgefield.data.batch import BatchSpec, to_device
from forgefield.data.module import read_data
from forgefield.models.building import build_model
from forgefield.models.resolving import resolve_model
from forgefield.tasks.task import Task
from tests.support.helpers import tiny_config
from tests.support.interrupting import Interrupted
from tests.support.resuming import END, assert_same_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_gpu(config: dict, **trainer) -> dict:
    return {**config, "trainer": {**config["trainer"], "accelerator": "gpu", "devices": 1, **trainer}}


@pytest.mark.parametrize("model", [{"l_max": 2, "parity": True}, {"l_max": 1, "parity": False, "zbl": True}])
def test_outputs_and_parameter_gradients_equal_those_of_the_cpu(model, tmp_path):
    config = tiny_config(tmp_path, task={"energy": {}, "forces": {}, "stress": {}})
    config["model"].update(model)
    config = load_config(config)
    data = read_data(config.data, seed=0)
    resolved = resolve_model(config.model, species=data.species.symbols, cutoff=3.5, statistics=data.statistics)
    task = Task(config.task, data.species.symbols)
    batch = next(iter(data.serve(BatchSpec()).train_dataloader()))
    results = {}
    for device in ("cpu", "cuda"):
        potential = build_model(resolved, precision="float64", seed=0).to(device).train()
        here = to_device(batch, device)
        outputs = potential(here, forces=True, stress=True)
        task.loss(outputs, here).total.backward()
        tensors = {name: p.grad for name, p in potential.named_parameters() if p.grad is not None} | outputs
        results[device] = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    assert results["cpu"].keys() == results["cuda"].keys()
    for name, expected in results["cpu"].items():
        torch.testing.assert_close(
            results["cuda"][name], expected, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_training_on_gpu_follows_training_on_cpu(tmp_path):
    config = tiny_config(tmp_path)
    config["training"]["precision"] = "float64"
    cpu = train({**config, "name": "cpu"}).metrics()
    gpu = train({**on_gpu(config), "name": "gpu"}).metrics()
    for a, b in zip(cpu, gpu, strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def test_repeated_training_gives_the_same_bits(tmp_path):
    config = on_gpu(tiny_config(tmp_path))
    a, b = (train({**config, "name": name}).path for name in ("a", "b"))
    assert (a / "metrics.csv").read_bytes() == (b / "metrics.csv").read_bytes()
    assert (a / "checkpoints/last.safetensors").read_bytes() == (b / "checkpoints/last.safetensors").read_bytes()


def test_interrupted_run_on_gpu_equals_uninterrupted_run(tmp_path, monkeypatch):
    config = on_gpu(tiny_config(tmp_path, callbacks=[END]))
    config["training"]["checkpoint"] = {"every_steps": 2}
    monkeypatch.setenv("END_AT", "-1")
    straight = train({**config, "name": "straight"}).path
    monkeypatch.setenv("END_AT", "7")
    monkeypatch.setenv("END_HOW", "raise")
    with pytest.raises(Interrupted):
        train({**config, "name": "again"})
    monkeypatch.setenv("END_AT", "-1")
    assert_same_run(straight, train({**config, "name": "again"}).path)


def test_a_training_step_does_not_wait_for_the_device(tmp_path):
    """Nothing in forward, loss or metrics reads a value back: torch would raise here."""
    config = load_config(tiny_config(tmp_path, task={"energy": {}, "forces": {"species_weights": {"Cu": 2.0}}}))
    data = read_data(config.data, seed=0)
    resolved = resolve_model(config.model, species=data.species.symbols, cutoff=3.5, statistics=data.statistics)
    potential = build_model(resolved, precision="float32", seed=0).to("cuda").train()
    task = Task(config.task, data.species.symbols)
    batch = to_device(next(iter(data.serve(BatchSpec()).train_dataloader())), "cuda")
    task.loss(potential(batch), batch).total.backward()  # first use builds tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        task.loss(potential(batch), batch).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(p.grad).all() for p in potential.parameters() if p.grad is not None)
