"""Energies of an electron density among pseudised ions: Hartree, exchange-correlation (PBE) and Ewald, without a DFT code.

The ions are those of norm-conserving, ultrasoft or PAW pseudopotentials with or without a nonlinear core correction; the
density is the full valence density on the grid, augmentation included. Everything is differentiable with respect to the
density and, if they require gradients, the positions.

Exchange-correlation is that of Perdew, Burke and Ernzerhof (PRL 77, 3865, 1996) for spin-unpolarised densities, with the
uniform gas of Perdew and Wang (PRB 45, 13244, 1992); the gradient enters as its square, so that everything is smooth where it
vanishes. The Ewald energy is that of point charges with a uniform neutralising background; the splitting depends on the number
of atoms, so that the cost grows as its power 3/2, and both sums are truncated where their terms fall below 1e-16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from ase.data import chemical_symbols
from matscipy.neighbours import neighbour_list
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.electronic.plane_waves import PlaneWaves
from forgefield.ldos.electronic.upf import Pseudopotential
from forgefield.physics.units import BOHR, HARTREE

CORE_RADIUS = 10.0
"""Radius up to which core densities are integrated, Bohr."""

_TABLE_SPACING = 0.005  # 1/Bohr; cubic interpolation of a core density is then good to 1e-10


class DensityTerms(NamedTuple):
    """Energies of a density, each () eV. With band energy and entropy they add up to the free energy."""

    hartree: Tensor
    exchange_correlation: Tensor
    ewald: Tensor
    minus_rho_vhxc: Tensor
    """-integral of density times (v_Hartree + v_xc), which is part of the band energy"""


class DensityEnergies:
    """Energies of densities of one structure.

    cell: (3, 3), A. positions: (n_atoms, 3), A. numbers: (n_atoms,) atomic numbers. pseudopotentials: by chemical symbol.
    grid_shape: points of the density along each lattice vector. density_cutoff: of the plane waves of the density, Ry
    (`ecutrho`); default: the largest that the grid supports. charge: of the cell, elementary charges. electrons: number of
    the calculation, optional; compared with that of the pseudopotentials.
    """

    def __init__(
        self,
        cell: Tensor,
        positions: Tensor,
        numbers: Sequence[int] | Tensor,
        pseudopotentials: Mapping[str, Pseudopotential],
        grid_shape: Sequence[int],
        density_cutoff: float | None = None,
        *,
        charge: float = 0.0,
        electrons: float | None = None,
    ) -> None:
        with torch.inference_mode(False):  # the potential is a derivative, so no tensor here may be an inference tensor
            self._set_up(cell, positions, numbers, pseudopotentials, grid_shape, density_cutoff)
        self.electrons = float(self.charges.sum()) - charge
        if electrons is not None and abs(electrons - self.electrons) > 1e-3:
            raise ForgefieldError(
                f"the calculation has {electrons:g} electrons, the pseudopotentials ({self._valences()}) give "
                f"{self.electrons:g}: they are not those of the calculation, or the cell is charged"
            )

    def _set_up(
        self,
        cell: Tensor,
        positions: Tensor,
        numbers: Sequence[int] | Tensor,
        pseudopotentials: Mapping[str, Pseudopotential],
        grid_shape: Sequence[int],
        density_cutoff: float | None,
    ) -> None:
        self.cell = torch.as_tensor(cell, dtype=torch.float64).detach().clone()
        self.positions = torch.as_tensor(positions, dtype=torch.float64).to(self.cell.device).clone()
        self.symbols = [chemical_symbols[int(number)] for number in numbers]
        self.pseudopotentials = {
            symbol: _checked_pseudopotential(symbol, pseudopotentials) for symbol in sorted(set(self.symbols))
        }
        valences = [self.pseudopotentials[symbol].valence for symbol in self.symbols]
        self.charges = torch.tensor(valences, dtype=torch.float64, device=self.cell.device)
        self.waves = PlaneWaves(self.cell / BOHR, grid_shape, density_cutoff)
        self.grid_shape = self.waves.grid_shape
        self.voxel_volume = float(torch.linalg.det(self.cell).abs()) / math.prod(self.grid_shape)

    def terms(self, density: Tensor) -> DensityTerms:
        """All energies of a density, (nx, ny, nz) or (n_points,), 1/A^3."""
        rho = self._in_bohr(density)
        hartree = hartree_energy(rho, self.waves)
        exchange_correlation, from_potential = self._exchange_correlation_with_potential(rho)
        return DensityTerms(
            hartree=HARTREE * hartree,
            exchange_correlation=HARTREE * exchange_correlation,
            ewald=self.ewald,
            minus_rho_vhxc=HARTREE * (-2 * hartree - from_potential),
        )

    def hartree(self, density: Tensor) -> Tensor:
        """() eV."""
        return HARTREE * hartree_energy(self._in_bohr(density), self.waves)

    def exchange_correlation(self, density: Tensor) -> Tensor:
        """() eV."""
        return HARTREE * self._exchange_correlation(self._in_bohr(density))

    @property
    def ewald(self) -> Tensor:
        """() eV, of the ions."""
        return self._ewald() if self.positions.requires_grad else self._cached_ewald

    @property
    def core_density(self) -> Tensor:
        """(nx, ny, nz), 1/Bohr^3: the cores of all atoms that have a core correction."""
        return self._core_density() if self.positions.requires_grad else self._cached_core_density

    @cached_property
    def _cached_ewald(self) -> Tensor:
        return self._ewald()

    @cached_property
    def _cached_core_density(self) -> Tensor:
        with torch.inference_mode(False):
            return self._core_density()

    def _ewald(self) -> Tensor:
        return ewald_energy(self.cell, self.positions, self.charges)

    def _core_density(self) -> Tensor:
        coefficients = torch.zeros_like(self.waves.squared, dtype=torch.complex128)
        for symbol, pseudopotential in self.pseudopotentials.items():
            if pseudopotential.core_density is not None:
                chosen = torch.tensor([each == symbol for each in self.symbols], device=self.cell.device)
                form = _core_form_factor(pseudopotential, self.waves) / self.waves.volume
                coefficients = coefficients + form * self.waves.structure_factor(self.positions[chosen] / BOHR)
        return self.waves.values(coefficients)

    def check_electrons(self, density: Tensor, tolerance: float = 0.01) -> None:
        """Raise a ForgefieldError if a density, 1/A^3, does not have the electrons of the pseudopotentials, within
        `tolerance`."""
        integrated = float(density.detach().sum(dtype=torch.float64)) * self.voxel_volume
        if not abs(integrated - self.electrons) <= tolerance * abs(self.electrons):
            raise ForgefieldError(
                f"the density has {integrated:.6g} electrons, the pseudopotentials ({self._valences()}) give "
                f"{self.electrons:g}; "
                f"check the unit of the density (1/A^3), the cell and the pseudopotentials"
            )

    def _valences(self) -> str:
        return ", ".join(f"{symbol}: {each.valence:g}" for symbol, each in self.pseudopotentials.items())

    def _in_bohr(self, density: Tensor) -> Tensor:
        if density.numel() != math.prod(self.grid_shape):
            raise ForgefieldError(f"a density of shape {tuple(density.shape)} does not fit the grid {self.grid_shape}")
        return density.to(torch.float64).reshape(self.grid_shape) * BOHR**3

    def _exchange_correlation(self, rho: Tensor) -> Tensor:
        """() Hartree."""
        total = rho + self.core_density
        return pbe_energy_density(total, self.waves.gradient_squared(total)).sum() * (self.voxel_volume / BOHR**3)

    def _exchange_correlation_with_potential(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """The energy, and the integral of density times potential, the derivative of the energy; () Hartree each."""
        differentiable = torch.is_grad_enabled() and (rho.requires_grad or self.positions.requires_grad)
        with torch.inference_mode(False), torch.enable_grad():
            variable = rho if differentiable and rho.requires_grad else rho.detach().clone().requires_grad_()
            energy = self._exchange_correlation(variable)
            (potential,) = torch.autograd.grad(energy, variable, create_graph=differentiable)
        product = (rho * potential).sum()
        return (energy, product) if differentiable else (energy.detach(), product.detach())


def _checked_pseudopotential(symbol: str, pseudopotentials: Mapping[str, Pseudopotential]) -> Pseudopotential:
    if symbol not in pseudopotentials:
        available = ", ".join(sorted(pseudopotentials)) or "none"
        raise ForgefieldError(
            f"there is no pseudopotential for {symbol} (available: {available}); energies of a density need it"
        )
    chosen = pseudopotentials[symbol]
    if not chosen.is_pbe:
        raise ForgefieldError(f"{chosen.path} was made for the functional {chosen.functional!r}; only PBE is supported")
    return chosen


def _core_form_factor(pseudopotential: Pseudopotential, waves: PlaneWaves) -> Tensor:
    """The Fourier transform of one core at |G|, electrons: (nx, ny, nz // 2 + 1); zero beyond the cutoff."""
    values, slopes = _core_transform(pseudopotential, waves.highest)
    position = waves.squared.sqrt().clamp_max(waves.highest) / _TABLE_SPACING
    index = position.long()
    t = position - index
    values, slopes = values.to(position.device), slopes.to(position.device) * _TABLE_SPACING
    low, high = values[index], values[index + 1]
    cubic = low + t * (slopes[index] + t * (3 * (high - low) - 2 * slopes[index] - slopes[index + 1]))
    cubic = cubic + t**3 * (2 * (low - high) + slopes[index] + slopes[index + 1])
    return cubic * waves.within


def _core_transform(pseudopotential: Pseudopotential, highest: float) -> tuple[Tensor, Tensor]:
    """4 pi times the integral of r^2 core(r) sin(qr)/(qr), and its derivative by q, for q = 0, 0.005, ... 1/Bohr."""
    core = pseudopotential.core_density
    assert core is not None
    inner = pseudopotential.radii <= CORE_RADIUS
    r = pseudopotential.radii[inner]
    charge = 4 * math.pi * _simpson(pseudopotential.steps[inner]) * r**2 * core[inner]
    q = torch.arange(math.ceil(highest / _TABLE_SPACING) + 2, dtype=torch.float64) * _TABLE_SPACING
    phase = q[:, None] * r
    bessel = torch.sinc(phase / math.pi)
    slope = torch.where(q[:, None] > 0, (phase.cos() - bessel) / q.clamp_min(_TABLE_SPACING)[:, None], 0.0)
    return bessel @ charge, slope @ charge


def _simpson(steps: Tensor) -> Tensor:
    """Weights of Simpson's rule on a mesh with dr/di = `steps`; for an even number of points the last one is omitted."""
    points = steps.shape[0] - (1 - steps.shape[0] % 2)
    weights = torch.zeros_like(steps)
    weights[:points] = 2.0
    weights[1:points:2] = 4.0
    weights[0] = weights[points - 1] = 1.0
    return weights * steps / 3


def hartree_energy(density: Tensor, waves: PlaneWaves) -> Tensor:
    """() Hartree, of a density (nx, ny, nz), 1/Bohr^3: half the sum of 4 pi |density_G|^2/G^2 over G != 0 times the volume."""
    coefficients = waves.coefficients(density)
    power = coefficients.real**2 + coefficients.imag**2
    nonzero = waves.squared > 0
    kernel = torch.where(nonzero, waves.counts / torch.where(nonzero, waves.squared, 1.0), 0.0)
    return 2 * math.pi * waves.volume * (kernel * power).sum()


SMALLEST_DENSITY = 1e-10
"""Points with a smaller density, 1/Bohr^3, are ignored."""

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
            f"atoms {int(i[pair])} and {int(j[pair])} have the same position: their energy is infinite"
        )
    return 0.5 * (charges[i] * charges[j] * torch.erfc(splitting * distance) / distance).sum()


def _reciprocal_space(cell: Tensor, positions: Tensor, charges: Tensor, splitting: float) -> Tensor:
    reciprocal = 2 * math.pi * torch.linalg.inv(cell).T
    longest = 2 * splitting * _REACH
    bounds = [math.floor(longest * float(length) / (2 * math.pi)) for length in cell.norm(dim=1)]
    axes = [torch.arange(-bound, bound + 1, dtype=torch.float64, device=cell.device) for bound in bounds]
    indices = torch.cartesian_prod(*axes)
    indices = indices[indices.shape[0] // 2 + 1 :]  # one of G and -G; the middle is G = 0
    vectors = indices @ reciprocal
    near = vectors.square().sum(1) <= longest**2
    total = torch.zeros((), dtype=torch.float64, device=cell.device)
    for block in vectors[near].split(max(1, _PHASES_AT_ONCE // positions.shape[0])):
        squared = block.square().sum(1)
        phases = block @ positions.T
        power = (charges * phases.cos()).sum(1) ** 2 + (charges * phases.sin()).sum(1) ** 2
        total = total + (power * torch.exp(-squared / (4 * splitting**2)) / squared).sum()
    return 4 * math.pi / torch.linalg.det(cell).abs() * total
