"""Relaxation of structures, and optionally of their cells, with ASE's optimisers.

Relaxed structures are appended to the output one by one. An interrupted relaxation continues with the first structure that is
not in it; since optimisers are deterministic, the result is the same as without the interruption.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms, units
from ase.filters import FrechetCellFilter
from ase.optimize import BFGS, FIRE, LBFGS

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.text import counted
from forgefield.trust.dynamics import forget_structures
from forgefield.trust.options import RelaxOptions
from forgefield.trust.structures import digest, frame_file, snapshot

OPTIMISERS = {"lbfgs": LBFGS, "bfgs": BFGS, "fire": FIRE}


@dataclass
class Relaxed:
    """The relaxation of one structure."""

    start: int
    """Index of the structure in the input."""
    converged: bool
    steps: int
    energy: float
    """eV."""
    change: float
    """Energy after minus energy before, eV."""
    fmax: float
    """Largest force, eV/A."""
    reason: str | None = None
    """Why the relaxation failed, if it did."""

    def __str__(self) -> str:
        outcome = "converged" if self.converged else f"not converged{f': {self.reason}' if self.reason else ''}"
        return (
            f"structure {self.start}: {outcome} after {counted(self.steps, 'step')}, energy {self.energy:.4f} eV (changed by "
            f"{self.change:+.4f} eV), largest force {self.fmax:.2g} eV/A"
        )


@dataclass
class Relaxation:
    """The result of `forgefield.relax`. file: the relaxed structures. structures: one entry each."""

    file: Path
    structures: list[Relaxed] = field(default_factory=list)
    was_complete: bool = False
    """Whether the file was complete before, so that nothing was relaxed."""

    @property
    def unconverged(self) -> list[Relaxed]:
        """The structures that did not converge."""
        return [each for each in self.structures if not each.converged]

    def __repr__(self) -> str:
        rows = "".join(f"\n  {each}" for each in self.structures)
        return f"Relaxation({str(self.file)!r}){rows}"


def relax_atoms(atoms: Atoms, options: RelaxOptions) -> tuple[bool, int]:
    """Relax a structure with a calculator in place; whether it converged, and after how many steps."""
    if options.cell and (not any(atoms.pbc) or atoms.cell.volume == 0):
        raise ForgefieldError("A cell can be relaxed for periodic structures only; leave out --cell.")
    target = FrechetCellFilter(atoms, scalar_pressure=options.pressure * units.GPa) if options.cell else atoms
    optimiser = OPTIMISERS[options.optimiser](target, logfile=None)
    converged = optimiser.run(fmax=options.fmax, steps=options.steps)
    return bool(converged), int(optimiser.nsteps)


def relax_structures(
    structures: list[Atoms],
    calculator: Any,
    out: Path,
    options: RelaxOptions,
    *,
    identity: str,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> Relaxation:
    """Relax each structure and write it to `out`; continues an interrupted relaxation.

    Parameters
    ----------
    structures, calculator, options
        What to relax, with which ASE calculator, and how.
    out
        File to write: .extxyz, .xyz or .traj. Frames carry `start` (index of the structure), `converged` and `steps`.
    identity
        What identifies the model.
    overwrite
        Start over and replace existing files.
    notify
        Called with one line for each structure.
    """
    frames, path = frame_file(out), out.with_name(f"{out.name}.state.json")
    description = {"model": identity, "structures": digest(structures), **dataclasses.asdict(options)}
    if overwrite:
        out.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    done: list[Relaxed] = []
    if path.exists():
        done, size = _read(path, out, description)
        frames.cut(size)
    elif out.exists() and frames.size() > 0:
        raise ForgefieldError(f"{out} exists already and is not an interrupted relaxation; --force overwrites it.")
    was_complete = len(done) == len(structures)
    if was_complete:
        notify(f"{out}: this relaxation is complete; nothing to do.")
    for index in range(len(done), len(structures)):
        atoms = structures[index].copy()
        atoms.calc = calculator
        relaxed = _relax(atoms, index, options)
        frames.append([snapshot(atoms, start=index, converged=relaxed.converged, steps=relaxed.steps)])
        done.append(relaxed)
        record = {
            "description": description,
            "size": frames.size(),
            "done": [dataclasses.asdict(each) for each in done],
        }
        write_atomically(path, json.dumps(record))
        notify(str(relaxed))
    return Relaxation(out, done, was_complete)


def _relax(atoms: Atoms, index: int, options: RelaxOptions) -> Relaxed:
    forget_structures(atoms.calc)
    before = atoms.get_potential_energy()
    last, reason, converged, steps = atoms.copy(), None, False, 0
    try:
        converged, steps = relax_atoms(atoms, options)
    except ForgefieldError as error:
        if atoms.positions.tolist() == last.positions.tolist():
            raise
        reason = str(error)
    fmax = float(np.sqrt((atoms.get_forces() ** 2).sum(axis=1).max())) if reason is None else float("nan")
    energy = float(atoms.get_potential_energy()) if reason is None else float("nan")
    return Relaxed(index, converged, steps, energy, energy - float(before), fmax, reason)


def _read(path: Path, out: Path, description: dict[str, Any]) -> tuple[list[Relaxed], int]:
    try:
        record = json.loads(path.read_text())
        done, size, before = [Relaxed(**each) for each in record["done"]], int(record["size"]), record["description"]
    except (ValueError, KeyError, TypeError) as error:
        raise ForgefieldError(f"{path} is damaged; --force starts over.") from error
    for key, value in description.items():
        if before.get(key) != value:
            raise ForgefieldError(
                f"{out} was started with {key} {before.get(key)}, now it is {value}. Use the former to continue it, -o for "
                "another file, or --force to start over."
            )
    return done, size
