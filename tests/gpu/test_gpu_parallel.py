"""Several processes on a GPU: nccl with one rank, two ranks that share the GPU, and no waiting of the host in between."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist

from forgefield.parallel.reductions import GradientBuckets, StepExchange
from tests.support.helpers import tiny_config
from tests.support.launching import start, torchrun, train_command, weights, write_config
from tests.support.train_many import train_only

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def gpu_config(folder, name: str, frames: int = 4, **trainer) -> dict:
    config = tiny_config(folder, name=name)
    config["data"] = {**config["data"], "batch": {"frames": frames}}
    config["training"] = {
        **config["training"],
        "precision": "float64",
        "engine": "eager",
        "checkpoint": {"every_steps": 1},
    }
    config["trainer"] = {**config["trainer"], "accelerator": "gpu", "devices": 1, **trainer}
    return config


@pytest.mark.parametrize("strategy", ["simple_ddp", "ddp"])
def test_one_rank_on_nccl_is_the_training_without_any(strategy, tmp_path):
    alone = train_only(gpu_config(tmp_path, "alone"))
    config = write_config(tmp_path / "ranked.yaml", gpu_config(tmp_path, "ranked", strategy=strategy))
    done = start([sys.executable, *train_command(config)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.equal(weights(alone.path), weights(tmp_path / "runs" / "ranked"))


@pytest.mark.parametrize("engine", ["eager", "graphs"])
def test_two_ranks_that_share_a_gpu_train_as_one(engine, tmp_path):
    alone = train_only(gpu_config(tmp_path, "alone"))
    ranked = gpu_config(tmp_path, "ranked", frames=2)
    ranked["training"] |= {"engine": engine, "graphs": {"compiled": False}}
    del ranked["trainer"]["devices"]
    config = write_config(tmp_path / "ranked.yaml", ranked)
    done = start([*torchrun(2), *train_command(config)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    if torch.cuda.device_count() == 1:
        assert "several processes share a GPU" in done.stdout
    assert float((weights(alone.path) - weights(tmp_path / "runs" / "ranked")).abs().max()) < 1e-9


@pytest.fixture
def group():
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_neither_the_message_of_a_batch_nor_the_gradients_make_the_host_wait(group):
    parameters = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in (7, 300, 41)]
    frozen = torch.nn.Parameter(torch.zeros(2, device="cuda"))
    buckets = GradientBuckets([*parameters, frozen], bucket_bytes=512)
    exchange = StepExchange(lambda: (0.0, 1.0))
    counts = torch.tensor([3.0, 5.0], dtype=torch.float64, device="cuda")

    def step(seed: int) -> list[torch.Tensor]:
        exchange.send(counts)
        gradients = [torch.full_like(p, float(seed + i)) for i, p in enumerate(parameters)]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient.clone()
        total = exchange.counts()
        buckets.average()
        return [*gradients, total]

    step(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        *gradients, total = step(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert total.tolist() == [3.0, 5.0]
    assert exchange.flags() == [0.0, 1.0]
    assert frozen.grad is None
    for parameter, gradient in zip(parameters, gradients):
        assert torch.equal(parameter.grad, gradient)
