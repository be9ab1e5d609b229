"""Densities of states and band energies of Kohn-Sham eigenvalues, the reference for those of an LDOS."""

from __future__ import annotations

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.physics.units import BOLTZMANN


def dos_of_eigenvalues(eigenvalues: Tensor, weights: Tensor, grid: EnergyGrid, width: float | None = None) -> Tensor:
    """Density of states (levels,), 1/eV: a Gaussian exp(-((e - e_n)/width)^2)/(sqrt(pi) width) for each eigenvalue.

    eigenvalues: (k_points, bands), eV. weights: (k_points,) of the k points; they add up to 2 where each state holds two
    electrons. width: eV; twice the spacing of the levels if not given.
    """
    if width is None:
        if not grid.uniform:
            raise ForgefieldError("levels of several spacings: the width of the Gaussians must be given, in eV")
        width = 2 * grid.spacing
    _check_weights(eigenvalues, weights)
    centres = eigenvalues.to(torch.float64)
    total = torch.zeros(grid.levels, dtype=torch.float64, device=centres.device)
    energies = grid.energies(centres.device)
    for centre, weight in zip(centres.split(256), weights.to(torch.float64).split(256), strict=True):
        gaussians = torch.exp(-(((energies - centre[..., None]) / width) ** 2))
        total = total + (weight[:, None, None] * gaussians).sum((0, 1))
    return total / (torch.pi**0.5 * width)


def electrons_of_eigenvalues(eigenvalues: Tensor, weights: Tensor, fermi: float | Tensor, temperature: float) -> Tensor:
    """Electrons (): the occupations of all eigenvalues (k_points, bands), eV, with weights (k_points,), added up."""
    return (weights[:, None] * _occupations(eigenvalues, weights, fermi, temperature)).sum()


def band_energy_of_eigenvalues(
    eigenvalues: Tensor, weights: Tensor, fermi: float | Tensor, temperature: float
) -> Tensor:
    """Band energy (), eV: the eigenvalues (k_points, bands), eV, times their occupations, added up."""
    return (weights[:, None] * eigenvalues * _occupations(eigenvalues, weights, fermi, temperature)).sum()


def _occupations(eigenvalues: Tensor, weights: Tensor, fermi: float | Tensor, temperature: float) -> Tensor:
    _check_weights(eigenvalues, weights)
    if not temperature > 0:
        raise ForgefieldError(
            f"a temperature above zero is needed for Fermi occupations, in K; this one is {temperature}"
        )
    return torch.sigmoid((fermi - eigenvalues.to(torch.float64)) / (BOLTZMANN * temperature))


def _check_weights(eigenvalues: Tensor, weights: Tensor) -> None:
    if eigenvalues.dim() != 2 or weights.shape != eigenvalues.shape[:1]:
        raise ForgefieldError(
            f"eigenvalues must be (k points, bands) with one weight per k point; they are {tuple(eigenvalues.shape)} and the "
            f"weights {tuple(weights.shape)}"
        )
