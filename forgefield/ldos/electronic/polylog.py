"""Polylogarithms Li1, Li2 and Li3 of -exp(x), in which integrals over the Fermi function are expressed.

PyTorch in float64, for tensors of any shape on any device, with relative errors of a few 1e-16. Orders 1 to 3 are computed
together, since they share the exponential.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

LI2_OF_MINUS_ONE = -(math.pi**2) / 12


def polylogarithms(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Li1(-e^x), Li2(-e^x), Li3(-e^x) for any real x, float64.

    For x > 0 by inversion: Li1(-e^x) = Li1(-e^-x) - x, Li2(-e^x) = -pi^2/6 - x^2/2 - Li2(-e^-x),
    Li3(-e^x) = -pi^2 x/6 - x^3/6 + Li3(-e^-x).
    """
    distance = x.abs()
    first, second = decaying_dilogarithm(distance)
    third = decaying_trilogarithm(distance)
    growing = x > 0
    square = x * x
    return (
        torch.where(growing, first - x, first),
        torch.where(growing, 2 * LI2_OF_MINUS_ONE - square / 2 - second, second),
        torch.where(growing, third + x * (2 * LI2_OF_MINUS_ONE - square / 6), third),
    )


def decaying_dilogarithm(distance: Tensor) -> tuple[Tensor, Tensor]:
    """Li1(-e^-y) and Li2(-e^-y) for y = `distance` >= 0, float64.

    With u = Li1(-e^-y) = -log(1 + e^-y), Li2 is the sum over B_n u^(n+1)/(n+1)! (B_n: Bernoulli numbers); |u| <= log 2, so
    each of the terms, which beyond the second are odd in u, is at least 80 times smaller than the one before.
    """
    u = -torch.log1p(torch.exp(-distance))
    square = u * u
    series = torch.full_like(u, _BERNOULLI_TERMS[-1])
    for coefficient in reversed(_BERNOULLI_TERMS[:-1]):
        series = series * square + coefficient
    return u, u * (series - u / 4)


def decaying_trilogarithm(distance: Tensor) -> Tensor:
    """Li3(-e^-y) for y = `distance` >= 0, float64: the accelerated alternating series, a polynomial in z = e^-y."""
    z = torch.exp(-distance)
    coefficients = _accelerated_series(order=3)
    series = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        series = series * z + coefficient
    return series * z


# B_2k/(2k+1)! for k = 0, 1, ...
_BERNOULLI_TERMS = tuple(
    numerator / (denominator * math.factorial(2 * k + 1))
    for k, (numerator, denominator) in enumerate(
        [(1, 1), (1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6), (-3617, 510)]
    )
)


@functools.cache
def _accelerated_series(order: int, terms: int = 23) -> tuple[float, ...]:
    """Coefficients of z, z^2, ... of Li_order(-z), good for 0 <= z <= 1 to about 5.8^-terms.

    The alternating sum of z^k/k^order is one of moments of a positive measure, for which the weights of Cohen, Rodriguez
    Villegas and Zagier (Experimental Mathematics 9, 2000, algorithm 1) converge geometrically; they are rational numbers.
    """
    chebyshev = [Fraction(1), Fraction(3)]  # T_n(3), the (exact) normalisation d
    for _ in range(terms - 1):
        chebyshev.append(6 * chebyshev[-1] - chebyshev[-2])
    d = chebyshev[terms]
    b, c = Fraction(-1), -d
    coefficients = []
    for k in range(terms):
        c = b - c
        coefficients.append(float(-c / d / (k + 1) ** order))
        b = b * (k + terms) * (k - terms) / (Fraction(2 * k + 1, 2) * (k + 1))
    return tuple(coefficients)
