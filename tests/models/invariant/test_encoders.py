"""SchNet, PaiNN, EGNN and CGCNN keep the laws, in both derivative forms and when traced; their vectors turn with structures."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from forgefield.checks import run_checks
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models import Potential, build_model, resolve_model
from forgefield.models.edges import edge_vectors
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.tracing import TracedEngine, trace
from forgefield.training.engines.verify import largest_difference
from tests.support.engine_cases import ALL, difference, labelled, step_function
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame

SMALL: dict[str, dict[str, Any]] = {
    "schnet": {"num_filters": 5, "num_gaussians": 6},
    "painn": {"num_bessels": 6},
    "egnn": {"attention": True},
    "cgcnn": {"num_gaussians": 6},
    "tensornet": {"num_rbf": 6},
    "m3gnet": {"max_n": 2},
}


def potential_of(name: str, precision: str = "float64", adaptive_cutoff: float | None = None, **more: Any) -> Potential:
    given = {"name": name, "num_layers": 2, "num_features": 6, **SMALL[name], **more}
    known: dict[str, Any] = {"species": SPECIES, "cutoff": 3.0, "statistics": STATISTICS}
    return build_model(resolve_model(given, adaptive_cutoff=adaptive_cutoff, **known), precision=precision, seed=1)


@pytest.mark.parametrize("name", SMALL)
def test_every_law_is_kept(name):
    """A crowded cell smaller than the cutoff's sphere, and a cluster; weights in float32, checked in a float64 copy."""
    frames = [make_frame(4, seed=2, box=3.5), make_frame(4, seed=3, periodic=False)]
    results = run_checks(
        potential_of(name, "float32"),
        frames,
        SpeciesTable(SPECIES),
        3.0,
        generator=np.random.default_rng(0),
        reference_energies=STATISTICS["reference_energies"],
    )
    assert [result for result in results if not result.passed] == []


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("schnet", {"envelope": "cosine", "zbl": True, "adaptive_cutoff": 4.0}),
        ("painn", {"avg_num_neighbours": {"H": 4.0, "O": 7.0}, "energy_shifts_trainable": True}),
        ("egnn", {"per_edge_type_cutoff": {"H": {"O": 2.5}}, "num_layers": 3}),
        ("egnn", {"update_coordinates": False}),
        ("cgcnn", {}),
        ("tensornet", {"adaptive_cutoff": 4.0}),
        ("m3gnet", {"per_edge_type_cutoff": {"H": {"O": 2.5}}, "three_body_basis": "smooth"}),
    ],
)
def test_tangent_form_gives_the_gradients_of_double_backward(name, more):
    potential = potential_of(name, **more)
    double, tangent = (step_function(potential, ALL, derivative=form) for form in ("double", "tangent"))
    assert difference(Engine(tangent), Engine(double), labelled(5, 3, 4)) < 1e-10


class Interpreted:
    """The traced function, run operation by operation."""

    def __init__(self, function: Any) -> None:
        self.function, self.traced = function, None

    def __call__(self, static: Any, batch: dict[str, torch.Tensor]) -> Any:
        self.traced = self.traced or trace(self.function, static, batch)
        with torch.no_grad():
            return self.traced.unflatten(self.traced.graph(*static, *batch.values()))


@pytest.mark.parametrize(
    ("name", "form", "layers"),
    [
        ("painn", "double", 2),
        pytest.param("cgcnn", "tangent", 1, marks=pytest.mark.slow),
        pytest.param("egnn", "tangent", 2, marks=pytest.mark.slow),
        ("tensornet", "double", 1),
        pytest.param("m3gnet", "double", 1, marks=pytest.mark.slow),
    ],
)
def test_one_trace_of_the_step_serves_every_size(name, form, layers):
    potential = potential_of(name, num_features=2, num_layers=layers)
    function = step_function(potential, ("forces",), derivative=form)
    engine, eager = TracedEngine(function, lambda flat, what: Interpreted(flat)), Engine(function)
    for number, atoms in enumerate([(4, 3), (3,), (5, 1, 2, 6)]):
        batch = labelled(*atoms, seed=number)
        found, expected = engine.differentiate(batch), eager.differentiate(batch)
        assert largest_difference(found, expected, function.trained)[0] < 1e-9, atoms


@pytest.mark.parametrize("name", ["painn", "egnn", "tensornet"])
def test_vectors_are_equivariant_and_come_with_the_features_of_the_same_pass(name):
    model, frame = potential_of(name).model, make_frame(5)
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    turned = dataclasses.replace(frame, positions=frame.positions @ turn.T + 0.3, cell=frame.cell @ turn.T)
    one, other = (model.encode_all(with_vectors(make_batch(f))) for f in (frame, turned))
    assert one.vectors.shape == (5, model.vector_dim, 3)
    assert float(one.vectors.detach().abs().max()) > 1e-3
    torch.testing.assert_close(other.vectors, one.vectors @ torch.from_numpy(turn).T, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(other.features, one.features, rtol=1e-9, atol=1e-10)
    features, energies = model.encode(with_vectors(make_batch(frame)))
    assert torch.equal(features, one.features)
    assert torch.equal(energies, one.energies)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_is_trained(name):
    potential = potential_of(name, num_layers=3).train()
    out = potential(make_batch(make_frame(5), make_frame(4, seed=1)))
    (out["energy"].square().sum() + out["forces"].square().sum()).backward()
    without = [key for key, p in potential.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert without in ([], ["model.readout.biases.1"])  # the last bias cancels with that of the lone atom


def with_vectors(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch | {"edge_vectors": edge_vectors(batch)}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "schnet", "num_gaussian": 3}, r"model\.num_gaussian is not .* Did you mean 'num_gaussians'"),
        ({"name": "schnet", "num_gaussians": 1}, r"model\.num_gaussians must be at least 2, not 1"),
        ({"name": "painn", "envelope": "hard"}, r"model\.envelope is 'hard'; choose one of polynomial, cosine"),
        ({"name": "egnn", "preset": "XXL"}, r"model\.preset is 'XXL'; choose one of S, M, L"),
        ({"name": "cgcnn", "energy_scales": -1.0}, r"model\.energy_scales is -1\.0; it must be positive"),
        ({"name": "schnett"}, r"Did you mean 'schnet'"),
    ],
)
def test_options_without_a_meaning_are_refused(given, sentence):
    with pytest.raises(ForgefieldError, match=sentence):
        resolve_model(given, species=SPECIES, cutoff=3.0, statistics=STATISTICS)
