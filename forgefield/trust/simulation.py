"""Molecular dynamics from a file of structures to a trajectory, continued exactly after an interruption.

Every checkpoint stores positions, momenta, the variables of thermostat and barostat, the random state and the size of the
trajectory in one file, which is replaced atomically. A simulation that was killed returns to its last checkpoint, cuts the
trajectory back to the size it had, and ends bit for bit as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from ase import Atoms

from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.trust.dynamics import Dynamics, forget_structures
from forgefield.trust.options import DynamicsOptions
from forgefield.trust.structures import FrameFile, digest, frame_file, snapshot

FINISHED, EXPLODED = "finished", "exploded"
LINES = 20
"""Largest number of progress lines per structure, if they are not further apart than `LONGEST_S`."""
SHORTEST_S, LONGEST_S = 1.0, 30.0
"""Time between two progress lines."""


@dataclass
class Averages:
    """Sums over the steps of a simulation: mean temperature and energy, and the slope of the conserved quantity."""

    n: int = 0
    temperature: float = 0.0
    energy: float = 0.0
    first: float = math.nan
    """Conserved quantity at the start, eV."""
    time: float = 0.0
    time_squared: float = 0.0
    conserved: float = 0.0
    time_conserved: float = 0.0

    def add(self, dynamics: Dynamics) -> None:
        """Include the present step."""
        conserved = dynamics.conserved()
        if conserved is not None:
            self.first = conserved if math.isnan(self.first) else self.first
            change = conserved - self.first
            self.conserved += change
            self.time_conserved += dynamics.time * change
        self.n += 1
        self.temperature += dynamics.temperature
        self.energy += dynamics.atoms.get_potential_energy()
        self.time += dynamics.time
        self.time_squared += dynamics.time**2

    def drift(self) -> float | None:
        """Slope of the least-squares line through the conserved quantity, eV/ps; None without one."""
        denominator = self.n * self.time_squared - self.time**2
        if math.isnan(self.first) or denominator <= 0:
            return None
        return (self.n * self.time_conserved - self.time * self.conserved) / denominator


@dataclass
class Trajectory:
    """The simulation of one structure."""

    start: int
    """Index of the structure in the start file."""
    status: str
    """`finished` or `exploded`."""
    steps: int
    ps: float
    temperature: float
    """Mean temperature, K."""
    energy: float
    """Mean potential energy, eV."""
    drift: float | None
    """Slope of the conserved quantity, meV/atom/ps; None for Langevin dynamics."""
    reason: str | None = None
    """Why the structure counts as exploded."""

    def __str__(self) -> str:
        drift = "" if self.drift is None else f", drift {self.drift:.3g} meV/atom/ps"
        text = f"structure {self.start}: {self.status} after {self.ps:.4g} ps, mean temperature {self.temperature:.1f} K{drift}"
        return text if self.reason is None else f"{text}: {self.reason}"


@dataclass
class Simulation:
    """The result of `forgefield.md`. file: the trajectory. trajectories: one per structure."""

    file: Path
    trajectories: list[Trajectory] = field(default_factory=list)
    was_complete: bool = False
    """Whether the trajectory was complete before, so that nothing was simulated."""

    @property
    def exploded(self) -> list[Trajectory]:
        """The trajectories that exploded."""
        return [each for each in self.trajectories if each.status == EXPLODED]

    def __repr__(self) -> str:
        rows = "".join(f"\n  {trajectory}" for trajectory in self.trajectories)
        return f"Simulation({str(self.file)!r}){rows}"


def simulate(
    structures: list[Atoms],
    calculator: Any,
    out: Path,
    options: DynamicsOptions,
    *,
    identity: str,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> Simulation:
    """Simulate each structure in turn and write all frames to `out`; continues an interrupted simulation.

    Parameters
    ----------
    structures
        Where to start.
    calculator
        ASE calculator.
    out
        Trajectory: .extxyz, .xyz or .traj. Frames carry `start` (index of the structure), `step` and `time_ps`.
    options
        See `DynamicsOptions`.
    identity
        What identifies the model. A trajectory of another model, structure or option is not continued.
    overwrite
        Start over and replace existing files.
    notify
        Called with progress messages.
    """
    files = _Files(out, _description(structures, options, identity), overwrite=overwrite)
    result = Simulation(out, [Trajectory(**entry) for entry in files.finished])
    if len(result.trajectories) == len(structures) and not files.can_be_extended(len(structures)):
        notify(f"{out}: this simulation is complete; nothing to do.")
        result.was_complete = True
        return result
    for index in range(files.index, len(structures)):
        atoms = structures[index].copy()
        atoms.calc = calculator
        forget_structures(calculator)
        trajectory = _run(atoms, index, options, files, _prefixed(notify, index, len(structures)))
        result.trajectories = [*result.trajectories[:index], trajectory]
        files.finish(trajectory)
    return result


def _prefixed(notify: Callable[[str], None], index: int, structures: int) -> Callable[[str], None]:
    """Messages about one of several structures start with its number."""
    return notify if structures == 1 else lambda text: notify(f"structure {index}: {text}")


def _run(
    atoms: Atoms, index: int, options: DynamicsOptions, files: _Files, notify: Callable[[str], None]
) -> Trajectory:
    dynamics = Dynamics(atoms, options, stream=index)
    options, averages = dynamics.options, Averages()
    timestep = float(options.timestep or 0.0)
    steps = max(1, round(options.ps * 1e3 / timestep))
    stored = files.state_of(index)
    if stored is not None:
        averages = Averages(**json.loads(str(stored["averages"])))
        dynamics.restore(stored)
        notify(f"continued at {dynamics.time:.4g} ps")
    else:
        _record(dynamics, averages, files, index)
        files.save(index, dynamics, averages)
    between = options.every * math.ceil(options.checkpoint / options.every)
    progress = _Progress(dynamics, averages, steps, notify)
    reason = None
    while dynamics.step_number < steps and reason is None:
        reason = advance(dynamics)
        if reason is not None:
            break
        averages.add(dynamics)
        is_last = dynamics.step_number == steps
        if dynamics.step_number % options.every == 0 or is_last:
            _write(dynamics, files, index)
        if dynamics.step_number % between == 0 or is_last:
            files.save(index, dynamics, averages)
            forget_structures(atoms.calc)
        progress.step()
    if reason is not None:
        _write(dynamics, files, index, exploded=reason)
        notify(f"exploded after {dynamics.time:.4g} ps: {reason}; the last frame is in {files.out}")
    drift = averages.drift()
    return Trajectory(
        start=index,
        status=FINISHED if reason is None else EXPLODED,
        steps=dynamics.step_number,
        ps=dynamics.time,
        temperature=averages.temperature / averages.n,
        energy=averages.energy / averages.n,
        drift=None if drift is None else drift * 1e3 / len(atoms),
        reason=reason,
    )


def advance(dynamics: Dynamics) -> str | None:
    """One step; the reason if the structure exploded in it."""
    try:
        dynamics.step()
        return dynamics.explosion()
    except (ForgefieldError, FloatingPointError, np.linalg.LinAlgError, ValueError) as error:
        # Far from any structure, neighbour lists and calculators fail in various ways. Before that, an error is an error.
        hot = not dynamics.temperature <= 0.2 * dynamics.max_temperature
        if hot or not np.isfinite(dynamics.atoms.positions).all():
            return str(error)
        raise


def _record(dynamics: Dynamics, averages: Averages, files: _Files, index: int) -> None:
    """The starting structure as the first frame."""
    dynamics.atoms.get_forces()
    averages.add(dynamics)
    _write(dynamics, files, index)


def _write(dynamics: Dynamics, files: _Files, index: int, **info: Any) -> None:
    times = {"start": index, "step": dynamics.step_number, "time_ps": dynamics.time}
    files.frames.append([snapshot(dynamics.atoms, **times, **info)])


class _Progress:
    """Prints a line now and then: time, temperature, energy, drift and speed."""

    def __init__(self, dynamics: Dynamics, averages: Averages, steps: int, notify: Callable[[str], None]) -> None:
        self.dynamics, self.averages, self.steps, self.notify = dynamics, averages, steps, notify
        self.began, self.first = time.monotonic(), dynamics.step_number
        self.shown, self.interval = self.began, max(1, steps // LINES)

    def step(self) -> None:
        """To be called after every step."""
        step, now = self.dynamics.step_number, time.monotonic()
        waited = now - self.shown
        if step != self.steps and waited < LONGEST_S and (step % self.interval or waited < SHORTEST_S):
            return
        self.shown = now
        ns = (step - self.first) * float(self.dynamics.options.timestep or 0.0) * 1e-6
        speed = ns / max(now - self.began, 1e-9) * 86400
        drift = self.averages.drift()
        shown = "" if drift is None else f"  drift {drift * 1e3 / len(self.dynamics.atoms):+.3g} meV/atom/ps"
        self.notify(
            f"{self.dynamics.time:9.4g} ps  {self.dynamics.temperature:7.1f} K  "
            f"{self.dynamics.atoms.get_potential_energy():.4f} eV{shown}  {speed:.3g} ns/day"
        )


# ---- files


def _description(structures: list[Atoms], options: DynamicsOptions, identity: str) -> dict[str, Any]:
    """What a simulation must agree on with the files that it continues."""
    return {"model": identity, "structures": digest(structures), **dataclasses.asdict(options)}


class _Files:
    """The trajectory and the state `OUT.state.npz` from which it is continued.

    index: the structure to simulate next. finished: results of those before.
    """

    def __init__(self, out: Path, description: dict[str, Any], *, overwrite: bool) -> None:
        self.out, self.description = out, description
        self.frames: FrameFile = frame_file(out)
        self.path = out.with_name(f"{out.name}.state.npz")
        self.index, self.finished = 0, list[dict[str, Any]]()
        self._state: dict[str, np.ndarray] | None = None
        if overwrite:
            self.path.unlink(missing_ok=True)
            out.unlink(missing_ok=True)
        if self.path.exists():
            self._read()
        elif out.exists() and self.frames.size() > 0:
            raise ForgefieldError(f"{out} exists already and is not an interrupted simulation; --force overwrites it.")

    def _read(self) -> None:
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                state = {name: arrays[name] for name in arrays.files}
            record = json.loads(str(state["record"]))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise ForgefieldError(f"{self.path} is damaged; --force starts over.") from error
        before = record["description"]
        different = [key for key, value in self.description.items() if before.get(key) != value]
        if different == ["ps"] and self.description["ps"] > before["ps"] and len(record["finished"]) <= 1:
            different = []
        if different:
            key = different[0]
            raise ForgefieldError(
                f"{self.out} was started with {key} {before.get(key)}, now it is {self.description[key]}. Use the former to "
                "continue it, -o for another file, or --force to start over."
            )
        self.extended = before["ps"] != self.description["ps"]
        self.finished, self.index, self._state = record["finished"], record["index"], state
        self.frames.cut(int(state["size"]))

    extended = False
    """Whether the simulation is to be longer than it was."""

    def can_be_extended(self, structures: int) -> bool:
        """Whether a complete simulation continues, because more time is asked for."""
        if not self.extended or structures != 1 or self.finished[0]["status"] == EXPLODED:
            return False
        self.finished, self.index = [], 0
        return True

    def state_of(self, index: int) -> dict[str, np.ndarray] | None:
        """The stored state of a structure whose simulation was interrupted."""
        if self._state is None or "positions" not in self._state or int(self._state["of"]) != index:
            return None
        return self._state

    def save(self, index: int, dynamics: Dynamics, averages: Averages) -> None:
        """Store the state of the simulation of a structure."""
        self.index = index
        state = dynamics.state() | {"averages": np.array(json.dumps(dataclasses.asdict(averages)))}
        self._save(state | {"of": np.array(index)})

    def finish(self, trajectory: Trajectory) -> None:
        """Store the result of a structure. The state stays in the file, for a longer simulation."""
        self.finished.append(dataclasses.asdict(trajectory))
        self.index = trajectory.start + 1
        self._save({name: value for name, value in (self._state or {}).items() if name not in ("record", "size")})

    def _save(self, state: dict[str, np.ndarray]) -> None:
        record = {"description": self.description, "finished": self.finished, "index": self.index}
        state |= {"record": np.array(json.dumps(record)), "size": np.array(self.frames.size())}
        with written_atomically(self.path) as partial:
            np.savez(partial, **state)  # type: ignore[arg-type]
        self._state = state
