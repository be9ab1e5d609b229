"""Models with further outputs: what frames and atoms have follows symmetry and size, and the energy is what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forgefield.errors import ForgefieldError
from forgefield.models import Potential, build_model, resolve_model
from forgefield.models.deeppot.exporter import write_deepmd
from forgefield.models.predictor import Predictor
from tests.support.predictor_cases import SMALL, doubled, moved, values
from tests.support.structures import SPECIES, STATISTICS, TINY, make_batch, make_frame

FACTS: dict[str, dict[str, Any]] = {
    "gap": {"unit": "eV", "reduce": "mean", "shift": [[1.0], [1.0]], "scale": 0.5},
    "tensor": {"shape": [3, 2], "reduce": "sum", "shift": [[0.1] * 6, [0.2] * 6], "scale": 2.0},
    "charge": {"per": "atom", "shift": [[0.3], [-0.6]], "scale": 0.1},
}


def resolved(name: str, heads: dict[str, Any] = FACTS, **options: Any) -> dict[str, Any]:
    has_energy = options.pop("has_energy", True)
    known: dict[str, Any] = {"species": SPECIES, "cutoff": 3.0, "statistics": STATISTICS}
    return resolve_model({**SMALL[name], **options}, heads=heads, has_energy=has_energy, **known)


def predictor(name: str, precision: str = "float64", **options: Any) -> Predictor:
    found = build_model(resolved(name, **options), precision=precision, seed=1)
    assert isinstance(found, Predictor)
    return found.eval()


@pytest.mark.parametrize("name", SMALL)
def test_a_doubled_cell_has_twice_the_extensive_and_the_same_intensive_value(name):
    model, frame = predictor(name, has_energy=False), make_frame(5)
    one, two = values(model, frame), values(model, doubled(frame))
    np.testing.assert_allclose(two["tensor"], 2 * one["tensor"], rtol=1e-11)
    np.testing.assert_allclose(two["gap"], one["gap"], rtol=1e-12)
    np.testing.assert_allclose(two["charge"], np.tile(one["charge"], 2), rtol=1e-11)


@pytest.mark.parametrize("name", SMALL)
def test_outputs_are_invariant_and_do_not_depend_on_batch_mates_or_order(name):
    model, frame = predictor(name, has_energy=False), make_frame(6)
    expected = values(model, frame)
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    turned = moved(frame, positions=frame.positions @ turn.T + 0.7, cell=frame.cell @ turn.T)
    order = np.random.default_rng(1).permutation(6)
    mixed = moved(frame, positions=frame.positions[order], numbers=frame.numbers[order])
    among = values(model, make_frame(4, seed=3), frame, make_frame(2, seed=4))
    for name_ in ("gap", "tensor"):
        np.testing.assert_allclose(values(model, turned)[name_], expected[name_], rtol=1e-10)
        np.testing.assert_allclose(values(model, mixed)[name_], expected[name_], rtol=1e-10)
        np.testing.assert_allclose(among[name_][1], expected[name_][0], rtol=1e-10)
    np.testing.assert_allclose(values(model, turned)["charge"], expected["charge"], rtol=1e-10)
    np.testing.assert_allclose(values(model, mixed)["charge"], expected["charge"][order], rtol=1e-10)
    np.testing.assert_allclose(among["charge"][4:10], expected["charge"], rtol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_outputs_depend_on_structure_and_species(name):
    model, frame = predictor(name, has_energy=False), make_frame(6)
    expected = values(model, frame)["gap"]
    shaken = moved(frame, positions=frame.positions + 0.1 * np.random.default_rng(0).standard_normal((6, 3)))
    other = moved(frame, numbers=np.where(np.arange(6) == 0, 9 - frame.numbers, frame.numbers))
    for changed in (shaken, other):
        assert abs(values(model, changed)["gap"] - expected).item() > 1e-7


@pytest.mark.parametrize("name", SMALL)
def test_energy_forces_and_stress_are_those_of_the_plain_potential(name):
    plain = build_model(resolved(name, heads={}), precision="float64", seed=1).eval()
    batch = make_batch(make_frame(5), make_frame(3, seed=1))
    expected, found = plain(batch, stress=True), predictor(name)(batch, stress=True)
    assert type(plain) is Potential
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert set(found) - set(expected) == set(FACTS)
    alone = predictor(name, has_energy=False)(batch)
    assert set(alone) == set(FACTS)
    assert all(torch.equal(alone[key], found[key]) for key in FACTS)


def test_values_are_in_the_unit_of_the_label_and_start_at_their_means():
    """An atom without neighbours has no features in NequIP: with zero biases it has exactly its shift."""
    frame = moved(make_frame(1, periodic=False), numbers=np.array([8]))
    found = values(predictor("nequip", "float32"), frame)
    assert found["gap"].tolist() == [1.0]
    assert found["charge"].tolist() == [-0.6]
    np.testing.assert_array_equal(found["tensor"], np.full((1, 3, 2), 0.2))


def test_a_head_has_the_same_first_weights_whatever_other_heads_there_are():
    alone = predictor("nequip", heads={"gap": FACTS["gap"]}).head("gap")
    for one, other in zip(alone.parameters(), predictor("nequip").head("gap").parameters()):
        assert torch.equal(one, other)


def test_what_energies_alone_need_is_not_trained_without_an_energy():
    model = predictor("nequip", has_energy=False, energy_shifts_trainable=True)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.readout.weights.0", "model.energy_shifts"}
    model.train()
    sum(value.sum() for value in model(make_batch(make_frame(4))).values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_the_resolved_options_alone_make_the_model_again():
    assert resolved("nequip")["predicts"]["heads"]["tensor"]["shape"] == [3, 2]
    assert "predicts" not in resolved("nequip", heads={})
    wide = resolve_model(
        {**TINY, "heads": {"gap": {"hidden": [8, 8], "activation": "tanh"}}},
        species=SPECIES,
        cutoff=3.0,
        statistics=STATISTICS,
        heads={"gap": FACTS["gap"]},
    )
    model = build_model(wide, precision="float32", seed=0)
    assert [tuple(weight.shape) for weight in model.head("gap").weights] == [(4, 8), (8, 8), (8, 1)]


@pytest.mark.parametrize(
    ("heads", "sentence"),
    [
        ({"gab": {}}, r"model\.heads\.gab: the task has no target of that name; its additional targets are gap"),
        ({"gap": {"hiden": [3]}}, r"model\.heads\.gap\.hiden is not an option of a head\. Did you mean 'hidden'"),
        ({"gap": {"scale": 3}}, r"model\.heads\.gap\.scale is not an option"),
        ({"gap": {"hidden": [0]}}, r"model\.heads\.gap\.hidden must be a list of widths.* not \[0\]"),
        ({"gap": {"activation": "relu"}}, r"choose one of silu, mish"),
        ({"gap": 3}, r"model\.heads\.gap must be a section .* not 3"),
        ([], r"model\.heads must be a mapping .* not \[\]"),
    ],
)
def test_invalid_heads_are_refused(heads, sentence):
    facts = {"gap": FACTS["gap"]}
    with pytest.raises(ForgefieldError, match=sentence):
        resolve_model({**TINY, "heads": heads}, species=SPECIES, cutoff=3.0, statistics=STATISTICS, heads=facts)


class Featureless(nn.Module):
    species, cutoff = SPECIES, 3.0

    def forward(self, batch):
        return batch["species"].double()


class Encoder(Featureless):
    feature_dim = 1

    def forward(self, batch):
        return batch["species"].double().unsqueeze(1)


def test_a_model_with_heads_is_not_written_without_them(tmp_path):
    with pytest.raises(ForgefieldError, match="also predicts charge, gap, tensor, which DeePMD-kit does not support"):
        write_deepmd(predictor("deeppot"), tmp_path / "model.yaml")


def test_models_without_features_or_energies_are_an_error():
    with pytest.raises(ForgefieldError, match="Featureless gives no features"):
        Predictor(Featureless(), {}, has_energy=True)
    with pytest.raises(ForgefieldError, match="Encoder gives features and no energies"):
        Predictor(Encoder(), {}, has_energy=True)
    assert not Predictor(Encoder(), {}, has_energy=False).has_energy
