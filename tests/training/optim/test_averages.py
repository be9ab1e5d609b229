"""The weight average follows its formula, and exchanging it leaves no trace."""

from __future__ import annotations

import pytest
import torch

from forgefield.training.optim.averages import WeightAverage


def test_average_follows_the_recurrence():
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    ema = WeightAverage(layer, decay=0.5)
    expected = layer.weight.detach().clone()
    for n in range(1, 30):
        with torch.no_grad():
            layer.weight += torch.randn_like(layer.weight)
        ema.update()
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * layer.weight.detach()
    torch.testing.assert_close(ema.average["weight"], expected, rtol=1e-12, atol=1e-14)


def test_inside_the_block_the_module_is_the_average_and_after_it_exactly_itself():
    layer = torch.nn.Linear(3, 2)
    ema = WeightAverage(layer, decay=0.9)
    with torch.no_grad():
        layer.weight += 1.0
    ema.update()
    before, average = layer.weight.detach().clone(), ema.average["weight"].clone()
    with pytest.raises(RuntimeError), ema.applied():
        assert torch.equal(layer.weight, average)
        raise RuntimeError
    assert torch.equal(layer.weight, before)
    assert torch.equal(ema.average["weight"], average)


def test_state_of_another_model_is_refused():
    ema = WeightAverage(torch.nn.Linear(3, 2), decay=0.9)
    with pytest.raises(ValueError, match="other parameters"):
        ema.load_state_dict(WeightAverage(torch.nn.Linear(3, 2, bias=False), decay=0.9).state_dict())
