"""The SNAP bispectrum of points, equal to LAMMPS' `compute sna/grid`, by quadrature instead of Clebsch-Gordan sums.

Each neighbour is a point q_k on the unit sphere of four dimensions, with a weight w_k; the point itself is the pole e with
weight 1. LAMMPS sums Wigner matrices of the q_k and couples three of them at a time. The same numbers are
B(j1, j2, j) = (j + 1) <F_j1 F_j2 F_j>, a mean over the sphere, with real functions F_j(q) = sum_k w_k U_j(q . q_k), U_j
Chebyshev polynomials of the second kind: characters of SU(2), whose products are expanded in Clebsch-Gordan coefficients.
A quadrature gives the mean exactly. The cost is that of matrix products with the same matrices for every point
(harmonic sums -> F_j on the nodes), and of sums of products of three numbers.

A point of the sphere is (Re a, Im a, Re b, Im b) with |a|^2 + |b|^2 = 1. The real harmonics of degree j are
Re/Im(a^p) Re/Im(b^q) times a polynomial in |a|^2 - |b|^2 of degree s, with p + q + 2 s = j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.polynomial import chebyshev, legendre
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.native import TripleSums, triple_sums
from forgefield.ldos.descriptors.neighbourhoods import Neighbours


class SphereHarmonics:
    """Harmonics of all degrees 0 ... `degree`, in order of degree: (degree + 1) (degree + 2) (2 degree + 3) / 6 of them.

    For each degree, those that are equal at a point and at its mirror image (conjugates of a and b) come first, then those that
    change sign. `sizes` are the numbers of both for degree 0, 1, 2, ...: [1, 0, 2, 2, 5, 4, ...].
    """

    def __init__(self, degree: int, dtype: torch.dtype, device: torch.device) -> None:
        self.degree = degree
        conversions, kinds = _conversions(degree)
        self._conversions = [torch.as_tensor(c, dtype=dtype, device=device) for c in conversions]
        self._order = torch.as_tensor(np.argsort(kinds, kind="stable"), device=device)
        self.sizes = np.bincount(kinds, minlength=2 * degree + 2).tolist()

    def sums(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
        """Weighted sums of all harmonics over the k points of each of n sets: (n, k) real arrays -> (n, n_harmonics)."""
        tilt = a[0] * a[0] + a[1] * a[1] - b[0] * b[0] - b[1] * b[1]
        left = _outer(_powers(a, self.degree), _chebyshev(tilt, self.degree // 2))
        right = _powers(b, self.degree) * weight
        moments = torch.bmm(right.permute(1, 0, 2), left.permute(1, 2, 0))
        harmonics = [moments[:, column] @ conversion for column, conversion in enumerate(self._conversions)]
        return torch.cat(harmonics, 1).index_select(1, self._order)

    def at(self, points: Tensor) -> Tensor:
        """Harmonics at points, (n, 4) -> (n, n_harmonics)."""
        x = points.unsqueeze(-1)
        return self.sums((x[:, 0], x[:, 1]), (x[:, 2], x[:, 3]), torch.ones_like(x[:, 0]))


def quadrature(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (n, 4) and weights (n,) for the mean over the sphere; each node represents itself and its mirror image.

    The mirror image (conjugates of a and b) has the same weight, so that weights sum to 1/2. Exact for polynomials up to
    `degree` (even) that are equal at opposite points: Gauss nodes in |a|^2 - |b|^2, equal steps in the sum and the
    difference of the phases.
    """
    steps = degree // 2 + 1
    tilts, tilt_weights = legendre.leggauss(-(-steps // 2))
    angles = 2 * np.pi * (np.arange(steps) + 0.5) / steps
    index = np.arange(steps**2)
    unique = index[index <= index[::-1]]  # the mirror image of a pair of phases has its index counted from the end
    total, difference = angles[unique // steps], angles[unique % steps]
    share = np.where(unique == index[::-1][unique], 0.5, 1.0)
    a = np.sqrt((1 + tilts) / 2)[:, None] * np.exp(0.5j * (total + difference))
    b = np.sqrt((1 - tilts) / 2)[:, None] * np.exp(0.5j * (total - difference))
    weights = tilt_weights[:, None] / 2 / steps**2 * share
    return np.stack([a.real, a.imag, b.real, b.imag], -1).reshape(-1, 4), weights.ravel()


def _powers(z: tuple[Tensor, Tensor], largest: int) -> Tensor:
    """1, Re z, Im z, Re z^2, Im z^2, ... of complex z in two real arrays (n, k): (2 largest + 1, n, k)."""
    rows = [torch.ones_like(z[0]), *z][: 2 * largest + 1]
    for _ in range(1, largest):
        real, imaginary = rows[-2], rows[-1]
        rows.append(torch.addcmul(real * z[0], imaginary, z[1], value=-1))
        rows.append(torch.addcmul(real * z[1], imaginary, z[0]))
    return torch.stack(rows)


def _chebyshev(x: Tensor, largest: int) -> list[Tensor]:
    """Chebyshev polynomials of degrees 0 ... `largest`; their values stay within -1 and 1."""
    polynomials = [torch.ones_like(x), x]
    twice = 2 * x
    for _ in range(1, largest):
        polynomials.append(torch.addcmul(-polynomials[-2], twice, polynomials[-1]))
    return polynomials[: largest + 1]


def _outer(powers: Tensor, polynomials: list[Tensor]) -> Tensor:
    """Products of polynomials (n, k) of degree s = 0, 1, ... and all powers p with p + 2 s up to the degree: (n_left, n, k)."""
    counts = [powers.shape[0] - 4 * s for s in range(len(polynomials))]
    if powers.requires_grad:
        return torch.cat([powers[:count] * polynomial for count, polynomial in zip(counts, polynomials)])
    products = powers.new_empty(sum(counts), *powers.shape[1:])
    for count, polynomial, target in zip(counts, polynomials, products.split(counts)):
        torch.mul(powers[:count], polynomial, out=target)
    return products


def _conversions(degree: int) -> tuple[list[np.ndarray], np.ndarray]:
    """From moments to orthonormal harmonics: one matrix (n_left, n_harmonics) per row of `_powers(b)`, and the kind of each
    harmonic: twice the degree, plus one if the mirror image has the other sign.

    Rows of a matrix follow `left` of `SphereHarmonics.sums`: by s, then 1, Re a, Im a, Re a^2, ...
    """
    start = np.cumsum([0] + [2 * (degree - 2 * s) + 1 for s in range(degree // 2 + 1)])
    matrices, kinds = [], []
    for column in range(2 * degree + 1):
        q = (column + 1) // 2
        columns = []
        for row in range(2 * (degree - q) + 1):
            p = (row + 1) // 2
            radial = _radial(p, q, (degree - p - q) // 2)
            for s, coefficients in enumerate(radial):
                entries = np.zeros(start[-1])
                entries[[start[t] + row for t in range(s + 1)]] = coefficients[: s + 1]
                columns.append(entries)
                kinds.append(2 * (p + q + 2 * s) + int((row > 0 and row % 2 == 0) != (column > 0 and column % 2 == 0)))
        matrices.append(np.stack(columns, 1))
    return matrices, np.array(kinds)


def _radial(p: int, q: int, largest: int) -> np.ndarray:
    """Row s of (largest + 1, largest + 1): Chebyshev coefficients of the polynomial that makes a harmonic of a^p b^q."""
    nodes, weights = legendre.leggauss(p + q + 2 * largest + 2)
    density = 0.5 * weights * ((1 + nodes) / 2) ** p * ((1 - nodes) / 2) ** q
    density *= (0.5 if p else 1.0) * (0.5 if q else 1.0)
    _, triangle = np.linalg.qr(np.sqrt(density)[:, None] * chebyshev.chebvander(nodes, largest))
    return np.linalg.inv(triangle * np.sign(np.diag(triangle))[:, None]).T


CLOSEST = 1e-20
"""A^2: an atom at the point itself is ignored, as in LAMMPS."""
_NODES_AT_ONCE, _NODES_AT_ONCE_ELSEWHERE = 256, 4096
"""Nodes per block; on a CPU the factors of products then stay in the cache."""
_WORTH_COMPILING = 5000
"""Number of points above which compiling the loop takes less time than it saves."""


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
        kinds = list(zip(self._functions[2::2], self._functions[3::2]))
        self._on_both_sides = [torch.cat([torch.cat([even, odd]), torch.cat([even, -odd])], 1) for even, odd in kinds]
        self._compiled: TripleSums | None = None

    def ready(self, n_points: int) -> None:
        """Prepare for `n_points` points; call this before `of`. Compiles the loop used on a CPU if requested or worthwhile."""
        kernel, on_cpu = self.options.kernel, self._weights.device.type == "cpu"
        if kernel == "compiled" and not on_cpu:
            raise ForgefieldError("kernel='compiled' is for the CPU; on other devices it must be 'auto' or 'torch'")
        worth = kernel == "compiled" or (kernel == "auto" and on_cpu and n_points >= _WORTH_COMPILING)
        if self._compiled is None and worth and self._plan.triples:
            rows = tuple((j2 - 1, j1 - 1, j - 1) for j1, j2, j in self._plan.triples)
            self._compiled = triple_sums(rows, self.dtype, required=kernel == "compiled")

    def _on_nodes(self, exact: SphereHarmonics, device: torch.device) -> list[Tensor]:
        """Matrices (n_harmonics, n_nodes) from sums to F_j at nodes, and to its change at their mirror images.

        Two for each degree, in the order of the harmonics. They include the cube root of the weight of a node, so that a
        product of three F_j includes the weight itself.
        """
        nodes, weights = quadrature(3 * self.options.twojmax // 2 * 2)
        values = (
            exact.at(torch.as_tensor(nodes, device=device)) * torch.as_tensor(np.cbrt(weights), device=device)[:, None]
        )
        by_kind = values.split(exact.sizes, 1)
        return [(harmonics / (kind // 2 + 1)).T.to(self.dtype).contiguous() for kind, harmonics in enumerate(by_kind)]

    @property
    def points_at_once(self) -> int:
        """Number of points per chunk: few enough for the cache of a CPU, enough to fill an accelerator."""
        if self._weights.device.type != "cpu":
            return 4096
        return 64 if self._compiled is None else 256

    def of(self, neighbours: Neighbours) -> Tensor:
        """Components (n, size) of points from their neighbours."""
        sums = self._self + self._harmonics.sums(*self._on_sphere(neighbours))
        if not self._plan.triples:
            means = sums.new_zeros(sums.shape[0], 0)
        elif self._compiled is not None and not sums.requires_grad:
            means = self._means_compiled(sums, self._compiled)
        else:
            means = self._means(sums)
        return self._plan.components(sums, means)

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
        weight = neighbours.exists * self._weights[neighbours.species]
        if options.switch:
            weight = weight * (0.5 + 0.5 * torch.cos(math.pi * share.clamp(min=0.0)))
        real = [values.to(self.dtype) for values in (cosine, scale * z, scale * x, scale * y, weight)]
        return (real[0], real[1]), (real[2], real[3]), real[4]

    def _means(self, sums: Tensor) -> Tensor:
        """Means of F_j1 F_j2 F_j, (n, n_triples), for the triples without degree 0."""
        by_degree = sums.split(self._plan.sizes, 1)[1:]
        total = sums.new_zeros(sums.shape[0], len(self._plan.triples))
        block = _NODES_AT_ONCE if sums.device.type == "cpu" else _NODES_AT_ONCE_ELSEWHERE
        for matrices in zip(*(matrix.split(block, 1) for matrix in self._on_both_sides)):
            if sums.requires_grad:
                values = torch.stack([degree_sums @ matrix for degree_sums, matrix in zip(by_degree, matrices)])
            else:
                values = sums.new_empty(len(by_degree), sums.shape[0], matrices[0].shape[1])
                for degree_sums, matrix, target in zip(by_degree, matrices, values):
                    torch.mm(degree_sums, matrix, out=target)
            total = total + self._plan.means(values)
        return total

    def _means_compiled(self, sums: Tensor, loop: TripleSums) -> Tensor:
        """The same, without a gradient and on the CPU, with half the work in matrix products."""
        by_kind = sums.split(self._harmonics.sizes, 1)
        total = sums.new_zeros(sums.shape[0], len(self._plan.triples))
        for matrices in zip(*(matrix.split(_NODES_AT_ONCE, 1) for matrix in self._functions)):
            values = sums.new_empty(2, self.options.twojmax, sums.shape[0], matrices[0].shape[1])
            for kind in range(2, len(by_kind)):
                torch.mm(by_kind[kind], matrices[kind], out=values[kind % 2, kind // 2 - 1])
            loop.add(values[0], values[1], total)
        return total


@dataclass(frozen=True)
class _Plan:
    """Products of F_i F_j with F_k that contain every component, as few as possible and as matrix products.

    j1 + j2 + j is even, so either two degrees are odd and one even, or all are even. The pairs are those of odd degrees and,
    with the even degrees divided into a lower and an upper half, those within a half: every triple contains one of them, and
    the third degree is even.
    """

    sizes: list[int]
    """Numbers of harmonics of each degree."""
    triples: tuple[tuple[int, int, int], ...]
    """(j1, j2, j) of the components without a degree 0."""
    groups: tuple[slice, ...]
    """Groups of rows of F_1, F_2, ...; all pairs within a group are multiplied."""
    pair_index: Tensor
    """Index of each of `triples` among all pairs times all even degrees."""
    order: Tensor
    """Index of each component in [those with degree 0 | triples]."""
    factors: Tensor
    """j + 1 of the triples."""

    @classmethod
    def of(cls, twojmax: int, dtype: torch.dtype, device: torch.device) -> _Plan:
        odd, even = list(range(1, twojmax + 1, 2)), list(range(2, twojmax + 1, 2))
        groups = [group for group in (odd, even[: len(even) // 2], even[len(even) // 2 :]) if group]
        pairs = [(low, high) for group in groups for k, low in enumerate(group) for high in group[k:]]
        components = bispectrum_triples(twojmax)
        with_zero, triples = [t for t in components if 0 in t], [t for t in components if 0 not in t]
        pair_index = []
        for triple in triples:
            low, middle, high = sorted(triple)
            choices = ((low, middle), high), ((middle, high), low), ((low, high), middle)
            pair, third = next(choice for choice in choices if choice[0] in pairs and choice[1] in even)
            pair_index.append(pairs.index(pair) * len(even) + even.index(third))
        return cls(
            sizes=[(j + 1) ** 2 for j in range(twojmax + 1)],
            triples=tuple(triples),
            groups=tuple(slice(group[0] - 1, group[-1], 2) for group in groups),
            pair_index=torch.tensor(pair_index, dtype=torch.int64, device=device),
            order=torch.tensor([(with_zero + triples).index(triple) for triple in components], device=device),
            factors=torch.tensor([j + 1.0 for _, _, j in triples], dtype=dtype, device=device),
        )

    def means(self, values: Tensor) -> Tensor:
        """Sums over nodes of F_j1 F_j2 F_j: values (twojmax, n, n_nodes) of F_1, F_2, ... -> (n, n_triples)."""
        products = torch.bmm(self._products(values).permute(1, 0, 2), values[1::2].permute(1, 2, 0))
        return products.flatten(1).index_select(1, self.pair_index)

    def _products(self, values: Tensor) -> Tensor:
        """F_i F_j of all pairs: (n_pairs, n, n_nodes)."""
        factors = [
            (group[k:], group[k]) for group in (values[rows] for rows in self.groups) for k in range(group.shape[0])
        ]
        if values.requires_grad:
            return torch.cat([group_rows * factor for group_rows, factor in factors])
        counts = [group_rows.shape[0] for group_rows, _ in factors]
        products = values.new_empty(sum(counts), *values.shape[1:])
        for (group_rows, factor), target in zip(factors, products.split(counts)):
            torch.mul(group_rows, factor, out=target)
        return products

    def components(self, sums: Tensor, means: Tensor) -> Tensor:
        """All components (n, size) from the harmonic sums and the means of products of three.

        With degree 0 the mean of a product is known: F_0 is constant, and the harmonics are orthonormal.
        """
        norms = [harmonics.sum(1) / (j + 1) for j, harmonics in enumerate((sums * sums).split(self.sizes, 1))]
        with_zero = torch.stack(norms, 1) * sums[:, :1]
        return torch.cat([with_zero, means * self.factors], 1).index_select(1, self.order)
