"""M3GNet: edges with features, changed by three-body interactions (Chen and Ong, Nature Computational Science 2, 718, 2022).

An edge from atom i to its neighbour j receives the sum over the other neighbours k of i of spherical Bessel functions of the
distance to k times Legendre polynomials of the angle at i. By the addition theorem of spherical harmonics this sum over triples
is a product of two sums over edges, so nothing is ever listed by triples:

    sum_k f(r_ik) P_l(cos jik) = 1 / (2l + 1) sum_m Y_lm(j) [sum_k f(r_ik) Y_lm(k)],  minus the term k = j

With `avg_num_neighbours` of 1 and the same weights, features are those of MatGL's M3GNet (`tests/models/invariant/
test_peer_encoders.py`). The radial basis of edges has two continuous derivatives at the cutoff, and the energy of an isolated
atom is subtracted. Energies are read out by a perceptron, as in the other networks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import spherical_jn
from torch import Tensor, nn

from forgefield.config.option import option
from forgefield.errors import ForgefieldError
from forgefield.models.invariant.message_passing import (
    Dense,
    MessagePassing,
    SharedOptions,
    Surroundings,
    complete_options,
    sizes,
)
from forgefield.ops.functions import polynomial_cutoff
from forgefield.ops.graph import barrier, cut, gather, join, segment_sum
from forgefield.ops.harmonics import SphericalHarmonics
from forgefield.ops.linear import WeightArguments, unit_normal
from forgefield.ops.products import product

THREE_BODY_SHARE = 0.8
"""Default of the three-body cutoff, in units of the cutoff: 4 A of 5 A in the paper."""
THREE_BODY_ENVELOPE_P = 3.0
"""Exponent of the envelope of three-body interactions."""


@dataclass
class M3GNetOptions(SharedOptions):
    """Hyperparameters of M3GNet. Numbers that are `None` come from statistics of the training data.

    The envelope of edges is part of the radial basis, so `envelope` and `polynomial_cutoff_p` must be left at their defaults.
    """

    max_n: int = option(3, at_least=1)
    """Radial basis functions, of edges and for each degree of three-body interactions."""
    max_l: int = option(3, at_least=1, at_most=6)
    """Degrees of three-body interactions, from 0 to max_l - 1."""
    three_body_cutoff: float | None = option(None, above=0)
    """Radius of three-body interactions, A. Default: 0.8 times the cutoff."""
    three_body_basis: str = option("bessel", choices=("bessel", "smooth"))
    """Radial functions of three-body interactions: spherical Bessel functions, as in the paper, or those of edges (smooth)."""


class M3GNet(MessagePassing[M3GNetOptions]):
    """Atomic energies and features from edge vectors. Built from resolved options."""

    Options = M3GNetOptions
    presets = sizes(S=(2, 32), M=(3, 64), L=(4, 128))
    readout_bias = False

    def __init__(
        self,
        options: M3GNetOptions,
        *,
        species: Sequence[str],
        cutoff: float,
        adaptive_cutoff: float | None = None,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator,
    ) -> None:
        super().__init__(
            options, species=species, cutoff=cutoff, adaptive_cutoff=adaptive_cutoff, dtype=dtype, generator=generator
        )
        assert options.three_body_cutoff is not None
        self.three_body_scale = self.cutoff / options.three_body_cutoff
        self.harmonics = SphericalHarmonics(options.max_l - 1)
        roots = bessel_roots(options.max_l, options.max_n)
        self.bessel = [
            [(float(root), math.sqrt(2 / self.cutoff**3) / abs(float(spherical_jn(degree + 1, root)))) for root in row]
            for degree, row in enumerate(roots)
        ]

    @classmethod
    def complete_options(
        cls, options: M3GNetOptions, species: tuple[str, ...], cutoff: float, statistics: Mapping[str, Any]
    ) -> M3GNetOptions:
        options = complete_options(options, species, cutoff, statistics)
        default = SharedOptions()
        if (options.envelope, options.polynomial_cutoff_p) != (default.envelope, default.polynomial_cutoff_p):
            raise ForgefieldError(
                "model.envelope and model.polynomial_cutoff_p have no effect in m3gnet, whose radial basis is smooth; "
                "leave them out."
            )
        radius = THREE_BODY_SHARE * cutoff if options.three_body_cutoff is None else options.three_body_cutoff
        if radius > cutoff:
            raise ForgefieldError(
                f"model.three_body_cutoff is {radius:g} A; it must be at most data.cutoff={cutoff:g}."
            )
        return replace(options, three_body_cutoff=float(radius))

    def make_layers(self, make: WeightArguments) -> list[nn.Module]:
        embedding = Dense([self.options.max_n, self.options.num_features], "silu", ends_active=True, **make)
        return [embedding, *(M3GNetLayer(self.options, **make) for _ in range(self.options.num_layers))]

    def interact(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor | None]:
        embedding, *layers = self.layers
        scaled = around.lengths_over_radius
        basis = barrier(smooth_bessels(scaled, self.options.max_n, self.cutoff).to(x.dtype), around.switch)
        envelope = polynomial_cutoff(scaled * self.three_body_scale, THREE_BODY_ENVELOPE_P).unsqueeze(1)
        inner = barrier((self._three_body_basis(scaled) * envelope).to(x.dtype), around.switch)
        triples = Triples(
            around.per_edge(inner),
            around.per_edge(barrier(envelope.to(x.dtype), around.switch)),
            cut(self.harmonics(around.directions.double()).to(x.dtype), degrees(self.options.max_l), 1),
        )
        assert isinstance(embedding, Dense)
        features = around.per_edge(embedding.after_first(basis @ embedding.weights[0]))
        for number, layer in enumerate(layers):
            x = around.edges.fill_ghosts(x) if number else x
            x, features = layer(x, features, basis, triples, around)
        return x, None

    def _three_body_basis(self, x: Tensor) -> Tensor:
        """(n,) lengths over the cutoff -> (n, max_l * max_n), degree by degree."""
        if self.options.three_body_basis == "smooth":
            return smooth_bessels(x, self.options.max_n * self.options.max_l, self.cutoff)
        columns = [
            spherical_bessel(degree, x * root) * norm for degree, row in enumerate(self.bessel) for root, norm in row
        ]
        return torch.stack(columns, 1)


def degrees(max_l: int) -> list[int]:
    """Numbers of components of the degrees."""
    return [2 * degree + 1 for degree in range(max_l)]


class Triples:
    """What three-body interactions need to know of each edge.

    inner: (n_edges, max_l * max_n), radial functions times the envelope. envelope: (n_edges, 1). harmonics: (n_edges, 2l + 1)
    of each degree, whose squares sum to 2l + 1.
    """

    def __init__(self, inner: Tensor, envelope: Tensor, harmonics: Sequence[Tensor]) -> None:
        self.inner, self.envelope, self.harmonics = inner, envelope, harmonics

    def sums(self, of_atoms: Tensor, around: Surroundings) -> Tensor:
        """For every edge the sum over the other neighbours of its centre: (n_edges, max_l * max_n).

        of_atoms: (n_rows, max_l * max_n), factors of the neighbours.
        """
        graph, n_degrees = around.graph, len(self.harmonics)
        weights = self.inner * gather(of_atoms, graph.by_source)
        parts = cut(weights, [weights.shape[1] // n_degrees] * n_degrees, 1)
        terms = [part.unsqueeze(1) * harmonic.unsqueeze(2) for part, harmonic in zip(parts, self.harmonics)]
        moments = gather(segment_sum(join(terms, 1), graph.by_destination), graph.by_destination)
        sums = []
        for moment, harmonic, part in zip(cut(moments, degrees(n_degrees), 1), self.harmonics, parts):
            count = harmonic.shape[1]
            all_neighbours = (moment * harmonic.unsqueeze(2)).sum(1)
            sums.append((all_neighbours - count * part) / math.sqrt(4 * math.pi * count))
        return join(sums, 1) * self.envelope


class M3GNetLayer(nn.Module):
    """Three-body interactions, then an update of edges and one of atoms."""

    def __init__(self, options: M3GNetOptions, *, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        width, degree = options.num_features, options.max_n * options.max_l
        self.of_atoms = Dense([width, degree], "silu", **make)
        self.of_triples = GatedDense([degree, width], bias=False, **make)
        self.edge_update = GatedDense([3 * width, width, width, width], **make)
        self.atom_update = GatedDense([3 * width, width, width, width], **make)
        self.edge_radial, self.atom_radial = (
            nn.Parameter(unit_normal(options.max_n, width, **make) / math.sqrt(options.max_n)) for _ in range(2)
        )

    def forward(
        self, x: Tensor, features: Tensor, basis: Tensor, triples: Triples, around: Surroundings
    ) -> tuple[Tensor, Tensor]:
        """Features of atoms (n_rows, width) and of edges (n_edges, width). basis: (n, max_n)."""
        features = features + self.of_triples(triples.sums(torch.sigmoid(self.of_atoms(x)), around))
        features = features + self.edge_update.of_edges(x, features, around) * around.per_edge(basis @ self.edge_radial)
        messages = self.atom_update.of_edges(x, features, around) * around.per_edge(basis @ self.atom_radial)
        return x + segment_sum(messages, around.graph.by_destination) * around.scale, features


class GatedDense(nn.Module):
    """A perceptron times another one with the same widths, which ends in a sigmoid."""

    def __init__(
        self, widths: Sequence[int], *, generator: torch.Generator, dtype: torch.dtype, bias: bool = True
    ) -> None:
        super().__init__()
        make: WeightArguments = {"generator": generator, "dtype": dtype}
        self.values = Dense(widths, "silu", bias=bias, ends_active=True, **make)
        self.gates = Dense(widths, "silu", bias=bias, **make)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.values(x) * torch.sigmoid(self.gates(x))
        return result

    def of_edges(self, x: Tensor, features: Tensor, around: Surroundings) -> Tensor:
        """The result for the joined features of centre, neighbour and edge; products with atoms are computed per atom."""
        return self._of_edges(self.values, x, features, around) * torch.sigmoid(
            self._of_edges(self.gates, x, features, around)
        )

    @staticmethod
    def _of_edges(dense: Dense, x: Tensor, features: Tensor, around: Surroundings) -> Tensor:
        of_centre, of_neighbour, of_edge = cut(dense.weights[0], [x.shape[1], x.shape[1], features.shape[1]], 0)
        inputs = product(features, of_edge) + gather(product(x, of_centre), around.graph.by_destination)
        return dense.after_first(inputs + gather(product(x, of_neighbour), around.graph.by_source))


def smooth_bessels(x: Tensor, number: int, cutoff: float) -> Tensor:
    """(n,) lengths over the cutoff -> (n, number): orthonormal combinations of spherical Bessel functions of degree 0 that
    end with two continuous derivatives (Kocer, Mason and Erturk, AIP Advances 10, 015021, 2020). cutoff: A, sets the unit."""
    inside = torch.where(x < 1, x, torch.ones_like(x))
    angles = [inside * (math.pi * k) for k in range(1, number + 2)]
    sincs = [torch.sin(angle) / angle for angle in angles]
    columns: list[Tensor] = []
    last = 1.0
    for n in range(number):
        factor = (-1) ** n * math.sqrt(2) * math.pi / cutoff**1.5 * (n + 1) * (n + 2) / math.hypot(n + 1, n + 2)
        function = factor * (sincs[n] + sincs[n + 1])
        overlap = n**2 * (n + 2) ** 2 / (4 * (n + 1) ** 4 + 1)
        if columns:
            norm = 1 - overlap / last
            function = (function + math.sqrt(overlap / last) * columns[-1]) / math.sqrt(norm)
            last = norm
        columns.append(function)
    return torch.stack(columns, 1) * (x < 1).to(x.dtype).unsqueeze(1)


def spherical_bessel(degree: int, x: Tensor) -> Tensor:
    """j_degree(x), x > 0, by upward recurrence."""
    sine, cosine = torch.sin(x), torch.cos(x)
    below, here = cosine / x, sine / x
    for number in range(degree):
        below, here = here, here * ((2 * number + 1) / x) - below
    return here


def bessel_roots(max_l: int, max_n: int) -> np.ndarray:
    """(max_l, max_n) the first positive roots of spherical Bessel functions of degrees 0 to max_l - 1."""
    rows = [math.pi * np.arange(1, max_n + max_l)]
    for degree in range(1, max_l):  # roots of one degree separate those of the next
        function = partial(spherical_jn, degree)
        row = [brentq(function, a, b, xtol=1e-14) for a, b in zip(rows[-1], rows[-1][1:])]
        rows.append(np.array(row))
    return np.array([row[:max_n] for row in rows])
