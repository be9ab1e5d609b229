"""The two derivative forms are each other's oracle: the same gradients by double backward and by the tangent form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forgefield.models import Potential
from forgefield.ops.execution import C_CONVOLUTIONS, C_LATEST, C_NONE
from forgefield.training.engines.engine import Engine, with_gradients
from tests.support.engine_cases import ALL, MODELS, difference, labelled, potential_of, step_function
from tests.support.structures import make_potential


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [ALL, ("forces",), ("energy", "stress")], ids="+".join)
def test_tangent_form_gives_the_gradients_of_double_backward(name, targets):
    potential = potential_of(name)
    double, tangent = (step_function(potential, targets, derivative=form) for form in ("double", "tangent"))
    assert difference(Engine(tangent), Engine(double), labelled(5, 3, 4)) < 1e-10


@pytest.mark.parametrize("form", ["double", "tangent"])
def test_gradients_are_those_of_finite_differences(form):
    potential = make_potential()
    function, batch = step_function(potential, derivative=form), labelled(4, 3)
    gradients = dict(zip(function.trained, Engine(function).differentiate(batch).gradients))
    with torch.no_grad():
        for name in ("model.layers.0.linear_in.weight", "model.readout.weights.0"):
            weight = dict(potential.named_parameters())[name]
            direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            losses = []
            for step in (1e-5, -2e-5):
                weight += step * direction
                losses.append(float(Engine(step_function(potential)).differentiate(batch).loss))
            weight += 1e-5 * direction
            slope = (losses[0] - losses[1]) / 2e-5
            assert float((gradients[name] * direction).sum()) == pytest.approx(slope, rel=1e-6)


def test_frames_without_volume_have_no_stress_and_no_influence_on_it():
    potential = make_potential()
    batch = labelled(4, 3, periodic=False)
    batch["stress"][:] = float("nan")
    double, tangent = (Engine(step_function(potential, derivative=form)) for form in ("double", "tangent"))
    result = tangent.differentiate(batch)
    assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in result.gradients)
    assert difference(tangent, double, batch) < 1e-10


def test_denominators_of_all_ranks_and_their_number_enter_the_gradient():
    function = step_function(make_potential())
    batch = labelled(4, 3)
    own = function.task.counts(batch)
    alone = Engine(function).differentiate(batch)
    among = Engine(function, world_size=2).differentiate(batch, lambda: 2 * own)
    for a, b in zip(alone.gradients, among.gradients):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_loss_with_precomputed_gradients_passes_them_to_the_weights():
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    loss = with_gradients(torch.tensor(2.0), [torch.tensor([1.0, 2.0]), None, torch.tensor([5.0])], weights)
    (loss / 4).backward()
    assert float(loss) == 2.0
    assert weights[0].grad.tolist() == [0.25, 0.5]
    assert weights[1].grad is None
    assert weights[2].grad.tolist() == [1.25]


class Scripted(nn.Module):
    """A model of which a part is TorchScript, as some libraries make theirs."""

    species, cutoff = ("H", "O"), 3.0

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(nn.Linear(1, 1, dtype=torch.float64))

    def forward(self, batch):
        lengths = self.part(batch["edge_vectors"].square().sum(1, keepdim=True)).squeeze(1)
        return lengths.new_zeros(batch["species"].shape[0]).index_add(0, batch["edge_index"][1], lengths)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_weights_inside_torchscript_are_found():
    function = step_function(Potential(Scripted()), ("energy",))
    assert function.trained == ["model.part.weight", "model.part.bias"]
    for found, weight in zip(function.trained_weights(), function.potential.parameters()):
        assert found.data_ptr() == weight.data_ptr()
    assert torch.isfinite(Engine(function).evaluate(labelled(4, 3)).sums).all()


@pytest.mark.parametrize("level", [C_NONE, C_CONVOLUTIONS, C_LATEST])
def test_a_step_uses_the_c_code_that_its_run_began_with(level):
    """Also with double backward, where autograd differentiates the loss after the step."""
    potential = make_potential(precision="float32")
    function = step_function(potential, c_code=level)
    engine, batch = Engine(function), labelled(*12 * [8], box=5.0)
    expected = engine.differentiate(batch).gradients
    step = engine.step(batch)
    found = torch.autograd.grad(step.loss, function.trained_weights(), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
