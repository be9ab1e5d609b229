"""Integrals over the Fermi function are exact, Fermi energies are roots, derivatives are derivatives, bad input is named."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import bisect
from scipy.special import expit, spence, xlogy

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.units import check_electrons, likely_unit_factor
from forgefield.ldos.electronic import fermi as physics
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.polylog import polylogarithms
from forgefield.physics.units import BOHR, BOLTZMANN, RYDBERG
from tests.support.helpers import SHARED_DATA

BE, AL = SHARED_DATA / "be2_ldos", SHARED_DATA / "al36_ldos"
BE_GRID = EnergyGrid(-5.0, 2.5, 11)
SPLIT_GRID = EnergyGrid.from_segments([(-4.0, 0.5, 7), (-1.0, 0.125, 17), (2.0, 0.5, 5)])


# The slow and obvious way ------------------------------------------------------------------------------------------


def oracle(dos: np.ndarray, grid: EnergyGrid, fermi: float, temperature: float) -> tuple[float, float, float]:
    """Electrons, band energy and -TS by quadrature of the interpolated density of states."""
    nodes, kt = grid.nodes().numpy(), BOLTZMANN * temperature

    def integrands(energy: float) -> tuple[float, float, float]:
        f = expit((fermi - energy) / kt)
        at = np.interp(energy, nodes, [0.0, *dos, 0.0])
        return at * f, at * energy * f, at * kt * (xlogy(f, f) + xlogy(1 - f, 1 - f))

    totals = [0.0, 0.0, 0.0]
    for low, high in itertools.pairwise(nodes):
        near = [fermi + n * kt for n in (-30, -8, 0, 8, 30) if low < fermi + n * kt < high]
        edges = [low, *near, high]
        for a, b in itertools.pairwise(edges):
            for n in range(3):
                totals[n] += quad(lambda energy, n=n: integrands(energy)[n], a, b, epsabs=1e-15, epsrel=1e-13)[0]
    return totals[0], totals[1], totals[2]


def random_dos(grid: EnergyGrid, seed: int, *batch: int) -> torch.Tensor:
    return 0.2 + torch.rand(*batch, grid.levels, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Polylogarithms ----------------------------------------------------------------------------------------------------


def test_polylogarithms_of_negative_arguments_equal_their_series():
    x = torch.cat([torch.linspace(-40, -0.5, 80, dtype=torch.float64), torch.tensor([-700.0])])
    for order, found in enumerate(polylogarithms(x), start=1):
        series = [math.fsum((-1) ** k * math.exp(k * float(at)) / k**order for k in range(1, 90)) for at in x]
        torch.testing.assert_close(found, torch.tensor(series, dtype=torch.float64), rtol=2e-15, atol=0)


def test_polylogarithms_equal_closed_forms_and_their_integrals():
    golden = math.log((1 + math.sqrt(5)) / 2)
    first, second, third = polylogarithms(torch.tensor([0.0, -golden, golden, 300.0], dtype=torch.float64))
    assert float(first[0]) == pytest.approx(-math.log(2), rel=1e-15)
    exact = [-(math.pi**2) / 12, -(math.pi**2) / 15 + golden**2 / 2, -(math.pi**2) / 10 - golden**2]
    assert second[:3].tolist() == pytest.approx(exact, rel=1e-15)
    assert float(third[0]) == pytest.approx(-0.9015426773696957, rel=1e-15)  # -3/4 zeta(3)
    assert float(third[3]) == pytest.approx(-(300**3) / 6 - 300 * math.pi**2 / 6, rel=1e-15)
    x = torch.linspace(-0.6, 30, 100, dtype=torch.float64)
    _, second, third = polylogarithms(x)
    torch.testing.assert_close(second, torch.from_numpy(spence(1 + np.exp(x.numpy()))), rtol=2e-15, atol=0)
    for place in (0, 1, 2, 5, 30, 99):
        parts = [
            quad(lambda t, s=float(x[place]): t * t / 2 * expit(s - t), a, a + 10, epsabs=0)[0]
            for a in range(0, 80, 10)
        ]
        assert float(third[place]) == pytest.approx(-sum(parts), rel=1e-13)


# Weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [30.0, 300.0, 40000.0])
@pytest.mark.parametrize("grid", [EnergyGrid(-2.0, 0.4, 12), SPLIT_GRID], ids=["uniform", "split"])
def test_integrals_equal_quadrature(grid, temperature):
    dos = random_dos(grid, 0)
    on_a_level = float(grid.energies()[7])
    for fermi in (0.137, on_a_level, grid.first - 0.05):
        found = [
            float(integral(dos, grid, temperature, fermi))
            for integral in (physics.electron_number, physics.band_energy, physics.entropy_energy)
        ]
        assert found == pytest.approx(oracle(dos.numpy(), grid, fermi, temperature), rel=1e-11, abs=1e-13)


def test_far_levels_are_filled_or_empty_to_the_last_digit():
    grid = EnergyGrid(-300.0, 0.1, 6000)
    weights = physics.occupation_weights(grid, 0.03, 300.0)
    torch.testing.assert_close(weights.number[:2900], torch.full((2900,), 0.1, dtype=torch.float64), rtol=1e-12, atol=0)
    assert weights.number[3100:].abs().max() == 0
    torch.testing.assert_close(weights.band_energy[:2900], 0.1 * grid.energies()[:2900], rtol=1e-12, atol=0)
    assert weights.entropy[:2900].abs().max() == 0


# The Fermi energy --------------------------------------------------------------------------------------------------


def test_fermi_energies_of_a_batch_are_the_roots_of_each():
    dos = random_dos(SPLIT_GRID, 1, 2, 3)
    temperatures = torch.tensor([[10.0, 300.0, 5000.0]]).expand(2, 3)
    electrons = torch.tensor([[1.0, 1.5, 2.0], [2.5, 3.0, 1.7]])
    found = physics.fermi_energy(dos, SPLIT_GRID, temperatures, electrons)
    assert found.shape == (2, 3)
    for place in np.ndindex(2, 3):
        temperature, wanted = float(temperatures[place]), float(electrons[place])

        def excess(level: float, d=dos[place], t=temperature, n=wanted) -> float:
            return float(physics.electron_number(d, SPLIT_GRID, t, level)) - n

        assert float(found[place]) == pytest.approx(
            bisect(excess, SPLIT_GRID.first, SPLIT_GRID.last, xtol=1e-14), abs=1e-12
        )
        assert abs(excess(float(found[place]))) < 2e-15 * wanted * 4


def test_one_density_of_states_at_several_temperatures():
    dos, temperatures = random_dos(BE_GRID, 7), torch.tensor([300.0, 3000.0, 15000.0])
    levels = physics.fermi_energy(dos, BE_GRID, temperatures, 9.0)
    energies = physics.band_energy(dos, BE_GRID, temperatures, levels)
    assert energies.shape == (3,)
    for temperature, level, energy in zip(temperatures.tolist(), levels, energies, strict=True):
        alone = physics.fermi_energy(dos, BE_GRID, temperature, 9.0)
        assert float(alone) == pytest.approx(float(level), rel=1e-14)
        assert float(physics.band_energy(dos, BE_GRID, temperature, alone)) == pytest.approx(float(energy), rel=1e-14)
    with pytest.raises(ForgefieldError, match="temperatures above zero are needed.* one is -1"):
        physics.fermi_energy(dos, BE_GRID, torch.tensor([-1.0, 5.0]), 9.0)


def test_fermi_energy_in_a_gap_holds_the_electrons():
    dos = torch.ones(41, dtype=torch.float64)
    dos[15:25] = 0
    grid = EnergyGrid(-2.0, 0.1, 41)
    electrons = float(physics.electron_number(dos, grid, 100.0, -0.05))
    level = physics.fermi_energy(dos, grid, 100.0, electrons)
    assert -0.6 < float(level) < 0.6
    assert float(physics.electron_number(dos, grid, 100.0, level)) == pytest.approx(electrons, rel=1e-14)


@pytest.mark.parametrize("temperature", [500.0, 6000.0])
def test_derivatives_pass_through_the_fermi_energy(temperature):
    grid = EnergyGrid(-1.0, 1.0, 4)
    dos = random_dos(grid, 2, 2).requires_grad_()
    electrons = torch.tensor([0.9, 1.3], dtype=torch.float64, requires_grad=True)

    def observables(d: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        level = physics.fermi_energy(d, grid, temperature, n)
        return (
            level,
            physics.band_energy(d, grid, temperature, level),
            physics.entropy_energy(d, grid, temperature, level),
        )

    assert torch.autograd.gradcheck(observables, (dos, electrons), eps=1e-6, atol=1e-7)
    assert torch.autograd.gradgradcheck(observables, (dos, electrons), eps=1e-6, atol=1e-5, fast_mode=True)


def test_free_energy_grows_by_the_fermi_energy_with_each_electron():
    dos, electrons = random_dos(BE_GRID, 3), torch.tensor(7.0, dtype=torch.float64, requires_grad=True)
    level = physics.fermi_energy(dos, BE_GRID, 3000.0, electrons)
    free = physics.band_energy(dos, BE_GRID, 3000.0, level) + physics.entropy_energy(dos, BE_GRID, 3000.0, level)
    assert float(torch.autograd.grad(free, electrons)[0]) == pytest.approx(level.item(), rel=1e-12)


def test_derivative_is_right_where_the_fermi_energy_is_a_level():
    level = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    dos = random_dos(BE_GRID, 4)
    number = physics.electron_number(dos, BE_GRID, 300.0, level)
    step = 1e-6
    around = [float(physics.electron_number(dos, BE_GRID, 300.0, 2.5 + sign * step)) for sign in (-1, 1)]
    slope = float(torch.autograd.grad(number, level)[0])
    assert slope == pytest.approx((around[1] - around[0]) / (2 * step), rel=1e-8)


def test_nothing_waits_for_the_device():
    dos = torch.empty(
        3, 11, dtype=torch.float64, device="meta", requires_grad=True
    )  # has no values that could be waited for
    level = physics.fermi_energy(dos, BE_GRID, 300.0, 4.0, checked=False)
    energy = physics.band_energy(dos, BE_GRID, 300.0, level) + physics.entropy_energy(dos, BE_GRID, 300.0, level)
    (gradient,) = torch.autograd.grad(energy.sum(), dos)
    assert level.shape == (3,)
    assert gradient.shape == (3, 11)


# Real data: values of MALA 1.4.0 -----------------------------------------------------------------------------------


@pytest.mark.skipif(not BE.is_dir(), reason="needs the Be snapshots")
@pytest.mark.parametrize(
    ("snapshot", "fermi", "band", "entropy"),
    [
        (0, 10.240735437, 12.447077139, -6.5515796e-4),
        (1, 10.149207155, 12.279480141, -6.6172470e-4),
        (2, 10.225296014, 12.417710873, -6.5611525e-4),
    ],
)
def test_beryllium_ldos_gives_the_energies_of_mala(snapshot, fermi, band, entropy):
    info = json.loads((BE / f"Be_snapshot{snapshot}.info.json").read_text())
    ldos = torch.from_numpy(np.load(BE / f"Be_snapshot{snapshot}.out.npy"))
    voxel, temperature = abs(np.linalg.det(info["voxel"]["array"])), info["temperature"]
    dos = physics.dos_of_ldos(ldos, voxel)
    level = physics.fermi_energy(dos, BE_GRID, temperature, 4.0)
    assert float(level) == pytest.approx(fermi, abs=1e-8)
    assert float(physics.band_energy(dos, BE_GRID, temperature, level)) == pytest.approx(band, abs=1e-8)
    assert float(physics.entropy_energy(dos, BE_GRID, temperature, level)) == pytest.approx(entropy, abs=1e-11)
    assert float(physics.electron_number(dos, BE_GRID, temperature, level)) == pytest.approx(4.0, abs=4e-15)
    density = physics.density(ldos, BE_GRID, temperature, level)
    assert density.shape == (18, 18, 27)
    assert float(density.sum() * voxel) == pytest.approx(4.0, abs=1e-13)


@pytest.mark.skipif(not AL.is_dir(), reason="needs the Al density of states")
def test_aluminium_dos_gives_the_energies_of_mala():
    dos, grid = torch.from_numpy(np.load(AL / "Al_dos.npy")), EnergyGrid(-10.0, 0.1, 250)
    temperature = 0.0019 * RYDBERG / BOLTZMANN
    level = physics.fermi_energy(dos, grid, temperature, 108)
    assert float(level) == pytest.approx(7.529509770, abs=1e-8)
    assert float(physics.band_energy(dos, grid, temperature, level)) == pytest.approx(323.322600584, abs=1e-8)
    assert float(physics.entropy_energy(dos, grid, temperature, level)) == pytest.approx(-0.0313762649, abs=1e-9)
    assert float(physics.electron_number(dos, grid, temperature, level)) == pytest.approx(108, abs=5e-14)


# Grids and bad input -----------------------------------------------------------------------------------------------


def test_windows_share_the_level_where_they_meet():
    assert SPLIT_GRID.levels == 6 + 17 + 5
    energies = SPLIT_GRID.energies()
    assert energies.diff().min() > 0
    assert energies[[0, 5, 6, 22, 23, 27]].tolist() == [-4.0, -1.5, -1.0, 1.0, 2.0, 4.0]
    assert SPLIT_GRID.nodes()[[0, -1]].tolist() == [-4.5, 4.5]
    for grid in (SPLIT_GRID, BE_GRID):
        assert EnergyGrid.from_dict(json.loads(json.dumps(grid.to_dict()))) == grid


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EnergyGrid(0.0, -1.0, 5), "spacing above zero"),
        (lambda: EnergyGrid(0.0, 1.0, 1), "at least two levels"),
        (lambda: EnergyGrid.from_segments([(0.0, 1.0, 5), (2.0, 0.1, 5)]), "overlap: one ends at 4 eV"),
        (lambda: EnergyGrid.from_dict({"first": 0.0, "space": 1.0, "levels": 5}), "first, spacing, levels"),
    ],
)
def test_wrong_grids_are_refused(make, words):
    with pytest.raises(ForgefieldError, match=words):
        make()


def test_wrong_densities_of_states_are_refused():
    dos = random_dos(BE_GRID, 5, 2)
    with pytest.raises(
        ForgefieldError, match=r"of snapshot 1 is outside the energy grid.* at its highest level, where 60 are needed"
    ):
        physics.fermi_energy(dos, BE_GRID, 300.0, torch.tensor([5.0, 60.0]))
    with pytest.raises(ForgefieldError, match="outside the energy grid"):
        physics.fermi_energy(dos, BE_GRID, 300.0, 1e-3)
    with pytest.raises(ForgefieldError, match="temperature above zero"):
        physics.band_energy(dos, BE_GRID, 0.0, 1.0)
    with pytest.raises(ForgefieldError, match="does not fit the energy grid of 11 levels"):
        physics.density(dos[:, 1:], BE_GRID, 300.0, 1.0)
    dos[1, 4] = math.nan
    with pytest.raises(ForgefieldError, match=r"not a number at 1 of 11 levels, first at level 4 \(5 eV\)"):
        physics.fermi_energy(dos, BE_GRID, 300.0, 4.0)


def test_unchecked_fermi_energy_beyond_the_grid_is_its_end_and_has_no_derivative():
    dos = random_dos(BE_GRID, 6, 2).requires_grad_()
    level = physics.fermi_energy(dos, BE_GRID, 300.0, torch.tensor([1e-3, 600.0]), checked=False)
    assert level.tolist() == [BE_GRID.first, BE_GRID.last]
    assert torch.autograd.grad(level.sum(), dos)[0].abs().max() == 0


def test_wrong_units_are_named_by_the_number_of_electrons():
    assert likely_unit_factor(4.0 * BOHR**3 * 0.95, 4.0) == ("1/(eV*Bohr^3)", pytest.approx(BOHR**-3))
    assert likely_unit_factor(4.0 * RYDBERG * BOHR**3, 4.0) == ("1/(Ry*Bohr^3)", pytest.approx(BOHR**-3 / RYDBERG))
    assert likely_unit_factor(4.0 / RYDBERG, 4.0, unit="1/(Ry*Bohr**3)") == ("1/(eV*Bohr^3)", pytest.approx(RYDBERG))
    assert likely_unit_factor(4.0 * 1.9, 4.0) == ("1/(Ry*Bohr^3)", pytest.approx(0.496, abs=1e-3))
    assert likely_unit_factor(4.0 * 300, 4.0) is None
    check_electrons(3.6, 4.0, where="Be")
    with pytest.raises(ForgefieldError, match=r"Be.out.npy: .*0\.593 electrons .* 4; .* probably in 1/\(eV\*Bohr\^3\)"):
        check_electrons(0.593, 4.0, where="Be.out.npy")
    with pytest.raises(ForgefieldError, match="no other unit"):
        check_electrons(5.0, 4.0, where="Be")
