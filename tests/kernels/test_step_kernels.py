"""Whole training steps by kernels, loss and errors included, against double backward by plain operations."""

import pytest

from forgefield.training.engines.engine import Engine
from tests.support.engine_cases import ALL, difference, labelled, step_function
from tests.support.extra_outputs import function, predictor, with_fields
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.structures import make_potential

pytestmark = needs_kernels
MODELS = {
    "scales and shifts are trained": {"energy_scales_trainable": True, "energy_shifts_trainable": True},
    "deep readout": {"readout_mlp_depth": 1},
}


def on_device(batch):
    return {key: value.to(DEVICE) for key, value in batch.items()}


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_those_by_double_backward(name):
    potential = make_potential(precision="float64", num_layers=1, l_max=1, num_features=2, **MODELS[name]).to(DEVICE)
    ours, plain = (Engine(step_function(potential, ALL, derivative=form)) for form in ("kernels", "double"))
    assert difference(ours, plain, on_device(labelled(3, 2, 1))) < 1e-9


def test_steps_with_extra_outputs_of_the_features():
    potential = predictor("nequip", has_energy=True).to(DEVICE)
    ours, plain = (Engine(function(potential, ("energy", "forces"), derivative=form)) for form in ("kernels", "double"))
    assert difference(ours, plain, on_device(with_fields(3, 2))) < 1e-9
