"""Physical observables of predicted snapshots, compared with those of the reference LDOS.

Observables are sums over the points of a snapshot, which may be distributed over several processes: each provides the LDOS of
its share of the points, sums are reduced, and all processes have the same result. Errors of energies are in meV per atom,
those of densities in per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from forgefield.ldos.data.units import check_electrons
from forgefield.ldos.electronic.density_energies import DensityEnergies
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.fermi import (
    band_energy,
    electron_number,
    entropy_energy,
    fermi_energy,
    occupation_weights,
)
from forgefield.ldos.loss import SnapshotReference

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""
FREE_ENERGIES = ("total_energy", "total_energy_actual_fe")
"""Observables that need the energies of the density."""


@dataclass
class SnapshotFacts:
    """Metadata of a snapshot for observables. dft_fermi_energy: of the calculation, eV. point_range: first point and last
    point + 1 of this process. dft: energies of the calculation, eV, by name (band, total)."""

    name: str
    temperature: float
    electrons: float
    n_atoms: int
    voxel_volume: float
    n_points: int
    point_range: tuple[int, int]
    dft_fermi_energy: float | None = None
    density_energies: Callable[[], DensityEnergies] | None = None
    dft: dict[str, float] | None = None
    unit: str = "1/(eV*A^3)"
    """Unit as which the files were read."""

    @cached_property
    def energies(self) -> DensityEnergies | None:
        return None if self.density_energies is None else self.density_energies()


class Observables(NamedTuple):
    """Observables of one LDOS: dos (levels,) 1/eV; energies in eV; density: (n,) 1/A^3 at the points of this process; total:
    the free energy; total_actual_fe: that with the Fermi energy of the reference. The last three are None if not requested."""

    dos: Tensor
    fermi: float
    band_energy: float
    entropy: float
    density: Tensor | None
    total: float | None
    total_actual_fe: float | None = None

    def cpu(self) -> Observables:
        """The same with all tensors on the CPU."""
        return self._replace(dos=self.dos.cpu(), density=None if self.density is None else self.density.cpu())


class Observer:
    """Computes observables of snapshots. metrics: those to compute. fermi: self_consistent or given. total: sums over
    processes."""

    def __init__(self, grid: EnergyGrid, metrics: Sequence[str], fermi: str, total: Total) -> None:
        self.grid, self.metrics, self.fermi, self.total = grid, tuple(metrics), fermi, total

    @property
    def needs_density(self) -> bool:
        return "density" in self.metrics or self.needs_total

    @property
    def needs_total(self) -> bool:
        """Whether a free energy is requested."""
        return any(name in self.metrics for name in FREE_ENERGIES)

    def observe(
        self,
        ldos: Callable[[], Iterable[Tensor]],
        facts: SnapshotFacts,
        *,
        of_reference: bool = False,
        reference_fermi: float | None = None,
    ) -> Observables:
        """Observables of one snapshot.

        ldos: returns the LDOS of this process's points in pieces (n, levels), 1/(eV A^3), each time it is called.
        of_reference: these are targets; check that their Fermi energy is on the grid and that their unit is right.
        reference_fermi: Fermi energy of the targets, for `total_actual_fe`.
        """
        sums = torch.zeros(self.grid.levels, dtype=torch.float64)
        for piece in ldos():
            sums = sums.to(piece.device) + piece.to(torch.float64).sum(0)
        dos = self.total(sums) * facts.voxel_volume
        if of_reference:
            self._require_unit(dos, facts)
        fermi = self._fermi(dos, facts, checked=of_reference)
        energy = float(band_energy(dos, self.grid, facts.temperature, fermi))
        entropy = float(entropy_energy(dos, self.grid, facts.temperature, fermi))
        density = self._density(ldos, facts, fermi) if self.needs_density else None
        total = total_actual = None
        if self.needs_total:
            assert density is not None
            total = energy + entropy + self._density_terms(density, facts)
        if "total_energy_actual_fe" in self.metrics and reference_fermi is not None:
            electrons = sum(
                float(of(dos, self.grid, facts.temperature, reference_fermi)) for of in (band_energy, entropy_energy)
            )
            total_actual = electrons + self._density_terms(self._density(ldos, facts, reference_fermi), facts)
        return Observables(dos, float(fermi), energy, entropy, density, total, total_actual)

    def _fermi(self, dos: Tensor, facts: SnapshotFacts, *, checked: bool) -> float:
        if self.fermi == "given":
            assert facts.dft_fermi_energy is not None
            return facts.dft_fermi_energy
        return float(fermi_energy(dos, self.grid, facts.temperature, facts.electrons, checked=checked))

    def _require_unit(self, dos: Tensor, facts: SnapshotFacts) -> None:
        """Raise an error that suggests a unit if the number of electrons at the Fermi energy of the calculation is far off."""
        if facts.dft_fermi_energy is not None:
            electrons = float(electron_number(dos, self.grid, facts.temperature, facts.dft_fermi_energy))
            check_electrons(electrons, facts.electrons, where=f"snapshot {facts.name}", unit=facts.unit)

    def _density(self, ldos: Callable[[], Iterable[Tensor]], facts: SnapshotFacts, fermi: float) -> Tensor:
        weights = occupation_weights(self.grid, fermi, facts.temperature).number
        return torch.cat([piece.to(torch.float64) @ weights.to(piece.device) for piece in ldos()])

    def _density_terms(self, density: Tensor, facts: SnapshotFacts) -> float:
        """Hartree, exchange-correlation, Ewald and double counting of the complete density, eV."""
        energies = facts.energies
        assert energies is not None
        full_density = torch.zeros(facts.n_points, dtype=torch.float64, device=density.device)
        full_density[slice(*facts.point_range)] = density
        full_density = self.total(full_density).cpu()
        return float(torch.stack([term.cpu() for term in energies.terms(full_density)]).sum())

    def errors(self, predicted: Observables, reference: Observables, facts: SnapshotFacts) -> dict[str, float]:
        """Prediction minus reference, in `OBSERVABLE_UNITS`; for density and dos the mean absolute error."""
        per_atom, errors = 1000.0 / facts.n_atoms, {}
        for name in self.metrics:
            if name == "band_energy":
                errors[name] = per_atom * (predicted.band_energy - reference.band_energy)
            elif name == "band_energy_actual_fe":
                energy = band_energy(predicted.dos, self.grid, facts.temperature, reference.fermi)
                errors[name] = per_atom * (float(energy) - reference.band_energy)
            elif name == "total_energy":
                assert predicted.total is not None
                assert reference.total is not None
                errors[name] = per_atom * (predicted.total - reference.total)
            elif name == "total_energy_actual_fe":
                assert predicted.total_actual_fe is not None
                assert reference.total is not None
                errors[name] = per_atom * (predicted.total_actual_fe - reference.total)
            elif name == "fermi_energy":
                errors[name] = 1000.0 * (predicted.fermi - reference.fermi)
            elif name == "dos":
                difference = (predicted.dos - reference.dos).abs().sum()
                errors[name] = 100.0 * float(difference / reference.dos.abs().sum())
            elif name == "electrons":
                number = float(electron_number(predicted.dos, self.grid, facts.temperature, reference.fermi))
                reference_number = float(electron_number(reference.dos, self.grid, facts.temperature, reference.fermi))
                errors[name] = 100.0 * (number - reference_number) / facts.electrons
            else:
                errors[name] = 100.0 * self._density_error(predicted, reference)
        return errors

    def _density_error(self, predicted: Observables, reference: Observables) -> float:
        assert predicted.density is not None
        assert reference.density is not None
        nonzero = reference.density != 0
        relative = torch.where(nonzero, (predicted.density - reference.density) / reference.density, 0.0).abs().sum()
        error, n = self.total(torch.stack([relative, nonzero.sum().to(relative.dtype)])).tolist()
        return error / n if n else float("nan")


def mean_absolute(errors: Sequence[dict[str, float]]) -> dict[str, float]:
    """`NAME_mae` of each observable: the mean absolute error over snapshots."""
    return (
        {f"{name}_mae": sum(abs(each[name]) for each in errors) / len(errors) for name in errors[0]} if errors else {}
    )


def snapshot_reference(observed: Observables, facts: SnapshotFacts) -> SnapshotReference:
    """Reference values for terms of the loss."""
    return SnapshotReference(
        dos=observed.dos,
        fermi=observed.fermi,
        band_energy=observed.band_energy,
        electrons=facts.electrons,
        temperature=facts.temperature,
        n_atoms=facts.n_atoms,
        voxel_volume=facts.voxel_volume,
    )
