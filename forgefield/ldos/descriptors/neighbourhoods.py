"""The atoms around points of a structure (periodic images, neighbours as padded arrays), and Gaussian densities.

A block of nearby points has few images as neighbours; those near its bounding box are candidates for all of its points.
Distances are compared in float64, and gradients with respect to positions and cell are supported. The Gaussian density is that
of LAMMPS' `compute gaussian/grid/local`: Gaussians at the atoms, summed per species.
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
    """Atoms near each of `n` points, padded to the largest number of them."""

    displacement: tuple[Tensor, Tensor, Tensor]
    """x, y, z of atom minus point, each (n, k), A; half the cutoff for padding."""
    species: Tensor
    """(n, k) int64: row of the species table; 0 for padding."""
    exists: Tensor
    """(n, k) bool: False for padding."""


class AtomImages:
    """All atoms and images of a structure within the cutoff of any point of its cell."""

    def __init__(self, cell: Tensor, positions: Tensor, species: Tensor, pbc: Tensor, cutoff: float) -> None:
        """cell: (3, 3), A; positions: (n_atoms, 3), A; species: (n_atoms,) int64; pbc: (3,) bool; all on one device."""
        self.cutoff = cutoff
        self.species = species
        self._frame = _completed(cell.detach(), pbc)
        self._inverse = torch.linalg.inv(self._frame)
        self._pbc = pbc
        self._atom, shift = self._images(positions.detach())
        self._image_positions = positions[self._atom] + shift @ torch.where(pbc[:, None], cell, torch.zeros_like(cell))

    def wrapped(self, points: Tensor) -> Tensor:
        """(n, 3): the same points in the cell, along periodic directions."""
        lattice_shift = torch.floor(points @ self._inverse) * self._pbc
        return points - lattice_shift @ self._frame

    def _images(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Atom and lattice shift, (n_images,) and (n_images, 3), of all images within the cutoff of a point in the cell."""
        fraction = positions @ self._inverse
        home = torch.floor(fraction) * self._pbc
        margin = self.cutoff * torch.linalg.norm(self._inverse, dim=0) + 1e-9
        reach = torch.where(self._pbc, torch.ceil(margin), torch.zeros_like(margin)).tolist()
        ranges = [torch.arange(-int(r), int(r) + 1, dtype=torch.float64, device=positions.device) for r in reach]
        shifts = torch.cartesian_prod(*ranges)
        fractions = (fraction - home)[:, None] + shifts[None]
        near = ((fractions >= -margin) & (fractions <= 1 + margin) | ~self._pbc).all(-1)
        atom, shift = near.nonzero(as_tuple=True)
        return atom, shifts[shift] - home[atom]

    def neighbours(self, points: Tensor, closest: float = -1.0) -> Neighbours:
        """Neighbours of wrapped `points`, (n, 3), at squared distances above `closest` and below the cutoff's square."""
        image_positions = self._image_positions.detach()
        low, high = points.amin(0) - self.cutoff, points.amax(0) + self.cutoff
        nearby = ((image_positions >= low) & (image_positions <= high)).all(-1).nonzero().squeeze(-1)
        x, y, z = (image_positions[nearby, axis] - points[:, axis, None] for axis in range(3))
        square = x * x + y * y + z * z
        within = (square < self.cutoff**2) & (square > closest)
        counts = within.sum(1)
        width = max(int(counts.max()), 1)
        row, column = within.nonzero(as_tuple=True)
        first = torch.cumsum(counts, 0) - counts
        slot = torch.arange(row.shape[0], device=row.device) - first[row]
        image = torch.zeros(points.shape[0], width, dtype=torch.int64, device=row.device)
        image[row, slot] = nearby[column]
        exists = torch.arange(width, device=row.device) < counts[:, None]
        return self._gather(points, image, exists)

    def _gather(self, points: Tensor, image: Tensor, exists: Tensor) -> Neighbours:
        if self._atom.shape[0] == 0:
            empty = torch.full_like(exists, 0.5 * self.cutoff, dtype=torch.float64)
            return Neighbours((empty, empty, empty), torch.zeros_like(image), exists)
        displacement = [torch.where(exists, self._image_positions[:, axis][image] - points[:, axis, None], 0.5 * self.cutoff)
                for axis in range(3)]  # fmt: skip
        species = torch.where(exists, self.species[self._atom[image]], 0)
        return Neighbours((displacement[0], displacement[1], displacement[2]), species, exists)


def _completed(cell: Tensor, pbc: Tensor) -> Tensor:
    """The cell, with missing directions (of molecules) replaced by orthogonal ones."""
    array = cell.cpu().numpy()
    periodic = pbc.cpu().numpy()
    if periodic.any() and not np.abs(array[periodic]).sum(1).all():
        raise ForgefieldError(f"the cell {array.tolist()} has no extent along a direction that is periodic (pbc)")
    full = complete_cell(array)
    if abs(np.linalg.det(full)) < 1e-9:
        raise ForgefieldError(f"the cell {array.tolist()} has no volume: its vectors are coplanar")
    return torch.as_tensor(np.ascontiguousarray(full), dtype=torch.float64, device=cell.device)


_SIGMA_OF_SPACING = 0.2 / 0.08099000022712448
"""Width per grid spacing; MALA's value, which was chosen for aluminium and is used for all systems."""


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
        """Nothing to prepare."""

    def of(self, neighbours: Neighbours) -> Tensor:
        """Densities (n, n_species) at points from their neighbours."""
        x, y, z = neighbours.displacement
        square = (x * x + y * y + z * z).to(self.dtype)
        height = (2 * math.pi * self.sigma**2) ** -1.5
        value = torch.where(neighbours.exists, torch.exp(square * (-0.5 / self.sigma**2)) * height, 0.0)
        of_species = neighbours.species[..., None] == torch.arange(self.n_species, device=square.device)
        return torch.einsum("nk,nks->ns", value, of_species.to(self.dtype))
