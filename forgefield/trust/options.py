"""Options of molecular dynamics and of relaxations, as the command line, Python and the learning loop take them."""

from __future__ import annotations

from dataclasses import dataclass

from forgefield.config.option import option, seed_option

ENSEMBLES = ("nve", "nvt", "npt")
THERMOSTATS = ("nose-hoover", "langevin", "bussi")


@dataclass
class DynamicsOptions:
    """How molecular dynamics is done."""

    ensemble: str = option("nvt", choices=ENSEMBLES)
    """What is constant: nve (energy), nvt (temperature) or npt (temperature and pressure)."""
    temperature: float | None = option(None, above=0, unit="K")
    """Temperature of the thermostat (required for nvt and npt), and of the initial velocities of structures without any."""
    pressure: float = option(0.0, unit="GPa")
    """Pressure of the barostat (npt)."""
    ps: float = option(10.0, above=0, unit="ps")
    """Simulated time."""
    timestep: float | None = option(None, above=0, unit="fs")
    """Time step. Default: 0.5 fs for structures with hydrogen, else 1 fs."""
    seed: int = seed_option(0)
    """Seed of initial velocities and of stochastic thermostats."""
    thermostat: str = option("nose-hoover", choices=THERMOSTATS)
    """Thermostat of nvt: nose-hoover (a chain of three), langevin or bussi (stochastic velocity rescaling). npt always uses
    chains of Martyna, Tobias and Klein."""
    thermostat_time: float | None = option(None, above=0, unit="fs")
    """Relaxation time of the thermostat. Default: 100 time steps."""
    barostat_time: float | None = option(None, above=0, unit="fs")
    """Relaxation time of the barostat. Default: 1000 time steps."""
    cell: str = option("isotropic", choices=("isotropic", "full"))
    """What the barostat changes: isotropic (the volume) or full (lengths and angles)."""
    every: int = option(100, above=0, unit="steps")
    """Steps between frames of the trajectory."""
    checkpoint: int = option(100, above=0, unit="steps")
    """Steps between states from which an interrupted simulation is continued, rounded up to a multiple of `every`."""
    max_temperature: float | None = option(None, above=0, unit="K")
    """Kinetic temperature above which the structure counts as exploded. Default: ten times the temperature of the thermostat or
    of the initial velocities, at least 5000 K."""


@dataclass
class RelaxOptions:
    """How structures are relaxed."""

    cell: bool = False
    """Relax the cell, too."""
    pressure: float = option(0.0, unit="GPa")
    """Pressure at which the cell is relaxed."""
    fmax: float = option(0.01, above=0, unit="eV/A")
    """Largest force at convergence; for a cell, the derivative by the strain divided by the number of atoms counts as well."""
    steps: int = option(500, above=0)
    """Largest number of steps."""
    optimiser: str = option("lbfgs", choices=("lbfgs", "bfgs", "fire"))
    """ASE's optimiser."""
