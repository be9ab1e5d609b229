"""EGNN: E(n)-equivariant graph network (Satorras, Hoogeboom and Welling, ICML 2021), on edges with periodic images.

Messages are made of the features of both atoms and their squared distance; from layer to layer atoms also move along their
edges, by equivariant steps, and their periodic images with them. Only differences of positions enter, so nothing depends on
the origin. Other than there, messages fade out at the cutoff and sums are divided by constants, never by what is in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgefield.models.invariant.message_passing import Dense, MessagePassing, SharedOptions, Surroundings, sizes
from forgefield.ops.graph import cut, gather, join, segment_sum
from forgefield.ops.products import product


@dataclass
class EGNNOptions(SharedOptions):
    """Hyperparameters of EGNN. Numbers left `None` are filled in from the statistics of the training data."""

    update_coordinates: bool = True
    """Let atoms move from layer to layer; without, distances stay what they are and atoms have no vectors."""
    attention: bool = False
    """Weigh every message by a number between 0 and 1 that is made of it."""


class EGNN(MessagePassing[EGNNOptions]):
    """Atomic energies, features and steps of atoms from edge vectors. Built from resolved options: every number is given."""

    Options = EGNNOptions
    presets = sizes(S=(3, 64), M=(4, 128), L=(7, 128))

    def make_layers(self, **make: Any) -> list[nn.Module]:
        last = self.options.num_layers - 1
        moves = self.options.update_coordinates
        self.vector_dim = last if moves else 0  # a step in each layer but the last, after which no distance is read
        return [Layer(self.options, moves=moves and number < last, **make) for number in range(last + 1)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        vectors, steps, envelope = around.vectors, [], around.per_edge(around.envelope)
        for layer in self.layers:
            x, step = layer(x, vectors, envelope, around)
            if step is not None:
                steps.append(step.unsqueeze(1))
                graph = around.graph
                vectors = vectors + gather(step, graph.by_source) - gather(step, graph.by_destination)
        return x, join(steps, 1) if steps else None


class Layer(nn.Module):
    """moves: whether atoms move along their edges."""

    def __init__(self, options: EGNNOptions, *, moves: bool, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: dict[str, Any] = {"generator": generator, "dtype": dtype}
        self.width = width = options.num_features
        self.message = Dense([2 * width + 1, width, width], "silu", ends_active=True, **make)
        self.attention = Dense([width, 1], "silu", **make) if options.attention else None
        self.step = Dense([width, width, 1], "silu", **make) if moves else None
        self.update = Dense([2 * width, width, width], "silu", **make)

    def forward(
        self, x: Tensor, vectors: Tensor, envelope: Tensor, around: Surroundings
    ) -> tuple[Tensor, Tensor | None]:
        """New features, and the step of every atom (n_rows, 3) over the reach.

        x: (n_rows, width); vectors: (n_edges, 3) over the reach; envelope: (n_edges, 1).
        """
        graph = around.graph
        of_centre, of_neighbour, of_square = cut(self.message.weights[0], [self.width, self.width, 1], 0)
        made = gather(product(x, of_centre), graph.by_destination) + gather(product(x, of_neighbour), graph.by_source)
        made = made + vectors.square().sum(1, keepdim=True) * of_square
        messages = self.message.after_first(made) * envelope
        step = None
        if self.step is not None:
            along = vectors * (self.step(messages) * envelope)
            step = segment_sum(along, graph.by_destination) * around.scale.square()
        if self.attention is not None:
            messages = messages * torch.sigmoid(self.attention(messages))
        summed = segment_sum(messages, graph.by_destination) * around.scale
        return x + self.update(join([x, summed], 1)), step
