"""Whole training steps and evaluations of MACE on an NVIDIA GPU, and where their time goes.

    python benchmarks/mace_gpu.py [--cases 32x192 8x192 1x192 5x27] [--engines graphs-kernels eager-kernels graphs-double]
                                  [--precision float32] [--profile] [--seconds 0.5]

128x0e+128x1o, max_ell 3, correlation 3, two layers, radial MLP 3x64, cutoff 5 A, on frames of water (frames x atoms). A step is
energies, forces, the gradients of a loss of both, and Adam. An evaluation is energies and forces, captured as well. Before an
engine is timed, loss and gradients must equal those of eager PyTorch operations (in float32 to what rounding explains).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from ase import Atoms
from torch.profiler import ProfilerActivity, profile

from forgefield.data.batch import Batch, batch_from_frames, to_device
from forgefield.data.padding import plan_sizes, sizes
from forgefield.data.readers import frames_from_atoms
from forgefield.data.species import SpeciesTable
from forgefield.inference.capture import capture
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import resolve_model
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.graphs import GraphsEngine
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.verify import require_equal
from forgefield.training.optim.captured_optimiser import CapturedOptimiser
from forgefield.training.precision import TOLERANCES, Precision

SPECIES, CUTOFF, DENSITY = ("H", "O"), 5.0, 0.0334
MODEL = {"name": "mace", "num_bessel": 8, "avg_num_neighbours": 54.0, "energy_scales": 1.0, "energy_shifts": 0.0}
CASES = ("32x192", "8x192", "1x192", "5x27")
ENGINES = ("graphs-kernels", "eager-kernels", "graphs-double", "eager-double")
LARGEST_DOUBLE = 2000
"""Atoms up to which a step is compared with one by PyTorch operations, whose memory is large."""


def water(n_molecules: int, rng: np.random.Generator) -> Atoms:
    """Randomly turned molecules on a grid, at the density of the liquid, with random labels."""
    length, per_edge = (n_molecules / DENSITY) ** (1 / 3), int(np.ceil(n_molecules ** (1 / 3)))
    grid = np.array(list(np.ndindex(per_edge, per_edge, per_edge)))[:n_molecules] * (length / per_edge)
    positions, numbers = [], []
    for place in grid:
        axes = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        oxygen = place + rng.normal(scale=0.05, size=3)
        positions += [oxygen, oxygen + 0.97 * axes[0], oxygen + 0.97 * (-0.25 * axes[0] + 0.968 * axes[1])]
        numbers += [8, 1, 1]
    return Atoms(numbers=numbers, positions=positions, cell=[length] * 3, pbc=True)


def batch_of(case: str, device: torch.device) -> Batch:
    frames, atoms = map(int, case.split("x"))
    rng = np.random.default_rng(0)
    made = [water(atoms // 3, rng) for _ in range(frames)]
    batch = batch_from_frames(frames_from_atoms(made), SpeciesTable(SPECIES), CUTOFF)
    generator = torch.Generator().manual_seed(0)
    batch["energy"] = torch.randn(frames, generator=generator, dtype=torch.float64)
    batch["forces"] = torch.randn(frames * atoms, 3, generator=generator, dtype=torch.float64)
    return to_device(batch, device)


def model_of(precision: str, device: torch.device) -> Potential:
    resolved = resolve_model(MODEL, species=SPECIES, cutoff=CUTOFF)
    return build_model(resolved, precision=Precision(precision).weights, seed=1).train().to(device)


def engine_of(name: str, potential: Potential, batch: Batch) -> Engine:
    form, _, derivative = name.partition("-")
    task = Task(TaskOptions(energy=TargetOptions(), forces=TargetOptions()), SPECIES)
    function = StepFunction(potential, task, ErrorMetrics(task.names, SPECIES), derivative=derivative)
    inner = Engine(function)
    return GraphsEngine(inner, plan=plan_sizes(np.array([sizes(batch)]))) if form == "graphs" else inner


def whole_step(engine: Engine, batch: Batch) -> Callable[[], None]:
    """Gradients and Adam, as the training does them with this engine."""
    weights = engine.function.trained_weights()
    optimiser = torch.optim.Adam(weights, lr=1e-4)
    update = CapturedOptimiser(optimiser, None) if isinstance(engine, GraphsEngine) else None

    def step() -> None:
        result = engine.differentiate(batch)
        if update is None:
            for weight, gradient in zip(weights, result.gradients):
                weight.grad = gradient
            optimiser.step()
        else:
            assert isinstance(engine, GraphsEngine)
            engine.assign_gradients()
            update.step()

    return step


def captured_evaluation(potential: Potential, engine: Engine, batch: Batch) -> Callable[[], None]:
    """Energies and forces by kernels, replayed."""
    function = engine.function
    trained, fixed = function.trained_weights(), function.fixed_weights()

    def evaluate() -> object:
        return function.evaluate(trained, fixed, batch)

    graph, _ = capture(evaluate, warm_up=evaluate, warm_ups=2)
    return graph.replay


def median_ms(action: Callable[[], object], seconds: float) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    taken = []
    for _ in range(int(np.clip(seconds / max(time.perf_counter() - start, 1e-4), 5, 200))):
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken)


def table_of_kernels(action: Callable[[], None], n_rows: int = 45, repeats: int = 5) -> str:
    """Kernels by their time in one step, with the number of launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(repeats):
            action()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / repeats / 1000
    count = sum(row.count for row in rows) / repeats
    lines = [f"    {total:8.3f} ms in {count:.0f} kernels"]
    for row in rows[:n_rows]:
        share = row.self_device_time_total / repeats / 1000
        lines.append(f"    {share:8.3f} ms {row.count / repeats:5.0f} x  {row.key[:110]}")
    return "\n".join(lines)


def measure(case: str, name: str, potential: Potential, args: argparse.Namespace, device: torch.device) -> None:
    batch = batch_of(case, device)
    _, atoms, edges = sizes(batch)
    engine = engine_of(name, potential, batch)
    step = whole_step(engine, batch)
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    step_ms = median_ms(step, args.seconds)
    memory = torch.cuda.max_memory_allocated() / 2**30
    difference = ""
    if atoms <= LARGEST_DOUBLE and name != "eager-double":
        reference = engine_of("eager-double", potential, batch)
        compared = require_equal(engine, reference, batch, TOLERANCES[args.precision])
        difference = f"differs {compared.difference:.1e}"
    row = f"{case:7} {atoms:5} atoms {edges:7} edges  {name:15} first {first:6.1f} s  step {step_ms:8.3f} ms {memory:6.2f} GiB"
    if name == "graphs-kernels":
        row += f"  evaluation {median_ms(captured_evaluation(potential, engine, batch), args.seconds):7.3f} ms"
    print(f"{row}  {difference}", flush=True)
    if args.profile and name == "graphs-kernels":
        print(table_of_kernels(step), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["graphs-kernels"])
    parser.add_argument("--precision", choices=sorted(TOLERANCES), default="float32")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on timing each, about")
    args = parser.parse_args()
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {args.precision}", flush=True)
    with Precision(args.precision).applied(args.precision):
        potential = model_of(args.precision, device)
        print(f"{sum(weight.numel() for weight in potential.parameters())} weights", flush=True)
        for case in args.cases:
            for name in args.engines:
                try:
                    measure(case, name, potential, args, device)
                except Exception as error:  # the other rows are still of interest
                    print(f"{case:7} {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
