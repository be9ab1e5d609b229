"""SchNet: convolutions with filters that are functions of the distance (Schuett et al., J. Chem. Phys. 148, 241722, 2018).

With the cosine envelope, one neighbour for `avg_num_neighbours` and the same weights it is the SchNet of PyTorch Geometric, on
edges with periodic images, less the energy of lone atoms (`tests/models/invariant/test_encoders_reference.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.models.invariant.message_passing import (
    Dense,
    MessagePassing,
    SharedOptions,
    Surroundings,
    gaussians,
    sizes,
)
from forgefield.models.options import option
from forgefield.ops.activations import activate
from forgefield.ops.graph import barrier, gather, segment_sum


@dataclass
class SchNetOptions(SharedOptions):
    """Hyperparameters of SchNet. Numbers left `None` are filled in from the statistics of the training data."""

    num_filters: int | None = option(None, at_least=1)
    """Channels of the convolutions. Default: as many as features."""
    num_gaussians: int = option(32, at_least=2)
    """Radial basis functions between 0 and the cutoff."""


class SchNet(MessagePassing[SchNetOptions]):
    """Atomic energies and features from edge lengths. Built from resolved options: every number is given."""

    Options = SchNetOptions
    presets = sizes(S=(3, 64), M=(4, 128), L=(6, 256))
    activation = "ssp"

    def make_layers(self, **make: Any) -> list[nn.Module]:
        return [Interaction(self.options, **make) for _ in range(self.options.num_layers)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        basis = gaussians(around.lengths_over_reach, self.options.num_gaussians)
        basis = barrier(basis.to(x.dtype), around.switch)
        for layer in self.layers:
            x = x + layer(x, basis, around)
        return x, None


class Interaction(nn.Module):
    def __init__(self, options: SchNetOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: dict[str, Any] = {"generator": generator, "dtype": dtype}
        width, filters = options.num_features, options.num_filters or options.num_features
        self.filter = Dense([options.num_gaussians, filters, filters], "ssp", **make)
        self.enter = Dense([width, filters], "ssp", bias=False, **make)
        self.leave = Dense([filters, width, width], "ssp", **make)

    def forward(self, x: Tensor, basis: Tensor, around: Surroundings) -> Tensor:
        """The change of the features. x: (n_rows, width); basis: (n, num_gaussians)."""
        hidden = activate("ssp", basis @ self.filter.weights[0] + self.filter.biases[0])
        weights = around.per_edge((hidden @ self.filter.weights[1] + self.filter.biases[1]) * around.envelope)
        messages = gather(self.enter(x), around.graph.by_source) * weights
        result: Tensor = self.leave(segment_sum(messages, around.graph.by_destination) * around.scale)
        return result
