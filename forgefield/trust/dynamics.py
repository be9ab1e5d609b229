"""Molecular dynamics with ASE's integrators, whose complete state can be stored and restored exactly.

Integrators: velocity Verlet (nve); Nose-Hoover chains, Langevin or Bussi's stochastic rescaling (nvt); the equations of
Martyna, Tobias and Klein (npt). Momenta that the equations of motion conserve (the total momentum, and for isolated molecules
the angular momentum) are zero and are not counted as degrees of freedom, so that small systems have the right temperature.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator as AseCalculator
from ase.md.bussi import Bussi
from ase.md.langevin import Langevin
from ase.md.md import MolecularDynamics
from ase.md.verlet import VelocityVerlet

from forgefield.errors import ForgefieldError
from forgefield.inference.ase import Calculator
from forgefield.trust.options import DynamicsOptions

LOWEST_LIMIT = 5000.0
"""Temperature, K, below which a structure never counts as exploded by default."""
_STATE = {
    "": ("_q", "_p", "_h", "_p_g", "_eps", "_p_eps", "_cell0", "_volume0", "transferred_energy"),
    "_thermostat": ("_eta", "_p_eta"),
    "_barostat": ("_xi", "_p_xi"),
}
"""Attributes of ASE's integrators, and of their thermostats and barostats, that change during a simulation."""


class Dynamics:
    """Molecular dynamics of one structure.

    Parameters
    ----------
    atoms
        The structure, with a calculator; it is moved. Momenta are used if it has any that are not zero, otherwise they are
        drawn from the Maxwell-Boltzmann distribution.
    options
        See `DynamicsOptions`.
    stream
        Number of the structure among several, so that each has its own random numbers.
    """

    def __init__(self, atoms: Atoms, options: DynamicsOptions, *, stream: int = 0) -> None:
        self.atoms, self.options = atoms, resolve_options(options, atoms)
        self.rng = np.random.default_rng([options.seed, stream])
        self.step_number = 0
        self.degrees_of_freedom = degrees_of_freedom(atoms, self.options)
        self._set_momenta()
        self.integrator = _integrator(atoms, self.options, self.degrees_of_freedom, self.rng)
        limit = 10 * max(self.options.temperature or 0.0, self.temperature)
        self.max_temperature = options.max_temperature or max(limit, LOWEST_LIMIT)

    def _set_momenta(self) -> None:
        if np.any(self.atoms.get_momenta()):
            return
        if self.options.temperature is None:
            raise ForgefieldError(
                "The structure has no velocities: give a temperature (--temperature 300), from which they are drawn."
            )
        scale = np.sqrt(self.atoms.get_masses() * units.kB * self.options.temperature)
        momenta = scale[:, None] * self.rng.standard_normal((len(self.atoms), 3))
        self.atoms.set_momenta(momenta)
        if conserves_momentum(self.atoms, self.options):
            remove_motion_as_a_whole(self.atoms)

    @property
    def time(self) -> float:
        """Simulated time, ps."""
        return self.step_number * float(self.options.timestep or 0.0) * 1e-3

    @property
    def temperature(self) -> float:
        """Kinetic temperature, K."""
        return float(2 * self.atoms.get_kinetic_energy() / (self.degrees_of_freedom * units.kB))

    def conserved(self) -> float | None:
        """The quantity that exact integration conserves, eV; None for Langevin dynamics, which has none."""
        if isinstance(self.integrator, Langevin):
            return None
        total = float(self.atoms.get_total_energy())
        if isinstance(self.integrator, Bussi):
            return total - float(self.integrator.transferred_energy)
        if isinstance(self.integrator, VelocityVerlet):
            return total
        return total + _energy_of_chains(self.integrator)

    def step(self) -> None:
        """Advance by one time step."""
        self.integrator.step()  # type: ignore[attr-defined]
        self.step_number += 1

    def explosion(self) -> str | None:
        """The reason why the structure counts as exploded; None if it does not."""
        energy = self.atoms.get_potential_energy()
        if not math.isfinite(energy) or not np.isfinite(self.atoms.get_forces()).all():
            return "energy or forces are not finite"
        if not self.temperature <= self.max_temperature:
            return f"the temperature is {self.temperature:.0f} K, above the limit of {self.max_temperature:.0f} K"
        return None

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the following steps depend on, as arrays."""
        arrays = {
            "positions": self.atoms.positions.copy(),
            "momenta": self.atoms.get_momenta(),
            "cell": np.array(self.atoms.cell),
            "step": np.array(self.step_number),
            "random": np.array(json.dumps(self.rng.bit_generator.state)),
            "max_temperature": np.array(self.max_temperature),
        }
        for part, name in self._variables():
            arrays[f"integrator.{part}.{name}"] = np.array(getattr(self._part(part), name))
        return arrays

    def restore(self, arrays: dict[str, Any]) -> None:
        """Return to a state; the calculator forgets earlier structures."""
        self.atoms.set_cell(arrays["cell"], scale_atoms=False)
        self.atoms.arrays["positions"][:] = arrays["positions"]
        self.atoms.arrays["momenta"][:] = arrays["momenta"]
        self.step_number = int(arrays["step"])
        self.rng.bit_generator.state = json.loads(str(arrays["random"]))
        self.max_temperature = float(arrays["max_temperature"])
        for part, name in self._variables():
            value = arrays[f"integrator.{part}.{name}"]
            setattr(self._part(part), name, value.copy() if value.ndim else float(value))
        forget_structures(self.atoms.calc)

    def _part(self, name: str) -> Any:
        return getattr(self.integrator, name) if name else self.integrator

    def _variables(self) -> list[tuple[str, str]]:
        parts = [part for part in _STATE if not part or hasattr(self.integrator, part)]
        return [(part, name) for part in parts for name in _STATE[part] if hasattr(self._part(part), name)]


def resolve_options(options: DynamicsOptions, atoms: Atoms) -> DynamicsOptions:
    """Options with the defaults that depend on the structure."""
    timestep = options.timestep or (0.5 if 1 in atoms.numbers else 1.0)
    return replace(
        options,
        timestep=timestep,
        thermostat_time=options.thermostat_time or 100 * timestep,
        barostat_time=options.barostat_time or 1000 * timestep,
    )


def forget_structures(calculator: AseCalculator) -> None:
    """Make the results of a calculator independent of the structures it has seen, whose neighbour lists it may reuse."""
    if isinstance(calculator, Calculator):
        calculator.forget_structures()
    elif isinstance(calculator, AseCalculator):
        calculator.reset()


# ---- degrees of freedom


def conserves_momentum(atoms: Atoms, options: DynamicsOptions) -> bool:
    """Whether the total momentum is conserved: no atom is fixed, and no random forces act."""
    random_forces = options.ensemble == "nvt" and options.thermostat == "langevin"
    return not atoms.constraints and not random_forces and len(atoms) > 1


def degrees_of_freedom(atoms: Atoms, options: DynamicsOptions) -> int:
    """Number of momenta that are thermalised."""
    free = int(atoms.get_number_of_degrees_of_freedom())
    if free == 0:
        raise ForgefieldError("All atoms of the structure are fixed, so that there is nothing to simulate.")
    if not conserves_momentum(atoms, options):
        return free
    return free - 3 - (0 if any(atoms.pbc) else len(_rotations(atoms)[0]))


def remove_motion_as_a_whole(atoms: Atoms) -> None:
    """Set the total momentum to zero and, without periodic directions, the angular momentum."""
    masses = atoms.get_masses()[:, None]
    momenta = atoms.get_momenta()
    atoms.set_momenta(momenta - masses * momenta.sum(axis=0) / masses.sum())
    if any(atoms.pbc):
        return
    moments, axes = _rotations(atoms)
    angular_velocity = axes.T @ ((axes @ atoms.get_angular_momentum()) / moments)
    arms = atoms.positions - atoms.get_center_of_mass()
    atoms.set_momenta(atoms.get_momenta() - masses * np.cross(angular_velocity, arms))


def _rotations(atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Moments of inertia (n,) and axes (n, 3) of rotations: three, two for linear molecules, none for one atom."""
    moments, axes = atoms.get_moments_of_inertia(vectors=True)
    rotates = moments > 1e-6 * max(moments.max(), 1e-12)
    return moments[rotates], axes[rotates]


# ---- integrators


def _integrator(atoms: Atoms, options: DynamicsOptions, degrees: int, rng: np.random.Generator) -> MolecularDynamics:
    timestep = float(options.timestep or 0.0) * units.fs
    if options.ensemble == "nve":
        return VelocityVerlet(atoms, timestep)
    if options.temperature is None:
        raise ForgefieldError(f"The ensemble {options.ensemble} needs a temperature: --temperature 300.")
    damping = float(options.thermostat_time or 0.0) * units.fs
    if options.ensemble == "npt":
        return _npt(atoms, options, degrees, timestep, damping)
    if options.thermostat == "langevin":
        return Langevin(atoms, timestep, temperature_K=options.temperature, friction=1 / damping, fixcm=False, rng=rng)
    if options.thermostat == "bussi":
        bussi = Bussi(atoms, timestep, temperature_K=options.temperature, taut=damping, rng=rng)
        bussi.ndof = degrees
        bussi.target_kinetic_energy = 0.5 * bussi.temp * degrees
        return bussi
    chains = _chains()
    chain = chains.NoseHooverChainNVT(atoms, timestep, temperature_K=options.temperature, tdamp=damping)
    chain._thermostat = _thermostat(chain, options.temperature, damping, degrees)
    return chain


def _npt(atoms: Atoms, options: DynamicsOptions, degrees: int, timestep: float, damping: float) -> MolecularDynamics:
    if not all(atoms.pbc) or atoms.cell.volume == 0:
        raise ForgefieldError("The ensemble npt needs a cell that is periodic in all three directions.")
    if atoms.constraints:
        raise ForgefieldError("The ensemble npt does not support fixed atoms; use nvt, or remove the constraints.")
    chains = _chains()
    cls = chains.IsotropicMTKNPT if options.cell == "isotropic" else chains.MTKNPT
    temperature, pressure = options.temperature, options.pressure * units.GPa
    barostat_time = float(options.barostat_time or 0.0) * units.fs
    dynamics = cls(atoms, timestep, temperature_K=temperature, pressure_au=pressure, tdamp=damping, pdamp=barostat_time)
    # ASE counts 3 N momenta. With the total momentum zero there are 3 N - 3, as many as N - 1 atoms have.
    dynamics._num_atoms_global = degrees / 3
    dynamics._thermostat = _thermostat(dynamics, float(temperature or 0.0), damping, degrees)
    barostat = type(dynamics._barostat)(num_atoms_global=degrees / 3, temperature_K=temperature, pdamp=barostat_time)
    if options.cell == "full":
        # The momenta of the cell are a symmetric matrix: six degrees of freedom, where ASE counts nine.
        barostat._R[0] *= 6 / barostat._cell_dof
        barostat._cell_dof = 6
    dynamics._barostat = barostat
    return dynamics


def _energy_of_chains(dynamics: Any) -> float:
    """Energy of thermostat, barostat and cell, eV. (ASE's sum for the isotropic barostat needs a free energy.)"""
    energy = float(dynamics._thermostat.get_thermostat_energy())
    if hasattr(dynamics, "_barostat"):
        energy += float(dynamics._barostat.get_barostat_energy() + dynamics._pressure_au * dynamics._get_volume())
        momenta = dynamics._p_eps if hasattr(dynamics, "_p_eps") else dynamics._p_g
        energy += float(np.sum(momenta**2) / (2 * dynamics._barostat.W))
    return energy


def _thermostat(dynamics: Any, temperature: float, damping: float, degrees: int) -> Any:
    """A chain for this number of degrees of freedom, which ASE writes as three times a number of atoms."""
    return _chains().NoseHooverChainThermostat(
        num_atoms_global=degrees / 3, masses=dynamics.masses, temperature_K=temperature, tdamp=damping
    )


def _chains() -> Any:
    try:
        from ase.md import nose_hoover_chain
    except ImportError as error:
        raise ForgefieldError(
            "This version of ASE has no Nose-Hoover chains; update it: pip install -U ase."
        ) from error
    return nose_hoover_chain
