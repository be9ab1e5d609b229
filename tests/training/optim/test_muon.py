"""Muon: steps of matrices are orthogonal, all other steps are AdamW's, and a training resumes exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from forgefield.errors import ForgefieldError
from forgefield.training.optim.optimisers import build_optimiser
from tests.support.helpers import tiny_config
from tests.support.resuming import END, assert_same_run, interrupted_run
from tests.support.structures import make_potential
from tests.support.train_many import train_only


def polynomial(s: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def oracle(gradients: list[np.ndarray], weights: np.ndarray, *, lr: float, decay: float, factor: float) -> np.ndarray:
    """Weights after steps with these gradients, from singular values."""
    buffer = np.zeros_like(weights)
    for gradient in gradients:
        buffer = 0.95 * buffer + 0.05 * gradient
        moment = 0.05 * gradient + 0.95 * buffer
        u, s, v = np.linalg.svd(moment, full_matrices=False)
        step = (u * polynomial(s / np.linalg.norm(s), 5)) @ v
        weights = weights * (1 - lr * decay) - lr * factor * step
    return weights


def test_steps_follow_from_singular_values_and_the_rest_takes_the_steps_of_adamw():
    random = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    bias, rates = module[0].bias.detach().clone(), {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.02}
    reference = torch.optim.AdamW([bias.requires_grad_(True)], **rates | {"lr": 0.05})
    options = {"name": "muon", "weight_decay": 0.01, "adamw_factor": 0.5, "adamw_weight_decay": 0.02}
    optimiser = build_optimiser(options, list(module.parameters()), lr=0.1, module=module)
    start = [layer.weight.detach().numpy().copy() for layer in module]
    gradients = [
        [torch.randn(p.shape, generator=random, dtype=torch.float64) for p in module.parameters()] for _ in range(3)
    ]
    for step in gradients:
        for parameter, gradient in zip(module.parameters(), step):
            parameter.grad = gradient
        bias.grad = step[1]
        optimiser.step()
        reference.step()
    torch.testing.assert_close(module[0].bias, bias, rtol=1e-13, atol=0)
    for layer, weights, place, factor in zip(module, start, (0, 2), (math.sqrt(5 / 3), 1.0)):
        of_layer = [step[place].numpy() for step in gradients]
        expected = oracle(of_layer, weights, lr=0.1, decay=0.01, factor=factor)
        np.testing.assert_allclose(layer.weight.detach().numpy(), expected, rtol=1e-9)
    peer = nn.Parameter(torch.from_numpy(start[0].copy()).float())  # torch computes the steps in bfloat16
    theirs = torch.optim.Muon([peer], lr=0.1, weight_decay=0.01)
    for step in gradients:
        peer.grad = step[0].float()
        theirs.step()
    torch.testing.assert_close(peer.double(), module[0].weight.detach(), rtol=0, atol=0.1 * 3 * 0.02)


def test_matrices_of_hidden_layers_take_orthogonal_steps():
    """In NequIP: the radial networks and the linear maps of each irrep; embedding, self-connection and readout do not."""
    potential = make_potential(num_layers=2)
    groups = build_optimiser({"name": "Muon"}, list(potential.parameters()), lr=0.1, module=potential).param_groups
    names = {id(parameter): name for name, parameter in potential.named_parameters()}
    hidden = {names[id(p)]: matrices for p, matrices in zip(groups[0]["params"], groups[0]["matrices"])}
    parts = ("linear_in.weight", "radial.weights.0", "radial.weights.1", "linear_out.weight")
    assert set(hidden) == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    linear = potential.model.layers[0].linear_out
    assert [(rows, columns) for rows, columns, _ in hidden["model.layers.0.linear_out.weight"]] == list(linear.channels)
    assert len(linear.channels) > 1
    parameter = linear.weight
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before, gradient = parameter.detach().clone(), parameter.grad.clone()
    optimiser = build_optimiser({"name": "Muon"}, list(potential.parameters()), lr=0.1, module=potential)
    optimiser.step()
    rows, columns = linear.channels[0]
    one, step = (
        [part[: rows * columns].view(rows, columns).numpy()] for part in (gradient, before - parameter.detach())
    )
    expected = -oracle(one, np.zeros((rows, columns)), lr=0.1, decay=0, factor=math.sqrt(max(1, columns / rows)))
    np.testing.assert_allclose(step[0], expected, rtol=1e-9)


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path, monkeypatch):
    scheduler = {"name": "ExponentialLR", "gamma": 0.9}
    config = tiny_config(
        tmp_path,
        training={"ema": 0.9, "optimizer": "Muon", "scheduler": scheduler, "checkpoint": {"every_steps": 2}},
        callbacks=[END, "tests.support.interrupting.CountsBatchStarts"],
    )
    monkeypatch.setenv("END_AT", "-1")
    straight = train_only({**config, "name": "straight"})
    again = interrupted_run({**config, "name": "again"}, [3], monkeypatch)
    assert_same_run(straight.path, again)
    losses = [row["val/loss"] for row in straight.metrics() if row.get("val/loss") is not None]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"adamw": ["layer.*"]}, r"training\.optimizer\.adamw: no parameter of the model matches 'layer\.\*'"),
        ({"adamw_factor": 0}, r"training\.optimizer\.adamw_factor is 0; it must be a positive number"),
        ({"scale_by": "rows"}, r"training\.optimizer\.scale_by is 'rows'; choose outputs or inputs"),
        ({"momentun": 0.9}, r"Did you mean 'momentum'"),
    ],
)
def test_options_without_a_meaning_are_refused(options, sentence):
    module = nn.Linear(2, 2)
    with pytest.raises(ForgefieldError, match=sentence):
        build_optimiser({"name": "Muon", **options}, list(module.parameters()), lr=0.1, module=module)
