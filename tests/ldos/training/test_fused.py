"""Steps by kernels of our own against written-out gradients and torch's Adam: by Triton's interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from forgefield.ldos.model import ACTIVATIONS
from forgefield.ldos.training import engines, fused
from forgefield.ldos.training.blocks import Block
from forgefield.ldos.training.engines import EagerEngine, GraphsEngine
from forgefield.ldos.training.fused import FusedGradient, FusedStep, adam_of, rounded_to_tf32, tiles_for
from forgefield.ldos.training.gradient import ManualGradient
from forgefield.ops.execution import products_in
from forgefield.training.optim.averages import WeightAverage
from forgefield.training.optim.update import Update
from tests.support.fused_points import DEVICE, LOW, RUNS, SMALL, Rows, network
from tests.support.point_networks import task

pytestmark = pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or its interpreter (TRITON_INTERPRET=1)")


def assert_close(mine: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    size = float(expected.abs().max())
    assert float((mine - expected).abs().max()) < tolerance * size + 1e-30


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_kernels_give_the_gradients_that_are_written_out(activation, dtype):
    """Short batch, weighted levels, an activation on the outputs, and each loss in turn."""
    number = sorted(ACTIVATIONS).index(activation)
    how = task(("mse", "mae", "huber")[number % 3], [1.0, 2, 0, 1, 1, 0.5, 1])
    model, resident = network(activation, activation if number % 2 else None), Rows(90)
    weight = torch.ones(90, device=DEVICE)
    weight[70:] = 0
    factor = 100 * how.slope_factor(70).to(DEVICE, torch.float32)  # far from the least numbers of float16
    batch = resident.layout.split(resident.rows)
    kernels = FusedGradient(FusedStep(model, how.loss, resident.layout, 90, None, dtype, SMALL))
    written = ManualGradient(model, how.loss)
    with products_in(dtype if dtype == LOW else None):
        expected = written(*batch, factor, weight)
    rough = dtype == LOW or DEVICE == "cuda"
    assert_close(kernels(*batch, factor, weight), expected, 2e-3 if rough else 1e-5)
    for mine, other in zip(kernels.gradients, written.gradients):
        assert_close(mine, other, 5e-3 if rough else 1e-5)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
@pytest.mark.parametrize("activation", ["relu", "softplus", "elu"])
def test_a_nan_value_is_seen_in_the_loss_and_in_the_gradients(activation, loss):
    """Where an input is NaN, behind an activation on the outputs too."""
    model, how, resident = network(activation, activation, hidden=(20, 20)), task(loss), Rows(20)
    resident.rows[3, 2] = torch.nan
    step = FusedGradient(FusedStep(model, how.loss, resident.layout, 20, None, torch.float32, SMALL))
    errors = step(*resident.layout.split(resident.rows), how.slope_factor(20).to(DEVICE, torch.float32), None)
    assert errors.isnan().all()
    assert all(gradient.isnan().any() for gradient in step.gradients)


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("optimiser", ["adam", "adamw", "sgd", "clipped"])
def test_captured_blocks_of_fused_steps_take_the_steps_of_the_eager_engine(optimiser, dtype, monkeypatch):
    """Rates that change, a weight average, blocks of several lengths, a short last batch, a count of steps that goes on, and
    the gradients of the last step where they are looked for."""
    monkeypatch.setattr(engines, "current_factor_dtype", lambda: dtype)
    monkeypatch.setitem(fused.TILES, dtype, (SMALL,))
    made = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9)),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        "clipped": lambda p: torch.optim.Adam(p, lr=0.1),
    }[optimiser]
    if optimiser == "sgd" and DEVICE == "cuda":
        pytest.skip("cannot be captured")
    ends = []
    for captured in (0, 8):
        model, how, resident = network(hidden=(20,)), task("mse"), Rows(50)
        clip = (0.01 if optimiser == "clipped" else None, "norm")
        groups = [{"params": list(model.weights)}, {"params": list(model.biases)}]
        update = Update(made(groups), WeightAverage(model, 0.9), clip=clip, reduce=None)
        engine = EagerEngine(model, how, ManualGradient(model, how.loss), update, resident=resident)  # type: ignore[arg-type]
        rates = iter([[0.01 / (n + 1), 0.02] for n in range(100)])
        engine = GraphsEngine(engine, captured, 6, fuses=True) if captured else engine
        places = torch.randperm(50, generator=torch.Generator().manual_seed(2))
        places = torch.cat([places, places[:4]]).view(9, 6).to(DEVICE)
        found, step = torch.zeros(7, dtype=torch.float64, device=DEVICE), 0
        for own in ([6] * 5, [6, 6, 6, 2]):
            block = Block(own, own, places[step : step + len(own)], None)
            with products_in(dtype if dtype == LOW else None):
                found = found + engine.run(block, step, lambda rates=rates: next(rates)).by_level
            step += len(own)
        states = [float(state["step"]) for state in update.optimiser.state.values() if "step" in state]
        assert states == [9.0] * len(states)
        if captured:
            assert (engine._fused.adam is None) == (optimiser in ("sgd", "clipped"))  # type: ignore[union-attr]
        ends.append(
            [found, *model.parameters(), *(p.grad for p in model.parameters()), *update.average.average.values()]
        )  # type: ignore[union-attr]
    for mine, expected in zip(*ends, strict=True):
        assert_close(mine, expected, 1e-5 if dtype == torch.float32 and DEVICE == "cpu" else 2e-2)


def test_factors_of_tf32_are_rounded_to_the_nearest():
    """Where they are stored: inputs, weights, values, slopes and their transposes have no bits below those of tf32."""
    model, how, resident = network(), task("mse"), Rows(20)
    step = FusedStep(model, how.loss, resident.layout, 20, None, torch.float32, replace(SMALL, rounds=True))
    FusedGradient(step)(*resident.layout.split(resident.rows), how.slope_factor(20).to(DEVICE, torch.float32), None)
    for plain, turned in (
        (step._values, step._values_t),
        (step._slopes, step._slopes_t),
        (step._copies, step._copies_t),
    ):
        for matrix, transpose in zip(plain, turned, strict=True):
            assert not (matrix.view(torch.int32) & 0x1FFF).any()
            assert torch.equal(matrix, transpose.t())
    inputs = resident.layout.split(resident.rows)[0]
    assert torch.equal(step._values[0][:20, :11], rounded_to_tf32(inputs))
    assert float((step._values[0][:20, :11] / inputs - 1).abs().max()) <= 2**-11
    odd = torch.tensor([1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 0.0, torch.inf])
    assert rounded_to_tf32(odd).tolist() == [1 + 2**-10, 1, -1 - 2**-10, 0, torch.inf]
    assert rounded_to_tf32(torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)).isnan().all()


@pytest.mark.parametrize(("room", "depths"), [(232_448, (128, 64)), (101_376, (64, 64)), (65_536, (64, 32))])
def test_smaller_gpus_get_smaller_tiles(room, depths, monkeypatch):
    """room: of shared memory, bytes."""
    known = SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    for dtype, depth in zip((torch.bfloat16, torch.float32), depths):
        tiles = tiles_for(dtype, torch.device("cuda"))
        assert tiles.depth == depth
        assert tiles.shared(dtype) < room


def test_an_optimiser_that_does_more_than_adam_is_left_to_torch():
    model, how, resident = network(), task("mse"), Rows(20)
    for options, clip in (({"amsgrad": True}, None), ({"maximize": True}, None), ({}, 1.0)):
        update = Update(torch.optim.Adam(model.parameters(), **options), None, clip=(clip, "norm"), reduce=None)
        engine = EagerEngine(model, how, ManualGradient(model, how.loss), update, resident=resident)  # type: ignore[arg-type]
        assert adam_of(update) is None  # no state yet
        engine.run(Block([20], [20], torch.arange(20, device=DEVICE)[None], None), 0, lambda: [0.001])
        assert adam_of(update) is None
