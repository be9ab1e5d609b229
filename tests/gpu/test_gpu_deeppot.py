"""Deep Potential models on a GPU: the numbers of the CPU, the same bits again, no waiting, compiled and captured."""

from __future__ import annotations

import pytest
import torch

from forgefield.data.padding import Size, SizePlan
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.verify import largest_difference
from tests.support.deeppots import make_deeppot
from tests.support.engine_cases import labelled, step_function
from tests.support.gpu_batches import SIZES, on_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = {
    "se_e2_a": {"sel": [100, 100]},
    "se_e2_a without sel": {},
    "se_e2_r": {"sel": [100, 100]},
    "se_atten": {"sel": 150, "attn_layer": 1, "attn": 8, "axis_neuron": 3, "tebd_dim": 4},
}


def deeppot(kind: str, precision: str = "float64"):
    return make_deeppot(kind.split()[0], precision=precision, **KINDS[kind])


def moved(result):
    return result._replace(
        gradients=[None if g is None else g.cpu() for g in result.gradients],
        measured=result.measured._make(t.cpu() for t in result.measured),
    )


@pytest.mark.parametrize("form", ["double", "tangent"])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_captured_steps_equal_those_of_the_cpu(kind, form):
    oracle = Engine(step_function(deeppot(kind)))
    inner = Engine(step_function(deeppot(kind).cuda(), derivative=form))
    captured = GraphsEngine(inner, plan=SizePlan((Size(edges=3000, atoms=160, frames=5),)))
    for number, atoms in enumerate(SIZES):
        expected = oracle.differentiate(labelled(*atoms, seed=number, box=6.0))
        for engine in (inner, captured):
            found = moved(engine.differentiate(on_gpu(*atoms, seed=number)))
            assert largest_difference(found, expected, oracle.function.trained)[0] < 1e-9


@pytest.mark.parametrize("kind", ["se_e2_a", "se_atten"])
def test_compiled_steps_equal_eager_ones_for_every_size(kind):
    potential = deeppot(kind).cuda()
    eager, compiled = Engine(step_function(potential)), CompileEngine(step_function(potential))
    for number, atoms in enumerate(SIZES):
        batch = on_gpu(*atoms, seed=number)
        found, expected = compiled.differentiate(batch), eager.differentiate(batch)
        assert largest_difference(found, expected, eager.function.trained)[0] < 1e-9
    assert compiled.training.compilations == 1


@pytest.mark.parametrize("kind", KINDS)
def test_steps_repeat_bit_for_bit_and_do_not_wait_for_the_device(kind):
    engine, batch = Engine(step_function(deeppot(kind, "float32").cuda())), on_gpu(20, 30)
    first = engine.differentiate(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = engine.differentiate(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first.gradients, again.gradients) if a is not None)
