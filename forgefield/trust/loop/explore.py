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
from forgefield.trust.loop.together import BatchExplorer, Walk, batches
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
    if options.explore.engine == "torch-sim":
        return _explore_together(run, starts, options, iteration, folder, device=device, notify=notify)
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
        record = Explored(start, temperature, pressure, dynamics.time, status, len(candidates), values)
        _write(record, candidates, folder, number, iteration)
        records.append(record)
        notify(_describe(record, options.explore))
    return records


def _explore_together(
    run: Run,
    starts: list[Atoms],
    options: LoopOptions,
    iteration: int,
    folder: Path,
    *,
    device: str,
    notify: Callable[[str], None],
) -> list[Explored]:
    """The same with batches of simulations."""
    conditions = list(_conditions(options, len(starts), iteration))
    walks = []
    for number, (start, temperature, _) in enumerate(conditions):
        atoms = starts[start].copy()
        atoms.arrays.pop("momenta", None)
        walks.append(Walk(atoms, temperature, 100_000 * iteration + number))
    explorer: BatchExplorer | None = None
    records: list[Explored] = []
    for batch in batches(walks, options.explore.together):
        numbers = range(len(records), len(records) + len(batch))
        files = [folder / f"{number:04d}.json" for number in numbers]
        if all(file.exists() for file in files):
            records += [Explored(**json.loads(file.read_text())) for file in files]
            continue
        explorer = explorer or BatchExplorer(run, options, device)
        explorer.explore(batch, notify)
        for number, walk in zip(numbers, batch):
            start, temperature, _ = conditions[number]
            record = Explored(start, temperature, None, walk.ps, walk.status, len(walk.candidates), walk.values)
            _write(record, walk.candidates, folder, number, iteration)
            records.append(record)
            notify(_describe(record, options.explore))
    return records


def _write(record: Explored, candidates: list[Atoms], folder: Path, number: int, iteration: int) -> None:
    """Write the candidates of a simulation, then its record."""
    for image in candidates:
        image.info |= {"start": record.start, "iteration": iteration, "temperature": record.temperature}
    with written_atomically(folder / f"{number:04d}.extxyz") as partial:
        write_extxyz(partial, candidates)
    write_atomically(folder / f"{number:04d}.json", json.dumps(asdict(record)))


def _describe(record: Explored, explore: ExploreOptions) -> str:
    pressure = "" if record.pressure is None else f", {record.pressure:g} GPa"
    largest = f"{max(record.uncertainties):.3g}" if record.uncertainties else "unknown"
    return (
        f"structure {record.start}, {record.temperature:.0f} K{pressure}: {record.status} after {record.ps:.3g} ps, largest "
        f"uncertainty {largest} {unit_of(explore)}, {record.candidates} of {len(record.uncertainties)} above "
        f"{explore.threshold:g}"
    )


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
