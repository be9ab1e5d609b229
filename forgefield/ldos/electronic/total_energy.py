"""The free energy of electrons and ions from a local density of states, and its contributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forgefield.ldos.data.units import check_electrons
from forgefield.ldos.electronic.density_energies import DensityEnergies, DensityTerms
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.fermi import (
    band_energy,
    density,
    dos_of_ldos,
    electron_number,
    entropy_energy,
    fermi_energy,
)


@dataclass(frozen=True)
class FreeEnergy:
    """Contributions to the free energy of a snapshot, each () eV."""

    fermi: Tensor
    """the Fermi energy, not a contribution to the sum"""
    band_energy: Tensor
    entropy: Tensor
    """-TS"""
    terms: DensityTerms

    @property
    def total(self) -> Tensor:
        """Band energy - TS - integral of density times v_Hxc + Hartree + exchange-correlation + Ewald, () eV."""
        return self.band_energy + self.entropy + torch.stack(self.terms).sum()


def total_energy(
    ldos: Tensor,
    grid: EnergyGrid,
    temperature: float,
    energies: DensityEnergies,
    *,
    fermi: float | Tensor | None = None,
) -> FreeEnergy:
    """Free energy of a local density of states (nx, ny, nz, levels) or (n_points, levels), 1/(eV A^3), at `temperature` (K).

    fermi: the Fermi energy, eV; default: the one at which the LDOS has the electrons of the pseudopotentials. With an explicit
    one the numbers of electrons may differ by 20 %, as for coarse energy grids; a larger difference indicates a wrong unit.
    """
    dos = dos_of_ldos(ldos, energies.voxel_volume)
    if fermi is None:
        level = fermi_energy(dos, grid, temperature, energies.electrons)
    else:
        level = torch.as_tensor(fermi, dtype=torch.float64, device=dos.device)
        check_electrons(float(electron_number(dos, grid, temperature, level)), energies.electrons, where="total energy")
    return FreeEnergy(
        fermi=level,
        band_energy=band_energy(dos, grid, temperature, level),
        entropy=entropy_energy(dos, grid, temperature, level),
        terms=energies.terms(density(ldos, grid, temperature, level)),
    )
