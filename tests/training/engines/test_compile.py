"""The compile engine: equal to eager for any size with one compilation, and a second start that finds the code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from forgefield.training.engines.compiled import CompileEngine, ShareEqualNodes
from forgefield.training.engines.engine import Engine
from tests.support.engine_cases import difference, labelled, step_function
from tests.support.structures import make_potential

TINY = {"num_layers": 1, "l_max": 1, "num_features": 2, "radial_mlp_width": 2}
TARGETS = ("energy", "forces")
SIZES = [(5, 4), (1,), (2,), (6, 1, 3), (1, 1), (20, 30, 20)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where compiled code is kept, for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="module")
def engine(kept) -> CompileEngine:
    potential = make_potential("float32", **TINY)
    potential.extra = nn.Parameter(torch.ones(3))
    return CompileEngine(step_function(potential, TARGETS))


@pytest.mark.slow
def test_one_compilation_serves_every_size(engine):
    eager = Engine(engine.function)
    for number, atoms in enumerate(SIZES):
        assert difference(engine, eager, labelled(*atoms, seed=number, box=6.0)) < 3e-6, atoms
    assert engine.training.compilations == 1
    assert engine.evaluation.compilations == 1


WITH_VECTORS = """
from torch._inductor.cpu_vec_isa import pick_vec_isa
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from tests.support.engine_cases import difference, labelled, step_function
from tests.support.structures import make_potential

assert pick_vec_isa()
potential = make_potential("float32", num_layers=1, l_max=1, num_features=2, radial_mlp_width=2)
engine = CompileEngine(step_function(potential, ("energy",)))
assert difference(engine, Engine(engine.function), labelled(20, 30, 20, box=6.0)) < 3e-6
"""


@pytest.mark.slow
def test_vector_instructions_which_tests_leave_out_change_nothing(tmp_path):
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    found = subprocess.run([sys.executable, "-c", WITH_VECTORS], env=environ, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_weights_follow_the_optimiser_and_unused_ones_get_no_gradient(engine):
    potential, batch = engine.function.potential, labelled(5, 4)
    loss = engine.step(batch).loss
    loss.backward()
    assert potential.extra.grad is None
    before = float(loss)
    optimiser = torch.optim.SGD(potential.model.parameters(), lr=1e-4)
    optimiser.step()
    optimiser.zero_grad()
    after = engine.step(batch).loss
    assert float(after) < before
    assert float(after) == pytest.approx(float(Engine(engine.function).step(batch).loss), rel=1e-5)
    assert engine.training.compilations == 1


@pytest.mark.slow
def test_a_second_engine_finds_the_code_on_disk(engine, monkeypatch):
    import torch._dynamo.utils as counted

    engine.differentiate(labelled(5, 4))
    counted.counters.clear()
    potential = make_potential("float32", **TINY)
    potential.extra = nn.Parameter(torch.ones(3))
    again = CompileEngine(step_function(potential, TARGETS))
    again.differentiate(labelled(6, 5, seed=4))
    assert counted.counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counted.counters["inductor"]["fxgraph_cache_hit"] == 1


def test_equal_nodes_become_one_and_random_ones_stay():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.ops.aten.sin.default, (x,))
    b = graph.call_function(torch.ops.aten.sin.default, (x,))
    c = graph.call_function(torch.ops.aten.mul.Tensor, (a, 2))
    d = graph.call_function(torch.ops.aten.mul.Tensor, (b, 2.0))
    noise = [graph.call_function(torch.ops.aten.rand_like.default, (x,)) for _ in range(2)]
    graph.output((c, d, *noise))
    ShareEqualNodes()(graph)
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.aten.sin.default) == 1
    assert targets.count(torch.ops.aten.mul.Tensor) == 2  # 2 and 2.0 are not the same number to an integer tensor
    assert targets.count(torch.ops.aten.rand_like.default) == 2
