"""How far the tables that generated kernels read radial weights from are from the network, as a sentence.

It is no verdict: before its first step a training with kernels is compared with one without, gradients included."""

from __future__ import annotations

from forgefield.models.nequip.model import NequIP
from forgefield.models.nequip.tables import Deviation, table_deviation
from forgefield.models.potential import Potential

NOTICEABLE = 10.0
"""Slopes from a table may be so much further from the network than float32 itself is before more intervals are advised."""


def radial_table_line(potential: Potential, knots: int) -> str | None:
    """None for models whose radial weights are not read from tables. knots: intervals of a table."""
    model = potential.model
    if not isinstance(model, NequIP) or model.adaptive_cutoff is not None:
        return None
    table, single = table_deviation(model, knots)
    advice = ""
    if table.slopes[0] > NOTICEABLE * single.slopes[0]:
        advice = " The table is too coarse for these weights: raise training.kernels.knots."
    return (
        f"Radial table, {knots} intervals: weights differ from the network by {_said(table)}; float32 itself: {_said(single)}. "
        f"Root mean squares, relative to that of all weights or slopes.{advice}"
    )


def _said(deviation: Deviation) -> str:
    (rms, largest), (rms_slope, largest_slope) = deviation.values, deviation.slopes
    return f"{rms:.1e} (largest {largest:.1e}), slopes by {rms_slope:.1e} ({largest_slope:.1e})"
