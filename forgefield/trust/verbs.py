"""From a run to results: open the calculator of a run, check structures and options, simulate or relax."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forgefield.config.checking import typed_section
from forgefield.config.sources import Sources
from forgefield.errors import ForgefieldError
from forgefield.inference.ase import Calculator
from forgefield.runs import Run
from forgefield.trust.options import DynamicsOptions, RelaxOptions
from forgefield.trust.relaxation import Relaxation, relax_structures
from forgefield.trust.simulation import Simulation, simulate
from forgefield.trust.structures import read_structures, require_species

_OF_BAROSTATS = ("pressure", "barostat_time", "cell")
WITHOUT_EFFECT = {
    "nve": ("thermostat", "thermostat_time", *_OF_BAROSTATS),
    "nvt": _OF_BAROSTATS,
    "npt": ("thermostat",),
}
"""Options of molecular dynamics that do not act, by ensemble."""


class Arguments(Sources):
    """Where options come from when they are arguments of a command or a function; messages name them as `--NAME`."""

    def where(self, key: str) -> str:
        return f"--{key.replace('_', '-')}"


def run_md(
    run: Run,
    structures: Any,
    out: str | os.PathLike[str],
    options: Mapping[str, Any],
    *,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> Simulation:
    """Molecular dynamics with the model of a run; see `forgefield.md`."""
    dynamics = typed_section(DynamicsOptions, options, Arguments())
    _refuse_without_effect(options, dynamics)
    starts = read_structures(structures)
    calculator = open_calculator(run, which=which, device=device, head=head)
    require_species(calculator.species, starts, structures)
    for index, atoms in enumerate(starts):
        _check_start(atoms, dynamics, index)
    identity = model_identity(run, which, head)
    return simulate(starts, calculator, Path(out), dynamics, identity=identity, overwrite=overwrite, notify=notify)


def run_relax(
    run: Run,
    structures: Any,
    out: str | os.PathLike[str],
    options: Mapping[str, Any],
    *,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> Relaxation:
    """Relaxation with the model of a run; see `forgefield.relax`."""
    relax = typed_section(RelaxOptions, options, Arguments())
    if options.get("pressure") is not None and not relax.cell:
        raise ForgefieldError("--pressure has no effect without --cell.")
    starts = read_structures(structures)
    for index, atoms in enumerate(starts):
        if relax.cell and (not any(atoms.pbc) or atoms.cell.volume == 0):
            raise ForgefieldError(f"frame {index}: it has no periodic cell, so --cell cannot relax it.")
    calculator = open_calculator(run, which=which, device=device, head=head)
    require_species(calculator.species, starts, structures)
    identity = model_identity(run, which, head)
    return relax_structures(starts, calculator, Path(out), relax, identity=identity, overwrite=overwrite, notify=notify)


def open_calculator(run: Run, *, which: str = "best", device: str = "cpu", head: str | None = None) -> Calculator:
    """The calculator of a run that predicts energies and forces."""
    arguments: dict[str, Any] = {"head": head} if head is not None else {}
    calculator = Calculator(run, which=which, device=device, **arguments)
    if not {"energy", "forces"} <= set(calculator.implemented_properties):
        raise ForgefieldError(f"Run {run.name} does not predict energies and forces, which this needs.")
    return calculator


def model_identity(run: Run, which: str, head: str | None) -> str:
    """A text that is different for different models: a digest of the weights and of the options of the model."""
    options = json.dumps(run.info["model"], sort_keys=True, default=str)
    text = f"{run.read_weights(which).sha256} {options} {head}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _refuse_without_effect(chosen: Mapping[str, Any], options: DynamicsOptions) -> None:
    """Refuse options that were set (`chosen`; those left at their defaults are not in it) but do not act in the ensemble."""
    for key in WITHOUT_EFFECT[options.ensemble]:
        if chosen.get(key) is not None:
            raise ForgefieldError(f"{Arguments().where(key)} has no effect with --ensemble {options.ensemble}.")


def _check_start(atoms: Any, options: DynamicsOptions, index: int) -> None:
    """Refuse a structure that cannot be simulated, before any simulation starts."""
    if options.ensemble != "nve" and options.temperature is None:
        raise ForgefieldError(f"--ensemble {options.ensemble} needs a temperature: --temperature 300.")
    if options.ensemble == "npt" and (not all(atoms.pbc) or atoms.cell.volume == 0):
        raise ForgefieldError(
            f"frame {index}: the ensemble npt needs a cell that is periodic in all three directions; use nvt."
        )
    if options.ensemble == "npt" and atoms.constraints:
        raise ForgefieldError(f"frame {index}: the ensemble npt does not support fixed atoms; use nvt.")
    if options.temperature is None and not atoms.get_momenta().any():
        raise ForgefieldError(f"frame {index}: it has no velocities; --temperature 300 draws them at random.")
