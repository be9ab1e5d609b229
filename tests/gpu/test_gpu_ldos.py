"""Trainings on points on a GPU: captured blocks against the eager engine, precisions, resume, and where rows are resident."""

from __future__ import annotations

import pytest
import torch

from forgefield.ldos.training.blocks import Block
from forgefield.ldos.training.data import RowLayout
from forgefield.ldos.training.engines import EagerEngine, GraphsEngine
from forgefield.ldos.training.fused import FusedGradient, FusedStep
from forgefield.ldos.training.gradient import ManualGradient
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.update import Update
from tests.support.interrupting import Interrupted
from tests.support.launching import average, weights
from tests.support.point_networks import network, rows, task
from tests.support.resuming import END, assert_same_run
from tests.support.snapshots import point_config
from tests.support.train_many import train_only

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gpu_config(folder, name: str, *, engine: str, **training) -> dict:
    config = point_config(folder, name=name)
    config["trainer"] = {"max_epochs": 4, "enable_progress_bar": False, "accelerator": "cuda", "devices": 1}
    config["training"] |= {"engine": engine, "graphs": {"compiled": False}, **training}
    return config


class Rows:
    """Stands for `ResidentRows`, on the GPU."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self.layout = RowLayout(3, 7)
        self.rows = torch.zeros(n, self.layout.width, dtype=dtype, device="cuda")
        for room, values in zip(self.layout.split(self.rows), rows(n)):
            room.copy_(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_captured_blocks_of_any_length_take_the_steps_of_the_eager_engine(dtype, clip):
    ends = []
    for captured in (0, 1, 4):
        model, how, resident = network("silu", dtype=dtype).cuda(), task("mse"), Rows(60, dtype)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        update = Update(optimiser, WeightAverage(model, 0.9), clip=(clip, "norm"), reduce=None)
        eager = EagerEngine(model, how, ManualGradient(model, how.loss), update, resident=resident)  # type: ignore[arg-type]
        engine = GraphsEngine(eager, captured, 6) if captured else eager
        rates = iter([[0.01 / (n + 1)] for n in range(100)])
        places = torch.randperm(60, generator=torch.Generator().manual_seed(2))[:54].cuda().view(9, 6)
        found, step = torch.zeros(7, dtype=torch.float64, device="cuda"), 0
        for own in ([6] * 5, [6, 6, 6, 2]):
            block = Block(own, own, places[step : step + len(own)], None)
            found = found + engine.run(block, step, lambda rates=rates: next(rates)).by_level
            step += len(own)
        ends.append([found, *model.parameters(), *update.average.average.values()])  # type: ignore[union-attr]
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    for other in ends[1:]:
        for mine, expected in zip(other, ends[0]):
            torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16-mixed", "fp16-mixed"])
def test_graphs_learn_what_the_eager_engine_learns(precision, tmp_path):
    if precision in ("tf32", "bf16-mixed") and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("no such arithmetic here")
    eager = train_only(gpu_config(tmp_path, "eager", engine="eager", precision=precision))
    graphs = train_only(gpu_config(tmp_path, "graphs", engine="graphs", precision=precision))
    tolerance = {"float32": 2e-3, "tf32": 3e-2, "bf16-mixed": 5e-2, "fp16-mixed": 2e-2}[precision]
    assert float((weights(eager.path) - weights(graphs.path)).abs().max()) < tolerance
    assert float((average(eager.path) - average(graphs.path)).abs().max()) < tolerance
    for mine, other in zip(eager.metrics(), graphs.metrics(), strict=True):
        assert mine["val/band_energy_mae"] == pytest.approx(other["val/band_energy_mae"], rel=0.1, abs=20)


@pytest.mark.parametrize("keep", ["device", "memory"])
def test_points_one_by_one_are_those_of_whole_batches_and_auto_takes_eager(keep, tmp_path, capsys):
    runs = []
    for fast, engine in ((True, "eager"), (False, "auto")):
        config = gpu_config(tmp_path, f"fast-{fast}", engine=engine)
        config["data"] |= {"fast": fast, "points": {**config["data"]["points"], "keep": keep}}
        runs.append(weights(train_only(config).path))
    assert "Engine graphs" not in capsys.readouterr().out
    assert torch.equal(*runs)


def trained_and_interrupted(config, monkeypatch):
    """The run "straight"; and "again" is one that has been stopped twice and is to go on."""
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only(config("straight"))
    monkeypatch.setenv("END_HOW", "raise")
    for step in ("4", "13"):
        monkeypatch.setenv("END_AT", step)
        with pytest.raises(Interrupted):
            train_only(config("again"))
    monkeypatch.setenv("END_AT", "-1")
    return straight


@pytest.mark.parametrize("terms", [{}, {"dos": {"every": 2}, "band_energy": {"every": 4}}], ids=["points", "terms"])
@pytest.mark.parametrize("keep", ["device", "memory", "disk"])
def test_a_run_with_captured_blocks_ends_as_if_it_had_not_been_interrupted(keep, terms, tmp_path, monkeypatch):
    """Also where the first step after a resume, the fifth, holds terms on snapshots and is not captured."""

    def config(name: str) -> dict:
        made = gpu_config(tmp_path, name, engine="graphs", checkpoint={"every_steps": 4})
        made["data"]["points"] = {**made["data"]["points"], "keep": keep}
        made["task"] = {**made["task"], **terms}
        return {**made, "callbacks": [END]}

    straight = trained_and_interrupted(config, monkeypatch)
    assert_same_run(straight.path, train_only(config("again")).path)


@pytest.fixture
def own_kernels(monkeypatch):
    """Both kinds of steps are timed, and own kernels used whatever the outcome."""
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("no such arithmetic here")
    timed = GraphsEngine._is_faster
    monkeypatch.setattr(GraphsEngine, "_is_faster", lambda *args: timed(*args) or True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
@pytest.mark.parametrize("activation", ["relu", "softplus", "elu"])
def test_kernels_do_not_hide_nan(activation, loss, dtype, own_kernels):
    """The least and the greatest of a NaN and a number are that number on a GPU."""
    model, how, resident = (
        network(activation, activation, dtype=torch.float32).cuda(),
        task(loss),
        Rows(20, torch.float32),
    )
    resident.rows[3, 2] = torch.nan
    step = FusedGradient(FusedStep(model, how.loss, resident.layout, 20, None, dtype))
    errors = step(*resident.layout.split(resident.rows), how.slope_factor(20).to("cuda", torch.float32), None)
    assert errors.isnan().all()
    assert all(gradient.isnan().any() for gradient in step.gradients)


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 5e-3), ("bf16-mixed", 2e-2)])
def test_kernels_learn_what_the_eager_engine_learns(precision, tolerance, own_kernels, tmp_path, capsys):
    eager = train_only(gpu_config(tmp_path, "eager", engine="eager", precision=precision))
    graphs = train_only(gpu_config(tmp_path, "own", engine="graphs", precision=precision, graphs={"compiled": True}))
    said = capsys.readouterr().out
    assert "Engine graphs of kernels" in said
    assert said.count("us with fused kernels and") == 1
    for mine, other in zip(graphs.metrics(), eager.metrics(), strict=True):
        assert mine["train/loss"] == pytest.approx(other["train/loss"], rel=tolerance)
        assert mine["val/loss"] == pytest.approx(other["val/loss"], rel=tolerance)


@pytest.mark.parametrize("precision", ["tf32", "bf16-mixed"])
def test_a_run_with_kernels_ends_as_if_it_had_not_been_interrupted(
    precision, own_kernels, tmp_path, monkeypatch, capsys
):
    """In the middle of two epochs; what was measured at the start is not measured again."""

    def config(name: str) -> dict:
        made = gpu_config(tmp_path, name, engine="graphs", precision=precision, checkpoint={"every_steps": 4})
        made["training"]["graphs"] = {"compiled": True}
        return {**made, "callbacks": [END]}

    straight = trained_and_interrupted(config, monkeypatch)
    capsys.readouterr()
    again = train_only(config("again"))
    said = capsys.readouterr().out
    assert "of kernels" in said
    assert "us with fused kernels and" not in said
    assert_same_run(straight.path, again.path)


def test_the_compiled_step_is_captured_too_and_auto_takes_graphs(tmp_path, capsys):
    compiled = gpu_config(tmp_path, "compiled", engine="graphs")
    compiled["training"]["graphs"] = {"compiled": True}
    losses = [row["train/loss"] for row in train_only(compiled).metrics()]
    assert losses[-1] < losses[0]
    train_only(gpu_config(tmp_path, "auto", engine="auto"))
    assert "Engine graphs" in capsys.readouterr().out
