"""Heads: small networks that compute extra outputs from the features of atoms, in the unit of their labels.

An atom's value is `shift + scale * network(features)`, with a shift of its species and one scale, both part of the model. The
value of a frame is the sum of its atoms' (extensive) or their mean (intensive), so it does not depend on the choice of the unit
cell of a crystal.

Equivariant values are vectors (dipoles, forces, noise) and tensors (polarisabilities). They are sums over an atom's neighbours
of directions r, weighted by a network of both atoms' features and their distance. The weights are invariant, so the value is
exactly equivariant for any encoder: a vector is the sum of w r; a tensor is the sum of u 1 + w (r r^T), and of products of such
vectors, which also have an antisymmetric part. An atom without neighbours has its shift: zero for a vector, a multiple of the
unit matrix for a tensor. Everything goes smoothly to zero at the cutoff.

Dropout is a function of keys in the batch (`frame_key`, of seed, epoch and position in it), never of the state of a generator:
the same values are dropped on any number of ranks, after a resume, and by every engine.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.heads.options import HeadOptions
from forgefield.models.terms import pair_radii
from forgefield.ops.functions import activate, combine_keys, keys_in_subset, polynomial_cutoff
from forgefield.ops.graph import EdgeGraph, Segments, gather, segment_max, segment_softmax, segment_sum
from forgefield.ops.linear import unit_normal
from forgefield.ops.products import product

NORM_EPSILON = 1e-5
"""Added to the variance that a layer is divided by."""


class HeadNetwork(nn.Module):
    """Base of heads: weights of layers from `n_in` over the hidden layers of `options` to `n_out`, and the buffers `shift`
    (n_species, size of a value) and `scale`, float64.

    A hidden layer is: product with its weights, norm, activation, dropout; with `residual` its input is added where it has the
    same width. Initial weights depend on `seed` and `name` only, not on the other heads.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self,
        name: str,
        options: HeadOptions,
        *,
        n_in: int,
        n_out: int,
        n_species: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.options, self.n_species = options, n_species
        self.activation, self.residual, self.dropout = options.activation, options.residual, options.dropout
        self.name_key = zlib.crc32(name.encode())
        sizes = [n_in, *options.hidden, n_out]
        generator = torch.Generator().manual_seed((seed << 32) ^ self.name_key)
        self.weights = nn.ParameterList(
            nn.Parameter(unit_normal(a, b, generator=generator, dtype=dtype) / math.sqrt(a))
            for a, b in itertools.pairwise(sizes)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in sizes[1:])
        normed: Sequence[int] = options.hidden if options.norm == "layer" else []
        self.norm_scales = nn.ParameterList(nn.Parameter(torch.ones(n, dtype=dtype)) for n in normed)
        self.norm_shifts = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=dtype)) for n in normed)

    def register_scaling(self) -> None:
        """Register the buffers `shift` and `scale`."""
        size = math.prod(self.options.output_shape)
        shift = torch.zeros(self.n_species, size, dtype=torch.float64)
        if self.options.shift is not None:
            shift = torch.tensor(self.options.shift, dtype=torch.float64).reshape(self.n_species, size)
        self.register_buffer("shift", shift)
        self.register_buffer("scale", torch.tensor(self.options.scale, dtype=torch.float64))

    @property
    def dtype(self) -> torch.dtype:
        result: torch.dtype = self.weights[0].dtype
        return result

    @property
    def last_width(self) -> int:
        """Width of the input of the last layer."""
        result: int = self.weights[-1].shape[0]
        return result

    def hidden(self, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """All layers but the last. x: (n_atoms, n_in)."""
        for number in range(len(self.weights) - 1):
            x = self._layer(number, x, product(x, self.weights[number]), batch)
        return x

    def hidden_from(self, first: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """As `hidden`, from the product of the first layer on."""
        x = self._layer(0, None, first, batch)
        for number in range(1, len(self.weights) - 1):
            x = self._layer(number, x, product(x, self.weights[number]), batch)
        return x

    def last(self, x: Tensor) -> Tensor:
        """The last layer."""
        result: Tensor = x @ self.weights[-1] + self.biases[-1]
        return result

    def _layer(self, number: int, x: Tensor | None, products: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Output of a hidden layer. x: its input, None where it cannot be added. products: of its input with its weights."""
        y = products + self.biases[number]
        if len(self.norm_scales):
            y = y - y.mean(1, keepdim=True)
            y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + NORM_EPSILON)
            y = y * self.norm_scales[number] + self.norm_shifts[number]
        y = activate(self.activation, y)
        if self.dropout and self.training:
            y = y * self._dropout_factors(number, y, batch)
        return x + y if self.residual and x is not None and x.shape[1] == y.shape[1] else y

    def _dropout_factors(self, layer: int, y: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(n_atoms, width): zero where a value is dropped, otherwise the factor that preserves the mean."""
        if "frame_key" not in batch:
            raise ForgefieldError(
                "A head with dropout is trained with batches that contain frame_key, which decides what is dropped; get them "
                "from FrameData.serve(BatchSpec(frame_keys=True)), or call eval() on the model."
            )
        n_atoms, frame = batch["n_atoms"], batch["frame"]
        first_atom = (torch.cumsum(n_atoms, 0) - n_atoms).index_select(0, frame)
        atom = torch.arange(frame.shape[0], device=frame.device) - first_atom
        layer_key = combine_keys(batch["frame_key"], torch.full_like(n_atoms, (self.name_key + layer) % (1 << 32)))
        atom_key = combine_keys(layer_key.index_select(0, frame), torch.bitwise_and(atom, (1 << 32) - 1))
        keys = combine_keys(atom_key.unsqueeze(1), torch.arange(y.shape[1], device=y.device))
        return keys_in_subset(keys, 1.0 - self.dropout).to(y.dtype) / (1.0 - self.dropout)


def frame_values(values: Tensor, batch: Mapping[str, Tensor], reduce: str) -> Tensor:
    """(n_atoms, size) -> (n_frames, size), by sum or mean."""
    n_atoms = batch["n_atoms"]
    sums = segment_sum(values, Segments(batch["frame"], n_atoms.shape[0], rows_are_sorted=True))
    return sums / n_atoms.to(values.dtype).unsqueeze(1) if reduce == "mean" else sums


def subtract_frame_mean(values: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """(n_atoms, size): values minus their mean over each frame, so that their sum is zero."""
    atoms = Segments(batch["frame"], batch["n_atoms"].shape[0], rows_are_sorted=True)
    return values - gather(frame_values(values, batch, "mean"), atoms)


POOLED = ("max", "attention")
"""Ways to reduce that compute one set of features of a frame from those of its atoms."""
N_BASIS = 8
"""Functions of the distance that the network of an equivariant head reads."""
N_PRODUCTS = 4
"""Products of two vectors that a tensor has."""
ENVELOPE = 6.0


class Head(HeadNetwork):
    """From features (n_atoms, n_features) to invariant values (n_frames, *shape) or (n_atoms, *shape), float64."""

    def __init__(
        self, name: str, options: HeadOptions, *, n_features: int, n_species: int, dtype: torch.dtype, seed: int
    ) -> None:
        n_out = math.prod(options.output_shape)
        super().__init__(name, options, n_in=n_features, n_out=n_out, n_species=n_species, dtype=dtype, seed=seed)
        if options.reduce == "attention":
            self.attention = nn.Parameter(torch.zeros(self.last_width, dtype=dtype))
        self.register_scaling()

    def forward(self, features: Tensor, batch: Mapping[str, Tensor], edges: EdgeGeometry | None = None) -> Tensor:
        x = self.hidden(features.to(self.dtype), batch)
        shift = gather(self.shift, Segments(batch["species"], self.n_species))
        if self.options.per == "frame" and self.options.reduce in POOLED:
            values = frame_values(shift, batch, "mean") + self.scale * self.last(self._pool(x, batch)).double()
        else:
            values = shift + self.scale * self.last(x).double()
            if self.options.per == "frame":
                values = frame_values(values, batch, self.options.reduce)
        return values.reshape(-1, *self.options.output_shape)

    def _pool(self, x: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(n_frames, width): the last hidden layer of a frame."""
        atoms = Segments(batch["frame"], batch["n_atoms"].shape[0], rows_are_sorted=True)
        if self.options.reduce == "max":
            return segment_max(x, atoms)
        weights = segment_softmax((x @ self.attention).double(), atoms).to(x.dtype)
        return segment_sum(x * weights.unsqueeze(1), atoms)


@dataclass(frozen=True)
class EdgeGeometry:
    """Of every edge, float64: unit vector from centre to neighbour (n_edges, 3), functions of the distance (n_edges, N_BASIS)
    and the envelope (n_edges,), both zero from the cutoff on."""

    graph: EdgeGraph
    directions: Tensor
    basis: Tensor
    envelope: Tensor


def edge_geometry(
    vectors: Tensor, graph: EdgeGraph, cutoff: float, adaptive_cutoff: float | None, *, to_nearest: bool = False
) -> EdgeGeometry:
    """vectors: (n_edges, 3), A, of the edges of `graph`. cutoff, adaptive_cutoff: A. to_nearest: see `pair_radii`."""
    lengths = vectors.square().sum(1).sqrt()
    limit = cutoff if adaptive_cutoff is None else adaptive_cutoff
    radii: Tensor | float = cutoff
    if adaptive_cutoff is not None:
        radii = pair_radii(lengths, graph, cutoff, adaptive_cutoff, to_nearest=to_nearest)
    envelope = polynomial_cutoff(lengths / radii, ENVELOPE)
    waves = torch.arange(1, N_BASIS + 1, dtype=lengths.dtype, device=lengths.device) * (math.pi / limit)
    basis = torch.sin(lengths.unsqueeze(1) * waves) * (envelope * limit / (math.pi * lengths)).unsqueeze(1)
    return EdgeGeometry(graph, vectors / lengths.unsqueeze(1), basis, envelope)


class EdgeHead(HeadNetwork):
    """From features (n_atoms, n_features) and edges to equivariant values (n_frames, *shape) or (n_atoms, *shape), float64.

    options: their `kind` is vector, symmetric or tensor.
    """

    def __init__(
        self, name: str, options: HeadOptions, *, n_features: int, n_species: int, dtype: torch.dtype, seed: int
    ) -> None:
        n_in, n_out = 2 * n_features + N_BASIS, 1 if options.kind == "vector" else 2 + 2 * N_PRODUCTS
        super().__init__(name, options, n_in=n_in, n_out=n_out, n_species=n_species, dtype=dtype, seed=seed)
        self.n_features = n_features
        self.per_neighbour = 1.0 / math.sqrt(max(options.neighbours, 1.0))
        self.register_scaling()

    def forward(self, features: Tensor, batch: Mapping[str, Tensor], edges: EdgeGeometry | None = None) -> Tensor:
        assert edges is not None
        factors = (self.per_neighbour * edges.envelope).unsqueeze(1)
        weights = self._weights(features.to(self.dtype), batch, edges) * factors
        sums = self._vectors(weights, edges) if self.options.kind == "vector" else self._tensors(weights, edges)
        values = gather(self.shift, Segments(batch["species"], self.n_species)) + self.scale * sums
        if self.options.net_zero:
            values = subtract_frame_mean(values, batch)
        if self.options.per == "frame":
            values = frame_values(values, batch, self.options.reduce)
        return values.reshape(-1, *self.options.output_shape)

    def _weights(self, features: Tensor, batch: Mapping[str, Tensor], edges: EdgeGeometry) -> Tensor:
        """(n_edges, n_out) float64. The products of the first layer are computed once per atom."""
        n, first = self.n_features, self.weights[0]
        centre, neighbour = product(features, first[:n]), product(features, first[n : 2 * n])
        of_edges = gather(centre, edges.graph.by_destination) + gather(neighbour, edges.graph.by_source)
        of_edges = of_edges + edges.basis.to(self.dtype) @ first[2 * n :]
        if len(self.weights) == 1:
            result: Tensor = (of_edges + self.biases[0]).double()
            return result
        return self.last(self.hidden_from(of_edges, batch)).double()

    def _vectors(self, weights: Tensor, edges: EdgeGeometry) -> Tensor:
        """(n_atoms, 3)."""
        return segment_sum(weights * edges.directions, edges.graph.by_destination)

    def _tensors(self, weights: Tensor, edges: EdgeGeometry) -> Tensor:
        """(n_atoms, 9)."""
        r = edges.directions
        unit = torch.eye(3, dtype=r.dtype, device=r.device)
        dyads = r.unsqueeze(2) * r.unsqueeze(1)
        direct = weights[:, 0].view(-1, 1, 1) * unit + weights[:, 1].view(-1, 1, 1) * dyads
        vectors = weights[:, 2:].unsqueeze(2) * r.unsqueeze(1)
        vector_sums = segment_sum(vectors, edges.graph.by_destination)
        first, second = vector_sums[:, :N_PRODUCTS], vector_sums[:, N_PRODUCTS:]
        sums = segment_sum(direct, edges.graph.by_destination)
        sums = sums + (first.unsqueeze(3) * second.unsqueeze(2)).sum(1)
        if self.options.kind == "symmetric":
            sums = 0.5 * (sums + sums.transpose(1, 2))
        return sums.reshape(-1, 9)


def build_head(
    name: str, options: HeadOptions, *, n_features: int, n_species: int, dtype: torch.dtype, seed: int
) -> Head | EdgeHead:
    """The head of the kind that the options select."""
    head = Head if options.kind == "values" else EdgeHead
    return head(name, options, n_features=n_features, n_species=n_species, dtype=dtype, seed=seed)
