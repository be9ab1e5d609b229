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
        """Means of F_i F_j F_k, (n, n_pairs, n_even), for the pairs (i, j) and the even degrees k of the plan."""
        plan, first = self._plan, by_degree[0]
        total = first.new_zeros(first.shape[0], plan.n_pairs, plan.n_even)
        if plan.n_pairs * plan.n_even == 0:
            return total
        if first.requires_grad:
            for matrices in self._functions:
                values = torch.stack([sums @ matrix for sums, matrix in zip(by_degree[1:], matrices)])
                total = total + plan.means(plan.products(values), values)
            return total
        for matrices in self._functions:
            shape = first.shape[0], matrices[0].shape[1]
            values = first.new_empty(len(matrices), *shape)
            for sums, matrix, target in zip(by_degree[1:], matrices, values):
                torch.mm(sums, matrix, out=target)
            total += plan.means(plan.products(values, out=first.new_empty(plan.n_pairs, *shape)), values)
        return total


@dataclass(frozen=True)
class _Plan:
    """Which products of F_i F_j with which F_k hold every component, as few as possible and in the form of matrix products.

    j1 + j2 + j is even, so either two degrees are odd and one even, or all are even. Pairs of odd degrees and, with the even
    degrees parted into a lower and an upper half, pairs within a half: one of them is in every triple, the third degree is even.
    """

    groups: tuple[slice, ...]
    n_pairs: int
    n_even: int
    places: Tensor
    """Of each component without a degree 0: where it is in (n_pairs * n_even)."""
    factors: Tensor
    inner: Tensor
    """Of each component: where it is in [those with a degree 0 | the others]."""
    squares: tuple[float, ...]

    @classmethod
    def of(cls, twojmax: int, dtype: torch.dtype, device: torch.device) -> _Plan:
        odd, even = list(range(1, twojmax + 1, 2)), list(range(2, twojmax + 1, 2))
        halves = [even[: len(even) // 2], even[len(even) // 2 :]]
        groups = [group for group in (odd, *halves) if group]
        pairs = [(low, high) for group in groups for place, low in enumerate(group) for high in group[place:]]
        row = {pair: index for index, pair in enumerate(pairs)}
        triples = bispectrum_triples(twojmax)
        places = []
        for triple in triples:
            if 0 in triple:
                continue
            low, middle, high = sorted(triple)
            options = (((low, middle), high), ((middle, high), low), ((low, high), middle))
            pair, third = next(option for option in options if option[0] in row and option[1] in even)
            places.append(row[pair] * len(even) + even.index(third))
        with_zero = [triple for triple in triples if 0 in triple]
        without = [triple for triple in triples if 0 not in triple]
        order = [(with_zero + without).index(triple) for triple in triples]
        return cls(
            groups=tuple(slice(group[0] - 1, group[-1], 2) for group in groups),
            n_pairs=len(pairs),
            n_even=len(even),
            places=torch.tensor(places, dtype=torch.int64, device=device),
            factors=torch.tensor([t[2] + 1.0 for t in without], dtype=dtype, device=device),
            inner=torch.tensor(order, device=device),
            squares=tuple(1 / (t[2] + 1.0) for t in with_zero),
        )

    def products(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """F_i F_j of all pairs: values (twojmax, n, n_nodes) of degrees 1, 2, ... -> (n_pairs, n, n_nodes)."""
        made, start = [], 0
        for members in (values[group] for group in self.groups):
            for place, member in enumerate(members):
                count = members.shape[0] - place
                into = None if out is None else out[start : start + count]
                made.append(torch.mul(members[place:], member, out=into))
                start += count
        return torch.cat(made) if out is None else out

    def means(self, products: Tensor, values: Tensor) -> Tensor:
        """Sums over nodes of products (n_pairs, n, n_nodes) times F_k of even k: (n, n_pairs, n_even)."""
        return torch.bmm(products.permute(1, 0, 2), values[1::2].permute(1, 2, 0))

    def components(self, by_degree: tuple[Tensor, ...], means: Tensor) -> Tensor:
        """All components (n, size) from the harmonic sums of each degree and the means of products of three."""
        norms = torch.stack([(sums * sums).sum(1) * factor for sums, factor in zip(by_degree, self.squares)], 1)
        coupled = means.flatten(1).index_select(1, self.places) * self.factors
        return torch.cat([norms * by_degree[0], coupled], 1).index_select(1, self.inner)
