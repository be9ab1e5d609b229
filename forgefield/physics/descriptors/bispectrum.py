"""The SNAP bispectrum of points, equal to LAMMPS' `compute sna/grid`, by quadrature instead of Clebsch-Gordan sums.

Each neighbour is a point q_k on the unit sphere of four dimensions, with a weight w_k; the point itself is the pole e with
weight 1. LAMMPS sums Wigner matrices of the q_k and couples three of them at a time. The same numbers are
B(j1, j2, j) = (j + 1) <F_j1 F_j2 F_j>, a mean over the sphere, with real functions F_j(q) = sum_k w_k U_j(q . q_k), U_j
Chebyshev polynomials of the second kind: characters of SU(2), whose products the coefficients of Clebsch and Gordan expand.
The mean is taken exactly by a quadrature. So all of the cost is matrix products that are the same for every point
(harmonic sums -> F_j on the nodes), and sums of products of three numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forgefield.physics.descriptors.native import triple_sums
from forgefield.physics.descriptors.options import DescriptorOptions
from forgefield.physics.descriptors.sphere import SphereHarmonics, quadrature
from forgefield.physics.descriptors.surroundings import Neighbours

CLOSEST = 1e-20
"""A^2: LAMMPS does not count an atom that lies on the point itself, and neither do we."""
_NODES_AT_ONCE = 256
"""On a CPU the nodes are taken in blocks, so that what is multiplied is still in its cache."""


def bispectrum_triples(twojmax: int) -> list[tuple[int, int, int]]:
    """(j1, j2, j) of the components, in the order of LAMMPS."""
    return [
        (j1, j2, j)
        for j1 in range(twojmax + 1)
        for j2 in range(j1 + 1)
        for j in range(j1 - j2, min(twojmax, j1 + j2) + 1, 2)
        if j >= j1
    ]


class Bispectrum:
    """Bispectrum components of points from their neighbours, on one device."""

    closest = CLOSEST

    def __init__(self, options: DescriptorOptions, weights: list[float], device: torch.device) -> None:
        """weights: of the species, in the order of the species table."""
        self.options = options
        self.dtype = getattr(torch, options.precision)
        self._weights = torch.tensor(weights, dtype=torch.float64, device=device)
        exact = SphereHarmonics(options.twojmax, torch.float64, device)
        self._harmonics = SphereHarmonics(options.twojmax, self.dtype, device)
        pole = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64, device=device)
        self._self = exact.at(pole).to(self.dtype)
        self._plan = _Plan.of(options.twojmax, self.dtype, device)
        self._functions = self._on_nodes(exact, device)
        rows = tuple((j2 - 1, j1 - 1, j - 1) for j1, j2, j in self._plan.triples)
        compiled = device.type == "cpu" and options.kernel == "auto" and bool(rows)
        self._compiled = triple_sums(rows, self.dtype) if compiled else None

    def _on_nodes(self, exact: SphereHarmonics, device: torch.device) -> list[list[Tensor]]:
        """For blocks of nodes, the matrices (n_harmonics, n_nodes) of degrees 1, 2, ... that turn sums into F_j.

        The cube root of the weight of a node is part of them: a product of three F_j then holds the weight itself.
        """
        degree = 3 * self.options.twojmax // 2 * 2
        nodes, weights, equal = quadrature(degree)
        values = exact.at(torch.as_tensor(nodes, device=device)) * torch.as_tensor(np.cbrt(weights), device=device)[:, None]
        by_degree = [part / (j + 1) for j, part in enumerate(values.split(exact.sizes, 1))][1:]
        block = len(nodes) if device.type != "cpu" else max(_NODES_AT_ONCE // equal, 1) * equal
        return [
            [part[start : start + block].T.to(self.dtype).contiguous() for part in by_degree]
            for start in range(0, len(nodes), block)
        ]

    def of(self, neighbours: Neighbours) -> Tensor:
        """Components (n, size) of points from their neighbours."""
        sums = self._self + self._harmonics.sums(*self._on_sphere(neighbours))
        by_degree = sums.split(self._harmonics.sizes, 1)
        return self._plan.components(by_degree, self._triple_means(by_degree))

    def _on_sphere(self, neighbours: Neighbours) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Neighbours as points on the sphere of four dimensions (a, b), each (n, k) real arrays, and their weights (n, k)."""
        options = self.options
        x, y, z = neighbours.displacement
        distance = torch.sqrt(x * x + y * y + z * z)
        share = (distance - options.rmin0) / (options.cutoff - options.rmin0)
        angle = options.rfac0 * math.pi * share
        sine, cosine = torch.sin(angle), torch.cos(angle)
        if options.rmin0 > 0:  # LAMMPS takes the same half of the sphere for distances below rmin0
            sine, cosine = sine.abs(), torch.where(sine < 0, -cosine, cosine)
        scale = sine / distance
        weight = neighbours.there * self._weights[neighbours.species]
        if options.switch:
            weight = weight * (0.5 + 0.5 * torch.cos(math.pi * share.clamp(min=0.0)))
        real = [part.to(self.dtype) for part in (cosine, scale * z, scale * x, scale * y, weight)]
        return (real[0], real[1]), (real[2], real[3]), real[4]

    def _triple_means(self, by_degree: tuple[Tensor, ...]) -> Tensor:
        """Means of F_j1 F_j2 F_j, (n, n_triples), of the triples without a degree 0."""
        plan, first = self._plan, by_degree[0]
        if not plan.triples:
            return first.new_zeros(first.shape[0], 0)
        if first.requires_grad:
            parts = [
                plan.means(torch.stack([sums @ matrix for sums, matrix in zip(by_degree[1:], matrices)]))
                for matrices in self._functions
            ]
            return torch.stack(parts).sum(0)
        total = first.new_zeros(first.shape[0], len(plan.triples))
        for matrices in self._functions:
            values = first.new_empty(len(matrices), first.shape[0], matrices[0].shape[1])
            for sums, matrix, target in zip(by_degree[1:], matrices, values):
                torch.mm(sums, matrix, out=target)
            if self._compiled is not None:
                self._compiled.add(values, total)
            else:
                total += plan.means(values)
        return total


@dataclass(frozen=True)
class _Plan:
    """Which products of F_i F_j with which F_k hold every component, as few as possible and in the form of matrix products.

    j1 + j2 + j is even, so either two degrees are odd and one even, or all are even. Pairs of odd degrees and, with the even
    degrees parted into a lower and an upper half, pairs within a half: one of them is in every triple, the third degree is even.
    """

    triples: tuple[tuple[int, int, int], ...]
    """(j1, j2, j) of the components without a degree 0."""
    groups: tuple[slice, ...]
    """Rows of F_1, F_2, ... of which all pairs are multiplied."""
    places: Tensor
    """Of each of `triples`: where it is among all pairs times all even degrees."""
    order: Tensor
    """Of each component: where it is in [those with a degree 0 | triples]."""
    factors: Tensor
    """j + 1 of the triples."""

    @classmethod
    def of(cls, twojmax: int, dtype: torch.dtype, device: torch.device) -> _Plan:
        odd, even = list(range(1, twojmax + 1, 2)), list(range(2, twojmax + 1, 2))
        groups = [group for group in (odd, even[: len(even) // 2], even[len(even) // 2 :]) if group]
        pairs = [(low, high) for group in groups for place, low in enumerate(group) for high in group[place:]]
        every = bispectrum_triples(twojmax)
        with_zero, triples = [t for t in every if 0 in t], [t for t in every if 0 not in t]
        places = []
        for triple in triples:
            low, middle, high = sorted(triple)
            choices = ((low, middle), high), ((middle, high), low), ((low, high), middle)
            pair, third = next(choice for choice in choices if choice[0] in pairs and choice[1] in even)
            places.append(pairs.index(pair) * len(even) + even.index(third))
        return cls(
            triples=tuple(triples),
            groups=tuple(slice(group[0] - 1, group[-1], 2) for group in groups),
            places=torch.tensor(places, dtype=torch.int64, device=device),
            order=torch.tensor([(with_zero + triples).index(triple) for triple in every], device=device),
            factors=torch.tensor([j + 1.0 for _, _, j in triples], dtype=dtype, device=device),
        )

    def means(self, values: Tensor) -> Tensor:
        """Sums over nodes of F_j1 F_j2 F_j: values (twojmax, n, n_nodes) of F_1, F_2, ... -> (n, n_triples)."""
        members = [values[group] for group in self.groups]
        products = torch.cat([group[place:] * group[place] for group in members for place in range(group.shape[0])])
        every = torch.bmm(products.permute(1, 0, 2), values[1::2].permute(1, 2, 0))
        return every.flatten(1).index_select(1, self.places)

    def components(self, by_degree: tuple[Tensor, ...], means: Tensor) -> Tensor:
        """All components (n, size) from the harmonic sums of each degree and the means of products of three.

        With a degree 0 the mean of a product is known: F_0 is the same everywhere, and the harmonics are orthonormal.
        """
        norms = [(sums * sums).sum(1) / (j + 1) for j, sums in enumerate(by_degree)]
        plain = torch.stack(norms, 1) * by_degree[0]
        return torch.cat([plain, means * self.factors], 1).index_select(1, self.order)
