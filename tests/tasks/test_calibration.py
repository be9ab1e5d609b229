"""Calibration metrics of normally distributed errors with known properties."""

import math

import numpy as np
import pytest

from forgefield.tasks.calibration import calibration_curve, calibration_metrics, error_by_uncertainty


def draw(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Uncertainties, and errors that are distributed accordingly."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(0.01, 0.2, n)
    return uncertainty * rng.normal(size=n), uncertainty


def test_calibrated_errors() -> None:
    error, uncertainty = draw(200_000)
    found = calibration_metrics(error, uncertainty)
    assert found["miscalibration"] < 0.003
    assert found["coverage"] == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.004)
    entropy = 0.5 * math.log(2 * math.pi * math.e) + np.log(uncertainty).mean()
    assert found["nll"] == pytest.approx(entropy, abs=0.005)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_errors_that_are_larger_or_smaller_by_a_factor(factor) -> None:
    """The observed share at probability p is erf(erfinv(p) / factor); its area to the diagonal is computed here by hand."""
    error, uncertainty = draw(200_000)
    found = calibration_metrics(factor * error, uncertainty)
    z = np.linspace(0, 8, 4001)
    expected = np.array([math.erf(x / math.sqrt(2)) for x in z])
    observed = np.array([math.erf(x / factor / math.sqrt(2)) for x in z])
    gap = np.abs(observed - expected)
    area = ((gap[1:] + gap[:-1]) / 2 * np.diff(expected)).sum()
    assert found["miscalibration"] == pytest.approx(area, abs=0.003)
    assert found["coverage"] == pytest.approx(math.erf(1 / factor / math.sqrt(2)), abs=0.004)
    constant = 0.5 * factor**2 + np.log(uncertainty).mean() + 0.5 * math.log(2 * math.pi)
    assert found["nll"] == pytest.approx(constant, abs=0.02)


def test_the_curve_of_exact_quantiles_is_the_diagonal() -> None:
    from statistics import NormalDist

    shares = (np.arange(1000) + 0.5) / 1000
    error = np.array([NormalDist().inv_cdf(0.5 + share / 2) for share in shares])
    expected, observed = calibration_curve(error, np.ones(1000))
    np.testing.assert_allclose(observed, expected, atol=1.1e-3)


def test_missing_and_certain_values_do_not_count() -> None:
    error, uncertainty = draw(1000)
    more = np.concatenate([error, [np.nan, 3.0, 1.0]]), np.concatenate([uncertainty, [0.1, 0.0, np.nan]])
    assert calibration_metrics(*more) == calibration_metrics(error, uncertainty)
    assert calibration_metrics(np.array([1.0]), np.array([0.0])) == {}


def test_errors_grow_with_their_uncertainty() -> None:
    spread, errors = error_by_uncertainty(*draw(50_000))
    assert len(spread) == 10
    np.testing.assert_allclose(errors, spread, rtol=0.05)
    assert (np.diff(spread) > 0).all()
