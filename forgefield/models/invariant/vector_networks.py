"""Networks with equivariant vectors: PaiNN and EGNN.

PaiNN (Schuett, Unke and Gastegger, ICML 2021) has scalar and vector features. Messages carry scalars and vectors between
neighbours, filtered by the distance; in between, every atom couples its scalars with the lengths and products of its vectors.
Energies are invariant; vectors are equivariant under rotations and reflections. The update multiplies three quantities that all
grow with the vectors, so the published form grows like a power of 4 with every layer and overflows where bonds are short. With
`normalise`, messages and updates read bounded copies of the features and each layer adds terms of order one, at any depth and
during training too.

EGNN (Satorras, Hoogeboom and Welling, ICML 2021) computes messages from the features of both atoms and their squared distance;
from layer to layer atoms also move along their edges, by equivariant steps, and their periodic images with them. Only
differences of positions are used, so nothing depends on the origin. Unlike the original, messages go to zero at the cutoff and
sums are divided by constants, never by numbers that depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.models.invariant.message_passing import (
    Dense,
    MessagePassing,
    SharedOptions,
    Surroundings,
    complete_options,
    sizes,
)
from forgefield.ops.graph import barrier, cut, gather, join, segment_sum
from forgefield.ops.linear import WeightArguments, unit_normal
from forgefield.ops.products import product

FILTER_SCALE = 0.1
"""Factor of initial filters, relative to unit variance: at bond lengths the basis is of order 3 and the messages of neighbours
of one species add up coherently. Initial filters of SchNetPack's PaiNN are equally small."""


@dataclass
class PaiNNOptions(SharedOptions):
    """Hyperparameters of PaiNN. Numbers that are `None` come from statistics of the training data."""

    num_bessels: int = option(20, at_least=1)
    """Radial basis functions."""
    norm_epsilon: float = option(1e-4, at_least=1e-12)
    """Lengths of vectors are sqrt(v^2 + epsilon), smooth where a vector vanishes, as it does on symmetric sites."""
    normalise: bool | None = None
    """Divide the features that messages and updates read by sqrt(1 + their mean square). Default: true. False is the published
    form, which is also used for runs whose record does not contain this option."""


class PaiNN(MessagePassing[PaiNNOptions]):
    """Atomic energies, features and vectors from edge vectors. Built from resolved options."""

    Options = PaiNNOptions
    presets = sizes(S=(3, 64), M=(3, 128), L=(5, 256))

    @classmethod
    def complete_options(
        cls, options: PaiNNOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> PaiNNOptions:
        normalise = True if options.normalise is None else options.normalise
        return replace(complete_options(options, species, cutoff, statistics), normalise=normalise)

    def make_layers(self, make: WeightArguments) -> list[nn.Module]:
        self.vector_dim = self.options.num_features
        return [PaiNNLayer(self.options, is_first=number == 0, **make) for number in range(self.options.num_layers)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        frequencies = math.pi * torch.arange(
            1, self.options.num_bessels + 1, dtype=torch.float64, device=around.lengths_over_reach.device
        )
        column = around.lengths_over_reach.unsqueeze(1)
        basis = barrier((torch.sin(column * frequencies) / column).to(x.dtype), around.switch)
        vectors: Tensor | None = None
        for layer in self.layers:
            if vectors is not None and around.edges.ghosts is not None:
                x, vectors = self._fill_ghosts(x, vectors, around)
            x, vectors = layer(x, vectors, basis, around)
        assert vectors is not None
        return x, vectors.transpose(1, 2)

    def _fill_ghosts(self, x: Tensor, vectors: Tensor, around: Surroundings) -> tuple[Tensor, Tensor]:
        """Scalars and vectors in one exchange."""
        width = x.shape[1]
        x, flat = cut(around.edges.fill_ghosts(join([x, vectors.flatten(1)], 1)), [width, 3 * width], 1)
        return x, flat.unflatten(1, (3, width))


class PaiNNLayer(nn.Module):
    """One message and one update. The messages of the first layer contain no vectors."""

    def __init__(
        self, options: PaiNNOptions, *, is_first: bool, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
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
        return self._update_atoms(x, inflow if vectors is None else vectors + inflow)

    def _update_atoms(self, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Scalars and vectors after coupling those of each atom with each other."""
        # Component by component: the number of rows of all components cannot be traced as a symbol.
        components = [component.squeeze(1) for component in cut(self._read(vectors), [1, 1, 1], 1)]
        mixed = join([product(component, self.mix).unsqueeze(1) for component in components], 1)
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


@dataclass
class EGNNOptions(SharedOptions):
    """Hyperparameters of EGNN. Numbers that are `None` come from statistics of the training data."""

    update_coordinates: bool = True
    """Let atoms move from layer to layer; without, distances do not change and atoms have no vectors."""
    attention: bool = False
    """Multiply every message by a weight between 0 and 1 computed from it."""


class EGNN(MessagePassing[EGNNOptions]):
    """Atomic energies, features and steps of atoms from edge vectors. Built from resolved options."""

    Options = EGNNOptions
    presets = sizes(S=(3, 64), M=(4, 128), L=(7, 128))

    def make_layers(self, make: WeightArguments) -> list[nn.Module]:
        last = self.options.num_layers - 1
        moves = self.options.update_coordinates
        self.vector_dim = last if moves else 0  # a step in each layer but the last, after which no distance is read
        return [EGNNLayer(self.options, moves=moves and number < last, **make) for number in range(last + 1)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        vectors, steps, envelope = around.vectors, [], around.per_edge(around.envelope)
        for number, layer in enumerate(self.layers):
            x, step = layer(x, vectors, envelope, around)
            if number < len(self.layers) - 1:
                x, step = self._fill_ghosts(x, step, around)
            if step is not None:
                steps.append(step.unsqueeze(1))
                graph = around.graph
                vectors = vectors + gather(step, graph.by_source) - gather(step, graph.by_destination)
        return x, join(steps, 1) if steps else None

    def _fill_ghosts(self, x: Tensor, step: Tensor | None, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        """Features and steps in one exchange."""
        if step is None:
            return around.edges.fill_ghosts(x), None
        x, step = cut(around.edges.fill_ghosts(join([x, step], 1)), [x.shape[1], 3], 1)
        return x, step


class EGNNLayer(nn.Module):
    """moves: whether atoms move along their edges."""

    def __init__(self, options: EGNNOptions, *, moves: bool, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        self.width = width = options.num_features
        self.message = Dense([2 * width + 1, width, width], "silu", ends_active=True, **make)
        self.attention = Dense([width, 1], "silu", **make) if options.attention else None
        self.step = Dense([width, width, 1], "silu", **make) if moves else None
        self.update = Dense([2 * width, width, width], "silu", **make)

    def forward(
        self, x: Tensor, vectors: Tensor, envelope: Tensor, around: Surroundings
    ) -> tuple[Tensor, Tensor | None]:
        """New features, and the step of every atom (n_rows, 3) in units of the largest cutoff.

        x: (n_rows, width); vectors: (n_edges, 3) in the same units; envelope: (n_edges, 1).
        """
        graph = around.graph
        of_centre, of_neighbour, of_square = cut(self.message.weights[0], [self.width, self.width, 1], 0)
        inputs = gather(product(x, of_centre), graph.by_destination) + gather(product(x, of_neighbour), graph.by_source)
        inputs = inputs + vectors.square().sum(1, keepdim=True) * of_square
        messages = self.message.after_first(inputs) * envelope
        step = None
        if self.step is not None:
            along = vectors * (self.step(messages) * envelope)
            step = segment_sum(along, graph.by_destination) * around.scale.square()
        if self.attention is not None:
            messages = messages * torch.sigmoid(self.attention(messages))
        summed = segment_sum(messages, graph.by_destination) * around.scale
        return x + self.update(join([x, summed], 1)), step
