"""Accuracy of radial tables: the deviation of weights that are read from them from those of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOTICEABLE = 10.0
"""More intervals are advised where slopes from a table deviate more than this many times as much as float32 itself."""
COMPARED = 2999
"""Number of lengths at which a table is compared with the network; prime, so that their positions in intervals vary."""


@dataclass(frozen=True)
class Deviation:
    """Root mean square and largest deviation of radial weights and of their slopes, each in units of the root mean square of
    the weights, or slopes, of all layers and lengths."""

    values: tuple[float, float]
    slopes: tuple[float, float]


def line_of_deviations(table: Deviation, single: Deviation, knots: int) -> str:
    """The deviations of a table of `knots` intervals, and of the network in float32, as a sentence."""
    advice = ""
    if table.slopes[0] > NOTICEABLE * single.slopes[0]:
        advice = " The table is too coarse for these weights: raise training.kernels.knots."
    return (
        f"Radial table, {knots} intervals: weights differ from the network by {_text(table)}; float32 itself: {_text(single)}. "
        f"Root mean squares, relative to that of all weights or slopes.{advice}"
    )


def _text(deviation: Deviation) -> str:
    (rms, largest), (rms_slope, largest_slope) = deviation.values, deviation.slopes
    return f"{rms:.1e} (largest {largest:.1e}), slopes by {rms_slope:.1e} ({largest_slope:.1e})"


def read_table(table: Tensor, x: Tensor) -> Tensor:
    """Weights and slopes read from a table, as in kernels, at lengths x in units of the cutoff."""
    n_intervals = table.shape[0]
    at = (x * n_intervals).long().clamp_(max=n_intervals - 1)
    u = (x * n_intervals - at - 0.5).to(table.dtype).unsqueeze(1)
    c0, c1, c2, c3 = table.index_select(0, at).unbind(1)
    return torch.stack([c0 + u * (c1 + u * (c2 + u * c3)), n_intervals * (c1 + u * (2 * c2 + 3 * u * c3))], 1)


def deviation(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> Deviation:
    """Of weights and slopes (n, 2, n_weights) of all layers, float64 if expected is."""
    pairs = []
    for column in range(2):
        exact = torch.cat([rows[:, column].flatten() for rows in expected])
        difference = torch.cat([rows[:, column].flatten() for rows in actual]).double() - exact
        size = exact.square().mean().sqrt()
        pairs.append((float(difference.square().mean().sqrt() / size), float(difference.abs().max() / size)))
    return Deviation(*pairs)
