"""Heads beyond plain networks: pooling, layers, dropout by keys, and values that turn with the structure for every encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.models import build_model, resolve_model
from forgefield.models.predictor import Predictor
from forgefield.ops.functions import activate
from forgefield.ops.graph import Segments, segment_max, segment_softmax
from tests.support.predictor_cases import SMALL, doubled, moved, values
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame

UNIT = [[0.1 * (i % 4 == 0) for i in range(9)], [0.2 * (i % 4 == 0) for i in range(9)]]
FACTS: dict[str, dict[str, Any]] = {
    "dipole": {"shape": [3], "kind": "vector", "reduce": "sum", "scale": 0.5, "neighbours": 9.0},
    "field": {"shape": [3], "kind": "vector", "reduce": "mean"},
    "forces": {"shape": [3], "kind": "vector", "per": "atom", "net_zero": True},
    "spins": {"shape": [3], "kind": "vector", "per": "atom"},
    "alpha": {"shape": [3, 3], "kind": "symmetric", "reduce": "sum", "shift": UNIT},
    "shielding": {"shape": [3, 3], "kind": "tensor", "per": "atom", "shift": UNIT},
    "peak": {"reduce": "max", "shape": [2]},
    "focus": {"reduce": "attention", "shape": [2], "shift": [[1.0, 2.0], [3.0, 4.0]]},
}
ATOMS = ("forces", "spins", "shielding")


def predictor(name: str = "nequip", heads: Any = None, facts: Any = FACTS, **known: Any) -> Predictor:
    section = {**SMALL[name], "heads": heads} if heads else SMALL[name]
    given = {"species": SPECIES, "cutoff": 3.0, "statistics": STATISTICS, **known}
    model = build_model(resolve_model(section, heads=facts, has_energy=False, **given), precision="float64", seed=1)
    if "focus" in facts:
        torch.nn.init.normal_(model.head("focus").attention, generator=torch.Generator().manual_seed(0))
    return model.eval()


@pytest.mark.parametrize("name", SMALL)
def test_vectors_and_tensors_are_equivariant_and_scalars_invariant(name):
    model, frame = predictor(name), make_frame(6)
    expected = values(model, frame)
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    found = values(model, moved(frame, positions=frame.positions @ turn.T + 0.7, cell=frame.cell @ turn.T))
    among = values(model, make_frame(4, seed=3), frame, make_frame(2, seed=4))
    two = values(model, doubled(frame))
    for key, fact in FACTS.items():
        was, kind = expected[key], fact.get("kind", "values")
        turned = was @ turn.T if kind == "vector" else turn @ was @ turn.T if kind != "values" else was
        np.testing.assert_allclose(found[key], turned, atol=1e-11, err_msg=key)
        assert np.abs(was).max() > 1e-4, key
        mine = among[key][4:10] if key in ATOMS else among[key][1:2]
        np.testing.assert_allclose(mine, was, atol=1e-11, err_msg=key)
        twice = np.concatenate([was, was]) if key in ATOMS else was * (2 if fact.get("reduce") == "sum" else 1)
        np.testing.assert_allclose(two[key], twice, atol=1e-10, err_msg=key)
    np.testing.assert_allclose(expected["forces"].sum(0), 0.0, atol=1e-12)
    assert np.abs(expected["spins"].sum(0)).max() > 1e-3
    alpha, shielding = expected["alpha"][0], expected["shielding"]
    np.testing.assert_array_equal(alpha, alpha.T)
    assert np.abs(shielding - shielding.swapaxes(1, 2)).max() > 1e-3


def test_vectors_vanish_smoothly_at_the_cutoff_and_for_an_atom_alone():
    model = predictor(facts={key: FACTS[key] for key in ("spins", "shielding")})
    pair = moved(make_frame(2, periodic=False), numbers=np.array([1, 8]))
    sizes = []
    for length in (2.9, 2.999, 3.001):
        found = values(model, moved(pair, positions=np.array([[0, 0, 0], [0, 0, length]])))
        sizes.append(np.abs(found["spins"]).max())
        if length > 3:
            np.testing.assert_array_equal(found["shielding"], np.stack([0.1 * np.eye(3), 0.2 * np.eye(3)]))
    assert 0 < sizes[1] < 1e-4 * sizes[0]
    assert sizes[2] == 0.0


def test_maximum_and_softmax_of_segments():
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    segments = Segments(torch.tensor([0, 0, 0, 2, 2, 2]), 3, rows_are_sorted=True)
    largest = segment_max(rows, segments)
    assert torch.equal(largest[0], rows[:3].max(0).values)
    assert torch.equal(largest[1], torch.zeros(3))
    weights = segment_softmax(rows[:, 0], segments)
    torch.testing.assert_close(weights[3:], torch.softmax(rows[3:, 0], 0))
    assert torch.autograd.gradcheck(lambda x: segment_max(x, segments), rows)
    assert torch.autograd.gradcheck(lambda x: segment_softmax(x[:, 0], segments), rows)


LAYERS = {"gap": {"hidden": [8, 8, 8], "norm": "layer", "residual": True, "dropout": 0.4, "activation": "tanh"}}


def keyed(batch: dict[str, torch.Tensor], *keys: int) -> dict[str, torch.Tensor]:
    return {**batch, "frame_key": torch.tensor(keys)}


def test_dropout_follows_the_key_of_a_frame_and_nothing_else():
    model = predictor(heads=LAYERS, facts={"gap": {"reduce": "mean"}})
    assert model.needs_keys
    a, b = make_frame(5), make_frame(4, seed=2)
    together, alone = make_batch(a, b), make_batch(b)
    without = model(together)["gap"]
    model.train()
    first = model(keyed(together, 7, 123456))["gap"]
    assert torch.equal(first, model(keyed(together, 7, 123456))["gap"])
    torch.testing.assert_close(model(keyed(alone, 123456))["gap"], first[1:])
    assert not torch.equal(first[0], model(keyed(together, 8, 123456))["gap"][0])
    with pytest.raises(ForgefieldError, match="frame_key"):
        model(together)
    model.eval()
    assert torch.equal(model(keyed(together, 7, 9))["gap"], without)


def test_dropout_leaves_out_its_share_and_keeps_the_mean():
    model = predictor(heads=LAYERS, facts={"gap": {"reduce": "mean"}}).train()
    head, batch = model.head("gap"), keyed(make_batch(make_frame(6), make_frame(5, seed=1)), 3, 4)
    masks = torch.stack(
        [head._dropout_factors(1, torch.zeros(11, 64), keyed(batch, key, 5 * key + 1)) for key in range(200)]
    )
    torch.testing.assert_close(masks.unique(), torch.tensor([0.0, 1 / 0.6]))
    assert float((masks == 0).double().mean()) == pytest.approx(0.4, abs=0.005)
    assert float((masks == 0).double().mean(0).std()) == pytest.approx((0.24 / 200) ** 0.5, rel=0.1)


def test_layers_are_what_a_plain_network_of_torch_gives():
    options = {"gap": {**LAYERS["gap"], "dropout": 0.0}}
    model = predictor(heads=options, facts={"gap": {"reduce": "mean"}})
    head, batch = model.head("gap"), make_batch(make_frame(5))
    x = torch.randn(5, head.weights[0].shape[0], dtype=torch.float64)
    y = x
    for number in range(3):
        z = y @ head.weights[number] + head.biases[number]
        z = activate("tanh", torch.nn.functional.layer_norm(z, (8,)))
        y = y + z if number else z
    torch.testing.assert_close(head(x, batch), (y @ head.weights[3] + head.biases[3]).mean().reshape(1))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"norm": "batch"}, r"model\.heads\.gap\.norm is 'batch'; choose one of none, layer"),
        ({"residual": True}, r"residual needs at least two hidden layers of one width"),
        ({"residual": True, "hidden": [8, 4]}, r"residual needs at least two hidden layers of one width"),
        ({"residual": 1}, r"residual must be true or false, not 1"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, not 1.0"),
        ({"dropout": 0.1, "hidden": []}, r"dropout is for hidden layers"),
        ({"dropuot": 0.1}, r"Did you mean 'dropout'"),
    ],
)
def test_invalid_layers_are_refused(given, sentence):
    with pytest.raises(ForgefieldError, match=sentence):
        predictor(heads={"gap": given}, facts={"gap": {}})


def test_dropout_of_a_vector_is_refused():
    with pytest.raises(ForgefieldError, match=r"model\.heads\.dipole\.dropout does not apply: dipole is a vector"):
        predictor(heads={"dipole": {"dropout": 0.1}}, facts={"dipole": FACTS["dipole"]})
