"""The script engine, and with it the trace that `compile` shares: equal to eager for any size, from one trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forgefield.data.padding import MIN_SIZES
from forgefield.errors import ForgefieldError
from forgefield.models import Potential
from forgefield.training.engines.compiled import conditions
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.tracing import failing_line, trace
from tests.support.engine_cases import ReadsAValue, difference, labelled, potential_of, step_function
from tests.support.structures import make_potential

SIZES = [(1,), (4, 3), (2,), (5, 1, 2, 6), (3, 3, 3)]
"""One atom without an edge, one frame, several."""


SMALLER = {"allegro": {"l_max": 1, "num_tensor_features": 2}}
"""A trace takes the longer the more products there are; what those of higher orders give is looked at elsewhere."""


@pytest.mark.parametrize(("name", "form"), [("nequip", "tangent"), ("allegro", "double"), ("own", "double")])
def test_script_equals_eager_for_every_size(name, form):
    """The other forms are traced with further outputs, in `test_further.py`. Weights are read where they lie."""
    potential = potential_of(name, **SMALLER.get(name, {}))
    engine, eager = ScriptEngine(step_function(potential, derivative=form)), Engine(step_function(potential))
    for number, atoms in enumerate(SIZES):
        assert difference(engine, eager, labelled(*atoms, seed=number)) < 1e-9, atoms
    with torch.no_grad():
        for parameter in potential.parameters():
            parameter.mul_(1.3)
    assert difference(engine, eager, labelled(4, 3)) < 1e-9


def test_frozen_weights_get_no_gradient_and_unused_ones_none():
    potential = make_potential(num_layers=1, l_max=0)
    potential.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    potential.model.readout.weights[0].requires_grad_(False)
    function = step_function(potential)
    assert "model.readout.weights.0" not in function.trained
    gradients = dict(zip(function.trained, ScriptEngine(function).differentiate(labelled(4, 3)).gradients))
    assert gradients["extra"] is None
    assert gradients["model.type_embedding"] is not None


@pytest.mark.parametrize(("how", "line"), [("value", "squares.max().item()"), ("size", "range(squares.shape[0])")])
def test_a_model_that_breaks_the_trace_is_named_with_its_line(how, line):
    function = step_function(Potential(ReadsAValue(how)), ("energy", "forces"))
    engine = ScriptEngine(function)
    with pytest.raises(Exception) as caught:
        engine.differentiate(labelled(4, 3))
    told = str(caught.value) if isinstance(caught.value, ForgefieldError) else failing_line(caught.value)
    assert line in told
    assert "engine_cases.py" in told


def test_a_trace_holds_for_all_sizes():
    function = step_function(make_potential("float32", num_layers=1))
    n = len(function.trained)
    batch = labelled(4, 3)
    traced = trace(
        lambda static, b: function.differentiate(static[:n], static[n:-1], b, static[-1], None),
        [*function.trained_weights(), *function.fixed_weights(), function.task.weights],
        batch,
    )
    assert not traced.environment.pinned
    holds = conditions(traced)
    assert all(holds(*size) for size in (tuple(MIN_SIZES.values()), (3, 10**5, 10**7), (10**4, 10**5, 2 * 10**6)))
    assert set(traced.symbols) == {"frames", "atoms", "edges"}
