"""Electrostatic energy of point charges in a periodic cell with a uniform neutralising background, after Ewald.

The splitting between real and reciprocal space follows the number of atoms, so that the cost grows as its power 3/2;
both sums are cut where their terms fall below 1e-16. Differentiable in positions.
"""

from __future__ import annotations

import math

import torch
from matscipy.neighbours import neighbour_list
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.physics.units import BOHR, HARTREE

_REACH = 6.0  # erfc(6) = 2e-17, exp(-36) = 2e-16
_PHASES_AT_ONCE = 2**22


def ewald_energy(cell: Tensor, positions: Tensor, charges: Tensor) -> Tensor:
    """() eV.

    cell: (3, 3), A, rows are the lattice vectors. positions: (n_atoms, 3), A. charges: (n_atoms,), elementary charges.
    """
    cell, positions, charges = (values.to(torch.float64) for values in (cell, positions, charges))
    volume = torch.linalg.det(cell).abs()
    # Pairs cost more than phases: 1.5 moves work from the sum over pairs to the one over plane waves.
    splitting = 1.5 * math.sqrt(math.pi) * (positions.shape[0] / float(volume) ** 2) ** (1 / 6)
    total = _real_space(cell, positions, charges, splitting) + _reciprocal_space(cell, positions, charges, splitting)
    total = total - splitting / math.sqrt(math.pi) * (charges**2).sum()
    total = total - math.pi / (2 * volume * splitting**2) * charges.sum() ** 2
    return HARTREE * BOHR * total


def _real_space(cell: Tensor, positions: Tensor, charges: Tensor, splitting: float) -> Tensor:
    first, second, images = neighbour_list(
        "ijS",
        positions=positions.detach().cpu().numpy(),
        cell=cell.detach().cpu().numpy(),
        pbc=[True, True, True],
        cutoff=_REACH / splitting,
    )
    i, j = (torch.from_numpy(index).to(positions.device, torch.int64) for index in (first, second))
    shifts = torch.from_numpy(images).to(positions.device, torch.float64) @ cell
    distance = (positions[j] - positions[i] + shifts).norm(dim=1)
    if distance.numel() and distance.min() < 1e-3:
        pair = int(distance.argmin())
        raise ForgefieldError(
            f"atoms {int(i[pair])} and {int(j[pair])} are at the same place: their energy is infinite"
        )
    return 0.5 * (charges[i] * charges[j] * torch.erfc(splitting * distance) / distance).sum()


def _reciprocal_space(cell: Tensor, positions: Tensor, charges: Tensor, splitting: float) -> Tensor:
    reciprocal = 2 * math.pi * torch.linalg.inv(cell).T
    longest = 2 * splitting * _REACH
    bounds = [math.floor(longest * float(length) / (2 * math.pi)) for length in cell.norm(dim=1)]
    axes = [torch.arange(-bound, bound + 1, dtype=torch.float64, device=cell.device) for bound in bounds]
    indices = torch.cartesian_prod(*axes)
    indices = indices[indices.shape[0] // 2 + 1 :]  # of G and -G one; the middle is G = 0
    vectors = indices @ reciprocal
    near = vectors.square().sum(1) <= longest**2
    total = torch.zeros((), dtype=torch.float64, device=cell.device)
    for block in vectors[near].split(max(1, _PHASES_AT_ONCE // positions.shape[0])):
        squared = block.square().sum(1)
        phases = block @ positions.T
        power = (charges * phases.cos()).sum(1) ** 2 + (charges * phases.sin()).sum(1) ** 2
        total = total + (power * torch.exp(-squared / (4 * splitting**2)) / squared).sum()
    return 4 * math.pi / torch.linalg.det(cell).abs() * total
