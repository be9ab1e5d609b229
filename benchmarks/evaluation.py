"""Molecular dynamics on a GPU: milliseconds and memory per step of the evaluation engine, in ASE and by itself.

    python benchmarks/evaluation.py [engine:6144 ase:6144 ...] [--model nequip] [--steps 60]

Liquid water, molecules on a grid of 3.1 A; NequIP with 4 layers, l_max 2 and 64 features in float32, untrained, cutoff 5 A
(`--model` for others). `ase` is VelocityVerlet (0.5 fs, 300 K) with `forgefield.Calculator`; `engine` the same integrator on
the device, which is what torch-sim does. Both include the neighbour lists that are built on the way. A row that fails prints
its error, and the others follow.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

from forgefield.bench.training import water
from forgefield.data.species import SpeciesTable
from forgefield.inference.ase import Calculator
from forgefield.inference.engine.comparison import compare
from forgefield.inference.engine.device import DeviceEngine, Systems
from forgefield.inference.evaluate import BatchEvaluator
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import resolve_model

SPECIES = ("H", "O")
CUTOFF = 5.0
STATISTICS = {"avg_num_neighbours": 54.0, "energy_scales": 1.0, "energy_shifts": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "nequip": {"name": "nequip", "num_layers": 4, "l_max": 2, "num_features": 64, "parity": False},
    "nequip-parity": {"name": "nequip", "num_layers": 4, "l_max": 2, "num_features": 64},
    "M": {"name": "nequip", "preset": "M"},
    "tiny": {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": 8},
    "allegro": {
        "name": "allegro",
        "l_max": 2,
        "num_layers": 2,
        "num_scalar_features": 64,
        "num_tensor_features": 64,
    },
    "mace": {"name": "mace"},
}


MOST_ATOM_STEPS = 2_000_000
"""Steps of large systems are fewer."""
SMALL = 192
"""Atoms of the boxes of a batch."""


def build(name: str, device: torch.device, precision: str = "float32") -> Potential:
    section = MODELS[name]
    statistics = STATISTICS if section["name"] != "mace" else {"avg_num_neighbours": 54.0}
    resolved = resolve_model({**section, **statistics}, species=SPECIES, cutoff=CUTOFF)
    potential = build_model(resolved, precision=precision, seed=1).to(device).eval()
    return potential.requires_grad_(False)


COPIES = {
    24: (2, (1, 1, 1)),
    192: (4, (1, 1, 1)),
    1536: (4, (2, 2, 2)),
    6144: (4, (4, 4, 2)),
    98304: (4, (8, 8, 8)),
    1105920: (4, (16, 18, 20)),
}
"""Molecules along an edge of a cube, and copies of the cube, by number of atoms."""


def box(n_atoms: int, seed: int = 7) -> Atoms:
    """Water at its density: copies of a cube, displaced at random."""
    random = np.random.default_rng(seed)
    along_edge, copies = COPIES[n_atoms]
    cube = water(random, along_edge)
    cube.calc = None
    atoms = cube.repeat(copies)
    atoms.positions += random.normal(0, 0.01, atoms.positions.shape)
    return atoms


def systems_of(boxes: list[Atoms], device: torch.device) -> tuple[Systems, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Systems, positions (n, 3), cells (n_systems, 3, 3) and masses (n, 1)."""
    table = SpeciesTable(SPECIES)
    species = np.concatenate([table.index(atoms.numbers, where="water") for atoms in boxes])
    systems = Systems(
        torch.from_numpy(species).to(device),
        torch.tensor([len(atoms) for atoms in boxes], device=device),
        torch.tensor(np.array([atoms.pbc for atoms in boxes]), device=device),
    )
    positions = torch.from_numpy(np.concatenate([atoms.positions for atoms in boxes])).to(device)
    cell = torch.from_numpy(np.array([np.array(atoms.cell) for atoms in boxes])).to(device)
    masses = torch.from_numpy(np.concatenate([atoms.get_masses() for atoms in boxes])).to(device).unsqueeze(1)
    return systems, positions, cell, masses


class Dynamics:
    """Velocity Verlet on the device, 0.5 fs, 300 K. The potential is untrained; forces are scaled down so that water stays
    liquid-like for some hundred steps."""

    def __init__(self, engine: DeviceEngine, boxes: list[Atoms], device: torch.device) -> None:
        self.engine, self.scale = engine, 1.0
        self.systems, self.positions, self.cell, self.masses = systems_of(boxes, device)
        generator = torch.Generator(device=device).manual_seed(3)
        noise = torch.randn(self.positions.shape, generator=generator, device=device, dtype=torch.float64)
        self.velocities = noise * (300 * units.kB / self.masses).sqrt()
        engine.set_systems(self.systems)
        self.start = engine.evaluate(self.positions, self.cell)
        assert self.start.forces is not None
        self.scale = min(1.0, 1.0 / float(self.start.forces.abs().max()))
        self.accelerations = self._accelerations()

    def _accelerations(self) -> torch.Tensor:
        forces = self.engine.evaluate(self.positions, self.cell).forces
        assert forces is not None
        return self.scale * forces / self.masses

    def step(self) -> None:
        dt = 0.5 * units.fs
        self.velocities += 0.5 * dt * self.accelerations
        self.positions += dt * self.velocities
        self.accelerations = self._accelerations()
        self.velocities += 0.5 * dt * self.accelerations


class Scaled(Calculator):
    """Forces scaled down, so that dynamics with an untrained model does not explode."""

    scale = 1.0

    def calculate(self, *arguments: Any, **options: Any) -> None:
        super().calculate(*arguments, **options)
        if "forces" in self.results:
            self.results["forces"] = self.scale * self.results["forces"]


def timed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Milliseconds of a step."""
    for _ in range(min(5, steps)):
        step()
    synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise(device)
    return 1e3 * (time.perf_counter() - start) / steps


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def gibibytes(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")


def time_engine(potential: Potential, boxes: list[Atoms], steps: int, device: torch.device, label: str) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine = DeviceEngine(potential, device, notify=print)
    start = time.perf_counter()
    dynamics = Dynamics(engine, boxes, device)
    results = dynamics.start
    assert results.forces is not None
    start_values = float(results.energy.sum()) / len(dynamics.positions), float(results.forces.square().mean().sqrt())
    synchronise(device)
    first = time.perf_counter() - start
    engine.builds = 0
    whole = timed(dynamics.step, steps, device)
    builds = engine.builds
    program = engine._program
    assert program is not None
    captures = engine.captures
    replay = timed(program.run, min(steps, 30), device)
    evaluation = timed(lambda: engine.evaluate(dynamics.positions, dynamics.cell), min(steps, 30), device)
    lists = timed(program.build_lists, min(steps, 10), device)
    n_atoms = len(dynamics.positions)
    print(
        f"{label:22} {n_atoms:8} atoms {int(program.status[2]):9} edges  step {whole:8.3f} ms  evaluate {evaluation:8.3f}  "
        f"replay {replay:8.3f}  lists {lists:8.2f} ({builds} in {steps} steps)  first {first:6.1f} s  "
        f"{gibibytes(device):6.2f} GiB  {1e6 * gibibytes(device) * 1.073741824 / n_atoms:7.1f} kB/atom  "
        f"start: {start_values[0]:.7f} eV/atom, rms force {start_values[1]:.7f} eV/A  "
        f"{captures} {'captured' if program.captured else 'not captured'}",
        flush=True,
    )


def ase_row(potential: Potential, n_atoms: int, steps: int, device: torch.device, label: str) -> None:
    atoms = box(n_atoms)
    calculator = Scaled(potential, device=device)
    atoms.calc = calculator
    calculator.scale = min(1.0, 1.0 / float(np.abs(atoms.get_forces()).max()))
    MaxwellBoltzmannDistribution(atoms, temperature_K=300, rng=np.random.default_rng(1))
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    step = dynamics.step
    forces: list[Any] = [None]

    def advance() -> None:
        forces[0] = step(forces[0])

    whole = timed(advance, steps, device)
    inside = timed(lambda: calculator.calculate(atoms, ["forces"], ["positions"]), min(steps, 30), device)
    print(f"{label:22} {len(atoms):8} atoms  ASE step {whole:8.3f} ms  calculate {inside:8.3f}", flush=True)


def compare_row(potential: Potential, n_atoms: int, steps: int, device: torch.device, label: str) -> None:
    atoms = box(n_atoms)
    engine = DeviceEngine(potential, device, notify=print)
    systems, positions, cell, _ = systems_of([atoms], device)
    engine.set_systems(systems)
    print(f"{label:22} {compare(engine, systems, positions, cell)}", flush=True)


def profile_row(potential: Potential, n_atoms: int, steps: int, device: torch.device, label: str) -> None:
    """Kernels of one replay."""
    atoms = box(n_atoms)
    engine = DeviceEngine(potential, device)
    systems, positions, cell, _ = systems_of([atoms], device)
    engine.set_systems(systems)
    for _ in range(5):
        engine.evaluate(positions, cell)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            engine.evaluate(positions, cell)
        synchronise(device)
    rows: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = rows.setdefault(event.name[:90], [0, 0.0])
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us()
    total = sum(time for _, time in rows.values()) / 5
    print(
        f"\n## {label}: kernels of one evaluation, {sum(n for n, _ in rows.values()) / 5:.0f} launches, {total:.0f} us"
    )
    for name, (count, microseconds) in sorted(rows.items(), key=lambda item: -item[1][1])[:32]:
        print(f"  {microseconds / 5:9.1f} us  {count / 5:5.1f} x  {name}")
    print(flush=True)


def batch_row(potential: Potential, n_atoms: int, steps: int, device: torch.device, label: str) -> None:
    """As many boxes of 192 atoms as there are in this number of atoms."""
    time_engine(potential, [box(SMALL, seed) for seed in range(n_atoms // SMALL)], steps, device, label)


def predict_row(potential: Potential, n_atoms: int, steps: int, device: torch.device, label: str) -> None:
    """Batches of different boxes of 192 atoms, as in `forgefield predict` and `test`, from batches on the device to results."""
    batches = []
    for number in range(4):
        boxes = [box(SMALL, 100 * number + seed) for seed in range(n_atoms // SMALL)]
        systems, positions, cell, _ = systems_of(boxes, device)
        frame = torch.repeat_interleave(systems.n_atoms)
        batches.append(
            {
                "species": systems.species,
                "n_atoms": systems.n_atoms,
                "pbc": systems.pbc,
                "frame": frame,
                "positions": positions,
                "cell": cell,
            }
        )
    for engine in (True, False):
        evaluator = BatchEvaluator(potential, device, engine=engine, notify=print)
        step = partial(_evaluate_next, evaluator, cycle(batches))
        milliseconds = timed(step, max(2, steps if engine else steps // 6), device)
        frames_per_s = 1e3 * (n_atoms // SMALL) / milliseconds
        how = "engine" if engine else "eager "
        print(
            f"{label:22} {n_atoms:8} atoms in {n_atoms // SMALL} frames  {how} {milliseconds:8.3f} ms  "
            f"{frames_per_s:9.0f} frames/s",
            flush=True,
        )


def _evaluate_next(evaluator: BatchEvaluator, batches: Iterator[dict[str, torch.Tensor]]) -> None:
    evaluator(next(batches), forces=True, stress=True)[0]["forces"].cpu()


def engine_row(potential: Potential, n_atoms: int, steps: int, device: torch.device, label: str) -> None:
    time_engine(potential, [box(n_atoms)], steps, device, label)


ROWS = {
    "compare": compare_row,
    "engine": engine_row,
    "ase": ase_row,
    "batch": batch_row,
    "predict": predict_row,
    "profile": profile_row,
}


def attempt(label: str, row: Callable[[], None]) -> None:
    try:
        row()
    except Exception as error:
        print(f"{label:22} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        traceback.print_exc(limit=-6)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


CASES = ["compare:192", *(f"{row}:{size}" for size in (192, 1536, 6144, 98304) for row in ("engine", "ase"))]
CASES += ["batch:6144", "engine:1105920", "profile:192", "profile:6144"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, help=f"row:atoms; rows {', '.join(ROWS)}")
    parser.add_argument("--model", default="nequip", choices=sorted(MODELS))
    parser.add_argument("--steps", type=int, default=60, help="at most; large systems are timed for fewer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, float32, water, cutoff {CUTOFF} A", flush=True)
    potential = build(arguments.model, device)
    for case in arguments.cases:
        row, _, size = case.partition(":")
        n_atoms = int(size)
        steps = max(2, min(arguments.steps, MOST_ATOM_STEPS // n_atoms))
        attempt(case, partial(ROWS[row], potential, n_atoms, steps, device, f"{arguments.model} {case}"))


if __name__ == "__main__":
    main()
