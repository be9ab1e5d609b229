"""The exchange-correlation energy of Perdew, Burke and Ernzerhof (PRL 77, 3865, 1996) for a spin-unpolarised density.

Correlation of the uniform gas is that of Perdew and Wang (PRB 45, 13244, 1992). Atomic units (Hartree, Bohr) throughout;
the gradient enters as its square, so that everything is smooth where the gradient vanishes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_DENSITY = 1e-10
"""Points with less, in 1/Bohr^3, add nothing."""

_KAPPA = 0.804
_BETA = 0.06672455060314922
_MU = _BETA * math.pi**2 / 3
_GAMMA = (1 - math.log(2)) / math.pi**2
_GAS_A, _GAS_ALPHA = 0.031091, 0.21370
_GAS_BETAS = (7.5957, 3.5876, 1.6382, 0.49294)


def pbe_energy_density(density: Tensor, gradient_squared: Tensor) -> Tensor:
    """Exchange-correlation energy per volume (...), Hartree/Bohr^3.

    density: (...), 1/Bohr^3, float64. gradient_squared: (...), 1/Bohr^8.
    """
    present = density > SMALLEST_DENSITY
    rho = torch.where(present, density, 1.0)
    sigma = torch.where(present, gradient_squared, 0.0)
    energy = rho * (_exchange(rho, sigma) + _correlation(rho, sigma))
    return torch.where(present, energy, 0.0)


def _exchange(rho: Tensor, sigma: Tensor) -> Tensor:
    """Exchange energy per electron: that of the uniform gas, enhanced."""
    fermi_vector = (3 * math.pi**2 * rho) ** (1 / 3)
    reduced_squared = sigma / (4 * fermi_vector**2 * rho**2)
    enhancement = 1 + _KAPPA - _KAPPA / (1 + _MU / _KAPPA * reduced_squared)
    return -3 / (4 * math.pi) * fermi_vector * enhancement


def _correlation(rho: Tensor, sigma: Tensor) -> Tensor:
    """Correlation energy per electron: that of the uniform gas, and H of the gradient."""
    gas = _uniform_gas_correlation((3 / (4 * math.pi) / rho) ** (1 / 3))
    fermi_vector = (3 * math.pi**2 * rho) ** (1 / 3)
    t_squared = math.pi * sigma / (16 * fermi_vector * rho**2)
    a = _BETA / _GAMMA / torch.expm1(-gas / _GAMMA)
    at = a * t_squared
    ratio = (1 + at) / (1 + at + at**2)
    return gas + _GAMMA * torch.log1p(_BETA / _GAMMA * t_squared * ratio)


def _uniform_gas_correlation(radius: Tensor) -> Tensor:
    """Correlation energy per electron of the uniform gas with Wigner-Seitz radius `radius`, Bohr."""
    root = radius.sqrt()
    first, second, third, fourth = _GAS_BETAS
    series = root * (first + root * (second + root * (third + root * fourth)))
    return -2 * _GAS_A * (1 + _GAS_ALPHA * radius) * torch.log1p(1 / (2 * _GAS_A * series))
