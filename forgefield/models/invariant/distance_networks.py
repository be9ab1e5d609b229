"""Networks that read edge lengths only: SchNet and CGCNN.

SchNet has convolutions with filters that are functions of the distance (Schuett et al., J. Chem. Phys. 148, 241722, 2018). With
the cosine envelope, `avg_num_neighbours` of 1 and the same weights it is the SchNet of PyTorch Geometric, with periodic images
and without the energy of isolated atoms (`tests/models/invariant/test_encoders_reference.py`).

CGCNN is a crystal graph network with gated convolutions (Xie and Grossman, Phys. Rev. Lett. 120, 145301, 2018). An atom's
features change by a sum over its edges, including periodic images, of a gate times a core, both computed from the features of
the two atoms and the distance. Unlike the original, messages go to zero at the cutoff, and nothing is normalised over the
batch: the result for a crystal must not depend on the other frames of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.models.invariant.message_passing import (
    Dense,
    MessagePassing,
    SharedOptions,
    Surroundings,
    gaussians,
    sizes,
)
from forgefield.ops.functions import activate
from forgefield.ops.graph import barrier, cut, gather, segment_sum
from forgefield.ops.linear import WeightArguments, unit_normal
from forgefield.ops.products import product


@dataclass
class SchNetOptions(SharedOptions):
    """Hyperparameters of SchNet. Numbers that are `None` come from statistics of the training data."""

    num_filters: int | None = option(None, at_least=1)
    """Channels of the convolutions. Default: as many as features."""
    num_gaussians: int = option(32, at_least=2)
    """Radial basis functions between 0 and the cutoff."""


class SchNet(MessagePassing[SchNetOptions]):
    """Atomic energies and features from edge lengths. Built from resolved options."""

    Options = SchNetOptions
    presets = sizes(S=(3, 64), M=(4, 128), L=(6, 256))
    activation = "ssp"

    def make_layers(self, make: WeightArguments) -> list[nn.Module]:
        return [FilterConvolution(self.options, **make) for _ in range(self.options.num_layers)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        basis = gaussians(around.lengths_over_reach, self.options.num_gaussians)
        basis = barrier(basis.to(x.dtype), around.switch)
        for number, layer in enumerate(self.layers):
            x = around.edges.fill_ghosts(x) if number else x
            x = x + layer(x, basis, around)
        return x, None


class FilterConvolution(nn.Module):
    def __init__(self, options: SchNetOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
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


@dataclass
class CGCNNOptions(SharedOptions):
    """Hyperparameters of CGCNN. Numbers that are `None` come from statistics of the training data."""

    num_gaussians: int = option(41, at_least=2)
    """Radial basis functions between 0 and the cutoff."""


class CGCNN(MessagePassing[CGCNNOptions]):
    """Atomic energies and features from edge lengths. Built from resolved options."""

    Options = CGCNNOptions
    presets = sizes(S=(3, 64), M=(4, 128), L=(5, 192))
    activation = "ssp"

    def make_layers(self, make: WeightArguments) -> list[nn.Module]:
        return [GatedConvolution(self.options, **make) for _ in range(self.options.num_layers)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        basis = gaussians(around.lengths_over_reach, self.options.num_gaussians)
        basis = barrier(basis.to(x.dtype), around.switch)
        for number, layer in enumerate(self.layers):
            x = around.edges.fill_ghosts(x) if number else x
            x = layer(x, basis, around)
        return x, None


class GatedConvolution(nn.Module):
    """x_i' = g(x_i + sum_j envelope * sigmoid(z W_f + b_f) * g(z W_s + b_s)), z = (x_i, x_j, basis), g the shifted softplus.

    The products with x_i and x_j are computed per atom; columns of all weights: gate, then core.
    """

    def __init__(self, options: CGCNNOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        self.width = width = options.num_features
        norm = (2 * width + options.num_gaussians) ** -0.5
        self.centre = nn.Parameter(unit_normal(width, 2 * width, **make) * norm)
        self.neighbour = nn.Parameter(unit_normal(width, 2 * width, **make) * norm)
        self.radial = Dense([options.num_gaussians, 2 * width], "ssp", **make)

    def forward(self, x: Tensor, basis: Tensor, around: Surroundings) -> Tensor:
        """x: (n_rows, width); basis: (n, num_gaussians)."""
        radial = around.per_edge(basis @ self.radial.weights[0] + self.radial.biases[0])
        inputs = gather(product(x, self.centre), around.graph.by_destination) + radial
        inputs = inputs + gather(product(x, self.neighbour), around.graph.by_source)
        gate, core = cut(inputs, [self.width, self.width], 1)
        messages = torch.sigmoid(gate) * activate("ssp", core) * around.per_edge(around.envelope)
        return activate("ssp", x + segment_sum(messages, around.graph.by_destination) * around.scale)
