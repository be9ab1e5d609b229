"""Whether measured errors are those of a model that learnt something: compared with the spread of the training labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FACTOR = 10.0
"""Errors this many times those of a constant prediction are reported."""
_BASELINES = {
    "energy_rmse": ("energy_residual_std", "the mean energy of the training data", "meV/atom"),
    "forces_rmse": ("forces_rms", "zero forces", "meV/A"),
}
"""Metric -> statistic of the training labels (eV/atom, eV/A) that is the RMSE of a constant prediction, which one, unit."""


def implausible_errors(errors: Mapping[str, float], statistics: Mapping[str, Any]) -> list[str]:
    """One sentence for each error that no working model has: not finite, or far above that of a constant prediction.

    errors: as `ErrorMetrics.compute` gives them. statistics: of the training data, as in a run's record.
    """
    sentences = [
        f"{name} is {value}: the model predicts numbers that are not finite."
        for name, value in errors.items()
        if name.endswith("_rmse") and not math.isfinite(value)
    ]
    for name, (statistic, prediction, unit) in _BASELINES.items():
        baseline = 1000 * (statistics.get(statistic) or 0.0)
        value = errors.get(name, 0.0)
        if baseline > 0 and math.isfinite(value) and value > FACTOR * baseline:
            sentences.append(
                f"{name.split('_')[0]} RMSE {value:.3g} {unit} is {value / baseline:.3g} times that of predicting "
                f"{prediction} ({baseline:.3g} {unit})."
            )
    return sentences


ADVICE = "The model is not usable: lower training.lr, train longer, or check data.units and data.reference_energies."
