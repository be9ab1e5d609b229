"""On a GPU: trainings by generated kernels against plain operations, the same bits on repetition, no compiling when sizes
change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.api import train
from forgefield.data.padding import plan_sizes, sizes
from forgefield.kernels.convolution import passes as convolution
from forgefield.kernels.core.runtime import has_triton
from forgefield.models.nequip import passes as nequip_passes
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.precision import Precision
from tests.support.engine_cases import labelled, step_function
from tests.support.helpers import tiny_config
from tests.support.structures import make_potential

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(), reason="needs a CUDA device and Triton"
)
MODEL = {"l_max": 2, "num_layers": 3, "num_features": [8, 4, 4], "parity": False}


def batch(*sizes: int) -> dict[str, torch.Tensor]:
    made = labelled(*sizes)
    return {key: tensor.cuda() for key, tensor in made.items()}


def trajectory(form: str, steps: int) -> list[torch.Tensor]:
    potential = make_potential(precision="float64", **MODEL).cuda().train()
    engine = Engine(step_function(potential, derivative=form))
    weights = engine.function.trained_weights()
    optimiser = torch.optim.Adam(weights, lr=2e-3)
    batches = [batch(5, 3), batch(4, 6, 2)]
    for number in range(steps):
        for weight, gradient in zip(weights, engine.differentiate(batches[number % 2]).gradients):
            weight.grad = gradient
        optimiser.step()
    return [weight.detach().clone() for weight in weights]


def test_two_hundred_steps_end_where_plain_operations_end():
    for ours, plain in zip(trajectory("kernels", 200), trajectory("double", 200)):
        torch.testing.assert_close(ours, plain, rtol=1e-7, atol=1e-8)


def test_the_same_bits_on_repetition_and_nothing_is_compiled_for_other_sizes(monkeypatch):
    import triton

    potential = make_potential(precision="float32", **MODEL).cuda().train()
    engine = Engine(step_function(potential, derivative="kernels"))
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: compiled.append(about["src"]))
    first = engine.differentiate(batch(5, 3))
    made = len(compiled)
    for several in ((4, 6, 2), (7,), (16,), (3, 3, 3, 3)):
        engine.differentiate(batch(*several))
    again = engine.differentiate(batch(5, 3))
    assert len(compiled) == made > 0
    for one, other in zip(first.gradients, again.gradients):
        assert torch.equal(one, other)


@pytest.mark.parametrize("radial", ["table", "exact"])
def test_a_training_by_kernels_follows_one_without(radial, tmp_path):
    config = tiny_config(tmp_path)
    config["trainer"] |= {"accelerator": "gpu", "devices": 1}
    config["training"] |= {"engine": "graphs", "kernels": {"radial": radial}}
    config["training"]["precision"] = "float32"
    ours = train({**config, "name": "ours"})
    del config["training"]["kernels"]
    config["training"] |= {"derivative": "double", "engine": "eager"}
    plain = train({**config, "name": "plain"})
    assert "generated kernels" in (ours.path / "log.txt").read_text()
    for a, b in zip(ours.metrics(), plain.metrics(), strict=True):
        assert a["val/loss"] == pytest.approx(b["val/loss"], rel=1e-3)


CAPTURED = {
    "usual": ({}, {}),
    "blocks in turn": ({}, {}),
    "deep radial networks": ({"radial_mlp_depth": 3, "radial_mlp_width": 24}, {}),
    "tables by autograd": ({"radial_mlp_depth": 2, "bessel_trainable": True}, {}),
    "stored in bfloat16": ({}, {"storage": "bfloat16"}),
    "exact radial weights": ({}, {"knots": 0}),
}


@pytest.mark.parametrize("case", CAPTURED)
def test_a_captured_step_gives_the_bits_of_one_that_is_not(case, monkeypatch):
    """What is computed beside the rest, on streams of its own, waits for what it reads and is waited for."""
    if case == "blocks in turn":
        monkeypatch.setattr(convolution, "MOST_ROWS", 0)
    options, setting = CAPTURED[case]
    given = [batch(*[9] * 40), batch(*[5] * 7)]
    potential = make_potential(precision="float32", **MODEL, **options).cuda().train()
    plain = Engine(step_function(potential, derivative="kernels", **setting))
    engine = GraphsEngine(
        Engine(step_function(potential, derivative="kernels", **setting)),
        plan=plan_sizes(np.array([sizes(one) for one in given])),
    )
    for turn in range(20):
        one = given[turn % 2]
        one["positions"] += 1e-3 * torch.sin(one["positions"] + turn)
        found = engine.differentiate(one)
        inputs = engine._captured.inputs[engine.plan.fit(*sizes(one))]
        expected = plain.differentiate(inputs.batch)  # with the same blank frames
        assert torch.equal(found.loss, expected.loss)
        for ours, other in zip(found.gradients, expected.gradients):
            assert torch.equal(ours, other)
    assert len(engine._captured) == 2


def test_a_step_of_which_only_the_readout_is_trained_is_captured():
    """Edges are sorted beside the rest, and nobody asks for them."""
    given = batch(5, 3)
    potential = make_potential(precision="float32", **MODEL).cuda().train()
    for name, weight in potential.named_parameters():
        weight.requires_grad_("readout" in name)
    function = step_function(potential, derivative="kernels")
    engine = GraphsEngine(Engine(function), plan=plan_sizes(np.array([sizes(given)])))
    found = engine.differentiate(given)
    expected = Engine(step_function(potential, derivative="double")).differentiate(given)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most_rows", [convolution.MOST_ROWS, 0], ids=["together", "blocks in turn"])
@pytest.mark.parametrize(
    ("storage", "precision"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "tf32")]
)
def test_kernels_that_are_compiled_side_by_side_are_those_that_are_launched(storage, precision, most_rows, monkeypatch):
    """After they are compiled no convolution is compiled again."""
    import triton

    monkeypatch.setattr(convolution, "MOST_ROWS", most_rows)
    compiled: list[str] = []
    together = nequip_passes.compile_together

    def then_listen(*given):
        together(*given)
        monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: compiled.append(about["src"].name))

    monkeypatch.setattr(nequip_passes, "compile_together", then_listen)
    monkeypatch.setattr(convolution, "_compiled_keys", set())
    potential = make_potential(precision="float32", **{**MODEL, "num_features": [12, 6, 4]}).cuda().train()
    with Precision(precision).applied(precision):
        Engine(step_function(potential, derivative="kernels", storage=storage)).differentiate(batch(5, 3))
    assert convolution._compiled_keys
    assert not [name for name in compiled if name.startswith("convolution")]
