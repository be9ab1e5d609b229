"""Further targets on a GPU: captured steps, filled up with blank frames, against eager ones on the CPU."""

from __future__ import annotations

import pytest
import torch

from forgefield.data.padding import Size, SizePlan
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.verify import largest_difference
from tests.support.engine_cases import ALL
from tests.support.extra_outputs import function, predictor, with_fields

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("form", ["double", "tangent"])
@pytest.mark.parametrize("targets", [ALL, ()], ids=["with energy", "alone"])
def test_captured_steps_equal_eager_ones_on_the_cpu(targets, form):
    host, potential = (predictor("nequip", has_energy=bool(targets)) for _ in range(2))
    oracle = Engine(function(host, targets))
    inner = Engine(function(potential.cuda(), targets, derivative=form))
    engine = GraphsEngine(inner, plan=SizePlan((Size(edges=3000, atoms=160, frames=5),)))
    for number, atoms in enumerate([(5, 4), (1,), (6, 1, 3)]):
        batch = with_fields(*atoms, seed=number)
        expected = oracle.differentiate(batch)
        found = engine.differentiate({key: tensor.cuda() for key, tensor in batch.items()})
        moved = found._replace(
            gradients=[None if g is None else g.cpu() for g in found.gradients],
            measured=found.measured._make(t.cpu() for t in found.measured),
        )
        assert largest_difference(moved, expected, oracle.function.trained)[0] < 1e-9
    assert engine.captures == 1
