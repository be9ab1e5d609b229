"""The comparison at the start of a training accepts kernels in every precision, of fresh models and of those that have learnt
their labels."""

import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.verify import largest_difference, require_equal
from forgefield.training.precision import TOLERANCES, Precision
from tests.support.engine_cases import labelled, learnt, step_function
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.structures import make_potential

pytestmark = needs_kernels
MODEL = {"l_max": 1, "num_layers": 1, "num_features": 2}


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16-mixed", "fp16-mixed"])
def test_kernels_are_accepted(precision):
    potential = make_potential(precision="float32", **MODEL).to(DEVICE)
    given = {key: value.to(DEVICE) for key, value in labelled(3).items()}
    engines = [Engine(step_function(potential, derivative=name)) for name in ("kernels", "double")]
    with Precision(precision).applied(precision):
        for batch in (given, learnt(potential, given)):
            assert require_equal(*engines, batch, TOLERANCES[precision]).difference is not None


def test_labels_that_were_learnt_would_show_rounding_and_little_else():
    potential = make_potential(precision="float32", **MODEL).to(DEVICE)
    given = learnt(potential, {key: value.to(DEVICE) for key, value in labelled(3).items()})
    engines = [Engine(step_function(potential, derivative=name)) for name in ("kernels", "double")]
    found = [engine.differentiate(given) for engine in engines]
    assert largest_difference(*found, engines[0].function.trained)[0] > TOLERANCES["float32"]


def test_kernels_that_are_wrong_are_not(monkeypatch):
    potential = make_potential(precision="float32", **MODEL).to(DEVICE)
    given = {key: value.to(DEVICE) for key, value in labelled(3).items()}
    engines = [Engine(step_function(potential, derivative=name)) for name in ("kernels", "double")]
    right = engines[0].differentiate

    def wrong(*given):
        found = right(*given)
        return found._replace(gradients=[torch.nan_to_num(gradient * 1.2) for gradient in found.gradients])

    monkeypatch.setattr(engines[0], "differentiate", wrong)
    for precision in ("float32", "bf16-mixed"):
        with (
            Precision(precision).applied(precision),
            pytest.raises(ForgefieldError, match="is not exact for this model"),
        ):
            require_equal(*engines, given, TOLERANCES[precision])
