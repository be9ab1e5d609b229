"""TensorNet: networks with features that are Cartesian tensors of rank 2 (Simeon and De Fabritiis, NeurIPS 2023).

A tensor of an atom is the sum of a scalar times the identity, an antisymmetric tensor and a symmetric traceless tensor, with 1,
3 and 5 independent components. Each is mixed over channels by a matrix of its own and is weighted by functions of the distance
in messages; the tensor of an atom is coupled with its message by matrix products. Antisymmetric parts are made of edge vectors
and change sign under inversion, and the product is M Y + Y M, which preserves this: energies are invariant under inversion too.

With the cosine envelope, `avg_num_neighbours` of 1 and the same weights it is the TensorNet of TorchMD-NET, with periodic
images and without the energy of isolated atoms (`tests/models/invariant/test_peer_encoders.py`).

Tensors are stored as components in an orthonormal basis of the 3 x 3 matrices (`tensor_basis`), so the squared Frobenius norm
of each part is the sum of the squares of its components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.models.invariant.message_passing import Dense, MessagePassing, SharedOptions, Surroundings, sizes
from forgefield.ops.graph import barrier, cut, gather, join, segment_sum
from forgefield.ops.linear import WeightArguments, unit_normal
from forgefield.ops.products import is_lowered, product

PARTS = (1, 3, 5)
"""Components of the scalar, antisymmetric and symmetric traceless part."""
STEEPNESS = 5.0
"""The radial basis consists of Gaussians in exp(-5 r / cutoff)."""
NORM_EPSILON = 1e-5
"""Added to variances where features are normalised."""


@dataclass
class TensorNetOptions(SharedOptions):
    """Hyperparameters of TensorNet. Numbers that are `None` come from statistics of the training data."""

    num_layers: int = option(2, at_least=1)
    """Interaction layers after the embedding of neighbours: each lets an atom see one cutoff further."""
    num_rbf: int = option(32, at_least=2)
    """Radial basis functions: Gaussians in exp(-5 r / cutoff), times the envelope."""
    self_loops: bool = True
    """Let every atom be its own neighbour at distance zero, as in TorchMD-NET; false is the form of MatGL."""


class TensorNet(MessagePassing[TensorNetOptions]):
    """Atomic energies, features and vectors from edge vectors. Built from resolved options."""

    Options = TensorNetOptions
    presets = sizes(S=(2, 32), M=(2, 64), L=(2, 128))
    readout_bias = False

    def make_layers(self, make: WeightArguments) -> list[nn.Module]:
        self.vector_dim = self.options.num_features
        layers = [TensorLayer(self.options, **make) for _ in range(self.options.num_layers)]
        return [TensorEmbedding(self.options, **make), *layers, TensorReadout(self.options, **make)]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        basis = barrier(self._basis(around.lengths_over_reach).to(x.dtype), around.switch) * around.envelope
        at_zero = self._basis(x.new_zeros(1, dtype=torch.float64)).to(x.dtype) if self.options.self_loops else None
        embedding, *layers, readout = self.layers
        tensors = embedding(x, basis, at_zero, around)
        for layer in layers:
            tensors = around.edges.fill_ghosts(tensors.flatten(1)).unflatten(1, (sum(PARTS), x.shape[1]))
            tensors = layer(tensors, basis, at_zero, around)
        _, vectors, _ = cut(tensors, PARTS, 1)
        return readout(tensors), vectors.transpose(1, 2)

    def _basis(self, x: Tensor) -> Tensor:
        """(n,) lengths over the largest cutoff -> (n, num_rbf): the functions without their envelope."""
        number, start = self.options.num_rbf, math.exp(-self.reach)
        centres = torch.linspace(start, 1, number, dtype=x.dtype, device=x.device)
        width = 2 / number * (1 - start)
        return torch.exp(-((torch.exp(-STEEPNESS * x).unsqueeze(1) - centres) / width).square())


class TensorEmbedding(nn.Module):
    """Tensors of atoms from the directions to their neighbours, weighted by functions of both species and the distance."""

    basis: Tensor

    def __init__(self, options: TensorNetOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        self.width = width = options.num_features
        self.species = Dense([2 * width, width], "silu", **make)
        self.radial = Dense([options.num_rbf, 3 * width], "silu", **make)
        self.norm = LayerNorm(width, dtype)
        self.gates = Dense([width, 2 * width, 3 * width], "silu", ends_active=True, **make)
        self.mix = TensorLinear(width, **make)
        self.register_buffer("basis", tensor_basis().flatten(1).to(dtype), persistent=False)

    def forward(self, x: Tensor, basis: Tensor, at_zero: Tensor | None, around: Surroundings) -> Tensor:
        """(n_rows, 9, width). x: (n_rows, width); basis: (n, num_rbf); at_zero: (1, num_rbf), for atoms as own neighbours."""
        of_centre, of_neighbour = cut(self.species.weights[0], [self.width, self.width], 0)
        centre, neighbour = product(x, of_centre) + self.species.biases[0], product(x, of_neighbour)
        pairs = gather(centre, around.graph.by_destination) + gather(neighbour, around.graph.by_source)
        weights = around.per_edge(self._radial(basis) * around.envelope)
        directions = self._directions(around.directions)
        factors = [pairs * part for part in cut(weights, [self.width] * 3, 1)]
        parts = zip(cut(directions, PARTS, 1), factors)
        messages = join([one.unsqueeze(2) * other.unsqueeze(1) for one, other in parts], 1)
        tensors = segment_sum(messages, around.graph.by_destination) * around.scale.unsqueeze(2)
        if at_zero is not None:
            scalar, rest = cut(tensors, [1, 8], 1)
            of_self = cut(self._radial(at_zero), [self.width] * 3, 1)[0] * math.sqrt(3)
            tensors = join([scalar + ((centre + neighbour) * of_self).unsqueeze(1), rest], 1)
        gates = self.gates(self.norm(squares(tensors)))
        result: Tensor = self.mix(tensors) * spread(cut(gates, [self.width] * 3, 1))
        return result

    def _radial(self, basis: Tensor) -> Tensor:
        result: Tensor = basis @ self.radial.weights[0] + self.radial.biases[0]
        return result

    def _directions(self, unit: Tensor) -> Tensor:
        """(n_edges, 3) unit vectors -> (n_edges, 9) components of identity + skew(v) + (v v^T - identity / 3)."""
        symmetric = (unit.unsqueeze(2) * unit.unsqueeze(1)).flatten(1) @ self.basis[4:].T
        return join([torch.full_like(unit[:, :1], math.sqrt(3)), unit * math.sqrt(2), symmetric], 1)


class TensorLayer(nn.Module):
    """One interaction: messages of neighbours' tensors, coupled with the atom's tensor by matrix products."""

    basis: Tensor

    def __init__(self, options: TensorNetOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        self.width = width = options.num_features
        self.radial = Dense([options.num_rbf, width, 2 * width, 3 * width], "silu", ends_active=True, **make)
        self.enter, self.leave = TensorLinear(width, **make), TensorLinear(width, **make)
        self.register_buffer("basis", tensor_basis().flatten(1).to(dtype), persistent=False)

    def forward(self, tensors: Tensor, basis: Tensor, at_zero: Tensor | None, around: Surroundings) -> Tensor:
        """tensors: (n_rows, 9, width); basis: (n, num_rbf)."""
        tensors = bounded(tensors)
        own = self.enter(tensors)
        weights = around.per_edge(self._radial(basis) * around.envelope)
        messages = gather(own, around.graph.by_source) * spread(cut(weights, [self.width] * 3, 1))
        message = segment_sum(messages, around.graph.by_destination) * around.scale.unsqueeze(2)
        if at_zero is not None:
            message = message + own * spread(cut(self._radial(at_zero), [self.width] * 3, 1))
        one, other = self._matrices(own), self._matrices(message)
        change: Tensor = self.leave(bounded(self._components(matrix_product(one, other) + matrix_product(other, one))))
        square = self._matrices(change)
        return tensors + change + self._components(matrix_product(square, square))

    def _radial(self, basis: Tensor) -> Tensor:
        result: Tensor = self.radial.after_first(basis @ self.radial.weights[0])
        return result

    def _matrices(self, components: Tensor) -> Tensor:
        """(n_rows, 9, width) -> (n_rows, 3, 3, width)."""
        matrices: Tensor = apply_to_components(self.basis.T, components).unflatten(1, (3, 3))
        return matrices

    def _components(self, matrices: Tensor) -> Tensor:
        """(n_rows, 3, 3, width) -> (n_rows, 9, width)."""
        return apply_to_components(self.basis, matrices.flatten(1, 2))


class TensorReadout(nn.Module):
    """Invariant features: a dense layer of the norms of the three parts."""

    def __init__(self, options: TensorNetOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        width = options.num_features
        self.norm = LayerNorm(3 * width, dtype)
        self.dense = Dense([3 * width, width], "silu", generator=generator, dtype=dtype, ends_active=True)

    def forward(self, tensors: Tensor) -> Tensor:
        """(n_rows, 9, width) -> (n_rows, width)."""
        features: Tensor = self.dense(self.norm(join([squares(part) for part in cut(tensors, PARTS, 1)], 1)))
        return features


class TensorLinear(nn.Module):
    """A matrix (width, width) for each of the three parts, without bias."""

    def __init__(self, width: int, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(unit_normal(width, width, generator=generator, dtype=dtype) / math.sqrt(width)) for _ in PARTS
        )

    def forward(self, tensors: Tensor) -> Tensor:
        # Component by component: the number of rows of all components cannot be traced as a symbol.
        weights = [weight for weight, count in zip(self.weights, PARTS) for _ in range(count)]
        if not is_lowered(tensors):
            return torch.bmm(tensors.transpose(0, 1), torch.stack(weights)).transpose(0, 1)
        components = cut(tensors, [1] * len(weights), 1)
        rows = [product(part.squeeze(1), weight).unsqueeze(1) for part, weight in zip(components, weights)]
        return join(rows, 1)


class LayerNorm(nn.Module):
    """Features of each row with zero mean and unit variance, times a weight and plus a bias of each feature."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(width, dtype=dtype)),
            nn.Parameter(torch.zeros(width, dtype=dtype)),
        )

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        spread = torch.rsqrt(centred.square().mean(1, keepdim=True) + NORM_EPSILON)
        return centred * spread * self.weight + self.bias


def tensor_basis() -> Tensor:
    """(9, 3, 3) float64, an orthonormal basis of the matrices: identity, 3 antisymmetric, 5 symmetric traceless ones.

    Components of v's skew matrix, which maps w to v x w, are sqrt(2) v.
    """
    basis = torch.zeros(9, 3, 3, dtype=torch.float64)
    basis[0] = torch.eye(3, dtype=torch.float64) / math.sqrt(3)
    half = math.sqrt(0.5)
    for k, (i, j) in enumerate(((1, 2), (2, 0), (0, 1))):
        basis[1 + k, i, j], basis[1 + k, j, i] = -half, half
        basis[4 + k, i, j] = basis[4 + k, j, i] = half
    basis[7] = torch.diag(torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)) * half
    basis[8] = torch.diag(torch.tensor([-1.0, -1.0, 2.0], dtype=torch.float64)) / math.sqrt(6)
    return basis


def apply_to_components(matrix: Tensor, components: Tensor) -> Tensor:
    """The product of a constant matrix (9, 9) and the components (n, 9, width) of every row and channel."""
    return torch.bmm(matrix.expand(components.shape[0], -1, -1), components)


def squares(tensors: Tensor) -> Tensor:
    """(n, k, width) components -> (n, width) squared Frobenius norms."""
    return tensors.square().sum(1)


def bounded(tensors: Tensor) -> Tensor:
    """Tensors (n, 9, width) over one plus their squared norms."""
    return tensors / (squares(tensors) + 1).unsqueeze(1)


def spread(parts: Sequence[Tensor]) -> Tensor:
    """A factor (n, width) of each of the three parts -> (n, 9, width), the factor of every component."""
    return join([part.unsqueeze(1).expand(-1, count, -1) for part, count in zip(parts, PARTS)], 1)


def matrix_product(one: Tensor, other: Tensor) -> Tensor:
    """(n, 3, 3, width), (n, 3, 3, width) -> the product of the matrices of each row and channel."""
    return (one.unsqueeze(3) * other.unsqueeze(1)).sum(2)
