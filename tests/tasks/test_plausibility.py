"""Errors that no working model has are pointed out, and ordinary ones are not."""

from __future__ import annotations

import pytest

from forgefield.tasks.plausibility import implausible_errors

STATISTICS = {"energy_residual_std": 0.02, "forces_rms": 1.2}


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({"energy_rmse": 19.0, "forces_rmse": 1100.0}, []),
        ({"energy_rmse": 150.0, "forces_rmse": 2000.0}, []),
        ({"energy_rmse": 1.86e15, "forces_rmse": 40.0}, ["energy RMSE 1.86e+15 meV/atom is 9.3e+13 times"]),
        ({"forces_rmse": 3.41e17}, ["forces RMSE 3.41e+17 meV/A is 2.84e+14 times that of predicting zero forces"]),
        ({"forces_rmse": float("inf")}, ["forces_rmse is inf: the model predicts numbers that are not finite"]),
        ({"band_gap_rmse": float("nan")}, ["band_gap_rmse is nan"]),
    ],
)
def test_errors_are_compared_with_those_of_a_constant_prediction(errors, expected):
    found = implausible_errors(errors, STATISTICS)
    assert len(found) == len(expected)
    for sentence, start in zip(found, expected):
        assert sentence.startswith(start)


def test_without_labels_or_statistics_only_numbers_that_are_not_finite_are_reported():
    assert implausible_errors({"energy_rmse": 1e9}, {}) == []
    assert implausible_errors({"energy_rmse": 1e9}, {"energy_residual_std": None}) == []
    assert len(implausible_errors({"energy_rmse": float("inf")}, {})) == 1
