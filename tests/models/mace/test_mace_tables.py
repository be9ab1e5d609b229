"""The line of `check` on radial tables of MACE: about as close to the networks as float32, or it advises more intervals."""

import pytest
import torch

from forgefield.models.mace.tables import table_deviation
from tests.support.mace_kernel_cases import mace

WIDE = {"radial_mlp": [64, 64, 64], "num_bessel": 8}


@pytest.mark.parametrize("options", [{}, {"apply_cutoff": False, "radial_type": "gaussian"}, {"radial_mlp": [24, 48]}])
def test_the_usual_table_is_about_as_precise_as_float32_and_a_coarse_one_is_not(options):
    model = mace("float64", **{**WIDE, **options}).model
    usual, single = table_deviation(model, 1024)
    coarse, same = table_deviation(model, 16)
    assert single == same
    assert usual.values[0] < 1e-6
    assert usual.slopes[0] < 2e-6
    assert max(single.values[0], single.slopes[0]) < 1e-6
    assert min(coarse.values[0], coarse.slopes[0]) > 1e-4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_the_line_advises_more_intervals_where_they_are_too_few():
    model = mace("float32", **WIDE).model
    assert "raise training.kernels.knots" in model.radial_table_line(16)
    assert "raise" not in model.radial_table_line(1024)
    steep = mace("float32", **WIDE, apply_cutoff=False, radial_type="chebyshev").model
    assert "raise training.kernels.knots" in steep.radial_table_line(1024)


@pytest.mark.parametrize("options", [{"distance_transform": "Agnesi"}, {"interaction": "nonlinear"}])
def test_models_whose_weights_depend_on_species_have_no_table(options):
    assert mace("float32", **options).model.radial_table_line(1024) is None
