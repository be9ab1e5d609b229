"""The atoms around points of a structure: periodic images, and neighbours of a block of points as padded arrays.

A block of points that lie close to each other sees few images; those near its bounding box are candidates for all of
its points. Distances are compared in float64, and gradients of positions and cell pass through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from ase.geometry import complete_cell
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.descriptor_options import DescriptorOptions


@dataclass(frozen=True)
class Neighbours:
    """Atoms near each of `n` points, filled up to the largest number of them."""

    displacement: tuple[Tensor, Tensor, Tensor]
    """x, y, z of atom minus point, each (n, k), A; some place at half the cutoff where there is no neighbour."""
    species: Tensor
    """(n, k) int64: row of the species table; 0 where there is no neighbour."""
    there: Tensor
    """(n, k) bool: whether there is a neighbour."""


class Surroundings:
    """All atoms and images of a structure that any point of its cell may see."""

    def __init__(self, cell: Tensor, positions: Tensor, species: Tensor, pbc: Tensor, cutoff: float) -> None:
        """cell: (3, 3), A; positions: (n_atoms, 3), A; species: (n_atoms,) int64; pbc: (3,) bool; all on one device."""
        self.cutoff = cutoff
        self.species = species
        self._frame = _completed(cell.detach(), pbc)
        self._inverse = torch.linalg.inv(self._frame)
        self._pbc = pbc
        self._atom, shift = self._images(positions.detach())
        self._places = positions[self._atom] + shift @ torch.where(pbc[:, None], cell, torch.zeros_like(cell))

    def wrapped(self, points: Tensor) -> Tensor:
        """(n, 3): the same points in the cell, along periodic directions."""
        whole = torch.floor(points @ self._inverse) * self._pbc
        return points - whole @ self._frame

    def _images(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Atom and lattice shift, (n_images,) and (n_images, 3), of all images that a point in the cell may see."""
        fraction = positions @ self._inverse
        home = torch.floor(fraction) * self._pbc
        margin = self.cutoff * torch.linalg.norm(self._inverse, dim=0) + 1e-9
        reach = torch.where(self._pbc, torch.ceil(margin), torch.zeros_like(margin)).tolist()
        ranges = [torch.arange(-int(r), int(r) + 1, dtype=torch.float64, device=positions.device) for r in reach]
        shifts = torch.cartesian_prod(*ranges)
        seen = (fraction - home)[:, None] + shifts[None]
        near = ((seen >= -margin) & (seen <= 1 + margin) | ~self._pbc).all(-1)
        atom, shift = near.nonzero(as_tuple=True)
        return atom, shifts[shift] - home[atom]

    def neighbours(self, points: Tensor, closest: float = -1.0) -> Neighbours:
        """Neighbours of wrapped `points`, (n, 3), at squared distances above `closest` and below the cutoff's square."""
        places = self._places.detach()
        low, high = points.amin(0) - self.cutoff, points.amax(0) + self.cutoff
        nearby = ((places >= low) & (places <= high)).all(-1).nonzero().squeeze(-1)
        x, y, z = (places[nearby, axis] - points[:, axis, None] for axis in range(3))
        square = x * x + y * y + z * z
        within = (square < self.cutoff**2) & (square > closest)
        counts = within.sum(1)
        most = max(int(counts.max()), 1)
        row, column = within.nonzero(as_tuple=True)
        first = torch.cumsum(counts, 0) - counts
        slot = torch.arange(row.shape[0], device=row.device) - first[row]
        image = torch.zeros(points.shape[0], most, dtype=torch.int64, device=row.device)
        image[row, slot] = nearby[column]
        there = torch.arange(most, device=row.device) < counts[:, None]
        return self._gathered(points, image, there)

    def _gathered(self, points: Tensor, image: Tensor, there: Tensor) -> Neighbours:
        if self._atom.shape[0] == 0:
            empty = torch.full_like(there, 0.5 * self.cutoff, dtype=torch.float64)
            return Neighbours((empty, empty, empty), torch.zeros_like(image), there)
        away = [torch.where(there, self._places[:, axis][image] - points[:, axis, None], 0.5 * self.cutoff)
                for axis in range(3)]  # fmt: skip
        species = torch.where(there, self.species[self._atom[image]], 0)
        return Neighbours((away[0], away[1], away[2]), species, there)


def _completed(cell: Tensor, pbc: Tensor) -> Tensor:
    """The cell, with directions of no extent (of molecules) filled up by orthogonal ones."""
    array = cell.cpu().numpy()
    periodic = pbc.cpu().numpy()
    if periodic.any() and not np.abs(array[periodic]).sum(1).all():
        raise ForgefieldError(f"the cell {array.tolist()} has no extent along a direction that is periodic (pbc)")
    full = complete_cell(array)
    if abs(np.linalg.det(full)) < 1e-9:
        raise ForgefieldError(f"the cell {array.tolist()} has no volume: its vectors lie in a plane")
    return torch.as_tensor(np.ascontiguousarray(full), dtype=torch.float64, device=cell.device)


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
