"""Exploration with torch-sim: many simulations in one batch, each monitored by the uncertainty of the model.

Simulations of a batch begin and are written together; a batch that was interrupted is repeated from its start with the same
random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.data.labels.label_reader import PREDICTED_BY
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from forgefield.trust.dynamics import LOWEST_LIMIT
from forgefield.trust.loop.options import LoopOptions

FRICTION_STEPS = 100
"""Relaxation time of the thermostat in time steps."""


@dataclass
class Walk:
    """One simulation. start: its structure. stream: number of its random numbers.

    values: uncertainties of all examined structures. status: `finished`, `uncertain` or `exploded`.
    """

    start: Atoms
    temperature: float
    stream: int
    candidates: list[Atoms] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    status: str = "finished"
    ps: float = 0.0


def batches(walks: Sequence[Walk], together: int) -> Iterator[list[Walk]]:
    """Consecutive walks of equal periodicity, at most `together`."""
    for _, group in groupby(walks, key=lambda walk: tuple(walk.start.pbc)):
        same = list(group)
        yield from (same[first : first + together] for first in range(0, len(same), together))


class BatchExplorer:
    """Langevin dynamics of batches with the model of a run."""

    def __init__(self, run: Run, options: LoopOptions, device: str) -> None:
        try:
            import torch_sim
        except ImportError as error:
            raise ForgefieldError(
                "explore.engine: torch-sim is not installed: pip install torch-sim-atomistic, or use explore.engine: ase."
            ) from error
        from forgefield.torchsim import Model

        self.torch_sim, self.options, self.device = torch_sim, options, torch.device(device)
        self.measure = options.explore.measure
        self.model = Model(run, device=device, compute_stress=False)
        self.monitor = Model(run, device=device, compute_stress=False, uncertainty=self.measure)

    def explore(self, walks: Sequence[Walk], notify: Callable[[str], None]) -> None:
        """Simulate a batch; results are in the walks."""
        explore, active = self.options.explore, list(walks)
        hydrogen = any(1 in walk.start.numbers for walk in walks)
        timestep = explore.timestep or (0.5 if hydrogen else 1.0)
        steps = max(1, round(explore.ps * 1e3 / timestep))
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(1_000_003 * self.options.seed + walks[0].stream)
            atoms = [walk.start for walk in walks]
            begun = self.torch_sim.initialize_state(atoms, self.device, torch.float64)
            state = self._begin(begun, walks, timestep)
            done = 0
            active, state = self._examine(state, active, 0.0, first=True)
            while active and done < steps:
                block = min(explore.every, steps - done)
                active, state = self._advance(state, active, block, timestep)
                done += block
                if active:
                    active, state = self._examine(state, active, done * timestep * 1e-3)
        notify(f"{len(walks)} simulations, {done} steps of {timestep:g} fs")

    def _begin(self, state: Any, walks: Sequence[Walk], timestep: float) -> Any:
        """A state with momenta drawn at the temperatures of the walks."""
        ts, seed = self.torch_sim, walks[0].stream
        if hasattr(ts, "nvt_langevin_init"):
            return ts.nvt_langevin_init(state=state, model=self.model, kT=self._kT(walks), seed=seed)
        return self._factory(walks, timestep)[0](state, seed=seed)

    def _step(self, walks: Sequence[Walk], timestep: float) -> Callable[[Any], Any]:
        """One step of the dynamics of the walks."""
        ts = self.torch_sim
        if hasattr(ts, "nvt_langevin_step"):
            options = {
                "kT": self._kT(walks),
                "dt": self._dt(timestep),
                "gamma": 1 / (FRICTION_STEPS * self._dt(timestep)),
            }
            return lambda state: ts.nvt_langevin_step(state=state, model=self.model, **options)
        step: Callable[[Any], Any] = self._factory(walks, timestep)[1]
        return step

    def _factory(self, walks: Sequence[Walk], timestep: float) -> Any:
        from torch_sim.integrators import nvt_langevin

        dt = self._dt(timestep)
        return nvt_langevin(model=self.model, dt=dt, kT=self._kT(walks), gamma=1 / (FRICTION_STEPS * dt))

    def _dt(self, timestep: float) -> torch.Tensor:
        time = float(self.torch_sim.units.MetalUnits.time)
        return torch.tensor(timestep * 1e-3 * time, dtype=torch.float64, device=self.device)

    def _kT(self, walks: Sequence[Walk]) -> torch.Tensor:  # noqa: N802
        unit = float(self.torch_sim.units.MetalUnits.temperature)
        return torch.tensor([walk.temperature * unit for walk in walks], dtype=torch.float64, device=self.device)

    def _advance(self, state: Any, walks: list[Walk], steps: int, timestep: float) -> tuple[list[Walk], Any]:
        """Some steps. Where atoms come too close to each other, systems are advanced one at a time to find out which."""
        before = state.clone()
        try:
            step = self._step(walks, timestep)
            for _ in range(steps):
                state = step(state)
            return walks, state
        except ForgefieldError:
            if len(walks) == 1:
                walks[0].status = "exploded"
                return [], before
        parts = [self._advance(before[i], [walk], steps, timestep) for i, walk in enumerate(walks)]
        kept = [(walk, part) for alive, part in parts for walk in alive]
        return [walk for walk, _ in kept], self._joined([part for _, part in kept]) if kept else before

    def _joined(self, states: list[Any]) -> Any:
        return states[0] if len(states) == 1 else self.torch_sim.concatenate_states(states)

    def _examine(self, state: Any, walks: list[Walk], ps: float, *, first: bool = False) -> tuple[list[Walk], Any]:
        """Compute the uncertainties of a state and keep candidates; the walks that continue, and their state."""
        explore, system = self.options.explore, state.system_idx.cpu().numpy()
        outputs = {name: value.cpu().numpy() for name, value in self.monitor(state).items()}
        if self.measure == "forces":
            of_atoms = np.linalg.norm(outputs["forces_uncertainty"], axis=1)
        else:
            of_atoms = outputs["energies_uncertainty"]
        kept = []
        temperatures = _temperatures(state, len(walks), system)
        for number, walk in enumerate(walks):
            rows = system == number
            value, walk.ps = float(of_atoms[rows].max()), ps
            finite = np.isfinite(outputs["forces"][rows]).all() and np.isfinite(value)
            if not finite or temperatures[number] > max(10 * walk.temperature, LOWEST_LIMIT):
                walk.status = "exploded"
                continue
            walk.values.append(value)
            if first:
                kept.append(number)
                continue
            if value > explore.threshold:
                image = walk.start.copy()
                image.positions = state.positions[torch.from_numpy(rows)].cpu().numpy()
                image.info |= {"uncertainty": value, PREDICTED_BY: "forgefield:"}
                energy, forces = float(outputs["energy"][number]), outputs["forces"][rows]
                image.calc = SinglePointCalculator(image, energy=energy, forces=forces)
                walk.candidates.append(image)
            if value > self.options.limit:
                walk.status = "uncertain"
            else:
                kept.append(number)
        if len(kept) == len(walks):
            return walks, state
        return [walks[number] for number in kept], state[kept] if kept else state


def _temperatures(state: Any, n_systems: int, system: np.ndarray) -> np.ndarray:
    """(n_systems,) kinetic temperatures, K."""
    from ase.units import kB

    momenta, masses = state.momenta.cpu().numpy(), state.masses.cpu().numpy()
    kinetic = np.bincount(system, (np.square(momenta) / (2 * masses[:, None])).sum(1), n_systems)
    return 2 * kinetic / (3 * kB * np.bincount(system, minlength=n_systems))
