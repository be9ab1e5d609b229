"""What each precision costs in accuracy and gains in time: NequIP S and Allegro S on boxes of water, on a GPU if there is one.

    python benchmarks/precision.py [--models nequip allegro] [--molecules 3] [--frames 1] [--engine eager|compile]

All precisions compute the same training step (energy and force loss, full backward) with the same weights, those of a model
that was not trained. Errors are root mean squares relative to the size of the value, against the same in float64: of the atomic
energies without shifts, of the forces, and of the gradient of the loss in all weights. Times are medians of whole steps without
optimiser.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import ase
import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from torch import Tensor

from forgefield.data.batch import batch_from_frames, to_device
from forgefield.data.readers import frames_from_atoms
from forgefield.data.species import SpeciesTable
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import resolve_model
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import StepFunction
from forgefield.training.options import PRECISIONS
from forgefield.training.precision import Precision

SPECIES, CUTOFF = ("H", "O"), 5.0
FACTS = {"mean_neighbours": 50.0, "forces_rms": 1.0, "reference_energies": {"H": 0.0, "O": 0.0}}


def water(n: int, seed: int) -> Atoms:
    """n^3 randomly turned molecules on a grid of 3.1 A: about the density of the liquid."""
    rng = np.random.default_rng(seed)
    box = Atoms(cell=[3.1 * n] * 3, pbc=True)
    for corner in np.ndindex(n, n, n):
        one = molecule("H2O")
        one.rotate(rng.uniform(0, 360), rng.normal(size=3))
        one.translate(3.1 * np.array(corner))
        box += one
    return box


def labelled_batch(n: int, frames: int, device: torch.device) -> dict[str, Tensor]:
    """With random labels: what the weights are pulled towards does not matter here."""
    atoms = [water(n, seed) for seed in range(frames)]
    batch = batch_from_frames(frames_from_atoms(atoms), SpeciesTable(SPECIES), CUTOFF)
    generator = torch.Generator().manual_seed(0)
    batch["forces"] = torch.randn(batch["positions"].shape, generator=generator, dtype=torch.float64)
    batch["energy"] = torch.randn(frames, generator=generator, dtype=torch.float64)
    return to_device(batch, device)


def potential_in(precision: Precision, name: str, device: torch.device) -> Potential:
    """The same weights in every precision: those that float32 can hold."""
    resolved = resolve_model({"name": name, "preset": "S"}, species=SPECIES, cutoff=CUTOFF, statistics=FACTS)
    single = build_model(resolved, precision="float32", seed=0)
    potential = build_model(resolved, precision=precision.weights, seed=0)
    potential.load_state_dict(single.state_dict())
    return potential.to(device).train()


def measure(name: str, precision: str, batch: dict[str, Tensor], engine_name: str) -> tuple[list[Tensor], float, float]:
    """Atomic energies, forces and gradients; ms per step; peak memory in GB (NaN on a CPU)."""
    device, setting = batch["positions"].device, Precision(precision)
    potential = potential_in(setting, name, device)
    task = Task(TaskOptions(energy=TargetOptions(), forces=TargetOptions()), SPECIES)
    function = StepFunction(potential, task, ErrorMetrics(task.names, SPECIES, device))
    engine = CompileEngine(function) if engine_name == "compile" else Engine(function)
    with setting.applied(precision):
        outputs = potential(batch)
        values = [outputs["atomic_energy"].detach(), outputs["forces"].detach()]
        del outputs
        gradients = [g for g in engine.differentiate(batch).gradients if g is not None]
        values.append(torch.cat([gradient.reshape(-1) for gradient in gradients]).double())
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        end = time.perf_counter() + 4.0
        while len(times) < 3 or (len(times) < 30 and time.perf_counter() < end):
            start = time.perf_counter()
            engine.differentiate(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return values, statistics.median(times), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("nequip", "allegro"), default=["nequip", "allegro"])
    parser.add_argument("--molecules", type=int, help="along an edge of the box; default 3, on a GPU 4")
    parser.add_argument("--frames", type=int, help="boxes in the batch; default 1, on a GPU 8")
    parser.add_argument("--engine", choices=("eager", "compile"), default="eager")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    n, frames = arguments.molecules or (4 if on_gpu else 3), arguments.frames or (8 if on_gpu else 1)
    batch = labelled_batch(n, frames, device)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    size = f"{batch['positions'].shape[0]} atoms, {batch['edge_index'].shape[1]} edges, cutoff {CUTOFF:g} A"
    print(f"torch {torch.__version__}, ase {ase.__version__}, {where}, engine {arguments.engine}; {size}")
    print("| model | precision | energy error | force error | gradient error | ms per step | speed | memory, GB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.models:
        rows = {}
        for precision in PRECISIONS:
            if on_gpu or precision != "tf32":
                rows[precision] = measure(name, precision, batch, arguments.engine)
        exact, single = rows["float64"][0], rows["float32"][1]
        for precision, (values, ms, memory) in rows.items():
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(values, exact)]
            shown = " | ".join("0" if error == 0 else f"{error:.1e}" for error in errors)
            peak = f"{memory:.2f}" if on_gpu else "-"
            print(f"| {name} S | {precision} | {shown} | {ms:.1f} | {single / ms:.2f} | {peak} |", flush=True)


if __name__ == "__main__":
    main()
