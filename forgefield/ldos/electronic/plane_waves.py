"""Functions on a real-space grid of a periodic cell as sums of plane waves up to a cutoff: transforms and gradients.

Atomic units. Only half of the plane waves are stored, since the functions are real; `counts` is the multiplicity of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError

_PHASES_AT_ONCE = 2**22


class PlaneWaves:
    """Plane waves exp(iGr) of a cell (3, 3), Bohr, on `grid_shape` points with |G|^2 <= `cutoff`, Ry.

    Without a cutoff: the largest sphere of G that the grid contains.
    """

    def __init__(self, cell: Tensor, grid_shape: Sequence[int], cutoff: float | None = None) -> None:
        self.cell = cell.to(torch.float64)
        self.grid_shape = tuple(int(n) for n in grid_shape)
        self.volume = torch.linalg.det(self.cell).abs()
        if len(self.grid_shape) != 3 or min(self.grid_shape) < 2:
            raise ForgefieldError(
                f"a grid of three dimensions, two points or more each, is needed; this one is {grid_shape}"
            )
        cutoff = self._cutoff(cutoff)
        nx, ny, nz = self.grid_shape
        device = cell.device
        self.miller = (
            torch.fft.fftfreq(nx, 1 / nx, dtype=torch.float64, device=device),
            torch.fft.fftfreq(ny, 1 / ny, dtype=torch.float64, device=device),
            torch.arange(nz // 2 + 1, dtype=torch.float64, device=device),
        )
        reciprocal = 2 * math.pi * torch.linalg.inv(self.cell).T
        h, k, m = torch.meshgrid(*self.miller, indexing="ij")
        self.vectors = [h * reciprocal[0, i] + k * reciprocal[1, i] + m * reciprocal[2, i] for i in range(3)]
        self.squared = self.vectors[0] ** 2 + self.vectors[1] ** 2 + self.vectors[2] ** 2
        self.within = self.squared <= cutoff
        self.counts = torch.where((m == 0) | (2 * m == nz), 1.0, 2.0) * self.within
        self.highest = math.sqrt(cutoff)

    def coefficients(self, values: Tensor) -> Tensor:
        """(nx, ny, nz // 2 + 1) of a real function on the grid (nx, ny, nz), with nothing beyond the cutoff."""
        return torch.fft.rfftn(values, norm="forward") * self.within

    def values(self, coefficients: Tensor) -> Tensor:
        """(nx, ny, nz) on the grid."""
        return torch.fft.irfftn(coefficients, s=self.grid_shape, norm="forward")

    def gradient_squared(self, values: Tensor) -> Tensor:
        """|grad f|^2 (nx, ny, nz), per Bohr^2, of a real function on the grid."""
        waves = self.coefficients(values)
        total = torch.zeros_like(values)
        for vector in self.vectors:
            total = total + self.values(1j * vector * waves) ** 2
        return total

    def structure_factor(self, positions: Tensor) -> Tensor:
        """Sum of exp(-iGr) over `positions` (n, 3), Bohr: (nx, ny, nz // 2 + 1), complex."""
        fractional = positions.to(torch.float64) @ torch.linalg.inv(self.cell)
        x, y, z = (
            torch.exp(-2j * math.pi * fractional[:, axis, None] * self.miller[axis]) for axis in range(3)
        )  # (n, points of this axis)
        slab = max(1, _PHASES_AT_ONCE // max(1, y.numel()))
        pieces = [(slab_phases[:, :, None] * y[:, None, :]).flatten(1).T @ z for slab_phases in x.split(slab, dim=1)]
        return torch.cat(pieces).reshape(x.shape[1], y.shape[1], z.shape[1])

    def _cutoff(self, cutoff: float | None) -> float:
        lengths = self.cell.norm(dim=1).tolist()
        radius = min(2 * math.pi * ((n - 1) // 2) / length for n, length in zip(self.grid_shape, lengths, strict=True))
        if cutoff is None:
            return radius**2
        needed = [2 * math.floor(math.sqrt(cutoff) * length / (2 * math.pi)) + 1 for length in lengths]
        if any(n < least for n, least in zip(self.grid_shape, needed, strict=True)):
            raise ForgefieldError(
                f"a grid of {'x'.join(map(str, self.grid_shape))} points is too coarse for a density cutoff of {cutoff:g} Ry: "
                f"at least {'x'.join(map(str, needed))} are needed"
            )
        return float(cutoff)
