"""Comparison of measured errors with the spread of the training labels, to detect models that have learnt nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FACTOR = 10.0
"""Errors that are this many times larger than those of a constant prediction are reported."""
_BASELINES = {
    "energy_rmse": ("energy_residual_std", "the mean energy of the training data", "meV/atom"),
    "forces_rmse": ("forces_rms", "zero forces", "meV/A"),
}
"""For metrics: the statistic of the training labels (eV/atom, eV/A) that is the RMSE of a constant prediction, that prediction,
and the unit of the metric."""


def implausible_errors(errors: Mapping[str, float], statistics: Mapping[str, Any]) -> list[str]:
    """A sentence for each error that is not finite, or far above that of a constant prediction.

    errors: as from `ErrorMetrics.compute`. statistics: of the training data, as in `run.json`.
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
