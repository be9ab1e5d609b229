"""SNAP as its papers define it, one point at a time: Wigner matrices and Clebsch-Gordan coefficients by their formulas."""

from __future__ import annotations

from math import comb, factorial, sqrt

import numpy as np


def wigner_matrix(j: int, a: complex, b: complex) -> np.ndarray:
    """Matrix of the SU(2) element ((a, b), (-b*, a*)) on homogeneous polynomials of degree j = 2J: (j + 1, j + 1)."""
    found = np.zeros((j + 1, j + 1), dtype=complex)
    for row in range(j + 1):
        scale = sqrt(factorial(row) * factorial(j - row))
        for column in range(j + 1):
            # coefficient of x^column y^(j-column) in (a x + b y)^row (-b* x + a* y)^(j-row)
            total = 0j
            for k in range(max(0, column - (j - row)), min(row, column) + 1):
                total += (
                    comb(row, k)
                    * comb(j - row, column - k)
                    * a**k
                    * b ** (row - k)
                    * (-np.conj(b)) ** (column - k)
                    * np.conj(a) ** (j - row - column + k)
                )
            found[row, column] = total * sqrt(factorial(column) * factorial(j - column)) / scale
    return found


def clebsch_gordan(j1: int, m1: int, j2: int, m2: int, j: int, m: int) -> float:
    """<j1 m1 j2 m2 | j m> by Racah's formula; all arguments are twice the quantum numbers."""
    if m1 + m2 != m or not abs(j1 - j2) <= j <= j1 + j2:
        return 0.0

    def f(twice: int) -> int:
        return factorial(twice // 2)

    front = (j + 1) * f(j1 + j2 - j) * f(j1 - j2 + j) * f(-j1 + j2 + j) / f(j1 + j2 + j + 2)
    front *= f(j + m) * f(j - m) * f(j1 - m1) * f(j1 + m1) * f(j2 - m2) * f(j2 + m2)
    total = 0.0
    for z in range((j1 + j2 - j) // 2 + 1):
        parts = [j1 + j2 - j - 2 * z, j1 - m1 - 2 * z, j2 + m2 - 2 * z, j - j2 + m1 + 2 * z, j - j1 - m2 + 2 * z]
        if min(parts) >= 0:
            total += (-1) ** z / (factorial(z) * np.prod([float(f(part)) for part in parts]))
    return sqrt(front) * total


def _coupling(j1: int, j2: int, j: int) -> np.ndarray:
    """Clebsch-Gordan coefficients as an array (j1 + 1, j2 + 1, j + 1), rows by rising m."""
    found = np.zeros((j1 + 1, j2 + 1, j + 1))
    for i1 in range(j1 + 1):
        for i2 in range(j2 + 1):
            m = 2 * i1 - j1 + 2 * i2 - j2
            if abs(m) <= j:
                found[i1, i2, (m + j) // 2] = clebsch_gordan(j1, 2 * i1 - j1, j2, 2 * i2 - j2, j, m)
    return found


def snap_of_point(
    displacements: np.ndarray,
    weights: np.ndarray,
    triples: list[tuple[int, int, int]],
    cutoff: float,
    *,
    switch: bool = True,
    rfac0: float = 0.99363,
    rmin0: float = 0.0,
) -> np.ndarray:
    """B(j1, j2, j) of a point whose neighbours are at `displacements` (n, 3), with `weights` (n,)."""
    top = max(j for triple in triples for j in triple)
    total = [np.eye(j + 1, dtype=complex) for j in range(top + 1)]
    for (x, y, z), weight in zip(displacements, weights):
        r = sqrt(x * x + y * y + z * z)
        if not 1e-10 < r < cutoff:
            continue
        z0 = r / np.tan(rfac0 * np.pi * (r - rmin0) / (cutoff - rmin0))
        length = sqrt(r * r + z0 * z0)
        fall = 0.5 * (np.cos(np.pi * (r - rmin0) / (cutoff - rmin0)) + 1) if switch and r > rmin0 else 1.0
        for j in range(top + 1):
            total[j] += weight * fall * wigner_matrix(j, complex(z0, -z) / length, complex(y, -x) / length)
    found = []
    for j1, j2, j in triples:
        c = _coupling(j1, j2, j)
        product = np.einsum("abm,cdn,ac,bd->mn", c, c, total[j1], total[j2], optimize=True)
        found.append(np.vdot(total[j], product).real)
    return np.array(found)
