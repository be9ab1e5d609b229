"""CGCNN: a crystal graph network with gated convolutions (Xie and Grossman, Phys. Rev. Lett. 120, 145301, 2018).

An atom's features change by a sum over its edges, periodic images included, of a gate times a core, both made of the features
of the two atoms and the distance. Other than there, messages fade out at the cutoff, and nothing is normalised over the batch:
what a crystal gives must not depend on its batch mates.
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
from forgefield.ops.graph import barrier, cut, gather, segment_sum
from forgefield.ops.linear import unit_normal
from forgefield.ops.products import product


@dataclass
class CGCNNOptions(SharedOptions):
    """Hyperparameters of CGCNN. Numbers left `None` are filled in from the statistics of the training data."""

    num_gaussians: int = option(41, at_least=2)
    """Radial basis functions between 0 and the cutoff."""


class CGCNN(MessagePassing[CGCNNOptions]):
    """Atomic energies and features from edge lengths. Built from resolved options: every number is given."""

    Options = CGCNNOptions
    presets = sizes(S=(3, 64), M=(4, 128), L=(5, 192))
    activation = "ssp"

    def make_layers(self, **make: Any) -> list[nn.Module]:
        return [GatedConvolution(self.options, **make) for _ in range(self.options.num_layers)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        basis = gaussians(around.lengths_over_reach, self.options.num_gaussians)
        basis = barrier(basis.to(x.dtype), around.switch)
        for layer in self.layers:
            x = layer(x, basis, around)
        return x, None


class GatedConvolution(nn.Module):
    """x_i' = g(x_i + sum_j envelope * sigmoid(z W_f + b_f) * g(z W_s + b_s)), z = (x_i, x_j, basis), g the shifted softplus.

    The products with x_i and x_j are made for atoms; columns of all weights: gate, then core.
    """

    def __init__(self, options: CGCNNOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: dict[str, Any] = {"generator": generator, "dtype": dtype}
        self.width = width = options.num_features
        norm = (2 * width + options.num_gaussians) ** -0.5
        self.centre = nn.Parameter(unit_normal(width, 2 * width, **make) * norm)
        self.neighbour = nn.Parameter(unit_normal(width, 2 * width, **make) * norm)
        self.radial = Dense([options.num_gaussians, 2 * width], "ssp", **make)

    def forward(self, x: Tensor, basis: Tensor, around: Surroundings) -> Tensor:
        """x: (n_rows, width); basis: (n, num_gaussians)."""
        radial = around.per_edge(basis @ self.radial.weights[0] + self.radial.biases[0])
        made = gather(product(x, self.centre), around.graph.by_destination) + radial
        made = made + gather(product(x, self.neighbour), around.graph.by_source)
        gate, core = cut(made, [self.width, self.width], 1)
        messages = torch.sigmoid(gate) * activate("ssp", core) * around.per_edge(around.envelope)
        return activate("ssp", x + segment_sum(messages, around.graph.by_destination) * around.scale)
