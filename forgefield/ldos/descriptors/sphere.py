"""The unit sphere of four dimensions: harmonics up to a degree, their sums over many points, and an exact quadrature.

A point is (Re a, Im a, Re b, Im b) with |a|^2 + |b|^2 = 1. The real harmonics of degree j are
Re/Im(a^p) Re/Im(b^q) times a polynomial in |a|^2 - |b|^2 of degree s, with p + q + 2 s = j: (j + 1)^2 of them, orthonormal
for the mean over the sphere. Their form makes a sum over neighbours a product of two small matrices.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.polynomial import chebyshev, legendre
from torch import Tensor


class SphereHarmonics:
    """Harmonics of all degrees 0 ... `degree`, in order of degree: (degree + 1) (degree + 2) (2 degree + 3) / 6 of them.

    Of each degree, those come first that are the same at a point and at its mirror image (conjugates of a and b), then those
    that change sign. `sizes` are the numbers of both: of degree 0, 1, 2, ...: [1, 0, 2, 2, 5, 4, ...].
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
        parts = [moments[:, column] @ conversion for column, conversion in enumerate(self._conversions)]
        return torch.cat(parts, 1).index_select(1, self._order)

    def at(self, points: Tensor) -> Tensor:
        """Harmonics at points, (n, 4) -> (n, n_harmonics)."""
        x = points.unsqueeze(-1)
        return self.sums((x[:, 0], x[:, 1]), (x[:, 2], x[:, 3]), torch.ones_like(x[:, 0]))


def quadrature(degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (n, 4) and weights (n,) for the mean over the sphere; each node stands for itself and for its mirror image too.

    The mirror image (conjugates of a and b) has the same weight, so that weights sum to 1/2. Exact for polynomials up to
    `degree` (even) that are the same at opposite points: Gauss nodes in |a|^2 - |b|^2, equal steps in the sum and the
    difference of the phases.
    """
    steps = degree // 2 + 1
    tilts, tilt_weights = legendre.leggauss(-(-steps // 2))
    angles = 2 * np.pi * (np.arange(steps) + 0.5) / steps
    place = np.arange(steps**2)
    one_of_two = place[place <= place[::-1]]  # the mirror image of a pair of phases has its place counted from the end
    total, difference = angles[one_of_two // steps], angles[one_of_two % steps]
    share = np.where(one_of_two == place[::-1][one_of_two], 0.5, 1.0)
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
    """Chebyshev polynomials of degrees 0 ... `largest`; the numbers stay within -1 and 1, whatever the degree."""
    found = [torch.ones_like(x), x]
    twice = 2 * x
    for _ in range(1, largest):
        found.append(torch.addcmul(-found[-2], twice, found[-1]))
    return found[: largest + 1]


def _outer(powers: Tensor, polynomials: list[Tensor]) -> Tensor:
    """Products of polynomials (n, k) of degree s = 0, 1, ... and all powers p with p + 2 s up to the degree: (n_left, n, k)."""
    counts = [powers.shape[0] - 4 * s for s in range(len(polynomials))]
    if powers.requires_grad:
        return torch.cat([powers[:count] * polynomial for count, polynomial in zip(counts, polynomials)])
    found = powers.new_empty(sum(counts), *powers.shape[1:])
    for count, polynomial, target in zip(counts, polynomials, found.split(counts)):
        torch.mul(powers[:count], polynomial, out=target)
    return found


def _conversions(degree: int) -> tuple[list[np.ndarray], np.ndarray]:
    """From moments to orthonormal harmonics: one matrix (n_left, n_harmonics) per row of `_powers(b)`, and the kinds of all:
    twice the degree, plus one where the mirror image has the other sign.

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
