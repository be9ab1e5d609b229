"""The environment of an atom: one row per neighbour, (1/r, x/r^2, y/r^2, z/r^2) times a switch that ends at the cutoff.

Rows are standardised with mean and deviation of their centre's species before networks see them. All of it is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def switch(lengths: Tensor, start: float, end: float) -> Tensor:
    """1 up to `start`, 0 from `end` on, in between a polynomial of degree 5 with two continuous derivatives. All in A."""
    u = (1 - (end - lengths) / (end - start)).clamp(0, 1)
    return 1 - u * u * u * (10 - u * (15 - 6 * u))


def environment_rows(vectors: Tensor, start: float, cutoff: float, protection: float = 0.0) -> Tensor:
    """(n_edges, 4), 1/A, of edge vectors (n_edges, 3), A. start: where the switch begins. protection: added to lengths, A."""
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    inverse = _inverse(lengths, protection)
    radial = switch(lengths, start, cutoff) * inverse
    return torch.cat([radial.unsqueeze(1), vectors * (radial * inverse).unsqueeze(1)], 1)


def radial_rows(vectors: Tensor, start: float, cutoff: float, protection: float = 0.0) -> Tensor:
    """(n_edges, 1): the first column of `environment_rows`."""
    lengths = torch.linalg.vector_norm(vectors, dim=1)
    return (switch(lengths, start, cutoff) * _inverse(lengths, protection)).unsqueeze(1)


def _inverse(lengths: Tensor, protection: float) -> Tensor:
    """1 / (lengths + protection); a sum of tensor and number has no tangent in a trace, a difference has."""
    return torch.reciprocal(lengths if protection == 0 else -(-protection - lengths))


class Standardise(torch.nn.Module):
    """Rows less the mean and over the deviation of their centre's species.

    mean, deviation: (n_species, c), 1/A. Without `shift_rows` the mean is subtracted from what networks read alone: rows then
    vanish at the cutoff, as they have to where no empty places stand in for neighbours that left.
    """

    mean: Tensor
    deviation: Tensor
    empty: Tensor

    def __init__(self, mean: list[list[float]], deviation: list[list[float]], *, shift_rows: bool) -> None:
        super().__init__()
        self.shift_rows = shift_rows
        means, deviations = torch.tensor(mean, dtype=torch.float64), torch.tensor(deviation, dtype=torch.float64)
        self.register_buffer("mean", means, persistent=False)
        self.register_buffer("deviation", deviations, persistent=False)
        self.register_buffer("empty", -means / deviations, persistent=False)
        self.has_shift = bool((means != 0).any())

    def forward(self, rows: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """Standardised rows (n_edges, c) and what networks read (n_edges,). centre: (n_edges,) species of the centre."""
        rows = rows / self.deviation.index_select(0, centre)
        if not self.has_shift:
            return rows, rows[:, 0]
        if self.shift_rows:
            rows = rows + self.empty.index_select(0, centre)
            return rows, rows[:, 0]
        return rows, rows[:, 0] + self.empty[:, 0].index_select(0, centre)
