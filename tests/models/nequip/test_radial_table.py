"""The line of `check` on radial tables: as close to the network as float32 is, and said where there are too few intervals."""

import pytest
import torch

from forgefield.kernels.radial.packing import pack_by_operations
from forgefield.models.nequip import tables as nequip_tables
from forgefield.models.nequip.tables import table_deviation
from forgefield.models.potential import Potential
from tests.support import toy_models as toys
from tests.support.structures import make_potential

WIDE = {"radial_mlp_width": 64, "num_features": 8}


@pytest.mark.parametrize("more", [{}, {"radial_mlp_depth": 2, "bessel_trainable": True}, {"radial_mlp_depth": 0}])
def test_usual_table_is_as_precise_as_float32_and_a_coarse_one_is_not(more):
    model = make_potential("float32", **WIDE, **more).model
    usual, single = table_deviation(model, 1024)
    coarse, same = table_deviation(model, 16)
    assert single == same
    for part in ("values", "slopes"):
        assert getattr(usual, part)[0] < 1.5 * getattr(single, part)[0]
        assert getattr(usual, part)[1] < 3 * getattr(single, part)[1]
        assert getattr(coarse, part)[0] > 1e-3
    assert single.values[0] < 1e-6


def test_the_table_is_measured_as_kernels_read_it(monkeypatch):
    """If the highest coefficients were lost where tables are packed, slopes would tell."""
    model = make_potential("float32", **WIDE).model
    usual, _ = table_deviation(model, 1024)
    monkeypatch.setattr(
        nequip_tables, "pack", lambda table: pack_by_operations(table * table.new_tensor([[1.0], [1], [1], [0]]))
    )
    spoiled, _ = table_deviation(model, 1024)
    assert spoiled.slopes[0] > 10 * usual.slopes[0]


def test_model_is_left_as_it_is_and_its_precision_does_not_matter():
    model = make_potential("float64", **WIDE).model
    table, _ = table_deviation(model, 1024)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert table.values[0] < 1e-6


def test_line_reports_a_coarse_table_and_is_missing_where_there_is_none():
    potential = make_potential("float32", **WIDE)
    usual, coarse = (potential.interface.radial_table_line(knots) for knots in (1024, 16))
    assert (usual or "").startswith("Radial table, 1024 intervals")
    assert (usual or "").endswith("slopes.")
    assert (coarse or "").endswith("raise training.kernels.knots.")
    assert Potential(toys.HardCutoff()).interface.radial_table_line(1024) is None
