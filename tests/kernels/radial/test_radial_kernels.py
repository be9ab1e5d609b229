"""Tables of radial weights by kernels against the same by plain operations and autograd."""

import pytest
import torch

from forgefield.kernels.radial import hidden
from forgefield.kernels.radial.hidden import CHANNELS, KNOTS
from forgefield.models.nequip import tables as nequip_tables
from forgefield.models.nequip.tables import radial_tables
from forgefield.ops.execution import execution
from tests.support.kernels import DEVICE, assert_same, draw, needs_kernels
from tests.support.structures import make_potential

pytestmark = needs_kernels


@pytest.mark.parametrize("n_intervals", [KNOTS - 1, 2 * KNOTS + 3])
@pytest.mark.parametrize(
    "options",
    [
        {"radial_mlp_width": 5, "num_bessels": 3},
        {"radial_mlp_width": CHANNELS + 7},
        {"radial_mlp_width": 5, "radial_mlp_depth": 2},
        {"radial_mlp_width": 7, "radial_mlp_depth": 3, "num_bessels": 3},
    ],
)
def test_tables_and_gradients_of_the_networks(options, n_intervals, monkeypatch):
    monkeypatch.setattr(hidden, "interpreted", lambda: False)  # programs as small as on a GPU
    for precision, tolerance in (("float64", 1e-12), ("float32", 2e-6)):
        model = make_potential(precision=precision, num_layers=2, l_max=1, num_features=2, **options).to(DEVICE).model
        weights = [weight for layer in model.layers for weight in layer.radial.weights]
        plain = radial_tables(model, n_intervals)
        with execution(kernels=True):
            ours = radial_tables(model, n_intervals)
        assert all((table.hidden is None) == ("radial_mlp_depth" in options) for table in ours)
        made = [curves @ matrix for curves, matrix in (table.tracked() for table in plain)]
        cotangents = [draw(number, *table.shape, dtype=table.dtype) for number, table in enumerate(made)]
        expected = torch.autograd.grad(made, weights, cotangents)
        tables = [table.polynomials() for table in ours]
        given = [of for table, cotangent in zip(ours, cotangents) for of in table.gradients(cotangent)]
        found = torch.autograd.grad([one for table in ours for one in table.tracked()], weights, given)
        for one, other in zip((*tables, *found), (*made, *expected)):
            assert_same(one, other, tolerance)
        assert all(gradient.stride() == weight.stride() for gradient, weight in zip(found, weights))


@pytest.mark.parametrize("options", [{"radial_mlp_depth": 0}, {"bessel_trainable": True}])
def test_other_networks_are_left_to_reference_operations(options, monkeypatch):
    monkeypatch.setattr(nequip_tables, "deep_curves", None)  # not to be called
    model = make_potential(precision="float32", num_layers=1, l_max=0, num_features=2, **options).to(DEVICE).model
    with execution(kernels=True):
        assert all(table.hidden is None for table in radial_tables(model, 8))


def test_the_basis_at_knots_stays_where_it_lies():
    """Captured graphs read it there, whatever else writes to the frequencies in the meantime."""
    model = make_potential(precision="float32", num_layers=1, l_max=0, num_features=2).to(DEVICE).model
    radial_tables(model, 16)
    before = model.knot_basis[1]
    model.bessel_frequencies.copy_(model.bessel_frequencies.clone())
    radial_tables(model, 16)
    assert model.knot_basis[1] is before
