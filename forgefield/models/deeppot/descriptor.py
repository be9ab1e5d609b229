"""What a descriptor of the Deep Potential family is: from the neighbours of each atom to numbers that fitting networks read.

A descriptor is a module built from its own options, all of them explicit. Its class says which options it has and how those
that were left out are filled in from statistics of the training data, so that a model is rebuilt without its data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forgefield.models.edges import Batch, EdgeContext
from forgefield.ops.graph import is_traced


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
