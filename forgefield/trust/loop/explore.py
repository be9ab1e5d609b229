"""Molecular dynamics monitored by the uncertainty of the model.

Each simulation writes its candidates and then a record; one without a record is repeated from its start, with the same random
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically, written_atomically
from forgefield.inference.ase import Calculator
from forgefield.inference.xyz_files import write_extxyz
from forgefield.runs import Run
from forgefield.trust.dynamics import Dynamics
from forgefield.trust.loop.options import ExploreOptions, LoopOptions
from forgefield.trust.options import DynamicsOptions
from forgefield.trust.simulation import advance
from forgefield.trust.structures import snapshot

UNCERTAINTY = "uncertainty"
"""Name in `info` of a candidate's uncertainty."""


@dataclass
class Explored:
    """One simulation. examined: structures whose uncertainty was computed. uncertainties: all of them."""

    start: int
    temperature: float
    pressure: float | None
    ps: float
    status: str
    """`finished`, `uncertain` (ended at the limit) or `exploded`."""
    candidates: int
    uncertainties: list[float]


class Monitor:
    """The uncertainty of structures with the model of a run."""

    def __init__(self, run: Run, options: ExploreOptions, device: str) -> None:
        self.measure = options.measure
        self.calculator = Calculator(run, device=device, uncertainty=options.measure)

    def __call__(self, atoms: Atoms) -> float:
        """The largest uncertainty of the force on an atom, eV/A, or of the energy of an atom, eV."""
        if self.measure == "forces":
            self.calculator.calculate(atoms, ["forces", "forces_uncertainty"])
            return float(np.linalg.norm(self.calculator.results["forces_uncertainty"], axis=1).max())
        self.calculator.calculate(atoms, ["energy"])
        return float(self.calculator.results["energies_uncertainty"].max())


def explore(
    run: Run,
    starts: list[Atoms],
    options: LoopOptions,
    iteration: int,
    folder: Path,
    *,
    device: str,
    notify: Callable[[str], None],
) -> list[Explored]:
    """Simulate with the model of a run; candidates are in `folder/NNNN.extxyz`, records in `folder/NNNN.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[Explored] = []
    calculator = monitor = None
    for number, (start, temperature, pressure) in enumerate(_conditions(options, len(starts), iteration)):
        record_file = folder / f"{number:04d}.json"
        if record_file.exists():
            records.append(Explored(**json.loads(record_file.read_text())))
            continue
        if calculator is None or monitor is None:
            calculator, monitor = Calculator(run, device=device), Monitor(run, options.explore, device)
        atoms = starts[start].copy()
        atoms.calc = calculator
        atoms.arrays.pop("momenta", None)
        dynamics = _dynamics(atoms, options, temperature, pressure, stream=100_000 * iteration + number)
        candidates, values, status = _watch(dynamics, monitor, options)
        for image in candidates:
            image.info |= {"start": start, "iteration": iteration, "temperature": temperature}
        record = Explored(start, temperature, pressure, dynamics.time, status, len(candidates), values)
        with written_atomically(folder / f"{number:04d}.extxyz") as partial:
            write_extxyz(partial, candidates)
        write_atomically(record_file, json.dumps(asdict(record)))
        records.append(record)
        conditions = f"{temperature:.0f} K" + (f", {pressure:g} GPa" if pressure is not None else "")
        notify(
            f"structure {start}, {conditions}: {status} after {dynamics.time:.3g} ps, largest uncertainty {max(values):.3g} "
            f"{unit_of(options.explore)}, {len(candidates)} of {len(values)} above {options.explore.threshold:g}"
        )
    return records


def unit_of(options: ExploreOptions) -> str:
    """Unit of uncertainties."""
    return "eV/A" if options.measure == "forces" else "eV"


def _conditions(options: LoopOptions, n_starts: int, iteration: int) -> Iterator[tuple[int, float, float | None]]:
    random = np.random.default_rng([options.seed, iteration])
    chosen = np.sort(random.permutation(n_starts)[: options.explore.starts])
    pressures: list[Any] = options.explore.pressures or [None]
    for start in chosen.tolist():
        for temperature in options.explore.temperatures:
            for pressure in pressures:
                yield start, temperature, pressure


def _dynamics(atoms: Atoms, options: LoopOptions, temperature: float, pressure: float | None, stream: int) -> Dynamics:
    explore = options.explore
    ensemble = "nvt" if pressure is None else "npt"
    settings = DynamicsOptions(
        ensemble=ensemble,
        temperature=temperature,
        pressure=pressure or 0.0,
        timestep=explore.timestep,
        seed=options.seed,
        thermostat=explore.thermostat,
    )
    return Dynamics(atoms, settings, stream=stream)


def _watch(dynamics: Dynamics, monitor: Monitor, options: LoopOptions) -> tuple[list[Atoms], list[float], str]:
    """Candidates, all uncertainties, and how the simulation ended."""
    explore = options.explore
    steps = max(1, round(explore.ps * 1e3 / float(dynamics.options.timestep or 1.0)))
    candidates: list[Atoms] = []
    values = [monitor(dynamics.atoms)]
    while dynamics.step_number < steps:
        if advance(dynamics) is not None:
            return candidates, values, "exploded"
        if dynamics.step_number % explore.every and dynamics.step_number != steps:
            continue
        try:
            values.append(monitor(dynamics.atoms))
        except ForgefieldError:
            return candidates, values, "exploded"
        if not values[-1] <= explore.threshold:
            candidates.append(snapshot(dynamics.atoms, **{UNCERTAINTY: values[-1]}))
        if not values[-1] <= options.limit:
            return candidates, values, "uncertain"
    return candidates, values, "finished"
