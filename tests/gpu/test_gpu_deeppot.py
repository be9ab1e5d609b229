"""Deep Potential models on a GPU: the numbers of the CPU, the same bits again, no waiting, compiled and captured."""

from __future__ import annotations

import pytest
import torch

from forgefield.data.padding import Size, SizePlan
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.verify import largest_difference
from tests.support import spins
from tests.support.deepmd_models import loaded, unpacked
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
ROWS = {"davg": [[0.1, 0.0, 0.0, 0.0]] * 2, "dstd": [[0.15, 0.1, 0.1, 0.1]] * 2}
LAYERS = ROWS | {"rcut": 2.5, "rcut_smth": 1.0, "nlayers": 2, "g1_dim": 6, "g2_dim": 4, "axis_neuron": 2}
OF_ANGLES = {
    "se_e3": {"sel": [60, 60], "neuron": [2, 4]},
    "se_e3_tebd": {"sel": 90, "neuron": [2, 4], "tebd_dim": 4},
    "dpa2": {
        "repinit": ROWS | {"nsel": 90, "neuron": [2, 4], "axis_neuron": 2, "tebd_dim": 4},
        "repformer": LAYERS | {"nsel": 60},
    },
    "dpa3": {
        "n_dim": 6,
        "e_dim": 4,
        "a_dim": 4,
        "nlayers": 2,
        "e_sel": 90,
        "e_rcut_smth": 1.0,
        "a_sel": 60,
        "a_rcut": 2.5,
        "a_rcut_smth": 1.0,
        "axis_neuron": 2,
    },
}
"""Descriptors with pairs of neighbours, and with several layers."""


def deeppot(kind: str, precision: str = "float64"):
    if kind in ("dpa2", "dpa3"):
        return make_deeppot(model={"descriptor": {"type": kind, **OF_ANGLES[kind]}}, precision=precision)
    return make_deeppot(kind.split()[0], precision=precision, **(KINDS | OF_ANGLES)[kind])


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


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("kind", OF_ANGLES)
def test_steps_with_pairs_of_neighbours_equal_those_of_the_cpu(kind, engine):
    oracle = Engine(step_function(deeppot(kind)))
    steps = Engine(step_function(deeppot(kind).cuda(), derivative="tangent"))
    if engine == "captured":
        steps = GraphsEngine(steps, plan=SizePlan((Size(edges=3000, atoms=160, frames=5),)))
    for number, atoms in enumerate(SIZES):
        expected = oracle.differentiate(labelled(*atoms, seed=number, box=6.0))
        found = moved(steps.differentiate(on_gpu(*atoms, seed=number)))
        assert largest_difference(found, expected, oracle.function.trained)[0] < 1e-9


@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("name", ["spin", "spin_atten"])
def test_steps_with_spins_equal_those_of_the_cpu(name, engine, tmp_path):
    oracle, potential = (loaded(unpacked(tmp_path, f"{name}.dp")) for _ in range(2))
    reference = Engine(spins.step_function(oracle, "double"))
    steps = Engine(spins.step_function(potential.cuda(), "tangent"))
    if engine == "captured":
        steps = GraphsEngine(steps, plan=SizePlan((Size(edges=3000, atoms=160, frames=5),)))
    for number, atoms in enumerate([(4, 3), (6, 1, 5)]):
        batch = spins.with_spins(labelled(*atoms, seed=number, box=8.0), number)
        found = moved(steps.differentiate({key: value.cuda() for key, value in batch.items()}))
        assert largest_difference(found, reference.differentiate(batch), reference.function.trained)[0] < 1e-9


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
