"""Base of networks with messages along edges (SchNet, PaiNN, EGNN, CGCNN, TensorNet, M3GNet): options, dense layers, one pass.

Messages are sent along the edges of the batch, including periodic images, and are multiplied by an envelope that is zero at the
cutoff, so that energies are smooth. One isolated atom of each species is added to every batch and its energy is subtracted: an
isolated atom has exactly its species' shift. Geometry and energies are float64, everything else has the precision of the
weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.interface import LastLayer
from forgefield.models.options import TermOptions, check_values, complete_terms
from forgefield.models.terms import PairLengths, SpeciesTerms
from forgefield.ops.functions import activate, polynomial_cutoff
from forgefield.ops.graph import EdgeGraph, GradientSwitch, Segments, barrier, gather
from forgefield.ops.linear import WeightArguments, unit_normal
from forgefield.ops.products import product


@dataclass
class SharedOptions(TermOptions):
    """Hyperparameters that all of these networks have. Numbers that are `None` come from statistics of the training data."""

    num_layers: int = option(3, at_least=1)
    """Interaction layers: each lets an atom see one cutoff further."""
    num_features: int = option(64, at_least=1)
    """Features of an atom."""
    envelope: str = option("polynomial", choices=("polynomial", "cosine"))
    """Envelope of messages, zero at the cutoff: polynomial (two continuous derivatives) or cosine (one)."""
    polynomial_cutoff_p: float = option(6, at_least=2)
    """Exponent of the polynomial envelope; smaller decays earlier."""
    readout_mlp_width: int | None = option(None, at_least=1)
    """Neurons between the last features and the atomic energy. Default: half of the features."""


OptionsT = TypeVar("OptionsT", bound=SharedOptions)


def complete_options(
    options: OptionsT, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
) -> OptionsT:
    """Options checked and with every default explicit; missing numbers come from the statistics."""
    check_values(options)
    filled = complete_terms(options, species, cutoff, statistics)
    filled["readout_mlp_width"] = options.readout_mlp_width or max(1, options.num_features // 2)
    return dataclasses.replace(options, **filled)


def sizes(**by_preset: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Presets from (layers, features) of each."""
    return {name: {"num_layers": layers, "num_features": width} for name, (layers, width) in by_preset.items()}


class Dense(nn.Module):
    """Layers of weights (in, out) and biases, with the activation between layers.

    bias: whether layers have biases, which are initially zero; weights have variance 1 / in.
    last_bias: whether the last layer has one, too.
    ends_active: whether the activation is also applied after the last layer.
    """

    def __init__(
        self,
        widths: Sequence[int],
        activation: str,
        *,
        generator: torch.Generator,
        dtype: torch.dtype,
        bias: bool = True,
        last_bias: bool = True,
        ends_active: bool = False,
    ) -> None:
        super().__init__()
        self.activation, self.ends_active = activation, ends_active
        self.weights = nn.ParameterList(
            nn.Parameter(unit_normal(n_in, n_out, generator=generator, dtype=dtype) / math.sqrt(n_in))
            for n_in, n_out in itertools.pairwise(widths)
        )
        with_bias = (widths[1:] if last_bias else widths[1:-1]) if bias else ()
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in with_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_first(product(x, self.weights[0]))

    def after_first(self, x: Tensor) -> Tensor:
        """As `forward`, from the product with the first weights on."""
        for number in range(len(self.weights)):
            x = product(x, self.weights[number]) if number else x
            x = x + self.biases[number] if number < len(self.biases) else x
            if number < len(self.weights) - 1 or self.ends_active:
                x = activate(self.activation, x)
        return x

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the last layer."""
        for number in range(len(self.weights) - 1):
            x = product(x, self.weights[number])
            x = activate(self.activation, x + self.biases[number] if len(self.biases) else x)
        return x


class Surroundings(NamedTuple):
    """The edges as layers use them; n is the number of pairs if edges and their reverses share rows, otherwise of edges.

    graph: of all atoms, followed by one isolated atom of each species.
    envelope: (n, 1).
    lengths_over_reach: (n,), float64, lengths in units of the largest cutoff.
    lengths_over_radius: (n,), float64, lengths in units of the radius at which the pair's interaction ends.
    directions: (n_edges, 3), unit vectors from centre to neighbour.
    vectors: (n_edges, 3), edge vectors in units of the largest cutoff.
    scale: (n_rows, 1), 1 / sqrt(mean number of neighbours).
    edges: as the model received them.
    to_edges: the row of each edge, None if rows are edges.
    """

    graph: EdgeGraph
    envelope: Tensor
    lengths_over_reach: Tensor
    lengths_over_radius: Tensor
    directions: Tensor
    vectors: Tensor
    scale: Tensor
    edges: EdgeContext
    to_edges: Segments | None

    @property
    def switch(self) -> GradientSwitch | None:
        return self.edges.gradient

    def per_edge(self, rows: Tensor) -> Tensor:
        """From rows that depend only on lengths to edges: (n, ...) -> (n_edges, ...)."""
        return rows if self.to_edges is None else gather(rows, self.to_edges)


class Encoded(NamedTuple):
    """Results of one pass.

    features: (n_atoms, feature_dim), invariant, in the precision of the weights.
    vectors: (n_atoms, vector_dim, 3), equivariant, in the same precision; None for models without vectors.
    energies: (n_atoms,), eV, float64; None if they are not requested.
    """

    features: Tensor
    vectors: Tensor | None
    energies: Tensor | None


class MessagePassing(SpeciesTerms[OptionsT], ABC):
    """Base of the networks. State: `embedding` (n_species, num_features), `layers`, `readout`.

    A subclass builds its layers (`make_layers`) and applies them to the features of atoms (`interact`).
    """

    ghost_atoms = "exchange"
    vector_dim: int = 0
    """Equivariant vectors of an atom."""
    activation = "silu"
    readout_bias: ClassVar[bool] = True
    """Whether the last layer has a bias, which cancels with that of the isolated atom; only for the state of earlier models."""
    embedding: nn.Parameter
    readout: Dense

    def __init__(
        self,
        options: OptionsT,
        *,
        species: Sequence[str],
        cutoff: float,
        adaptive_cutoff: float | None = None,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(options, species, cutoff, adaptive_cutoff)
        self.reach = self.cutoff if adaptive_cutoff is None else float(adaptive_cutoff)
        width = options.num_features
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        self.embedding = nn.Parameter(unit_normal(len(self.species), width, **make))
        self.layers = nn.ModuleList(self.make_layers(make))
        hidden = options.readout_mlp_width or max(1, width // 2)
        self.readout = Dense([width, hidden, 1], self.activation, last_bias=self.readout_bias, **make)
        self.feature_dim = width

    @classmethod
    def complete_options(
        cls, options: OptionsT, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> OptionsT:
        return complete_options(options, species, cutoff, statistics)

    @abstractmethod
    def make_layers(self, make: WeightArguments) -> list[nn.Module]:
        """The interaction layers. make: arguments for initial weights."""

    @abstractmethod
    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        """From embedded species (n_rows, num_features) to features of the same shape, and vectors (n_rows, vector_dim, 3)."""

    def forward(self, batch: Batch, edges: EdgeContext | None = None) -> Tensor:
        """(n_atoms,) atomic energies, eV, float64."""
        energies = self.encode_all(batch, edges).energies
        assert energies is not None
        return energies

    def encode(
        self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Features of the last layer, (n_atoms, feature_dim) in the precision of the weights, and atomic energies."""
        encoded = self.encode_all(batch, edges, energies=energies)
        return encoded.features, encoded.energies

    def encode_all(self, batch: Batch, edges: EdgeContext | None = None, *, energies: bool = True) -> Encoded:
        """Features, vectors and energies from one pass."""
        species = batch["species"]
        features, vectors, pairs, graph = self._interacted(batch, edges or EdgeContext.of(batch))
        atomic, n_atoms = None, species.shape[0]
        if energies:
            outputs = self.readout(features).squeeze(1).double()
            atomic = self.energies(self._without_isolated(outputs, species), pairs, species, graph)
        return Encoded(features[:n_atoms], None if vectors is None else vectors[:n_atoms], atomic)

    def last_layer(self, batch: Batch, edges: EdgeContext) -> LastLayer:
        species = batch["species"]
        features, _, pairs, graph = self._interacted(batch, edges)
        hidden = self._without_isolated(self.readout.hidden(features), species)  # biases cancel
        return self.scaled_last_layer(hidden, self.readout.weights[-1].squeeze(1), pairs, species, graph)

    def _interacted(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None, PairLengths, EdgeGraph]:
        """Features and vectors of the last layer, of all atoms and then of an isolated atom of each species."""
        species, graph, n_species = batch["species"], edges.graph, len(self.species)
        if self.inverse_cutoff.numel() > 1:  # an edge and its reverse may end at different lengths
            graph = EdgeGraph(graph.source, graph.destination, graph.n_atoms)
        pairs = self.pair_lengths(edges.vectors, species, graph)
        kinds = torch.cat([species, torch.arange(n_species, device=species.device)])
        around = self._surroundings(edges, pairs, kinds, graph)
        features, vectors = self.interact(gather(self.embedding, Segments(kinds, n_species)), around)
        return features, vectors, pairs, graph

    def _without_isolated(self, outputs: Tensor, species: Tensor) -> Tensor:
        """Outputs of atoms minus those of an isolated atom of their species, which follow them: (n_rows, ...) ->
        (n_atoms, ...)."""
        n_atoms = species.shape[0]
        return outputs[:n_atoms] - gather(outputs[n_atoms:], Segments(species, len(self.species)))

    def _surroundings(self, edges: EdgeContext, pairs: PairLengths, kinds: Tensor, graph: EdgeGraph) -> Surroundings:
        dtype, vectors, switch = self.embedding.dtype, edges.vectors, edges.gradient
        lengths, scaled, to_edges = pairs.lengths, pairs.scaled, None
        if graph.pair is not None and graph.pair_edge is not None:
            lengths, scaled = (values.index_select(0, graph.pair_edge) for values in (lengths, scaled))
            to_edges = Segments(graph.pair, graph.pair_edge.shape[0])
        envelope = barrier(self._envelope(scaled).to(dtype).unsqueeze(1), switch)
        directions = barrier((vectors / pairs.lengths.unsqueeze(1)).to(dtype), switch)
        return Surroundings(
            graph=dataclasses.replace(graph, n_atoms=kinds.shape[0]),
            envelope=envelope,
            lengths_over_reach=lengths / self.reach,
            lengths_over_radius=scaled,
            directions=directions,
            vectors=barrier((vectors / self.reach).to(dtype), switch),
            scale=self.feature_scale.to(dtype).index_select(0, kinds).unsqueeze(1),
            edges=edges,
            to_edges=to_edges,
        )

    def _envelope(self, x: Tensor) -> Tensor:
        """1 at zero, 0 from x = 1 on."""
        if self.options.envelope == "polynomial":
            return polynomial_cutoff(x, float(self.options.polynomial_cutoff_p))
        return torch.where(x < 1, 0.5 * (1 + torch.cos(math.pi * x)), torch.zeros_like(x))


def gaussians(x: Tensor, number: int) -> Tensor:
    """(n,) -> (n, number): Gaussians with equally spaced centres on [0, 1], as wide as their spacing."""
    centres = torch.linspace(0, 1, number, dtype=x.dtype, device=x.device)
    return torch.exp(-0.5 * ((x.unsqueeze(1) - centres) * (number - 1)).square())
