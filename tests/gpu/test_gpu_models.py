"""On an accelerator: the numbers of the CPU, the same bits every time, and never a wait for the device."""

import pytest
import torch

from forgefield.ops.graph import reverse_edges
from tests.support.structures import make_batch, make_frame, make_potential

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
VARIANTS = [
    {},
    {"l_max": 2, "parity": False, "num_features": [8, 4, 3], "num_layers": 3},
    {"l_max": 3, "num_features": 4, "num_layers": 3, "zbl": True, "avg_num_neighbours": {"H": 3.0, "O": 9.0}},
    {"per_edge_type_cutoff": {"H": 2.0}},
]


def frames():
    return [make_frame(6, seed=1), make_frame(2, seed=2, box=2.4), make_frame(5, seed=3, periodic=False), make_frame(1)]


def step(potential, batch):
    outputs = potential.train()(batch, stress=True)
    loss = outputs["forces"].square().sum() + outputs["energy"].sum() + outputs["stress"][:2].square().sum()
    return [*outputs.values(), *torch.autograd.grad(loss, list(potential.parameters()))]


def on_device(batch):
    return {key: value.cuda() for key, value in batch.items()}


@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("options", VARIANTS)
def test_equals_the_cpu(options, by_pair, monkeypatch):
    monkeypatch.setattr("forgefield.ops.graph.PAIRS_FROM_EDGES", 0)
    batch = make_batch(*frames())
    if by_pair:
        batch["edge_reverse"] = reverse_edges(batch["edge_index"], batch["edge_shift"])
    potential = make_potential(**options)
    expected = step(potential, batch)
    for got, value in zip(step(potential.cuda(), on_device(batch)), expected):
        torch.testing.assert_close(got.cpu(), value, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("options", VARIANTS)
def test_repeats_bit_for_bit(options):
    potential, batch = make_potential("float32", **options).cuda(), on_device(make_batch(*frames()))
    for a, b in zip(step(potential, batch), step(potential, batch)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("options", VARIANTS)
def test_never_waits_for_the_device(options):
    potential, batch = make_potential("float32", **options).cuda(), on_device(make_batch(*frames()))
    step(potential, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(potential, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
