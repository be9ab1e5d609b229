"""PaiNN: polarisable atom interaction network (Schuett, Unke and Gastegger, ICML 2021), with scalar and vector features.

Messages carry scalars and vectors between neighbours, filtered by the distance; in between, every atom couples its scalars with
the lengths and products of its vectors. Energies are invariant; vectors are equivariant under rotations and reflections.

The update multiplies three quantities that all grow with the vectors, so the published form grows like a power of 4 with every
layer and overflows where bonds are short. With `normalise`, messages and updates read bounded copies of the features and each
layer adds terms of order one, at any depth and during training too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.models.invariant.message_passing import (
    Dense,
    MessagePassing,
    SharedOptions,
    Surroundings,
    complete_options,
    sizes,
)
from forgefield.models.options import option
from forgefield.ops.graph import barrier, cut, gather, join, segment_sum
from forgefield.ops.linear import unit_normal
from forgefield.ops.products import product

FILTER_SCALE = 0.1
"""Initial filters are this much smaller than unit-variance ones: at bond lengths the basis is of order 3 and the messages of
neighbours of one species add up coherently. In SchNetPack's PaiNN they start as small."""


@dataclass
class PaiNNOptions(SharedOptions):
    """Hyperparameters of PaiNN. Numbers left `None` are filled in from the statistics of the training data."""

    num_bessels: int = option(20, at_least=1)
    """Radial basis functions."""
    norm_epsilon: float = option(1e-4, at_least=1e-12)
    """Lengths of vectors are sqrt(v^2 + epsilon), smooth where a vector vanishes, as it does on symmetric sites."""
    normalise: bool | None = None
    """Divide the features that messages and updates read by sqrt(1 + their mean square). Default: true. False is the published
    form, which runs without this option in their record have."""


class PaiNN(MessagePassing[PaiNNOptions]):
    """Atomic energies, features and vectors from edge vectors. Built from resolved options: every number is given."""

    Options = PaiNNOptions
    presets = sizes(S=(3, 64), M=(3, 128), L=(5, 256))

    @classmethod
    def complete_options(
        cls, options: PaiNNOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> PaiNNOptions:
        normalise = True if options.normalise is None else options.normalise
        return replace(complete_options(options, species, cutoff, statistics), normalise=normalise)

    def make_layers(self, **make: Any) -> list[nn.Module]:
        self.vector_dim = self.options.num_features
        return [Layer(self.options, is_first=number == 0, **make) for number in range(self.options.num_layers)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        frequencies = math.pi * torch.arange(
            1, self.options.num_bessels + 1, dtype=torch.float64, device=around.lengths_over_reach.device
        )
        column = around.lengths_over_reach.unsqueeze(1)
        basis = barrier((torch.sin(column * frequencies) / column).to(x.dtype), around.switch)
        vectors: Tensor | None = None
        for layer in self.layers:
            x, vectors = layer(x, vectors, basis, around)
        assert vectors is not None
        return x, vectors.transpose(1, 2)


class Layer(nn.Module):
    """One message and one update. The first layer's messages know no vectors yet."""

    def __init__(
        self, options: PaiNNOptions, *, is_first: bool, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        super().__init__()
        make: dict[str, Any] = {"generator": generator, "dtype": dtype}
        self.width, self.epsilon = options.num_features, options.norm_epsilon
        self.normalise = bool(options.normalise)
        parts = 2 if is_first else 3
        self.message = Dense([self.width, self.width, parts * self.width], "silu", **make)
        self.filter = Dense([options.num_bessels, parts * self.width], "silu", **make)
        with torch.no_grad():
            self.filter.weights[0].mul_(FILTER_SCALE)
        self.mix = nn.Parameter(unit_normal(self.width, 2 * self.width, **make) / math.sqrt(self.width))
        self.update = Dense([2 * self.width, self.width, 3 * self.width], "silu", **make)

    def forward(self, x: Tensor, vectors: Tensor | None, basis: Tensor, around: Surroundings) -> tuple[Tensor, Tensor]:
        """x: (n_rows, width); vectors: (n_rows, 3, width); basis: (n, num_bessels)."""
        graph = around.graph
        filters = (basis @ self.filter.weights[0] + self.filter.biases[0]) * around.envelope
        messages = gather(self.message(self._read(x)), graph.by_source) * around.per_edge(filters)
        for_scalars, for_directions, *for_vectors = cut(messages, [self.width] * (messages.shape[1] // self.width), 1)
        flow = around.directions.unsqueeze(2) * for_directions.unsqueeze(1)
        if vectors is not None:
            flow = flow + gather(self._read(vectors), graph.by_source) * for_vectors[0].unsqueeze(1)
        x = x + segment_sum(for_scalars, graph.by_destination) * around.scale
        inflow = segment_sum(flow, graph.by_destination) * around.scale.unsqueeze(2)
        return self._updated(x, inflow if vectors is None else vectors + inflow)

    def _updated(self, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Scalars and vectors of each atom coupled with each other."""
        # Component by component: rows of all components in one product have a number that cannot be traced as a symbol.
        components = [part.squeeze(1) for part in cut(self._read(vectors), [1, 1, 1], 1)]
        mixed = join([product(part, self.mix).unsqueeze(1) for part in components], 1)
        one, other = cut(mixed, [self.width, self.width], 2)
        length = torch.sqrt(other.square().sum(1) + self.epsilon)
        for_vectors, for_products, for_scalars = cut(self.update(join([self._read(x), length], 1)), [self.width] * 3, 1)
        x = x + for_scalars + for_products * (one * other).sum(1)
        return x, vectors + for_vectors.unsqueeze(1) * one

    def _read(self, features: Tensor) -> Tensor:
        """Scalars or vectors as messages and updates use them."""
        return bounded(features) if self.normalise else features


def bounded(features: Tensor) -> Tensor:
    """Features of each atom over sqrt(1 + mean square over channels): near-linear where small, of order one where large.

    features: (n_rows, width) scalars or (n_rows, 3, width) vectors, for which the square is that of the length: equivariant.
    """
    squares = features.square() if features.dim() == 2 else features.square().sum(1, keepdim=True)
    return features * torch.rsqrt(1 + squares.mean(-1, keepdim=True))
