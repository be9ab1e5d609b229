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
    """Harmonics of all degrees 0 ... `degree`, in order of degree: (degree + 1) (degree + 2) (2 degree + 3) / 6 of them."""

    def __init__(self, degree: int, dtype: torch.dtype, device: torch.device) -> None:
        self.degree = degree
        self.sizes = [(j + 1) ** 2 for j in range(degree + 1)]
        conversions, degrees = _conversions(degree)
        self._conversions = [torch.as_tensor(c, dtype=dtype, device=device) for c in conversions]
        self._by_degree = torch.as_tensor(np.argsort(degrees, kind="stable"), device=device)

    def sums(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
        """Weighted sums of all harmonics over the k points of each of n sets: (n, k) real arrays -> (n, n_harmonics)."""
        tilt = a[0] * a[0] + a[1] * a[1] - b[0] * b[0] - b[1] * b[1]
        powers = _powers(a, self.degree)
        left = torch.cat([
            powers[: 2 * (self.degree - 2 * s) + 1] * polynomial
            for s, polynomial in enumerate(_chebyshev(tilt, self.degree // 2))
        ])  # fmt: skip
        right = _powers(b, self.degree) * weight
        moments = torch.bmm(right.permute(1, 0, 2), left.permute(1, 2, 0))
        parts = [moments[:, column] @ conversion for column, conversion in enumerate(self._conversions)]
        return torch.cat(parts, 1).index_select(1, self._by_degree)

    def at(self, points: Tensor) -> Tensor:
        """Harmonics at points, (n, 4) -> (n, n_harmonics)."""
        x = points.unsqueeze(-1)
        return self.sums((x[:, 0], x[:, 1]), (x[:, 2], x[:, 3]), torch.ones_like(x[:, 0]))


def quadrature(degree: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Nodes (n, 4), weights (n,) that sum to 1, and how many nodes in a row have equal weight.

    Exact for the mean over the sphere of all polynomials of even degree up to `degree` (even) that do not change
    sign between opposite points: Gauss nodes in |a|^2 - |b|^2, equal steps in the sum and the difference of the phases.
    """
    steps = degree // 2 + 1
    tilts, tilt_weights = legendre.leggauss(-(-steps // 2))
    angles = 2 * np.pi * np.arange(steps) / steps
    tilt, total, difference = (grid.ravel() for grid in np.meshgrid(tilts, angles, angles, indexing="ij"))
    a = np.sqrt((1 + tilt) / 2) * np.exp(0.5j * (total + difference))
    b = np.sqrt((1 - tilt) / 2) * np.exp(0.5j * (total - difference))
    weights = np.repeat(tilt_weights / 2 / steps**2, steps**2)
    return np.stack([a.real, a.imag, b.real, b.imag], 1), weights, steps**2


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


def _conversions(degree: int) -> tuple[list[np.ndarray], np.ndarray]:
    """From moments to orthonormal harmonics: one matrix (n_left, n_harmonics) per row of `_powers(b)`, and the degrees of all.

    Rows of a matrix follow `left` of `SphereHarmonics.sums`: by s, then 1, Re a, Im a, Re a^2, ...
    """
    start = np.cumsum([0] + [2 * (degree - 2 * s) + 1 for s in range(degree // 2 + 1)])
    matrices, degrees = [], []
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
                degrees.append(p + q + 2 * s)
        matrices.append(np.stack(columns, 1))
    return matrices, np.array(degrees)


def _radial(p: int, q: int, largest: int) -> np.ndarray:
    """Chebyshev coefficients (largest + 1, largest + 1), row s: the polynomial of degree s that completes a^p b^q to harmonics."""
    nodes, weights = legendre.leggauss(p + q + 2 * largest + 2)
    density = 0.5 * weights * ((1 + nodes) / 2) ** p * ((1 - nodes) / 2) ** q
    density *= (0.5 if p else 1.0) * (0.5 if q else 1.0)
    _, triangle = np.linalg.qr(np.sqrt(density)[:, None] * chebyshev.chebvander(nodes, largest))
    return np.linalg.inv(triangle * np.sign(np.diag(triangle))[:, None]).T
