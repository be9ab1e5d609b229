"""The Hartree energy of a periodic electron density: electrons in a uniform neutral background."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forgefield.ldos.electronic.plane_waves import PlaneWaves


def hartree_energy(density: Tensor, waves: PlaneWaves) -> Tensor:
    """() Hartree, of a density (nx, ny, nz), 1/Bohr^3: half the sum of 4 pi |density_G|^2/G^2 over G != 0 times the volume."""
    coefficients = waves.coefficients(density)
    power = coefficients.real**2 + coefficients.imag**2
    nonzero = waves.squared > 0
    kernel = torch.where(nonzero, waves.counts / torch.where(nonzero, waves.squared, 1.0), 0.0)
    return 2 * math.pi * waves.volume * (kernel * power).sum()
