"""The atomic density: Gaussians on the atoms, added up per species, as LAMMPS' `compute gaussian/grid/local`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forgefield.ldos.descriptor_options import DescriptorOptions
from forgefield.ldos.descriptors.surroundings import Neighbours

_SIGMA_OF_SPACING = 0.2 / 0.08099000022712448
"""Width per grid spacing that describes aluminium well, which MALA takes for all systems."""


def default_sigma(cell: Tensor, grid_shape: tuple[int, int, int]) -> float:
    """Width, A, for a cell (3, 3), A, divided into `grid_shape` voxels: in proportion to their longest edge."""
    edges = torch.linalg.norm(cell.detach().cpu(), dim=1) / torch.tensor(grid_shape, dtype=cell.dtype)
    return float(edges.max()) * _SIGMA_OF_SPACING


class GaussianDensity:
    """Sums of normalised Gaussians of the distances to the atoms of each species, 1/A^3."""

    closest = -1.0
    points_at_once = 4096

    def __init__(self, options: DescriptorOptions, n_species: int, sigma: float) -> None:
        self.dtype = getattr(torch, options.precision)
        self.n_species = n_species
        self.sigma = sigma

    def ready(self, n_points: int) -> None:
        """Nothing to prepare, whatever the number of points."""

    def of(self, neighbours: Neighbours) -> Tensor:
        """Densities (n, n_species) at points from their neighbours."""
        x, y, z = neighbours.displacement
        square = (x * x + y * y + z * z).to(self.dtype)
        height = (2 * math.pi * self.sigma**2) ** -1.5
        value = torch.where(neighbours.there, torch.exp(square * (-0.5 / self.sigma**2)) * height, 0.0)
        of_species = neighbours.species[..., None] == torch.arange(self.n_species, device=square.device)
        return torch.einsum("nk,nks->ns", value, of_species.to(self.dtype))
