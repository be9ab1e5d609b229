"""Steps without the host on a GPU: frames that stay there, captured evaluation, state that is copied during the training."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from forgefield.api import train
from forgefield.data.padding import Size, SizePlan
from forgefield.data.sampling import resident
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.resident import ResidentFrames
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.run import writer
from forgefield.training.run.writer import Snapshot
from tests.support.engine_cases import labelled, potential_of, step_function
from tests.support.gpu_batches import SIZES, on_gpu
from tests.support.helpers import tiny_config
from tests.support.interrupting import Interrupted
from tests.support.mixed_frames import DATASET
from tests.support.resuming import END, assert_same_run
from tests.support.warm import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("window", [1, 2**30])
def test_batches_made_on_the_gpu_equal_those_of_the_host(window):
    plain, kept = (FrameLoader(DATASET, 4, shuffle=True, seed=2) for _ in range(2))
    kept.resident = ResidentFrames(DATASET, torch.device("cuda"), window_bytes=window)
    for batch, other in zip(plain, kept, strict=True):
        assert list(batch) == list(other)
        for key, tensor in batch.items():
            assert other[key].is_cuda
            assert torch.equal(tensor.nan_to_num(nan=-7.0), other[key].cpu().nan_to_num(nan=-7.0)), key


@pytest.mark.parametrize("name", ["nequip", "allegro"])
def test_captured_evaluation_equals_that_of_the_cpu(name):
    oracle = Engine(step_function(potential_of(name)))
    notes: list[str] = []
    inner = Engine(step_function(potential_of(name).cuda()))
    plan = SizePlan((Size(edges=3000, atoms=160, frames=5),))
    engine = GraphsEngine(inner, plan=SizePlan(()), evaluation_plan=lambda: plan, notify=notes.append)
    for number, atoms in enumerate(SIZES):
        expected = oracle.evaluate(labelled(*atoms, seed=number, box=6.0))
        found = engine.evaluate(on_gpu(*atoms, seed=number))
        for one, other in zip(found, expected):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-9)
    assert notes == []  # captured
    assert len(engine._evaluations) == 1


def test_runs_with_frames_on_the_gpu_and_on_the_host_have_the_same_bits(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, callbacks=[END])
    config["training"] |= {"engine": "graphs", "checkpoint": {"every_steps": 2}}
    config["trainer"] |= {"accelerator": "gpu", "devices": 1}
    monkeypatch.setenv("END_AT", "-1")
    straight = train({**config, "name": "straight"}, "data.keep=memory").path
    assert_same_run(straight, train({**config, "name": "kept"}, "data.keep=device").path)
    monkeypatch.setenv("END_AT", "7")
    monkeypatch.setenv("END_HOW", "raise")
    with pytest.raises(Interrupted):
        train({**config, "name": "again"})
    monkeypatch.setenv("END_AT", "-1")
    assert_same_run(straight, train({**config, "name": "again"}).path)


@pytest.mark.parametrize(("gathered", "pinned"), [(2**26, 2**32), (100, 2**32), (2**20, 100)])
def test_a_snapshot_has_the_values_of_its_time(gathered, pinned, monkeypatch):
    monkeypatch.setattr(writer, "GATHERED_BYTES", gathered)
    monkeypatch.setattr(writer, "PINNED_BYTES", pinned)
    tensors = {
        "weights": [torch.randn(1000, 300, device="cuda"), torch.randn(7, device="cuda", dtype=torch.float64)],
        "count": torch.ones((), device="cuda"),
        "transposed": torch.randn(3, 5, device="cuda").t(),
        "host": torch.arange(4),
    }
    before = {
        "weights": [tensor.cpu() for tensor in tensors["weights"]],
        **{key: tensors[key].cpu().clone() for key in ("count", "transposed", "host")},
    }
    snapshot = Snapshot(tensors)
    for tensor in (*tensors["weights"], tensors["count"], tensors["transposed"], tensors["host"]):
        tensor.zero_()
    copy = snapshot.content()
    for key in ("count", "transposed", "host"):
        assert torch.equal(copy[key], before[key])
    for one, other in zip(copy["weights"], before["weights"]):
        assert torch.equal(one, other)
        assert one.untyped_storage().nbytes() == one.nbytes  # a file of it holds nothing else


def test_frames_that_need_too_much_memory_are_assembled_on_the_host(monkeypatch):
    device = torch.device("cuda")
    assert isinstance(resident.resident_frames(DATASET, device, "auto", noisy=False), ResidentFrames)
    monkeypatch.setattr(resident, "MOST_BYTES", 1000)
    reason = resident.resident_frames(DATASET, device, "auto", noisy=False)
    assert reason.startswith("assembled on the host, because all frames need ")
    assert isinstance(resident.resident_frames(DATASET, device, "device", noisy=False), ResidentFrames)


def test_a_whole_training_is_measured_through_the_real_command(tmp_path):
    """The model and the batches of the benchmark, with all defaults: frames on the GPU, captured validation, checkpoints."""
    words = ["benchmarks/training.py", "--once", "--epochs", "2", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"steps +[\d.]+ s +[\d.]+ ms per step", done.stdout), done.stdout
    log = (tmp_path / "full" / "log.txt").read_text()
    assert "made on the device, where all frames are kept" in log
    assert "Validation is not captured" not in log
