"""Descriptors of the Deep Potential family: from the neighbours of each atom to numbers that fitting networks read.

A descriptor is a module built from its options, all of them explicit. Its class declares which options it has and how those
that the config leaves open follow from statistics of the training data, so that a model is rebuilt without its data.

The environment of an atom has one row per neighbour, (1/r, x/r^2, y/r^2, z/r^2) times a switch that ends at the cutoff. Rows
are standardised with mean and deviation of the centre's species before networks read them. All of it is float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgefield.models.edges import Batch, EdgeContext
from forgefield.ops.graph import is_traced


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


class Descriptor(nn.Module, ABC):
    """Base of descriptors.

    dim_out: numbers per atom. dim_rotation: rows M of the rotation matrix, 0 where it has none. mixed_types: the descriptor
    tells species apart by itself, so that one fitting network serves all of them.
    """

    Options: ClassVar[type]
    """Dataclass of its options, `type` first; defaults are DeePMD-kit's."""
    dim_out: int
    dim_rotation: int = 0
    mixed_types: bool = False

    def __init__(
        self,
        options: Any,
        *,
        species: Sequence[str],
        cutoff: float,
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        """options: resolved, every number given. cutoff: A. dtype: of weights whose `precision` is default."""
        super().__init__()
        self.options, self.species, self.cutoff = options, tuple(species), float(cutoff)

    @classmethod
    @abstractmethod
    def complete(cls, options: Any, *, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]) -> Any:
        """Options checked, with every number explicit. statistics: `statistics["environment"]` is what
        `environment_statistics` gives, where there is training data."""

    def may_wait_for(self, tensor: Tensor) -> bool:
        """Whether values may be looked at here: not in a trace or a capture, nor in training on a GPU, which must not wait."""
        if is_traced(tensor):
            return False
        return not (tensor.is_cuda and (self.training or torch.cuda.is_current_stream_capturing()))

    @abstractmethod
    def forward(self, batch: Batch, edges: EdgeContext, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Descriptor (n_atoms, dim_out) and rotation (n_atoms, dim_rotation, 3) or None, both in the descriptor's precision.

        mask: (n_edges,) float64, 0 for edges that are ignored.
        """
