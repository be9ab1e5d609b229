"""Energies of a density equal those of Quantum ESPRESSO and of closed forms; derivatives are forces; bad input is named."""

from __future__ import annotations

import json
import math

import ase.io
import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.ldos.electronic.density_energies import (
    DensityEnergies,
    ewald_energy,
    hartree_energy,
    pbe_energy_density,
)
from forgefield.ldos.electronic.eigenvalues import (
    band_energy_of_eigenvalues,
    dos_of_eigenvalues,
    electrons_of_eigenvalues,
)
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.plane_waves import PlaneWaves
from forgefield.ldos.electronic.total_energy import total_energy
from forgefield.ldos.electronic.upf import read_pseudopotentials, read_upf
from forgefield.physics.units import BOHR, HARTREE, RYDBERG
from tests.support.helpers import SHARED_DATA

BE = SHARED_DATA / "be2_ldos"
needs_beryllium = pytest.mark.skipif(not BE.is_dir(), reason="needs the Be snapshots")


def tensor(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


@pytest.fixture(scope="module")
def info() -> dict:
    return json.loads((BE / "Be_snapshot0.info.json").read_text())


def beryllium(info: dict, positions: torch.Tensor | None = None, **options) -> DensityEnergies:
    atoms = info["atoms"]
    positions = tensor(atoms["positions"]) if positions is None else positions
    potentials = read_pseudopotentials(BE, ["Be"], info["pseudopotentials"])
    return DensityEnergies(
        tensor(atoms["cell"]), positions, atoms["numbers"], potentials, (18, 18, 27), 160.0, **options
    )


# Quantum ESPRESSO ---------------------------------------------------------------------------------------------------


@needs_beryllium
def test_terms_equal_quantum_espresso(info):
    energies = beryllium(info, electrons=4.0)
    density = tensor(np.load(BE / "Be_snapshot0.dens.npy"))
    assert int(energies.waves.counts.sum()) == 3669  # "Dense grid: 3669 G-vectors"
    energies.check_electrons(density, tolerance=1e-5)
    with torch.inference_mode():
        terms = beryllium(info).terms(density)
    assert float(terms.hartree) / RYDBERG == pytest.approx(0.00453875, abs=1e-8)
    assert float(terms.ewald) / RYDBERG == pytest.approx(-6.13837306, abs=1e-7)
    assert float(terms.exchange_correlation) / RYDBERG == pytest.approx(-3.29457444, abs=1e-6)
    assert terms == energies.terms(density.flatten())


@needs_beryllium
def test_forces_of_ions_and_cores_equal_quantum_espresso(info):
    positions = tensor(info["atoms"]["positions"]).requires_grad_()
    energies = beryllium(info, positions)
    density = tensor(np.load(BE / "Be_snapshot0.dens.npy"))
    ionic = -torch.autograd.grad(energies.ewald, positions)[0] * BOHR / RYDBERG
    cores = -torch.autograd.grad(energies.terms(density).exchange_correlation, positions)[0] * BOHR / RYDBERG
    expected = tensor([[-0.01116614, 0.00277571, -0.00084427], [0.01116614, -0.00277571, 0.00084427]])
    torch.testing.assert_close(ionic, expected, rtol=0, atol=5e-8)
    expected = tensor([[0.00104605, -0.00022287, 0.00019019], [-0.00104698, 0.00022187, -0.00019046]])
    torch.testing.assert_close(cores, expected, rtol=0, atol=3e-7)


@needs_beryllium
def test_eigenvalues_give_the_band_energy_of_the_calculation(info):
    points = ase.io.read(BE / "Be_snapshot0.out", format="espresso-out").calc.kpts
    eigenvalues, weights = tensor([point.eps_n for point in points]), tensor([point.weight for point in points])
    occupied = (eigenvalues, weights, info["fermi_energy_dft"], info["temperature"])
    assert float(electrons_of_eigenvalues(*occupied)) == pytest.approx(
        info["number_of_electrons_from_eigenvals"], rel=1e-12
    )
    assert float(band_energy_of_eigenvalues(*occupied)) == pytest.approx(info["band_energy_dft_calculation"], rel=1e-12)
    grid = EnergyGrid(-8.0, 0.1, 450)
    assert float(dos_of_eigenvalues(eigenvalues, weights, grid).sum() * 0.1) == pytest.approx(
        4 * float(weights.sum()), rel=1e-10
    )


@needs_beryllium
def test_total_energy_of_an_ldos_is_the_sum_of_its_parts_and_has_a_derivative(info):
    energies, grid = beryllium(info), EnergyGrid(-5.0, 2.5, 11)
    ldos = tensor(np.load(BE / "Be_snapshot0.out.npy")).requires_grad_()
    result = total_energy(ldos, grid, info["temperature"], energies)
    assert float(result.fermi.detach()) == pytest.approx(10.240735437, abs=1e-8)
    parts = [result.band_energy, result.entropy, *result.terms]
    assert result.total.item() == pytest.approx(math.fsum(part.item() for part in parts), rel=1e-14)
    assert result.total.item() == pytest.approx(
        info["total_energy_dft_calculation"], abs=0.4
    )  # 11 levels, SCF to 0.03 eV
    (gradient,) = torch.autograd.grad(result.total, ldos)
    direction = ldos.detach() * torch.rand(
        18, 18, 27, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    step = 1e-4
    ahead, behind = (
        total_energy(ldos.detach() + sign * step * direction, grid, info["temperature"], energies).total
        for sign in (1, -1)
    )
    assert float((gradient * direction).sum()) == pytest.approx(float((ahead - behind) / (2 * step)), rel=1e-7)
    given = total_energy(ldos.detach(), grid, info["temperature"], energies, fermi=10.240735437)
    assert float(given.total) == pytest.approx(result.total.item(), abs=1e-7)
    with pytest.raises(ForgefieldError, match=r"probably in 1/\(eV\*Bohr\^3\)"):
        total_energy(ldos.detach() * BOHR**3, grid, info["temperature"], energies, fermi=10.24)


# Closed forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [1, 2])
def test_ewald_energies_are_those_of_madelung_and_wigner(repeats):
    coulomb = HARTREE * BOHR
    cell = np.eye(3) * 5.0
    sodium = np.array([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]) * 2.5
    positions, charges = np.concatenate([sodium, sodium + np.array([2.5, 0, 0])]), np.repeat([1.0, -1.0], 4)
    shifts = np.array(list(np.ndindex(repeats, repeats, repeats))) * 5.0
    images = (positions[None] + shifts[:, None]).reshape(-1, 3)
    energy = ewald_energy(tensor(cell * repeats), tensor(images), tensor(np.tile(charges, len(shifts))))
    assert float(energy) == pytest.approx(-1.7475645946331822 * coulomb / 2.5 * 4 * repeats**3, rel=1e-13)
    bcc = tensor([[-1, 1, 1], [1, -1, 1], [1, 1, -1]]) * 1.5
    radius = (3 * 13.5 / (4 * math.pi)) ** (1 / 3)
    wigner = ewald_energy(bcc, torch.zeros(1, 3), torch.ones(1))
    assert float(wigner) == pytest.approx(-0.8959292556829 * coulomb / radius, rel=1e-11)


def test_hartree_energy_of_a_wave_is_exact():
    cell = tensor([[4.0, 0, 0], [1.0, 5.0, 0], [0.5, -1.0, 6.0]])
    waves = PlaneWaves(cell, (12, 15, 16))
    places = torch.stack(torch.meshgrid(*(tensor(range(n)) / n for n in (12, 15, 16)), indexing="ij"), -1)
    miller = tensor([2.0, -1.0, 3.0])
    vector = 2 * math.pi * torch.linalg.inv(cell) @ miller
    density = 0.3 + 0.1 * torch.cos(2 * math.pi * places @ miller)
    expected = math.pi * 120.0 * 0.1**2 / float(vector @ vector)
    assert float(hartree_energy(density, waves)) == pytest.approx(expected, rel=1e-12)
    slope = 0.01 * torch.sin(2 * math.pi * places @ miller) ** 2 * (vector @ vector)
    torch.testing.assert_close(waves.gradient_squared(density), slope, rtol=1e-10, atol=1e-14)


def test_pbe_has_its_limits():
    rho = tensor([1e-3, 0.03, 0.3, 5.0])
    exchange = -0.75 * (3 / math.pi) ** (1 / 3) * rho ** (4 / 3)
    gas = pbe_energy_density(rho, torch.zeros(4))
    at_two = tensor([3 / (4 * math.pi) / 8])  # Wigner-Seitz radius 2: -0.0448 Hartree in the table of Perdew and Wang
    correlation = pbe_energy_density(at_two, torch.zeros(1)) / at_two + 0.75 * (3 / math.pi * at_two) ** (1 / 3)
    assert float(correlation) == pytest.approx(-0.0448, abs=5e-5)
    assert (gas < exchange).all()
    steep = pbe_energy_density(rho, 1e12 * rho ** (8 / 3))  # no correlation is left, exchange is enhanced by 1 + kappa
    torch.testing.assert_close(steep, 1.804 * exchange, rtol=1e-6, atol=0)
    assert pbe_energy_density(tensor([0.0, -1e-3]), torch.zeros(2)).tolist() == [0.0, 0.0]


def test_potential_is_the_derivative_of_the_energy(tmp_path):
    energies = small_cell(tmp_path)
    density = (
        0.2 + torch.rand(6, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ).requires_grad_()
    terms = energies.terms(density)
    (derivative,) = torch.autograd.grad(terms.hartree + terms.exchange_correlation, density, retain_graph=True)
    assert terms.minus_rho_vhxc.item() == pytest.approx(-float((density * derivative).sum().detach()), rel=1e-12)
    (slope,) = torch.autograd.grad(terms.minus_rho_vhxc, density)
    bump = torch.zeros(6, 6, 6, dtype=torch.float64)
    bump[1, 2, 3] = 1e-5
    values = [float(energies.terms(density.detach() + sign * bump).minus_rho_vhxc) for sign in (1, -1)]
    assert float(slope[1, 2, 3]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


# Pseudopotentials ---------------------------------------------------------------------------------------------------

CORE_CHARGE, CORE_EXPONENT = 1.7, 0.8


def write_upf(folder, version: int, element: str = "Be", functional: str = "SLA  PW   PBX  PBC"):
    """A pseudopotential with nothing but a mesh and a Gaussian core."""
    radii = np.exp(np.linspace(-9, math.log(12), 801))
    steps = radii * (math.log(12) + 9) / 800
    core = CORE_CHARGE * (CORE_EXPONENT / math.pi) ** 1.5 * np.exp(-CORE_EXPONENT * radii**2)
    lines = {
        name: " ".join(f"{value:.15E}" for value in values).replace("E", "D" if version == 1 else "E")
        for name, values in (("PP_R", radii), ("PP_RAB", steps), ("PP_NLCC", core))
    }
    if version == 1:
        header = (
            f"<PP_HEADER>\n 0 Version Number\n {element} Element\n NC Norm - Conserving pseudopotential\n"
            f" T Nonlinear Core Correction\n {functional}   PBE  Exchange-Correlation functional\n"
            " 2.00000000000 Z valence\n</PP_HEADER>"
        )
        text = f"<PP_INFO>\n a < b & c\n</PP_INFO>\n{header}\n<PP_MESH>\n"
    else:
        text = (
            '<UPF version="2.0.1">\n<PP_INFO>\n a < b & c\n</PP_INFO>\n<PP_HEADER\n'
            f'element="{element}"\ncore_correction=".true."\nfunctional="{functional}"\nz_valence="    2.000"/>\n'
            '<PP_MESH mesh="801">\n'
        )
    text += "\n".join(f"<{name}>\n{body}\n</{name}>" for name, body in lines.items())
    path = folder / f"{element}.test-v{version}.UPF"
    path.write_text(text)
    return path


def small_cell(folder, numbers=(4, 4), **options) -> DensityEnergies:
    cell = tensor([[3.0, 0, 0], [0.4, 3.2, 0], [0, 0, 3.4]])
    potentials = {"Be": read_upf(write_upf(folder, 2))}
    return DensityEnergies(cell, tensor([[0.1, 0.2, 0.3], [1.6, 1.5, 1.9]]), numbers, potentials, (6, 6, 6), **options)


@pytest.mark.parametrize("version", [1, 2])
def test_core_density_is_that_of_the_file(tmp_path, version):
    write_upf(tmp_path, version)
    potentials = read_pseudopotentials(tmp_path, ["Be"])
    assert (potentials["Be"].valence, potentials["Be"].is_pbe) == (2.0, True)
    cell = tensor([[3.0, 0, 0], [0.4, 3.2, 0], [0, 0, 3.4]])
    place = tensor([0.1, 0.2, 0.3])
    energies = DensityEnergies(cell, place[None], [4], potentials, (32, 32, 32))
    steps = torch.cartesian_prod(*[torch.arange(-3.0, 4.0, dtype=torch.float64)] * 3) @ cell
    squared = ((tensor([10, 20, 5]) / 32 @ cell + steps - place) / BOHR).square().sum(1)
    expected = CORE_CHARGE * (CORE_EXPONENT / math.pi) ** 1.5 * torch.exp(-CORE_EXPONENT * squared).sum()
    assert float(energies.core_density[10, 20, 5]) == pytest.approx(float(expected), rel=1e-8)


def test_wrong_input_is_named(tmp_path):
    write_upf(tmp_path, 2)
    write_upf(tmp_path, 2, element="Al", functional="SLA PW NOGX NOGC")
    with pytest.raises(ForgefieldError, match=r"no pseudopotential of B in .*: a file such as B\.pbe\.UPF"):
        read_pseudopotentials(tmp_path, ["Be", "B"])
    with pytest.raises(ForgefieldError, match="Be_other.UPF of Be is not in"):
        read_pseudopotentials(tmp_path, ["Be"], {"Be": "/elsewhere/Be_other.UPF"})
    with pytest.raises(ForgefieldError, match="is a pseudopotential of Al, not of Be"):
        read_pseudopotentials(tmp_path, ["Be"], {"Be": "Al.test-v2.UPF"})
    write_upf(tmp_path, 1)
    with pytest.raises(ForgefieldError, match="several pseudopotentials of Be"):
        read_pseudopotentials(tmp_path, ["Be"])
    (tmp_path / "O.UPF").write_text("not a pseudopotential")
    with pytest.raises(ForgefieldError, match="no <PP_HEADER> section"):
        read_upf(tmp_path / "O.UPF")
    potentials = read_pseudopotentials(tmp_path, ["Al"])
    with pytest.raises(ForgefieldError, match="made for the functional 'SLA PW NOGX NOGC'"):
        DensityEnergies(torch.eye(3) * 4, torch.zeros(1, 3), [13], potentials, (8, 8, 8))
    with pytest.raises(ForgefieldError, match=r"there is no pseudopotential for Al \(available: Be\)"):
        small_cell(tmp_path, numbers=(4, 13))
    with pytest.raises(ForgefieldError, match=r"calculation has 6 electrons.*Be: 2\) give 4"):
        small_cell(tmp_path, electrons=6)
    with pytest.raises(ForgefieldError, match=r"too coarse for a density cutoff of 160 Ry: at least 23x25x25"):
        small_cell(tmp_path, density_cutoff=160.0)
    energies = small_cell(tmp_path)
    with pytest.raises(ForgefieldError, match="does not fit the grid"):
        energies.hartree(torch.ones(5, 6, 6))
    with pytest.raises(ForgefieldError, match="density has 32.64 electrons"):
        energies.check_electrons(torch.ones(6, 6, 6))
    with pytest.raises(ForgefieldError, match="atoms 0 and 1 have the same position"):
        ewald_energy(torch.eye(3) * 4, torch.zeros(2, 3), torch.ones(2))
