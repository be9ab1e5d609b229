"""Electrons, Fermi energy, band energy, entropy and density of a density of states at a temperature.

The density of states is a straight line between levels; its product with the Fermi function is integrated exactly
(hat functions, polylogarithms), so that each integral is a dot product with `occupation_weights`. Everything is float64,
batched and differentiable, and does not synchronise with the device except where values are checked. Densities of states
(..., levels), Fermi energies, temperatures and electrons (...) broadcast: for example one density of states at
several temperatures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.electronic.polylog import LI2_OF_MINUS_ONE, decaying_dilogarithm, decaying_trilogarithm
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.physics.units import BOLTZMANN

SECTIONS, ROUNDS, NEWTON_STEPS = 16, 8, 2
"""Search for the Fermi energy: the interval is divided by 16, eight times (2e-10 of its length), then two Newton steps."""

_SOMMERFELD = -2 * LI2_OF_MINUS_ONE  # pi^2/6


class OccupationWeights(NamedTuple):
    """Weights of the levels: integrals are dot products with a density of states (1/eV); each (..., levels)."""

    number: Tensor
    """electrons: the integral of hat_i(e) f(e), eV"""
    band_energy: Tensor
    """the integral of hat_i(e) e f(e), eV^2"""
    entropy: Tensor
    """-TS: the integral of hat_i(e) kT [f log f + (1 - f) log(1 - f)], eV^2"""


def occupation_weights(grid: EnergyGrid, fermi: float | Tensor, temperature: float | Tensor) -> OccupationWeights:
    """Weights of the levels of `grid` for Fermi energies `fermi` (...), eV, and temperatures in K (a number, or (...))."""
    level = torch.as_tensor(fermi, dtype=torch.float64)
    level, thermal = torch.broadcast_tensors(level, _thermal_energy(temperature, level))
    return OccupationWeights(*_Weights.apply(level, thermal.detach(), grid.nodes(level.device)))


def electron_number(dos: Tensor, grid: EnergyGrid, temperature: float | Tensor, fermi: float | Tensor) -> Tensor:
    """Electrons (...) of `dos` (..., levels), 1/eV, at the Fermi energy `fermi` (...), eV."""
    dos, weights = _with_weights(dos, grid, temperature, fermi)
    return (dos * weights.number).sum(-1)


def band_energy(dos: Tensor, grid: EnergyGrid, temperature: float | Tensor, fermi: float | Tensor) -> Tensor:
    """Sum of the energies of occupied states (...), eV."""
    dos, weights = _with_weights(dos, grid, temperature, fermi)
    return (dos * weights.band_energy).sum(-1)


def entropy_energy(dos: Tensor, grid: EnergyGrid, temperature: float | Tensor, fermi: float | Tensor) -> Tensor:
    """-TS of the occupations (...), eV; never above zero for a density of states that is not below it."""
    dos, weights = _with_weights(dos, grid, temperature, fermi)
    return (dos * weights.entropy).sum(-1)


def fermi_energy(
    dos: Tensor, grid: EnergyGrid, temperature: float | Tensor, electrons: float | Tensor, *, checked: bool = True
) -> Tensor:
    """The energy (...), eV, at which `dos` (..., levels) has `electrons` electrons.

    If there are several such energies, in a density of states with negative values, it is one of them. Differentiable with
    respect to `dos` and `electrons`, by the implicit function theorem. `checked` synchronises with the device and raises a
    ForgefieldError if levels are not finite or the Fermi energy is outside the grid. Otherwise such an energy is the nearer end
    of the grid, with zero derivative.
    """
    dos = _as_dos(dos, grid)
    number, thermal = _on_device(electrons, dos), _thermal_energy(temperature, dos)
    batch = torch.broadcast_shapes(dos.shape[:-1], number.shape, thermal.shape)
    dos, number, thermal = dos.expand(*batch, -1), number.expand(batch), thermal.expand(batch)
    if checked:
        _check_levels(dos, grid)
        _check_temperatures(thermal)
        _check_within_grid(dos, grid, thermal, number)
    return _FermiEnergy.apply(dos, number, thermal.detach(), grid.nodes(dos.device))


def density(ldos: Tensor, grid: EnergyGrid, temperature: float, fermi: float | Tensor) -> Tensor:
    """Electron density (...), 1/A^3, of `ldos` (..., levels), 1/(eV A^3): one matrix-vector product, in float64."""
    _check_width(ldos, grid, "LDOS")
    weights = occupation_weights(grid, _on_device(fermi, ldos).reshape(()), temperature).number
    rows = ldos.reshape(-1, grid.levels)
    return torch.cat([chunk.to(torch.float64) @ weights for chunk in _chunks(rows)]).reshape(ldos.shape[:-1])


def dos_of_ldos(ldos: Tensor, voxel_volume: float | Tensor) -> Tensor:
    """Density of states (levels,), 1/eV, of `ldos` (..., levels), 1/(eV A^3): the sum over all points times A^3 of each."""
    rows = ldos.reshape(-1, ldos.shape[-1])
    total = sum((chunk.to(torch.float64).sum(0) for chunk in _chunks(rows)), start=_zeros(rows))
    return total * voxel_volume


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in pieces whose float64 copies fit into the cache of a CPU; larger pieces on a GPU, to limit kernel launches."""
    return rows.split(max(1, (2**17 if rows.device.type == "cpu" else 2**26) // rows.shape[1]))


def _zeros(rows: Tensor) -> Tensor:
    return torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)


def _with_weights(
    dos: Tensor, grid: EnergyGrid, temperature: float | Tensor, fermi: float | Tensor
) -> tuple[Tensor, OccupationWeights]:
    dos = _as_dos(dos, grid)
    return dos, occupation_weights(grid, _on_device(fermi, dos), temperature)


# The weights -------------------------------------------------------------------------------------------------------
#
# Integrating hat_i times g over energy is the second difference, over the nodes, of a function whose second derivative is g.
# With x = (e - fermi)/kT, y = |x| and L_k = Li_k(-e^-y), those functions are, apart from a polynomial for x < 0,
#     f                    kT^2 (-L2),  for x < 0  kT^2 (pi^2/6 + L2)        polynomial kT^2 x^2/2
#     (e - fermi) f        kT^3 (-y L2 - 2 L3)                               polynomial kT^3 (x^3/6 - pi^2 x/6)
#     f log f + ...        kT^3 (y L2 + 3 L3)                                polynomial kT^3 pi^2 x/3
# The polynomials are the step function in place of the Fermi function and the Sommerfeld term: they are integrated in
# closed form, so that far from the Fermi energy nothing large is subtracted from anything large.


def _number_weights(nodes: Tensor, fermi: Tensor, thermal: Tensor) -> Tensor:
    """The integral of hat_i f, (..., levels)."""
    below, distance = _reduced(nodes, fermi, thermal)
    dilog = decaying_dilogarithm(distance)[1]
    smooth = _second_difference(torch.where(below, _SOMMERFELD + dilog, -dilog), nodes)
    return _step_number(nodes, fermi) + thermal[..., None] ** 2 * smooth


def _level_weights(nodes: Tensor, fermi: Tensor, thermal: Tensor) -> Tensor:
    """The derivative of `_number_weights` by the Fermi energy: the integral of hat_i f (1 - f)/kT."""
    _, distance = _reduced(nodes, fermi, thermal)
    first = decaying_dilogarithm(distance)[0]
    return _hats(nodes, fermi) - thermal[..., None] * _second_difference(first, nodes)


def _all_weights(nodes: Tensor, fermi: Tensor, thermal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integrals of hat_i times f, e f, and kT [f log f + (1 - f) log(1 - f)]."""
    below, distance = _reduced(nodes, fermi, thermal)
    dilog, trilog = decaying_dilogarithm(distance)[1], decaying_trilogarithm(distance)
    kt = thermal[..., None]
    sommerfeld = _SOMMERFELD * kt**2 * _hats(nodes, fermi)
    number = _step_number(nodes, fermi) + kt**2 * _second_difference(
        torch.where(below, _SOMMERFELD + dilog, -dilog), nodes
    )
    above_fermi = (
        _step_energy(nodes, fermi) + sommerfeld - kt**3 * _second_difference(distance * dilog + 2 * trilog, nodes)
    )
    entropy = kt**3 * _second_difference(distance * dilog + 3 * trilog, nodes) - 2 * sommerfeld
    return number, above_fermi + fermi[..., None] * number, entropy


def _level_moments(nodes: Tensor, fermi: Tensor, thermal: Tensor) -> tuple[Tensor, Tensor]:
    """Integrals of hat_i f (1 - f)/kT times 1 and times (e - fermi)."""
    below, distance = _reduced(nodes, fermi, thermal)
    first, dilog = decaying_dilogarithm(distance)
    half = distance * first + 2 * dilog
    centred = thermal[..., None] ** 2 * _second_difference(torch.where(below, 2 * _SOMMERFELD + half, -half), nodes)
    return _hats(nodes, fermi) - thermal[..., None] * _second_difference(first, nodes), centred


def _reduced(nodes: Tensor, fermi: Tensor, thermal: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a node is below the Fermi energy, and its distance from it in kT, each (..., levels + 2).

    Beyond 100 kT all functions of it are constant to 1e-43; denormal numbers would only be slow.
    """
    x = (nodes - fermi[..., None]) / thermal[..., None]
    return x < 0, x.abs().clamp_max(100.0)


def _second_difference(values: Tensor, nodes: Tensor) -> Tensor:
    """Change of slope at the inner nodes, (..., levels)."""
    slopes = values.diff(dim=-1) / nodes.diff()
    return slopes.diff(dim=-1)


def _hats(nodes: Tensor, fermi: Tensor) -> Tensor:
    """hat_i at the Fermi energy, (..., levels)."""
    position = (fermi[..., None] - nodes[:-1]) / nodes.diff()
    return torch.minimum(position[..., :-1], 1 - position[..., 1:]).clamp_min(0)


def _filled(nodes: Tensor, fermi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Widths of the intervals, how far above their lower ends the Fermi energy is, and how much of them is below it."""
    width = nodes.diff()
    position = (fermi[..., None] - nodes[:-1]) / width
    return width, position, position.clamp(0, 1)


def _step_number(nodes: Tensor, fermi: Tensor) -> Tensor:
    """The integral of hat_i over the energies below the Fermi energy, (..., levels)."""
    width, _, filled = _filled(nodes, fermi)
    rising = filled * filled / 2
    falling = filled - rising
    return width[:-1] * rising[..., :-1] + width[1:] * falling[..., 1:]


def _step_energy(nodes: Tensor, fermi: Tensor) -> Tensor:
    """The integral of hat_i (e - fermi) over the energies below the Fermi energy, (..., levels)."""
    width, position, filled = _filled(nodes, fermi)
    half_square = filled * filled / 2
    third_cube = filled * filled * filled / 3
    rising = third_cube - position * half_square
    falling = half_square - third_cube - position * (filled - half_square)
    return width[:-1] ** 2 * rising[..., :-1] + width[1:] ** 2 * falling[..., 1:]


class _Weights(TypedFunction):
    """Weights whose derivative by the Fermi energy is in closed form: smooth, also where it falls on a level."""

    @staticmethod
    def forward(ctx: AutogradContext, fermi: Tensor, thermal: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(fermi, thermal, nodes)
        return _all_weights(nodes, fermi, thermal)

    @staticmethod
    def backward(ctx: AutogradContext, *cotangents: Tensor) -> Gradients:
        number, energy, entropy = cotangents
        fermi, thermal, nodes = ctx.saved_tensors
        density, centred = _level_moments(nodes, fermi, thermal)
        gradient = (number + energy * fermi[..., None]) * density + (energy - entropy) * centred
        return gradient.sum(-1), None, None


# The Fermi energy --------------------------------------------------------------------------------------------------


class _FermiEnergy(TypedFunction):
    """Root of the electron number; its derivative is that of the implicit function."""

    @staticmethod
    def forward(ctx: AutogradContext, dos: Tensor, electrons: Tensor, thermal: Tensor, nodes: Tensor) -> Tensor:
        fermi, inside = _solve(dos, electrons, thermal, nodes)
        ctx.save_for_backward(dos, fermi, inside, thermal, nodes)
        return fermi

    @staticmethod
    def backward(ctx: AutogradContext, *cotangents: Tensor) -> Gradients:
        (gradient,) = cotangents
        dos, fermi, inside, thermal, nodes = ctx.saved_tensors
        slope = (dos * _level_weights(nodes, fermi, thermal)).sum(-1)
        usable = inside & (slope != 0)
        by_electrons = torch.where(usable, gradient / torch.where(usable, slope, 1.0), 0.0)
        return -by_electrons[..., None] * _number_weights(nodes, fermi, thermal), by_electrons, None, None


def _solve(dos: Tensor, electrons: Tensor, thermal: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The Fermi energy (...) and whether it is within the grid; a fixed number of steps without synchronisation."""
    lowest, highest = nodes[1].expand_as(electrons), nodes[-2].expand_as(electrons)
    low, high = lowest, highest
    cuts = torch.arange(SECTIONS + 1, dtype=torch.float64, device=dos.device) / SECTIONS
    for _ in range(ROUNDS):
        candidates = low[..., None] + (high - low)[..., None] * cuts
        upper = _first_with_enough(dos, electrons, thermal, nodes, candidates).clamp(1, SECTIONS)[..., None]
        low, high = candidates.gather(-1, upper - 1)[..., 0], candidates.gather(-1, upper)[..., 0]
    fermi = (low + high) / 2
    for _ in range(NEWTON_STEPS):
        excess = (dos * _number_weights(nodes, fermi, thermal)).sum(-1) - electrons
        slope = (dos * _level_weights(nodes, fermi, thermal)).sum(-1)
        fermi = torch.where(slope > 0, fermi - excess / slope, fermi).clamp(low, high)
    ends = torch.stack([lowest, highest], dim=-1)
    first_enough = _first_with_enough(dos, electrons, thermal, nodes, ends)
    inside = first_enough == 1
    return torch.where(inside, fermi, torch.where(first_enough == 0, lowest, highest)), inside


def _first_with_enough(dos: Tensor, electrons: Tensor, thermal: Tensor, nodes: Tensor, candidates: Tensor) -> Tensor:
    """Index (...) of the first Fermi energy among `candidates` (..., n) with at least `electrons` electrons; n if none has."""
    weights = _number_weights(nodes, candidates, thermal[..., None].expand_as(candidates))
    enough = (weights @ dos[..., None])[..., 0] >= electrons[..., None]
    return (enough.cumsum(-1) == 0).sum(-1)


# Input -------------------------------------------------------------------------------------------------------------


def _as_dos(dos: Tensor, grid: EnergyGrid) -> Tensor:
    _check_width(dos, grid, "density of states")
    return dos.to(torch.float64)


def _check_width(values: Tensor, grid: EnergyGrid, quantity: str) -> None:
    if values.shape[-1:] != (grid.levels,):
        raise ForgefieldError(
            f"the {quantity} of shape {tuple(values.shape)} does not fit the energy grid of {grid.levels} levels"
        )


def _on_device(value: float | Tensor, like: Tensor) -> Tensor:
    """`value` in float64 where `like` is; a number is created there without a copy from the host."""
    if isinstance(value, Tensor):
        return value.to(like.device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=like.device)


def _thermal_energy(temperature: float | Tensor, like: Tensor) -> Tensor:
    """kT in eV."""
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ForgefieldError(
            f"a temperature above zero is needed for Fermi occupations, in K; this one is {temperature}"
        )
    return _on_device(temperature, like) * BOLTZMANN


def _check_temperatures(thermal: Tensor) -> None:
    if not (thermal > 0).all():
        lowest = float(thermal.min()) / BOLTZMANN
        raise ForgefieldError(f"temperatures above zero are needed for Fermi occupations, in K; one is {lowest:g}")


def _check_levels(dos: Tensor, grid: EnergyGrid) -> None:
    wrong = ~torch.isfinite(dos.detach()).reshape(-1, grid.levels).all(0)
    if wrong.any():
        level = int(wrong.nonzero()[0])
        raise ForgefieldError(
            f"the density of states is not a number at {int(wrong.sum())} of {grid.levels} levels, first at level {level} "
            f"({float(grid.energies()[level]):g} eV)"
        )


def _check_within_grid(dos: Tensor, grid: EnergyGrid, thermal: Tensor, electrons: Tensor) -> None:
    with torch.no_grad():
        needed = electrons.detach().reshape(-1)
        ends = grid.nodes(dos.device)[[1, -2]].expand(*dos.shape[:-1], 2)
        weights = _number_weights(grid.nodes(dos.device), ends, thermal[..., None].expand_as(ends))
        fewest, most = (weights @ dos[..., None])[..., 0].reshape(-1, 2).unbind(-1)
        outside = (fewest >= needed) | (most < needed)
    if outside.any():
        index = int(outside.nonzero()[0])
        where = f" of snapshot {index}" if outside.numel() > 1 else ""
        raise ForgefieldError(
            f"the Fermi energy{where} is outside the energy grid ({grid}): the density of states has "
            f"{float(fewest[index]):.4g} electrons with the Fermi energy at its lowest level and {float(most[index]):.4g} at "
            f"its highest level, where {float(needed[index]):.4g} are needed; check the energies of the grid and the unit "
            "of the LDOS"
        )
