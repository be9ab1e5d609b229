"""How well uncertainties agree with errors. Uncertainties are standard deviations of normal distributions.

Errors and uncertainties are arrays of the same shape (n,). Values whose uncertainty is not positive, as that of an energy that
does not depend on any trained weight, and values without a reference (NaN) are not counted.
"""

from __future__ import annotations

import math

import numpy as np

LEVELS = 200
"""Intervals of the calibration curve."""
METRICS = ("nll", "miscalibration", "coverage")
"""Endings of the metrics' names, as in `energy_nll`."""
_ROOT_2 = math.sqrt(2.0)
_erf = np.vectorize(math.erf, otypes=[np.float64])


def counted(error: np.ndarray, uncertainty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those values that count."""
    inside = np.isfinite(error) & np.isfinite(uncertainty) & (uncertainty > 0)
    return error[inside], uncertainty[inside]


def calibration_metrics(error: np.ndarray, uncertainty: np.ndarray) -> dict[str, float]:
    """By name: `nll`, the mean negative log-likelihood of the errors; `miscalibration`, the area between the calibration curve
    and the diagonal, 0 for perfect and 0.5 for useless uncertainties; `coverage`, the share of errors below one standard
    deviation, 0.683 if calibrated. Empty where no value counts."""
    error, uncertainty = counted(error, uncertainty)
    if len(error) == 0:
        return {}
    expected, observed = calibration_curve(error, uncertainty)
    gap = np.abs(observed - expected)
    return {
        "nll": negative_log_likelihood(error, uncertainty),
        "miscalibration": float(((gap[1:] + gap[:-1]) / 2 * np.diff(expected)).sum()),
        "coverage": float((np.abs(error) <= uncertainty).mean()),
    }


def negative_log_likelihood(error: np.ndarray, uncertainty: np.ndarray) -> float:
    """Mean of (error / uncertainty)^2 / 2 + log(uncertainty sqrt(2 pi)); depends on the unit of both."""
    terms = 0.5 * np.square(error / uncertainty) + np.log(uncertainty) + 0.5 * math.log(2 * math.pi)
    return float(terms.mean())


def calibration_curve(error: np.ndarray, uncertainty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expected and observed shares (LEVELS + 1,): for each probability p, the share of errors inside the central interval that
    contains an error with probability p."""
    error, uncertainty = counted(error, uncertainty)
    needed = np.sort(
        _erf(np.abs(error) / uncertainty / _ROOT_2)
    )  # probability of the interval that just contains the error
    expected = np.linspace(0.0, 1.0, LEVELS + 1)
    return expected, np.searchsorted(needed, expected, side="right") / max(len(needed), 1)


def error_by_uncertainty(error: np.ndarray, uncertainty: np.ndarray, groups: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Root mean square of uncertainties and of errors, each (n_groups,), in groups of equal size by uncertainty."""
    error, uncertainty = counted(error, uncertainty)
    parts = np.array_split(np.argsort(uncertainty, kind="stable"), max(1, min(groups, len(error))))

    def root_mean_squares(values: np.ndarray) -> np.ndarray:
        return np.array([math.sqrt(np.square(values[part]).mean()) for part in parts if len(part)])

    return root_mean_squares(uncertainty), root_mean_squares(error)
