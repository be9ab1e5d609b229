"""The physics of an LDOS: deviations from Quantum ESPRESSO and MALA, and CPU time.

    OMP_NUM_THREADS=1 python benchmarks/ldos_physics.py --data shared/data

data: folder that holds `be2_ldos` and `al36_ldos`. Prints the tables of docs/explanations/ldos-energies.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from ase.build import bulk

from forgefield.ldos.electronic.density_energies import DensityEnergies
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.fermi import band_energy, density, dos_of_ldos, entropy_energy, fermi_energy
from forgefield.ldos.electronic.upf import read_pseudopotentials
from forgefield.physics.units import RYDBERG

MALA = {  # Fermi energy, band energy, -TS of MALA 1.4.0, eV
    "Be_snapshot0": (10.240735437, 12.447077139, -6.5515796e-4),
    "Be_snapshot1": (10.149207155, 12.279480141, -6.6172470e-4),
    "Be_snapshot2": (10.225296014, 12.417710873, -6.5611525e-4),
    "Al_dos": (7.529509770, 323.322600584, -0.0313762649),
}
ESPRESSO = {"hartree": 0.00453875, "exchange_correlation": -3.29457444, "ewald": -6.13837306}  # of Be_snapshot0, Ry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("shared/data"))
    folder = parser.parse_args().data
    aluminium, grid = torch.from_numpy(np.load(folder / "al36_ldos" / "Al_dos.npy")), EnergyGrid(-10.0, 0.1, 250)
    infos = {n: json.loads((folder / "be2_ldos" / f"{n}.info.json").read_text()) for n in MALA if n.startswith("Be")}
    temperature = infos["Be_snapshot0"]["temperature"]
    report("Al_dos", aluminium, grid, temperature, 108.0)
    coarse = EnergyGrid(-5.0, 2.5, 11)
    for name, info in infos.items():
        ldos = torch.from_numpy(np.load(folder / "be2_ldos" / f"{name}.out.npy"))
        dos = dos_of_ldos(ldos, abs(np.linalg.det(info["voxel"]["array"])))
        report(name, dos, coarse, info["temperature"], 4.0)
    terms(folder / "be2_ldos", infos["Be_snapshot0"])
    level = fermi_energy(aluminium, grid, temperature, 108.0)
    for batch in (1, 10):
        several = aluminium.expand(batch, -1).clone()
        clock(f"Fermi energy, {batch} x 250 levels", lambda d=several: fermi_energy(d, grid, temperature, 108.0))
        clock(f"band energy, {batch} x 250 levels", lambda d=several: band_energy(d, grid, temperature, level))
    rows = torch.rand(100_000, 250)
    clock("density, 100,000 x 250 float32", lambda: density(rows, grid, temperature, level))
    weights = torch.rand(250)
    clock("  the same product in float32 (bare)", lambda: rows @ weights)
    large_cell(folder / "be2_ldos")


def report(name: str, dos: torch.Tensor, grid: EnergyGrid, temperature: float, electrons: float) -> None:
    level = fermi_energy(dos, grid, temperature, electrons)
    found = (level, band_energy(dos, grid, temperature, level), entropy_energy(dos, grid, temperature, level))
    gaps = ", ".join(f"{abs(float(value) - expected):.1e}" for value, expected in zip(found, MALA[name], strict=True))
    print(f"{name}: differs from MALA by {gaps} eV (Fermi energy, band energy, -TS)")


def terms(folder: Path, info: dict) -> None:
    energies = make(
        folder, info["atoms"]["cell"], info["atoms"]["positions"], info["atoms"]["numbers"], (18, 18, 27), 160.0
    )
    rho = torch.from_numpy(np.load(folder / "Be_snapshot0.dens.npy"))
    found = energies.terms(rho)._asdict()
    for name, expected in ESPRESSO.items():
        value = float(found[name]) / RYDBERG
        print(f"{name}: {value:.8f} Ry, Quantum ESPRESSO {expected:.8f}, difference {abs(value - expected):.1e}")
    clock("all terms, 18x18x27", lambda: energies.terms(rho))


def large_cell(folder: Path) -> None:
    atoms = bulk("Be", "hcp", a=2.26, c=3.57) * (5, 5, 5)
    atoms.rattle(0.05, seed=1)
    start = time.process_time()
    energies = make(folder, atoms.cell.array, atoms.positions, atoms.numbers, (100, 100, 100), None)
    print(f"{len(atoms)} atoms, 100^3 points: plane waves {time.process_time() - start:.2f} s")
    clock("Ewald", energies._ewald, repeats=2)
    clock("core density", energies._core_density, repeats=2)
    assert energies.ewald.isfinite()
    assert energies.core_density.isfinite().all()
    rho = 1 + torch.rand(100, 100, 100, dtype=torch.float64)
    rho *= energies.electrons / (rho.sum() * energies.voxel_volume)
    clock("Hartree", lambda: energies.hartree(rho), repeats=3)
    clock("all terms", lambda: energies.terms(rho), repeats=3)


def make(
    folder: Path, cell: object, positions: object, numbers: object, shape: tuple, cutoff: float | None
) -> DensityEnergies:
    places = [torch.tensor(np.asarray(values), dtype=torch.float64) for values in (cell, positions)]
    return DensityEnergies(*places, list(numbers), read_pseudopotentials(folder, ["Be"]), shape, cutoff)  # type: ignore[call-overload]


def clock(name: str, work: Callable[[], object], repeats: int = 10) -> None:
    """CPU time, the least of several."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    print(f"{name}: {1000 * min(times):.1f} ms CPU")


if __name__ == "__main__":
    main()
