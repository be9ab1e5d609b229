"""`forgefield bench --plan`: predicted memory against measured memory, and the arithmetic between the two."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forgefield.bench.memory import (
    FILLED,
    MemoryModel,
    Peak,
    _peak_on_cpu,
    available_bytes,
    batch_sizes,
    fit_memory,
    largest_batch,
    peak_of_step,
    plan_memory,
    planned_choice,
)
from forgefield.bench.step import BareStep, bare_step
from forgefield.cli import main
from forgefield.config.loading import load_config
from forgefield.errors import ForgefieldError
from forgefield.ops.execution import C_CONVOLUTIONS
from forgefield.training.engines.engine import Engine
from forgefield.training.run.checkpoint import list_checkpoints, load_checkpoint
from tests.support.helpers import tiny_config
from tests.support.launching import write_config
from tests.support.train_many import train_only

CPU = torch.device("cpu")


@pytest.mark.parametrize("derivative", ["double", "tangent"])
def test_small_batches_predict_a_large_one(tmp_path: Path, derivative: str) -> None:
    config = load_config(tiny_config(tmp_path, training={"engine": "eager", "derivative": derivative}))
    plan = plan_memory(config)
    step = bare_step(config)
    function = step.function(derivative)
    function.c_code = C_CONVOLUTIONS  # splines, which save memory, are not used for the few pairs of the small batches
    large = peak_of_step(step, Engine(function), step.batch(np.arange(40) % 10))
    assert large.atoms > 8 * plan.measured[-1].atoms or large.frames == 40
    assert plan.model.bytes(large.atoms, large.edges) == pytest.approx(large.bytes, rel=0.05)


def test_peak_counts_what_lives_at_the_same_time() -> None:
    """Two blocks at a time, three in all, beside what was there before."""
    before = torch.zeros(1000, dtype=torch.float64)

    def run(engine: Any, batch: Any) -> None:
        first = torch.empty(50_000, dtype=torch.float64)
        second = torch.empty(70_000, dtype=torch.float64)
        del first
        third = torch.empty(60_000, dtype=torch.float64)
        del second, third

    step: Any = SimpleNamespace(run=run, persistent_tensors=lambda: [before, before[:10]])
    assert _peak_on_cpu(step, None, {}) == 8 * (1000 + 70_000 + 60_000)  # type: ignore[arg-type]


def test_coefficients_are_recovered() -> None:
    truth = MemoryModel(5e6, 3e3, 700.0)
    sizes = [(1, 10, 90), (2, 21, 250), (4, 39, 410)]
    found = fit_memory([Peak(*size, round(truth.bytes(size[1], size[2]))) for size in sizes])
    for atoms, edges in ((1000, 9000), (1000, 90_000)):
        assert found.bytes(atoms, edges) == pytest.approx(truth.bytes(atoms, edges), rel=1e-3)


def test_where_atoms_and_edges_cannot_be_separated_edges_are_charged() -> None:
    found = fit_memory([Peak(n, 10 * n, 120 * n, 1000 + 600 * n) for n in (1, 2, 4)])
    assert found.per_atom == 0
    assert (found.fixed, found.per_edge) == (pytest.approx(1000), pytest.approx(5))


def test_isolated_atoms_cost_something() -> None:
    assert fit_memory([Peak(n, n, 0, 1000 + 600 * n) for n in (1, 2, 4)]).bytes(10, 0) == pytest.approx(7000)


def test_the_batch_that_fits_is_the_largest_that_does() -> None:
    model, room = MemoryModel(1e6, 2e3, 500.0), 1e9
    fits = largest_batch(model, room, 192.0, 54.0)
    assert model.bytes(192 * fits["frames"], 192 * 54 * fits["frames"]) <= room
    assert model.bytes(192 * (fits["frames"] + 1), 192 * 54 * (fits["frames"] + 1)) > room
    assert fits["edges"] == pytest.approx(54 * fits["atoms"], rel=1e-3)
    assert largest_batch(model, 1e5, 192.0, 54.0) == {"frames": 0, "atoms": 0, "edges": 0}


@pytest.mark.parametrize("batch", [{"frames": 3}, {"atoms": 17}, {"edges": 200}], ids=["frames", "atoms", "edges"])
def test_the_configured_batch_is_the_largest_of_the_loader(tmp_path: Path, batch: dict[str, int]) -> None:
    step = bare_step(load_config(tiny_config(tmp_path, data={"batch": batch})))
    loader = step.batches.train_dataloader()
    seen = [(len(b["n_atoms"]), len(b["positions"]), b["edge_index"].shape[1]) for b in loader]
    found = batch_sizes(loader, 12.0)
    assert found[: len(seen)] == seen
    assert len(found) == sum(loader.batches_in(epoch) for epoch in range(4))


def test_one_frame_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    step = bare_step(load_config(tiny_config(tmp_path)))

    class Full(Engine):
        def step(self, batch: Any, denominators: Any = None) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ForgefieldError, match=r"1 frame of the training data \(\d atoms, \d+ edges\) already exceed"):
        peak_of_step(step, Full(step.function("double")), step.batch([0]))


def test_what_is_measured_for_each_engine(tmp_path: Path) -> None:
    def chosen(**training: Any) -> str:
        return str(planned_choice(load_config(tiny_config(tmp_path, training=training)), CPU))

    assert chosen(engine="auto") == "eager, double derivative"
    assert chosen(engine="compile", derivative="tangent") == "compile, tangent derivative"
    assert chosen(engine="graphs") == "compile, double derivative"
    assert chosen(engine="graphs", graphs={"compiled": False}) == "eager, double derivative"


def test_lasting_memory_is_weights_gradients_state_and_average(tmp_path: Path) -> None:
    step: BareStep = bare_step(load_config(tiny_config(tmp_path, training={"ema": 0.9})))
    step.run(Engine(step.function("double")), step.batch([0]))
    n = sum(p.numel() for p in step.potential.parameters())
    floats = sum(t.numel() for t in step.persistent_tensors() if t.dtype == torch.float32 and t.dim() > 0)
    buffers = sum(b.numel() for b in step.potential.buffers() if b.dtype == torch.float32 and b.dim() > 0)
    assert floats - buffers == 5 * n  # weights, gradients, two moments, average


@pytest.mark.parametrize(
    "training",
    [
        {"swa": {"start": 0.5}, "ema": None},
        {"freeze": ["model.layers.*"], "ema": 0.9},
        {"lora": {"rank": 1}, "freeze": ["model.readout"], "ema": 0.9},
        {"lr_groups": {"model.layers.*": 0.1}, "ema": 0.9, "freeze": ["model.type_embedding"]},
    ],
    ids=["swa", "freeze", "lora", "lr_groups"],
)
def test_lasting_memory_is_that_of_what_is_trained(training: dict[str, Any], tmp_path: Path) -> None:
    """Gradients, two moments and an average of the parameters that a training of the same config trains."""
    config = tiny_config(tmp_path, training=training)
    config["trainer"] = {**config["trainer"], "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
    if "lora" in training:
        first = train_only({**config, "name": "first", "training": {}})
        config["model"] = {"from": str(first.path)}
    step = bare_step(load_config(config))
    step.run(Engine(step.function("double")), step.batch([0]))
    (tmp_path / "real").mkdir()
    run = train_only({**config, "out": str(tmp_path / "real"), "training": {**config["training"], **training}})
    stored = load_checkpoint(list_checkpoints(run.path / "checkpoints")[0])
    trained = sum(t.numel() for t in stored["forgefield"]["ema"]["average"].values())
    groups = stored["optimizer_states"][0]["param_groups"]
    assert [group["lr"] for group in step.optimiser.param_groups] == [group["lr"] for group in groups]
    assert sum(p.numel() for p in step.potential.parameters() if p.requires_grad) == trained
    every = sum(p.numel() for p in step.potential.parameters())
    floats = sum(t.numel() for t in step.persistent_tensors() if t.dtype == torch.float32 and t.dim() > 0)
    buffers = sum(b.numel() for b in step.potential.buffers() if b.dtype == torch.float32 and b.dim() > 0)
    assert floats - buffers == every + 4 * trained


def test_patterns_that_match_nothing_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for training in ({"freeze": ["modle.*"]}, {"lr_groups": {"modle.*": 0.1}}):
        with pytest.raises(ForgefieldError, match="no trained parameter of the model matches 'modle"):
            plan_memory(load_config(tiny_config(tmp_path, training=training)))


def test_an_optimiser_that_evaluates_several_times_is_planned_for(tmp_path: Path) -> None:
    optimiser = {"name": "lbfgs", "max_iter": 2, "history_size": 3}
    step = bare_step(load_config(tiny_config(tmp_path, training={"optimizer": optimiser})))
    step.run(Engine(step.function("double")), step.batch([0]))
    n = sum(p.numel() for p in step.potential.parameters())
    assert sum(t.numel() for t in step.persistent_tensors()) > 4 * n


def test_command_reports_the_result_of_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = tiny_config(tmp_path, training={"engine": "eager"}, data={"batch": {"frames": 5}})
    config = write_config(tmp_path / "mine.yaml", content)
    assert main(["bench", str(config), "--plan", "--json", str(tmp_path / "plan.json")]) == 0
    told = json.loads((tmp_path / "plan.json").read_text())
    plan = json.loads(json.dumps(plan_memory(load_config(content)).as_dict()))
    for mine, its in zip(plan["measured"], told["measured"], strict=True):
        assert mine.pop("bytes") == pytest.approx(its.pop("bytes"), rel=0.01)
        assert mine == its
    assert told["largest"] == plan["largest"]
    assert told["available"] == pytest.approx(available_bytes(CPU), rel=0.5)
    assert told["fits"]["frames"] > 5
    model = MemoryModel(**told["model"])
    assert model.bytes(told["fits"]["atoms"], told["fits"]["edges"]) == pytest.approx(
        FILLED * told["available"], rel=1e-3
    )
    out = capsys.readouterr().out
    assert "fills 90 %" in out
    assert "it fits." in out
    assert not (tmp_path / "runs").exists()
