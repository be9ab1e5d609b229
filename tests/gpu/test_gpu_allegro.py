"""On a GPU: training steps of Allegro with its sums over edges by kernels, against plain operations; compiled and captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from forgefield.data.padding import plan_sizes, sizes
from forgefield.kernels.convolution import dispatch
from forgefield.kernels.core.runtime import has_triton
from forgefield.models import Potential, build_model, resolve_model
from forgefield.ops.execution import execution
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.verify import largest_difference
from tests.support.engine_cases import labelled, step_function
from tests.support.structures import SPECIES, STATISTICS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(), reason="needs a CUDA device and Triton"
)
MODEL = {"name": "allegro", "l_max": 2, "num_layers": 2, "num_scalar_features": 16, "num_tensor_features": 40}
FORMS = {
    "a weight for each degree": {},
    "one weight for all": {"weight_individual_irreps": False},
    "degree 3, wide": {"l_max": 3, "num_tensor_features": 4, "allegro_mlp_width": 96},
}


def allegro(precision: str, **options) -> Potential:
    resolved = resolve_model(MODEL | options, species=SPECIES, cutoff=3.0, statistics=STATISTICS)
    return build_model(resolved, precision=precision, seed=1).cuda().train()


def batch(*atoms: int) -> dict[str, Tensor]:
    return {key: value.cuda() for key, value in labelled(*atoms).items()}


def difference_from_plain(engine: Engine, given: dict[str, Tensor], reference: Engine | None = None) -> float:
    with execution(operators=False):
        expected = (reference or Engine(engine.function)).differentiate(given)
    found = engine.differentiate(given)
    return largest_difference(found, expected, engine.function.trained)[0]


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_plain_operations(form):
    engine = Engine(step_function(allegro("float64", **FORMS[form])))
    assert engine.function.sums_by_kernels
    for atoms in ((6, 5, 9), (12,)):
        assert difference_from_plain(engine, batch(*atoms)) < 1e-9


def test_steps_are_the_same_bits_on_repetition():
    engine = Engine(step_function(allegro("float32")))
    given = batch(6, 5, 9)
    first, again = engine.differentiate(given), engine.differentiate(given)
    assert all(torch.equal(one, other) for one, other in zip(first.gradients, again.gradients) if one is not None)


def test_float32_is_as_near_to_float64_as_plain_operations_are():
    given = batch(6, 5, 9)
    single, double = (Engine(step_function(allegro(precision))) for precision in ("float32", "float64"))
    with execution(operators=False):
        exact, plain = double.differentiate(given), single.differentiate(given)
    names = single.function.trained
    by_plain, _ = largest_difference(plain, exact, names)
    by_kernels, _ = largest_difference(single.differentiate(given), exact, names)
    assert by_kernels < 3 * by_plain


def test_a_compiled_step_launches_the_kernels_and_holds_for_any_sizes():
    engine = CompileEngine(step_function(allegro("float64")))
    for atoms in ((6,) * 11, (5, 7) * 7):
        assert difference_from_plain(engine, batch(*atoms), Engine(engine.function)) < 1e-9
    assert engine.training.compilations == 1
    ((_, _, traced),) = engine.training._variants
    targets = [str(node.target) for node in traced.graph.graph.nodes]
    assert sum("forgefield.project_double_backward" in target for target in targets) == 2


@pytest.mark.parametrize("compiled", [True, False])
def test_captured_steps_are_those_of_plain_operations(compiled):
    function, given = step_function(allegro("float64")), batch(*(6,) * 11)
    inner = CompileEngine(function) if compiled else Engine(function)
    engine = GraphsEngine(inner, plan=plan_sizes(np.array([sizes(given)])))
    assert difference_from_plain(engine, given, Engine(function)) < 1e-9


def test_a_training_can_use_reference_operations(monkeypatch):
    asked: list[bool] = []
    decide = dispatch.use_edge_operators
    monkeypatch.setattr(dispatch, "use_edge_operators", lambda x: asked.append(decide(x)) or asked[-1])
    for edge_kernels in (True, False):
        Engine(step_function(allegro("float64"), edge_kernels=edge_kernels)).differentiate(batch(6, 5))
        assert asked[-1] == edge_kernels
